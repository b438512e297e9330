"""Intervals and nulls of a sweep: every resampled share equals that of the split with a basis made
without the contexts left out, and every draw of the null that of explicitly shifted positions."""

from __future__ import annotations

import gc
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.planted import require_caught
from tests.tiny import tiny, tokens
from tl_geometry import decompose, split_scores, sweep_heads
from tl_geometry.base.intervals import LeftOut, jackknife_interval
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models import view
from tl_geometry.scores import details, position_null, sweep
from tl_geometry.scores.leave_out import BLOCKS, GroupBasis, LeaveOut, own_groups
from tl_geometry.scores.position_null import DRAWS, PositionNull, shifted_positions
from tl_geometry.scores.sums import ShareSums, share_sums
from tl_geometry.scores.sweep_table import SweepTable

KNOWN = tokens(batch=24, length=16, seed=2)
FRESH = tokens(batch=12, length=14, seed=9)
GROUP = torch.arange(24) // 3
ARCHITECTURES = ["gpt2", "llama", "bloom"]


@cache
def basis_of(architecture: str, *, normalize: bool = False) -> PositionContext:
    model = tiny("bridge", architecture)
    return decompose(model, KNOWN, normalize=normalize, progress=False)


@cache
def swept(architecture: str, *, fresh: bool = False, normalize: bool = False) -> SweepTable:
    return sweep_heads(
        tiny("bridge", architecture),
        FRESH if fresh else KNOWN,
        basis_of(architecture, normalize=normalize),
        detail=("intervals", "nulls"),
        batch_size=5,
        progress=False,
    )


@cache
def without(architecture: str, normalize: bool, *groups: int) -> PositionContext:
    kept = ~torch.isin(GROUP, torch.tensor(groups, dtype=torch.int64))
    model = tiny("bridge", architecture)
    return decompose(model, KNOWN[kept], normalize=normalize, window=(1, 16), progress=False)


def split_sums(architecture: str, ids: Tensor, basis: PositionContext) -> ShareSums:
    return split_scores(tiny("bridge", architecture), ids, basis).shares(drop=1).sums


def pooled_shares(parts: list[ShareSums]) -> torch.Tensor:
    """Covariance shares of sums over contexts that were split by different bases."""
    total = torch.stack([p.total for p in parts]).sum(0)
    return torch.stack([p.numerators for p in parts]).sum(0) / total.unsqueeze(-1)


@pytest.mark.parametrize(
    ("architecture", "normalize"), [("gpt2", False), ("llama", True), ("bloom", False)]
)
def test_resampled_shares_are_those_of_bases_made_without_the_groups(
    architecture: str, normalize: bool
) -> None:
    """The route is another one: decompose the contexts that are left, split with that basis."""
    table = swept(architecture, normalize=normalize)
    assert table.resampled is not None
    assert len(table.resampled_sizes) == 1
    for sample, left_out in ((0, -1), (6, 5)):
        parts = [
            split_sums(
                architecture,
                KNOWN[own == GROUP],
                without(architecture, normalize, *({own, left_out} - {-1})),
            )
            for own in range(8)
            if own != left_out
        ]
        expected = pooled_shares(parts)
        assert torch.allclose(table.resampled[:, sample], expected, atol=2e-5)
        assert float((expected - table.cs).abs().max()) > 1e-3, "it matters which basis is used"


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_fresh_contexts_have_two_jackknives(architecture: str) -> None:
    table = swept(architecture, fresh=True)
    assert table.resampled is not None
    assert [len(s) for s in table.resampled_sizes] == [8, 12]
    basis = basis_of(architecture)
    own = split_sums(architecture, FRESH, basis)
    assert torch.allclose(table.resampled[:, 0], own.cs, atol=2e-5)
    group = split_sums(architecture, FRESH, without(architecture, False, 3))
    assert torch.allclose(table.resampled[:, 1 + 3], group.cs, atol=2e-5)
    block = split_sums(architecture, torch.cat([FRESH[:7], FRESH[8:]]), basis)
    assert torch.allclose(table.resampled[:, 1 + 8 + 7], block.cs, atol=2e-5)


def test_intervals_are_the_formula_and_sum_to_one() -> None:
    table = swept("gpt2")
    s = table.resampled
    assert s is not None
    rest, found = s[:, 1:], table.intervals
    assert found is not None
    corrected = 8 * s[:, 0] - 7 * rest.mean(1)
    error = (7 / 8 * (rest - rest.mean(1, keepdim=True)).square().sum(1)).sqrt()
    assert torch.allclose(found.value, corrected)
    assert torch.allclose(found.error, error)
    assert torch.allclose(found.high - found.value, 2.364624 * error, rtol=1e-6)
    assert torch.allclose(found.value.sum(1), torch.ones(8).double())
    groups = table.group_intervals
    assert groups is not None
    content = table.terms.index("cvec-cvec")
    assert torch.allclose(groups.low[:, 1], found.low[:, content])
    assert not torch.allclose(groups.low[:, 2], found.low[:, [2, 5, 6, 7]].sum(1), atol=1e-4)
    frame = table.shares().to_dataframe()
    row = frame[(frame.term == "cvec-cvec") & (frame.layer == 0) & (frame["head"] == 2)].iloc[0]
    shown = float(found.value[2, content]), float(found.low[2, content])
    assert (row.cs_corrected, row.cs_low) == pytest.approx(shown)


def test_a_label_needs_a_margin_whose_interval_excludes_zero() -> None:
    import dataclasses

    table = swept("gpt2")
    assert table.resampled is not None
    plain = dataclasses.replace(table, resampled=None)
    assert set(plain.by_group.labels) - {"unclear"}
    noise = torch.zeros_like(table.resampled)
    noise[:, 1, 0], noise[:, 1, -1] = 1.0, -1.0  # one group decides everything
    torn = dataclasses.replace(table, resampled=table.resampled + noise)
    assert set(torn.by_term.labels) == {"unclear"}
    sure = dataclasses.replace(table, resampled=table.resampled[:, :1].expand(-1, 9, -1))
    assert sure.by_group.labels == plain.by_group.labels
    assert torch.equal(torn.by_group.margin, plain.by_group.margin)


@pytest.mark.parametrize(("contexts", "given"), [(10, True), (9, False)])
def test_no_interval_and_no_label_from_few_contexts(contexts: int, given: bool) -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(batch=contexts, length=16, seed=7)
    for swept_on, corpus in ((KNOWN, ids), (ids, KNOWN)):
        basis = decompose(model, corpus, progress=False)
        table = sweep_heads(
            model, swept_on, basis, detail=("intervals", "nulls"), layers=0, progress=False
        )
        found = table.intervals
        assert found is not None
        assert bool(found.low.isfinite().all()) == given
        assert bool(found.low.isnan().all()) != given
        assert bool(table.details["p_position"].isfinite().all()) == given
        assert any("no intervals" in flag for flag in table.provenance.flags) != given
        assert given or set(table.dominant) == {"unclear"}


def test_no_interval_from_few_groups() -> None:
    model = tiny("bridge", "gpt2")
    for groups, given in ((4, True), (3, False)):
        basis = decompose(model, KNOWN, groups=groups, progress=False)
        table = sweep_heads(model, KNOWN, basis, detail="intervals", layers=0, progress=False)
        assert table.intervals is not None
        assert bool(table.intervals.low.isfinite().all()) == given


def test_contexts_are_known_by_their_tokens() -> None:
    basis = basis_of("gpt2")
    mixed = torch.cat([KNOWN[[23, 0, 7]], FRESH[:1, :14].repeat(1, 2)[:, :16]])
    assert own_groups(basis, mixed).tolist() == [7, 0, 2, -1]
    assert own_groups(basis, KNOWN[:, :12]).tolist() == [-1] * 24


def test_contexts_of_few_groups_are_resampled_apart_from_the_basis() -> None:
    model = tiny("bridge", "gpt2")
    table = sweep_heads(
        model, KNOWN[:12], basis_of("gpt2"), detail="intervals", layers=0, progress=False
    )
    assert [len(s) for s in table.resampled_sizes] == [8, 12]
    assert table.resampled is not None
    parts = [split_sums("gpt2", KNOWN[g == GROUP], without("gpt2", False, g)) for g in range(4)]
    expected = pooled_shares(parts)
    assert torch.allclose(table.resampled[:, 0], expected[:4], atol=2e-5)


def test_blocks_of_contexts_merge_in_pairs() -> None:
    """Nothing is lost, and no block is more than twice as large as another but for the last."""
    work = LeaveOut(torch.full((4,), 0.25).double())
    n, contexts = 81, 75
    sums = ShareSums(
        numerators=torch.rand(contexts, 2, n).double(),
        energies=torch.zeros(contexts, 2, n).double(),
        gains=torch.zeros(contexts, 2, n).double(),
        total=torch.rand(contexts, 2).double(),
        gain_total=torch.zeros(contexts, 2).double(),
        floor=torch.zeros(contexts, 2).double(),
        rows=torch.ones(contexts).double(),
        cells=torch.ones(contexts).double(),
    )
    for part in range(0, contexts, 10):
        some = slice(part, min(part + 10, contexts))
        kept = ShareSums(**{k: v[some] for k, v in sums._tensors().items()})
        work.add(kept, torch.full((some.stop - some.start,), -1))
    sizes = work.table(100).sizes[1]
    assert BLOCKS <= len(sizes) <= 2 * BLOCKS
    assert [round(contexts * s) for s in sizes] == [8] * 9 + [3]
    summed = torch.stack([s.total for s in work.sums.values()]).sum(0)
    assert torch.allclose(summed, sums.total.sum(0))


def held(module: Any, length: int) -> int:
    """Bytes that one layer keeps of a batch with every group left out and every null."""
    model, ids = tiny("bridge", "gpt2"), KNOWN[:, :length]
    basis = decompose(model, ids, progress=False)
    work = sweep._Sweep(view(model), basis, (0,), length, ("intervals", "nulls"), 2**31, 0)
    work.details[0] = module.Details(work.detail, work.drop, 0)
    work.batch = ids
    view(model).run_layers(ids, (0,), work.on_layer)
    left: list[Any] = [work.details[0]]
    seen, sizes = {id(basis)}, {}
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, type):
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            sizes[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        else:
            left.extend(x for x in gc.get_referents(found) if not callable(x))
    return sum(sizes.values())


def check_held(module: Any) -> None:
    """All layers are held beside each other, so none keeps what grows with the window."""
    assert 0 < held(module, 16) == held(module, 12)


def test_a_layer_keeps_nothing_that_grows_with_the_window() -> None:
    check_held(details)


def test_vectors_of_positions_that_stay_are_noticed() -> None:
    faults = {
        "shifted positions": ("self.null.release()", "pass"),
        "sums of all contexts": ("self.left_out.settle()", "pass"),
        "groups": ("self.groups = None\n        if self.null", "if self.null"),
    }
    require_caught(check_held, details, faults)


# ---- the null of position


@pytest.mark.parametrize(
    ("architecture", "fresh"), [("gpt2", False), ("bloom", True), ("llama", False)]
)
def test_draws_of_the_null_are_splits_by_shifted_positions(architecture: str, fresh: bool) -> None:
    model, basis = tiny("bridge", architecture), basis_of(architecture)
    table, ids, layer = swept(architecture, fresh=fresh), FRESH if fresh else KNOWN, 1
    offsets = PositionNull(basis, 0).offsets
    states: list[Tensor] = []
    view(model).run_layers(ids, (layer,), lambda seen: states.append(seen.h.double()))
    sums = basis.group_sums[:, basis.index(layer)] / 3
    for draw in (0, 1, DRAWS):
        base = torch.empty(len(ids), 16, states[0].shape[-1]).double()
        for c in range(len(ids)):
            others = [g for g in range(8) if fresh or g != c // 3]
            shift = [
                int(offsets[draw, g]) - (0 if fresh else int(offsets[draw, c // 3])) for g in others
            ]
            moved = [
                torch.cat([sums[g, :1], sums[g, 1:].roll(s, 0)])
                for g, s in zip(others, shift, strict=True)
            ]
            base[c] = torch.stack(moved).mean(0)
        position = base[:, : ids.shape[1]]
        parts = {"position": position, "rest": states[0] - position}
        split = split_scores(model, ids, None, layers=layer, parts=parts)
        shares = split.shares(drop=1)
        # the user's parts have the constants apart, as "bias": they belong to position here
        names = [t for t in shares.terms if "rest" not in t]
        expected = shares.cs[:, [shares.terms.index(t) for t in names]].sum(1)
        name = "cs_position_others" if draw == 0 else "draws_position_shifted"
        found = table.details[name][4:]
        found = found if draw == 0 else found[:, draw - 1]
        assert torch.allclose(found, expected, atol=5e-5)
        content = shares.cs[:, shares.terms.index("rest-rest")]
        if draw:
            assert torch.allclose(
                table.details["draws_content_shifted"][4:, draw - 1], content, atol=5e-5
            )


def check_shifted(module: Any) -> None:
    """Terms of position and content of every draw equal those of the split of queries and keys,
    beyond one block of rows, whatever the mask, with a bias and without."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length, draws = 70, 3
    every = torch.ones(length, length, dtype=torch.bool)
    masks, biased = (every.tril(), every, every.tril().triu(-9)), draw(2, length, length)
    for allowed, bias in itertools.product(masks, (None, biased)):
        q, k = (
            module.ShiftedSide(
                draw(2, 2, length, 4) + 3,
                draw(2, draws, length, 4) + 2,
                draw(2, 2, length).exp(),
                draw(2, 2, length, 4) + 1,
            )
            for _ in "qk"
        )
        sums, total, floor = module.shifted_numerators(q, k, allowed, bias)
        for at in range(draws):
            sides = []
            for side in (q, k):
                position = side.mapped[:, at] * side.frozen.unsqueeze(-1) + side.constant
                both = torch.stack([position, side.whole - position])
                sides.append(both.transpose(2, 3))
            plain = {"bias": bias, "energy": False, "gain": False}
            wanted = share_sums(sides[0], sides[1], allowed, **plain)
            assert torch.allclose(sums[:, :, at], wanted.numerators, rtol=1e-9)
            assert torch.allclose(total, wanted.total, rtol=1e-9)
            assert at or torch.allclose(floor, wanted.floor, rtol=1e-9)


def test_faults_of_shifted_terms_are_seen() -> None:
    require_caught(
        check_shifted,
        position_null,
        {
            "position counted twice in content": (
                "sums[..., 1:3].sum(-1) - sums[..., 0]",
                "sums[..., 1:3].sum(-1)",
            ),
            "sides swapped": (
                "sums[..., 1] += at_query(of_keys)",
                "sums[..., 2] += at_query(of_keys)",
            ),
            "mixed terms hold position": ("sums[..., 1:3] -= sums[..., :1]", "0 * sums[..., :1]"),
            "keys not shifted": ("k.mapped - middle", "k.mapped"),
            "the shift of keys not made up for": (
                "self.beyond[..., None, :keys] @ x",
                "0 * x[:, :, :1]",
            ),
            "the constant of queries without the keys' mapped": (
                "+ keys.dot(of_query_constants)",
                "",
            ),
            "the constant of keys left out": ("at_query(of_constants) +", ""),
            "the bias left out of S": ("centred = centred + added", "centred = centred + 0"),
            "one block of rows": ("total += torch", "total = torch"),
        },
    )


def test_true_offsets_give_the_held_out_share_of_position() -> None:
    for architecture in ARCHITECTURES:
        table = swept(architecture)
        assert table.resampled is not None
        position = table._grouped(table.resampled)[:, 0, 0]
        assert torch.allclose(table.details["cs_position_others"], position, atol=2e-5)
        draws = table.details["draws_position_shifted"]
        above = (draws >= table.details["cs_position_others"].unsqueeze(1)).sum(1)
        assert torch.allclose(table.details["p_position"], (1 + above).double() / 20)
        assert torch.allclose(table.details["cs_position_shifted"], draws.mean(1))


def test_planted_positions_beat_the_null_and_no_position_does_not() -> None:
    assert (swept("gpt2").details["p_position"] == 0.05).all()
    model = tiny("bridge", "llama")  # position is in the rotation, hardly in the stream
    ids = tokens(batch=40, length=16, seed=4)
    table = sweep_heads(
        model, ids, decompose(model, ids, progress=False), detail="nulls", progress=False
    )
    assert (table.details["p_position"] > 0.05).sum() >= 5


def test_shifts_are_cyclic_inside_the_window() -> None:
    groups = GroupBasis(
        torch.zeros(2, 1).double(),
        torch.arange(10.0).double().reshape(2, 5, 1),
        torch.tensor([0.5, 0.5]).double(),
    )
    offsets = torch.tensor([[0, 0], [1, 3]])
    beside = (groups.pos, groups.share)
    found = shifted_positions(*beside, 0, offsets, (1, 5))[..., 0].tolist()
    assert found == [[5, 6, 7, 8, 9], [5, 8, 9, 6, 7]]
    both = shifted_positions(*beside, -1, offsets, (1, 5))[1, :, 0].tolist()
    assert both == [2.5, (4 + 7) / 2, (1 + 8) / 2, (2 + 9) / 2, (3 + 6) / 2]


# ---- the jackknife itself


def test_jackknife_takes_the_bias_of_first_order_out_whatever_the_sizes() -> None:
    """The square of a mean is biased by exactly sd^2 / n; s* has none over all samples of a
    population (here: all pairs of signs), equal groups or not."""
    g = torch.Generator().manual_seed(0)
    for counts in ((4, 4, 4, 4), (2, 6, 3, 5)):
        x = torch.randn(40_000, 16, generator=g).double() + 2
        groups = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
        rest = torch.stack([x[:, groups != i].mean(1).square() for i in range(4)])
        sizes = torch.tensor(counts).double() / 16
        found = jackknife_interval(x.mean(1).square(), [LeftOut(rest, sizes)])
        assert float(found.value.mean()) == pytest.approx(4, abs=0.02)
        assert float(x.mean(1).square().mean()) == pytest.approx(4 + 1 / 16, abs=0.02)
        covered = ((found.low <= 4) & (found.high >= 4)).double().mean()
        assert 0.93 < float(covered) < 0.98


def test_two_sources_of_error_add_up() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 5.0]).double()
    one = LeftOut((x.sum() - x) / 3, torch.ones(4).double())
    found: Any = jackknife_interval(x.mean(), [one, one])
    assert float(found.error) == pytest.approx(2**0.5 * float(x.std()) / 2)
    t = (float(found.high) - 3) / float(found.error)
    assert t == pytest.approx(2.446912, rel=1e-5), "six degrees of freedom"
