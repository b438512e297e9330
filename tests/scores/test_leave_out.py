"""Intervals and nulls of a sweep: every resampled share equals that of the split with a basis made
without the contexts left out, and every draw of the null that of explicitly turned groups."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from functools import cache, reduce
from typing import Any

import pytest
import torch
from einops import einsum
from torch import Tensor

from benchmarks.planted import World, layer_of, parts_of
from tests.tiny import tiny, tokens
from tl_geometry import decompose, split_scores, sweep_heads
from tl_geometry.base.intervals import LeftOut, jackknife_interval
from tl_geometry.base.results import row_hashes
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition import decompose_activations
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models import view
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores import details, sweep
from tl_geometry.scores.details import Details
from tl_geometry.scores.leave_out import (
    BLOCKS,
    GroupProjections,
    LeaveOut,
    group_basis,
    own_groups,
)
from tl_geometry.scores.position_null import PositionNull
from tl_geometry.scores.sums import ShareSums
from tl_geometry.scores.sweep_table import SweepTable

KNOWN = tokens(batch=64, length=16, seed=2)
FRESH = tokens(batch=32, length=14, seed=9)
GROUP = torch.arange(64) // 8
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


def pooled_shares(parts: list[ShareSums]) -> tuple[Tensor, Tensor]:
    """Covariance and gain shares of sums over contexts that were split by different bases."""
    added = reduce(ShareSums.__add__, parts)
    return added.cs, added.gs


def check_sample(table: SweepTable, sample: int, expected: tuple[Tensor, Tensor]) -> None:
    assert table.resampled is not None
    samples = (table.resampled.cs, table.resampled.gs)
    for ours, theirs in zip(samples, expected, strict=True):
        assert torch.allclose(ours[: len(theirs), sample], theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("architecture", "normalize"),
    [("gpt2", False), ("llama", True), ("bloom", False), ("gemma2", False)],
)
def test_resampled_shares_are_those_of_bases_made_without_the_groups(
    architecture: str, normalize: bool
) -> None:
    """The route is another one: decompose the contexts that are left, split with that basis."""
    table = swept(architecture, normalize=normalize)
    assert table.resampled is not None
    assert len(table.resampled.sizes) == 1
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
        check_sample(table, sample, expected)
        for held_out, plain in zip(expected, (table.cs, table.gs), strict=True):
            assert float((held_out - plain).abs().max()) > 1e-3, "it matters which basis is used"


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_fresh_contexts_have_two_jackknives(architecture: str) -> None:
    table = swept(architecture, fresh=True)
    assert table.resampled is not None
    assert [len(s) for s in table.resampled.sizes] == [8, 4]
    basis = basis_of(architecture)
    own = split_sums(architecture, FRESH, basis)
    check_sample(table, 0, (own.cs, own.gs))
    group = split_sums(architecture, FRESH, without(architecture, False, 3))
    check_sample(table, 1 + 3, (group.cs, group.gs))
    block = split_sums(architecture, torch.cat([FRESH[:16], FRESH[24:]]), basis)
    check_sample(table, 1 + 8 + 2, (block.cs, block.gs))


@pytest.mark.parametrize("share", ["cs", "gs"])
def test_intervals_are_the_formula_and_sum_to_one(share: str) -> None:
    table = swept("gpt2")
    assert table.resampled is not None
    s = table.resampled.cs if share == "cs" else table.resampled.gs
    found = table.intervals if share == "cs" else table.gain_intervals
    groups = table.group_intervals if share == "cs" else table.group_gain_intervals
    assert found is not None
    assert groups is not None
    rest = s[:, 1:]
    corrected = 8 * s[:, 0] - 7 * rest.mean(1)
    error = (7 / 8 * (rest - rest.mean(1, keepdim=True)).square().sum(1)).sqrt()
    assert torch.allclose(found.value, corrected)
    assert torch.allclose(found.error, error)
    assert torch.allclose(found.high - found.value, 2.364624 * error, rtol=1e-6)
    assert torch.allclose(found.value.sum(1), torch.ones(8).double())
    content = table.terms.index("cvec-cvec")
    assert torch.allclose(groups.low[:, 1], found.low[:, content])
    assert not torch.allclose(groups.low[:, 2], found.low[:, [2, 5, 6, 7]].sum(1), atol=1e-4)
    frame = table.shares().to_dataframe()
    row = frame[(frame.term == "cvec-cvec") & (frame.layer == 0) & (frame["head"] == 2)].iloc[0]
    shown = float(found.value[2, content]), float(found.low[2, content])
    assert (row[f"{share}_corrected"], row[f"{share}_low"]) == pytest.approx(shown)


def test_a_label_needs_a_margin_whose_interval_excludes_zero() -> None:
    table = swept("gpt2")
    assert table.resampled is not None
    plain = dataclasses.replace(table, resampled=None)
    assert set(plain.by_group.labels) - {"unclear"}
    samples, change = table.resampled, dataclasses.replace
    noise = torch.zeros_like(samples.cs)
    noise[:, 1, 0], noise[:, 1, -1] = 1.0, -1.0  # one group decides everything
    torn = change(table, resampled=change(samples, cs=samples.cs + noise))
    assert set(torn.by_term.labels) == {"unclear"}
    same = lambda x: x[:, :1].expand(-1, 9, -1)
    sure = change(table, resampled=change(samples, cs=same(samples.cs), gs=same(samples.gs)))
    assert sure.by_group.labels == plain.by_group.labels
    assert torch.equal(torn.by_group.margin, plain.by_group.margin)


def test_small_groups_are_left_out_with_their_neighbours() -> None:
    """Topics go on over several windows: eight groups of four contexts are four blocks."""
    model, ids, block = tiny("bridge", "gpt2"), KNOWN[:32], torch.arange(32) // 8

    def basis_without(*blocks: int) -> PositionContext:
        kept = ids[~torch.isin(block, torch.tensor(blocks, dtype=torch.int64))]
        return decompose(model, kept, window=(1, 16), progress=False)

    basis = basis_without()
    assert basis.group_counts.tolist() == [4] * 8
    table = sweep_heads(model, ids, basis, detail="intervals", progress=False)
    assert table.resampled is not None
    assert [len(s) for s in table.resampled.sizes] == [4]
    for sample, left_out in ((0, -1), (3, 2)):
        parts = [
            split_sums("gpt2", ids[block == own], basis_without(*({own, left_out} - {-1})))
            for own in range(4)
            if own != left_out
        ]
        check_sample(table, sample, pooled_shares(parts))


@pytest.mark.parametrize(
    ("contexts", "given", "tested"), [(32, True, True), (31, False, True), (9, False, False)]
)
def test_no_interval_and_no_label_from_few_contexts(
    contexts: int, given: bool, tested: bool
) -> None:
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
        assert bool(table.details["p_position"].isfinite().all()) == tested
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
    mixed = torch.cat([KNOWN[[63, 0, 20]], FRESH[:1, :14].repeat(1, 2)[:, :16]])
    assert own_groups(basis, mixed).tolist() == [7, 0, 2, -1]
    assert own_groups(basis, KNOWN[:, :12]).tolist() == [-1] * 64


def test_contexts_of_few_groups_are_resampled_apart_from_the_basis() -> None:
    model = tiny("bridge", "gpt2")
    table = sweep_heads(
        model, KNOWN[:32], basis_of("gpt2"), detail="intervals", layers=0, progress=False
    )
    assert table.resampled is not None
    assert [len(s) for s in table.resampled.sizes] == [8, 4]
    parts = [split_sums("gpt2", KNOWN[g == GROUP], without("gpt2", False, g)) for g in range(4)]
    cs, gs = pooled_shares(parts)
    check_sample(table, 0, (cs[:4], gs[:4]))


def test_blocks_of_contexts_merge_in_pairs() -> None:
    """Nothing is lost, and no block is more than twice as large as another; what is left joins the
    last."""
    work = LeaveOut(torch.full((4,), 0.25).double())
    n, contexts = 81, 75
    sums = ShareSums(
        numerators=torch.rand(contexts, 2, n).double(),
        energies=torch.zeros(contexts, 2, n).double(),
        gains=torch.zeros(contexts, 2, n).double(),
        total=torch.rand(contexts, 2).double(),
        gain_total=torch.zeros(contexts, 2).double(),
        floor=torch.zeros(contexts, 2).double(),
        cells=torch.ones(contexts, 2).double(),
    )
    for part in range(0, contexts, 10):
        some = slice(part, min(part + 10, contexts))
        work.add(sums.select(some), [-1] * (some.stop - some.start))
    sizes = work.table(100).sizes[1]
    assert BLOCKS <= len(sizes) <= 2 * BLOCKS
    assert [round(contexts * s) for s in sizes] == [8] * 8 + [11]
    summed = torch.stack([s.total for s in work.sums.values()]).sum(0)
    assert torch.allclose(summed, sums.total.sum(0))


def held(module: Any, length: int) -> int:
    """Bytes that one layer keeps of a batch with every group left out and every null."""
    model, ids = tiny("bridge", "gpt2"), KNOWN[:24, :length]
    basis = decompose(model, ids, progress=False)
    work = sweep._SweepSums(view(model), basis, (0,), length, ("intervals", "nulls"), 2**31, 0)
    work.details[0] = module.Details(work.detail, work.drop, 0)
    work.begin(ids)
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


# ---- the null of position


def by_hand(
    layer: LayerView, basis: PositionContext, c: Tensor, *, rotary: bool, turn: Tensor | None = None
) -> Tensor:
    """``sum X~ . S~`` of the position terms of one draw, every context in full: base vectors turned
    with the groups, and with ``turn`` (an orthogonal matrix) the contexts of each group too."""
    group_mean, group_pos, share = (
        x.to(layer.h) for x in group_basis(basis, layer.layer, layer.h.shape[1])
    )
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for which, whole, constant in (
        ("q", layer.q, layer.q_constant),
        ("k", layer.k, layer.k_constant),
    ):
        mapped = layer.q_map if which == "q" else layer.k_map
        bias = mapped(group_mean.unsqueeze(1).expand_as(group_pos)) + constant[:1]
        pos, mean = mapped(group_pos), (bias * share[:, None, None, None]).sum(0)
        kept, moves = torch.ones(mean.shape[1]).to(mean), pos
        if rotary:
            noise = ((bias - mean).square() * share[:, None, None, None]).sum((0, 1, 3)) / 7
            kept = (1 - noise / mean.square().sum((0, 2))).clamp(min=0)
            moves = pos + bias - (mean * kept[:, None] if which == "q" else 0)
        mean = mean * kept[:, None] * (which == "q" or not rotary)
        weight = (c.to(share) * share).to(mean)
        base = mean + einsum(weight, moves, "g, g i h e -> i h e")
        if turn is not None:
            root = share.sqrt()[:, None, None, None]
            changed = einsum(turn.to(mean), moves * root, "g f, f i h e -> g i h e") / root - moves
            whole = whole + changed[own_groups(basis, KNOWN)[: len(whole)]]
        found[which] = base.expand_as(whole), whole
    position, score = (
        einsum(found["q"][i], found["k"][i], "b i h e, b j h e -> b h i j") * layer.scale
        for i in (0, 1)
    )
    score = score if layer.bias is None else score + layer.bias
    return (row_center(position, layer.allowed) * row_center(score, layer.allowed)).sum((0, 2, 3))


def planted_basis(h: Tensor, ids: Tensor, *, level: bool = False) -> PositionContext:
    """A basis of states in eight groups; ``level`` gives all groups the same mean over the
    window."""
    if level:
        each = h.mean(1, keepdim=True)
        group = torch.stack([each[g == GROUP].mean(0) for g in range(8)])
        h.sub_(group[GROUP]).add_(each.mean(0))
    basis = decompose_activations(h, window=(0, h.shape[1]), second_moments=False)
    return dataclasses.replace(basis, token_hashes=row_hashes(ids))


def test_draws_turn_the_groups_and_the_contexts_that_they_were_made_from() -> None:
    """A draw turns the groups of the basis, and the contexts that it was made from with them; the
    bias of ALiBi is in the scores of every draw, and position in none."""
    generator = torch.Generator().manual_seed(3)
    distance = (torch.arange(16.0)[:, None] - torch.arange(16.0)).abs()
    for scheme, fresh in itertools.product(("pos", "rotary", "alibi"), (False, True)):
        rotary = scheme == "rotary"
        h = World(stay=0.5, length=16, rotary=rotary).draw(64, generator)
        basis = planted_basis(h, KNOWN, level=not rotary)
        layer = layer_of(h, rotary=rotary, query=float(rotary))
        slopes = torch.linspace(0.1, 1, layer.q.shape[2])
        bias = -slopes[:, None, None] * distance if scheme == "alibi" else None
        layer = dataclasses.replace(layer, scale=0.2, bias=bias)  # not 1/sqrt(d_head)
        groups = GroupProjections(layer, basis)
        null, sums = PositionNull(groups.share, 0, 0), LeaveOut(groups.share)
        null.add(layer, groups)
        known = torch.full((64,), -1) if fresh else own_groups(basis, KNOWN)
        sums.add(groups.sums(layer, slice(None), 0), known.tolist())
        turn = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
        c = (turn.T @ groups.share.sqrt()) / groups.share.sqrt()
        pairs, beside, _ = null.pairs(sums)
        assert bool((beside != 0).all()) == (scheme == "alibi")
        count = 0 if fresh else 64
        found = null.numerators(pairs, count, torch.stack([torch.ones(8).double(), c]))
        truth = by_hand(layer, basis, torch.ones(8), rotary=rotary)
        drawn = by_hand(layer, basis, c, rotary=rotary, turn=None if fresh else turn)
        assert torch.allclose(found, torch.stack([truth, drawn], 1).double(), rtol=2e-4, atol=2e-2)
        assert float((truth - drawn).abs().min()) > 1


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bloom", "gemma2"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_basis_is_the_first_direction(architecture: str, normalize: bool) -> None:
    """Its share is the printed one: same contexts, same keys, same estimator."""
    model, basis = tiny("bridge", architecture), basis_of(architecture, normalize=normalize)
    work = sweep._SweepSums(view(model), basis, (0, 1), 16, ("nulls",), 2**31, 0)
    work.begin(KNOWN)
    view(model).run_layers(KNOWN, (0, 1), work.on_layer)
    printed = swept(architecture, normalize=normalize).group_cs[:, 0]
    for layer, made in work.details.items():
        assert made.null is not None
        assert made.left_out is not None
        pairs, beside, total = made.null.pairs(made.left_out)
        first = made.null.directions()[0][:1]
        share = (made.null.numerators(pairs, 64, first)[:, 0] + beside) / total
        assert torch.allclose(share, printed[4 * layer : 4 * layer + 4], atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_null_is_of_all_batches(architecture: str) -> None:
    """Scales of the norm differ from context to context: no batch stands for the others."""
    model, basis = tiny("bridge", architecture), basis_of(architecture)
    whole, parts = (
        sweep_heads(model, KNOWN, basis, detail="nulls", batch_size=size, progress=False).details
        for size in (64, 4)
    )
    for name in ("cs_position_null", "cs_position_null_95"):
        assert (whole[name] - parts[name]).abs().max() <= 0.01 * whole[name].abs().max()
    assert (whole["p_position"] - parts["p_position"]).abs().max() <= 0.002 + 1e-9


def test_relative_position_is_destroyed_and_found() -> None:
    """Constants of queries and keys are a relative position, of which the stream holds nothing."""
    world = World(position=0.0, rotary=True, along=0.0)
    h = world.draw(64, torch.Generator().manual_seed(1))
    basis, shares = planted_basis(h, KNOWN), []
    for size in (0.0, 2.0):
        layer = layer_of(h, rotary=True, query=size, key=size)
        made = Details(("nulls",), 0, 0)
        made.begin(layer, basis)
        parts = parts_of(layer, basis.mean[0], basis.pos_seen[0])
        made.update(layer, parts, slice(0, 64), KNOWN, own_groups(basis, KNOWN).tolist())
        table = made.table(64)
        shares.append(table["cs_position_null"])
        p = table["p_position"]
        assert bool((p <= 0.002).all()) if size else bool((p > 0.05).any())
        assert float(table["cs_position_null_95"].max()) < 0.15
    assert float(shares[1].abs().max()) < 0.1, "as large as noise, whatever there is"


def test_p_values_are_adjusted_for_the_number_of_heads() -> None:
    table = swept("gpt2")
    p, adjusted = table.details["p_position"], table.details["p_position_bh"]
    order = p.argsort()
    steps = p[order] * 8 / torch.arange(1, 9)
    by_hand = steps.flip(0).cummin(0).values.flip(0).clamp(max=1)
    assert torch.allclose(adjusted[order], by_hand)
    assert float(p.min()) == 1 / 2000, "far below 0.05 over the number of heads"
    assert (adjusted[:4] < 0.05).all()
    model = tiny("bridge", "llama")  # position is in the rotation, hardly in the means
    ids = tokens(batch=40, length=16, seed=4)
    basis = decompose(model, ids, progress=False)
    table = sweep_heads(model, ids, basis, detail="nulls", progress=False)
    assert (table.details["p_position"] > 0.05).sum() >= 4


def test_no_p_value_where_neighbouring_groups_are_alike() -> None:
    """Topics of two groups each: a rotary layer's keys hold them, and the groups are not
    independent; without the rotation they do not count."""
    for rotary, topics in itertools.product((True, False), (0, 4)):
        world = World(position=0.0, length=16, topics=topics, rotary=rotary)
        h = world.draw(64, torch.Generator().manual_seed(1))
        basis, layer = planted_basis(h, KNOWN), layer_of(h, rotary=rotary)
        made = Details(("nulls",), 0, 0)
        made.begin(layer, basis)
        parts = parts_of(layer, basis.mean[0], basis.pos_seen[0])
        made.update(layer, parts, slice(0, 64), KNOWN, own_groups(basis, KNOWN).tolist())
        table = made.table(64)
        assert bool(table["p_position"].isnan().all()) == (rotary and topics > 0)
        assert table["cs_position_null"].isfinite().all()


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


def test_contexts_are_added_together_or_one_by_one() -> None:
    """Neighbours of one group and block are added at once; blocks fill and merge alike."""
    g = torch.Generator().manual_seed(5)
    n = 75
    fields = {
        name: torch.rand(n, 2, 81, generator=g).double()
        for name in ("numerators", "energies", "gains")
    }
    fields |= {
        name: torch.rand(n, 2, generator=g).double()
        for name in ("total", "gain_total", "floor", "cells")
    }
    sums, own = ShareSums(**fields), torch.randint(-1, 3, (n,), generator=g).sort().values.tolist()
    own[10], own[40] = 2, -1  # a group comes back

    def added(step: int, groups: list[int]) -> LeaveOut:
        work = LeaveOut(torch.full((4,), 0.25).double())
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            work.add(sums.select(part), groups[part])
        return work

    one, many = added(1, own), added(32, own)
    assert one.counts == many.counts
    assert sum(one.counts.values()) == one.done == n
    for key, expected in one.sums.items():
        for name, value in expected.tensors().items():
            assert torch.allclose(many.sums[key].tensors()[name], value, rtol=1e-12)
    assert added(32, own[::-1]).counts != one.counts  # the twin
