"""Tables of the package and their parts from numbers made by hand, without a model: names of terms,
marginals, bands, values, groups of contexts, ranges of ids, passes over a corpus."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tl_geometry.base.errors import BudgetError, GeometryError
from tl_geometry.base.results import Provenance, hash_tokens
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.models.model_view import ModelView
from tl_geometry.scores import corpus_pass, head_types, position_null
from tl_geometry.scores.corpus_pass import CorpusPass, rows_per_batch
from tl_geometry.scores.labels import Ranking, dominant
from tl_geometry.scores.leave_out import LeaveOut, group_parts, without
from tl_geometry.scores.plane_tables import PlaneTable
from tl_geometry.scores.planes import Band, HeadPlanes
from tl_geometry.scores.shapes import ContrastSums, Pattern, contrast_sums
from tl_geometry.scores.share_table import Marginals
from tl_geometry.scores.terms import (
    CONTEXT_PARTS,
    POSITION_PARTS,
    TermResult,
    bias_label,
    group_of,
    label,
    term_names,
    term_pairs,
)
from tl_geometry.scores.values import ValueSplit


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


# --- Terms ----------------------------------------------------------------------------------------


def test_every_pair_of_known_parts_has_its_group() -> None:
    """By how many of its sides are context; a part of any other name has none."""
    assert CONTEXT_PARTS == ("cvec", "ctx", "resid")
    assert POSITION_PARTS == ("bias", "mean", "pos", "alibi")
    for a in POSITION_PARTS + CONTEXT_PARTS:
        for b in POSITION_PARTS + CONTEXT_PARTS:
            sides = (a in CONTEXT_PARTS) + (b in CONTEXT_PARTS)
            assert group_of(f"{a}-{b}") == ("position", "mixed", "content")[sides], (a, b)
    assert group_of("mlp-pos") is None
    assert term_pairs(("a", "b"), alibi=True)[-2:] == (("b", "b"), ("alibi", "alibi"))
    assert term_names(("a",)) == ("a-a",)


@pytest.mark.parametrize("about", ["", "cs_", "gs_", "es_", "tv_", "kl_"])
def test_columns_about_the_bias_are_shown_under_its_name(about: str) -> None:
    """Other columns keep theirs, also where they end alike; other values are shown as they are."""
    assert label(f"{about}bias-bias", "mean-mean") == f"{about}mean-mean"
    assert label(f"{about}bias-bias") == f"{about}bias-bias"
    assert label(f"{about}pos-pos", "mean-mean") == f"{about}pos-pos"
    assert label(f"p_{about}bias-bias", "mean-mean") == f"p_{about}bias-bias"
    result = TermResult(provenance=Provenance(), bias_label="relative position")
    assert result.label(f"{about}bias-bias") == f"{about}relative position"
    assert result.readable(f"{about}bias-bias") == f"{about}relative position"
    assert result.readable(3) == 3
    assert TermResult(provenance=Provenance()).readable("bias-bias") == "bias-bias"


@pytest.mark.parametrize(
    ("rotary", "relative", "name"),
    [
        (False, False, "bias-bias"),
        (False, True, "bias-bias"),
        (True, False, "mean-mean"),
        (True, True, "relative position"),
    ],
)
def test_the_bias_is_called_after_what_it_depends_on(
    rotary: bool, relative: bool, name: str
) -> None:
    """A function of the offset only in a rotary model without a scale that varies by token."""
    assert bias_label(rotary=rotary, relative=relative) == name


# --- Labels ---------------------------------------------------------------------------------------


def test_a_lead_is_clear_and_a_share_is_most_above_their_limits_alone() -> None:
    """Half of the covariance and a lead of exactly a tenth are not enough; the numbers are exact in
    binary."""
    quarter = torch.tensor([[0.5, 0.25, 0.25], [0.515625, 0.25, 0.234375]], dtype=torch.float64)
    assert dominant(quarter, quarter, "abc").labels == ("unclear", "a")
    tenth = torch.tensor([[0.1, 0.0], [0.1000001, 0.0], [0.0, 0.2]], dtype=torch.float64)
    found = Ranking.of(tenth)
    assert found.clear.tolist() == [False, True, True]
    assert found.first.tolist() == [0, 0, 1]
    assert found.margin.tolist() == pytest.approx([0.1, 0.1000001, 0.2])
    only = Ranking.of(torch.ones(2, 1), torch.tensor([True, False]))
    assert only.clear.tolist() == [True, False]
    assert only.margin.tolist() == [float("inf")] * 2


def test_labels_without_names_and_without_gain() -> None:
    """No names: nothing to say. No gain: no second name, no flag and no label."""
    cs = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    nothing = dominant(cs[:, :0], cs[:, :0], [])
    assert nothing.labels == nothing.by_cs == nothing.by_gs == nothing.flags == ("",)
    assert nothing.share.isnan().all()
    assert nothing.gain_margin.isnan().all()
    no_gain = dominant(cs, torch.full_like(cs, torch.nan), ["a", "b"])
    assert (no_gain.labels, no_gain.by_cs, no_gain.by_gs) == (("unclear",), ("a",), ("",))
    assert no_gain.flags == ("",)
    partly = dominant(torch.tensor([[0.7, torch.nan]]), cs.float(), ["a", "b"])
    assert partly.labels == partly.by_cs == partly.by_gs == ("uniform",)
    assert partly.share.isnan().all()


# --- Tables ---------------------------------------------------------------------------------------


def test_marginals_have_a_row_for_each_head_side_and_part() -> None:
    """Sides are named; what was dropped stands beside them."""
    marginals = Marginals(
        provenance=Provenance(),
        heads=((2, 1),),
        parts=("pos", "cvec"),
        cs=torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]),
        gs=torch.tensor([[[0.0, 1.0], [-0.5, 1.5]]]),
        dropped_mass=torch.tensor([0.125]),
    )
    assert list(marginals.columns()) == [
        "layer",
        "head",
        "side",
        "part",
        "cs",
        "gs",
        "dropped_mass",
    ]
    assert [tuple(row) for row in marginals.rows()] == [
        (2, 1, "query", "pos", 0.25, 0.0, 0.125),
        (2, 1, "query", "cvec", 0.75, 1.0, 0.125),
        (2, 1, "key", "pos", 0.5, -0.5, 0.125),
        (2, 1, "key", "cvec", 0.5, 1.5, 0.125),
    ]


def test_bands_of_planes_by_hand() -> None:
    """Terms are kept by band and summed by head; bands of one's own need not cover all planes."""
    planes = HeadPlanes(
        torch.tensor([[0, 1, 2, 2]]),
        2 * torch.pi / torch.tensor([[4.0, 20.0, torch.inf]], dtype=torch.float64),
        32,
    )
    cs = torch.tensor([[[0.5, 0.125], [0.0, 0.25], [0.0625, 0.0625]]], dtype=torch.float64)
    gs = torch.tensor([[[0.5, 0.25], [0.0, 0.125], [0.125, 0.0]]], dtype=torch.float64)
    table = PlaneTable(
        provenance=Provenance(),
        heads=((3, 2),),
        terms=("a-a", "bias-bias"),
        head_planes=planes,
        cs=cs,
        gs=gs,
        bias_label="mean-mean",
    )
    assert table.length == 32
    assert list(table.columns()) == [
        *("layer", "head", "plane", "wavelength", "band", "term", "cs", "gs")
    ]
    assert [row[4] for row in table.rows()] == ["near"] * 2 + ["middle"] * 2 + ["pass"] * 2
    assert table.rows()[3] == (3, 2, 1, pytest.approx(20), "middle", "bias-bias", 0.25, 0.125)
    bands = table.by_band()
    assert (bands.bands, bands.bias_label) == (("near", "middle", "far", "pass"), "mean-mean")
    assert bands.cs[0].tolist() == [[0.5, 0.125], [0, 0.25], [0, 0], [0.0625, 0.0625]]
    assert bands.gs[0].tolist() == [[0.5, 0.25], [0, 0.125], [0, 0], [0.125, 0]]
    assert bands.total_cs.tolist() == [[0.625, 0.25, 0, 0.125]]
    assert bands.total_gs.tolist() == [[0.75, 0.125, 0, 0.125]]
    assert bands.dominant == ("near",)
    heads = bands.by_head()
    assert list(heads.columns()) == [
        *("layer", "head", "dominant"),
        *(f"{share}_{band}" for share in ("cs", "gs") for band in bands.bands),
    ]
    numbers = (0.625, 0.25, 0, 0.125, 0.75, 0.125, 0, 0.125)
    assert heads.rows() == [(3, 2, "near", *numbers)]
    own = table.by_band({"slow": Band(10, 20)})
    assert own.bands == ("slow", "pass")
    assert own.total_cs.tolist() == [[0.25, 0.125]]


def values(**changes: Any) -> ValueSplit:
    """Two parts of two heads."""
    fields: dict[str, Any] = {
        "provenance": Provenance(),
        "heads": ((0, 1), (1, 0)),
        "parts": ("pos", "cvec"),
        "z": draw(2, 3, 4, 2, 5),
        "W_O": draw(2, 5, 6, seed=1),
    }
    return ValueSplit(**(fields | changes))


def test_outputs_shares_and_norms_of_values_by_numpy() -> None:
    """What each part writes, its covariance with the whole and its root mean square length."""
    split = values()
    each = np.einsum("pbihe,hed->pbihd", split.z.numpy(), split.W_O.numpy())
    whole = each.sum(0)
    assert np.allclose(split.output(), whole)
    for p, part in enumerate(split.parts):
        assert np.allclose(split.output(part), each[p])
        for h in range(2):
            out, total = each[p, :, :, h], whole[:, :, h]
            assert float(split.share[h, p]) == pytest.approx((out * total).sum() / (total**2).sum())
            norm = np.sqrt((out**2).sum(-1).mean())
            assert float(split.norm[h, p]) == pytest.approx(norm)
    row = (0, 1, "cvec", float(split.share[0, 1]), float(split.norm[0, 1]))
    assert tuple(split.rows()[1]) == row
    silent = values(z=torch.zeros(2, 3, 4, 2, 5, dtype=torch.float64))
    assert silent.share.isnan().all()
    assert not silent.norm.any()


def test_effects_are_those_of_a_part_and_were_asked_for() -> None:
    """A part that is not there, and logits that were not computed, are refused."""
    logits = draw(2, 3, 4, 2, 2)
    assert torch.equal(values(logits=logits).effect("cvec"), logits[1])
    with pytest.raises(
        GeometryError, match=r"^effect: expected token_ids= in split_values, got no"
    ):
        values().effect("pos")
    with pytest.raises(GeometryError, match=r"^part: expected one of 'pos', 'cvec', got 'ctx'"):
        values(logits=logits).effect("ctx")


# --- Groups of contexts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "spread"),
    [
        ((8, 8), True),
        ((4, 12), True),  # half of the share that the basis has
        ((3, 13), False),
        ((12, 4), True),
        ((13, 3), False),
        ((16, 0), False),
    ],
)
def test_contexts_are_spread_as_the_basis_within_a_factor_of_two(
    counts: tuple[int, int], spread: bool
) -> None:
    """Half as many as expected are enough, and no context may be outside the basis."""
    work = LeaveOut(torch.tensor([0.5, 0.5]))
    work.counts = {(group, 0): n for group, n in enumerate(counts) if n}
    work.done = sum(counts)
    assert work.spread == spread
    work.counts = {**work.counts, (-1, 1): 1}
    work.done += 1
    assert not work.spread


def test_twice_the_expected_share_is_still_spread() -> None:
    """Both sides of the upper limit."""
    for n, spread in ((8, True), (9, False)):
        work = LeaveOut(torch.tensor([0.25, 0.75]))
        work.counts = {(0, 0): n, (1, 0): 16 - n}
        work.done = 16
        assert work.spread == spread


@pytest.mark.parametrize("left_out", [set(), {0}, {1, 2}])
def test_parts_without_groups_by_hand(left_out: set[int]) -> None:
    """Bias and pos are means over the groups that stay; with cvec they sum to the whole."""
    share = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    q, bias, pos = draw(2, 3, 1, 4), draw(3, 2, 3, 1, 4, seed=1), draw(3, 2, 3, 1, 4, seed=2)
    parts = group_parts(q, bias, pos, share)
    assert parts.shape == (7, 2, 3, 1, 4)
    torch.testing.assert_close(parts.sum(0), q)
    found = torch.einsum("pm,mbihe->pbihe", without(share, left_out), parts)
    stay = [g for g in range(3) if g not in left_out]
    weight = share[stay] / share[stay].sum()
    for i, vectors in enumerate((bias, pos)):
        expected = (weight.reshape(-1, 1, 1, 1, 1) * vectors[stay]).sum(0)
        torch.testing.assert_close(found[i], expected)
    torch.testing.assert_close(found.sum(0), q)


@pytest.mark.parametrize("ordered", [True, False])
def test_neighbouring_groups_that_are_alike_are_rare_among_random_orders(ordered: bool) -> None:
    """The share of all 720 orders with such neighbours, up to the sampling error; one where order
    means nothing, and zero where all groups are the same."""
    x = torch.tensor([[2.0, 0], [2, 0.1], [0, 2], [0.1, 2], [-2, 0], [-2, 0.1]]).double()
    x = x - x.mean(0)
    gram, size = x @ x.mT, x.square().sum()
    found = position_null.independence(gram, size, 0, ordered=ordered)
    sums = [sum(float(gram[a, b]) for a, b in pairwise(o)) for o in permutations(range(6))]
    share = sum(s >= sums[0] - 1e-6 for s in sums) / len(sums)
    assert share < 0.1
    error = (share * (1 - share) / position_null.DRAWS) ** 0.5
    assert found == pytest.approx(share, abs=4 * error) if ordered else found == 1
    still = position_null.independence(0 * gram, size, 0, ordered=ordered)
    assert still == 0
    tiny = torch.eye(6).double() * 1e-10 / 6
    assert position_null.independence(tiny, torch.tensor(1.01).double(), 0, ordered=False) == 0
    assert position_null.independence(tiny, torch.tensor(0.99).double(), 0, ordered=False) == 1


# --- Shapes of terms ------------------------------------------------------------------------------


def test_distances_of_patterns_by_loops() -> None:
    """Over rows that see two keys at least; a row that sees none counts for nothing."""
    scores, other = draw(2, 4, 5), draw(2, 4, 5, seed=1)
    allowed = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0]])
    pattern = Pattern(scores, allowed.bool())
    tv, kl = np.zeros(2), np.zeros(2)
    for h in range(2):
        for i in (2, 3):
            seen = allowed[i].bool().numpy()
            p, q = (np.exp(x[h, i].numpy()[seen]) for x in (scores, other))
            p, q = p / p.sum(), q / q.sum()
            assert pattern.p[h, i].numpy()[seen] == pytest.approx(p)
            tv[h] += np.abs(p - q).sum() / 2 / 2
            kl[h] += (p * np.log(p / q)).sum() / 2
    assert np.allclose(pattern.distance(other), [tv, kl])
    assert not pattern.p[:, 0].any()
    assert float(pattern.distance(scores).abs().max()) < 1e-12


def test_the_contrast_of_equal_tokens_by_numpy() -> None:
    """Means of pairs of one token and of two, over their pooled deviation, without the diagonal."""
    tokens = torch.tensor([[1, 2, 1, 2], [3, 3, 1, 3]])
    x, allowed = draw(2, 1, 4, 4), torch.ones(4, 4, dtype=torch.bool).tril()
    same, others = [], []
    for b in range(2):
        for i in range(4):
            for j in range(i):
                where = same if tokens[b, i] == tokens[b, j] else others
                where.append(float(x[b, 0, i, j]))
    squares = sum(np.var(y) * len(y) for y in (same, others))
    pooled = np.sqrt(squares / (len(same) + len(others) - 2))
    expected = (np.mean(same) - np.mean(others)) / pooled
    assert float(contrast_sums(x, tokens, allowed).contrast) == pytest.approx(expected)
    few = torch.tensor([[[1.0], [2.0], [4.0]], [[9.0], [1.0], [3.0]]])
    assert ContrastSums(values=few).contrast.isnan().all()
    few[0] = torch.tensor([[2.0], [2.0], [4.0]])
    assert ContrastSums(values=few).contrast.isfinite().all()


# --- Tokens of head types and passes over a corpus ------------------------------------------------


@pytest.mark.parametrize(
    ("d_vocab", "avoid", "expected"),
    [
        (20_000, [19_999], (1000, 10_000)),
        (19_999, [], (0, 19_999)),
        (100, [0, 49], (50, 100)),
        (100, [0, 50], (1, 100)),
        (100, [None, 3, 1], (4, 100)),
    ],
)
def test_ids_are_drawn_above_special_ones_of_the_lower_half(
    d_vocab: int, avoid: list[int | None], expected: tuple[int, int]
) -> None:
    """Both sides of a large vocabulary and of the middle of a small one."""
    assert head_types.token_range(d_vocab, avoid) == expected


@pytest.mark.parametrize(
    ("n_ctx", "d_vocab", "bos", "period"),
    [
        (64, 100, False, 32),
        (63, 100, False, 31),
        (64, 100, True, 31),
        (65, 100, True, 32),
        (64, 33, False, 32),
        (64, 32, False, 31),
        (2, 100, True, 1),
        (1000, 1000, False, 32),
    ],
)
def test_two_copies_fit_into_the_context(n_ctx: int, d_vocab: int, bos: bool, period: int) -> None:
    """With BOS there is a position less; ids are distinct within a copy."""
    assert head_types.period_for(n_ctx, d_vocab, bos=bos) == period


def test_ranges_of_ids_are_twelve_by_default_and_at_least_one() -> None:
    """The first thousand ids and the last fiftieth are left out."""
    ranges = head_types.token_ranges(50_000)
    assert len(ranges) == 12
    assert ranges[0] == (1000, 5000)
    assert ranges[-1] == (45_000, 49_000)
    assert head_types.token_ranges(50_000, count=1) == [(1000, 49_000)]
    with pytest.raises(GeometryError, match=r"^count: expected at least 1 range, got 0"):
        head_types.token_ranges(50_000, count=0)


@pytest.mark.parametrize(("budget", "size", "rows"), [(100, None, 10), (59, None, 5), (100, 4, 4)])
def test_a_batch_has_what_the_budget_holds_and_no_more_than_was_asked_for(
    budget: int, size: int | None, rows: int
) -> None:
    """Ten bytes for each context."""
    view = Mock(spec=ModelView, device=torch.device("cpu"))
    assert rows_per_batch(view, 16, 10, budget, size) == rows
    text = (
        r"^memory_budget: expected at least 10 bytes for one context of 16 positions, got 9\. Use "
        r"shorter windows, or a larger memory_budget=\.$"
    )
    with pytest.raises(BudgetError, match=text):
        rows_per_batch(view, 16, 10, 9, size)
    assert rows_per_batch(view, 16, 10, 10, size) == 1


def source_of(first: list[int]) -> tuple[Mock, Tensor]:
    """Seven contexts of four tokens, which begin with the given ones."""
    tokens = torch.arange(28).view(7, 4) + 1
    tokens[:, 0] = torch.tensor(first)
    source = Mock(spec=TokenSource, corpus="mine", length=4, contexts=7, flags=("cut",))
    source.batches = lambda rows: iter(tokens.split(rows))
    return source, tokens


@pytest.mark.parametrize(
    ("first", "bos"), [([0] * 7, [True] * 3), ([0, 0, 0, 5, 0, 0, 0], [True, False, False])]
)
def test_a_pass_counts_and_hashes_what_was_read(
    first: list[int], bos: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch at hand is not yet counted, but its BOS is; all queries of the first sampled
    context are compared, later 32; the last batch has one context."""
    made: list[dict[str, Any]] = []
    view = Mock(spec=ModelView, bos_id=0)
    view.name = "model"
    view.provenance = lambda **about: made.append(about) or Provenance()
    source, tokens = source_of(first)
    stream = CorpusPass(view, source, 3, seed=4)
    seen = []
    for batch in stream:
        row, verify = stream.sample()["sample"]
        assert verify("anything") is None
        assert stream.sample(print)["sample"] == (row, print)
        assert 0 <= row < len(batch)
        queries = stream.sample()["queries"]
        seen.append((len(batch), stream.contexts, stream.first, queries, stream.begins_with_bos))
    assert seen == [
        (3, 0, True, None, bos[0]),
        (3, 3, False, 32, bos[1]),
        (1, 6, False, 32, bos[2]),
    ]
    assert (stream.contexts, stream.row) == (7, 0)
    assert stream.token_hash == hash_tokens(tokens)
    stream.provenance(1, flags=("own",), preset="exact")
    assert made.pop() == {
        "corpus": "mine",
        "token_hash": stream.token_hash,
        "has_bos": bos[-1],
        "window": (1, 4),
        "contexts": 7,
        "seed": 4,
        "flags": ("own",),
        "preset": "exact",
    }
    assert capsys.readouterr().err == ""
    list(CorpusPass(view, source, 3, progress=True))
    shown = capsys.readouterr().err
    assert "7/7" in shown
    assert "model" in shown
    assert "ctx" in shown
    assert corpus_pass.SAMPLED == 32
