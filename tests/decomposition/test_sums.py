"""The sums of a pass by loops over contexts and positions, at the ends of their ranges: defaults,
thresholds, buffers, and the sentence of each refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refusals import refused
from tl_geometry import decompose_activations
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition import moments, variance
from tl_geometry.decomposition.moments import Moments, Scratch
from tl_geometry.decomposition.variance import Anova

F64 = torch.float64


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def sums(
    h: Tensor, window: tuple[int, int], group_of: Tensor | None = None, **options: Any
) -> Moments:
    """Moments of one batch ``[state context position d_model]``."""
    states, contexts, length, d_model = h.shape
    found = Moments.zeros(states=states, length=length, d_model=d_model, window=window, **options)
    group_of = torch.zeros(contexts).long() if group_of is None else group_of
    for row in range(states):
        found.add(row, h[row], group_of)
    found.count(group_of)
    return found


# ---- moments


def test_no_sums_yet() -> None:
    """Eight groups by default, without second moments; products would be float32."""
    empty = Moments.zeros(states=2, length=5, d_model=3, window=(1, 5))
    assert empty.sums.shape == (8, 2, 5, 3)
    assert (empty.second, empty.shift, empty.product_dtype) == (None, None, torch.float32)
    assert {v.dtype for n, v in empty.tensors().items() if n != "counts"} == {F64}
    assert {v.device.type for v in empty.tensors().values()} == {"cpu"}
    assert (empty.contexts, empty.fixed, empty.scratch.busy) == (0, set(), False)
    assert not any(v.any() for v in empty.tensors().values())
    counted = repr(sums(gaussian(0, 2, 4, 5, 3), (1, 5), groups=3))
    sizes = "2 states of 5 positions and d_model 3"
    assert counted == f"Moments(4 contexts in 3 groups, {sizes})"


@pytest.mark.parametrize("positions_at_a_time", [1, 2, 3, 99])
@pytest.mark.parametrize("window", [(0, 8), (1, 8), (2, 5), (3, 4), (4, 6)])
def test_sums_by_loops(
    window: tuple[int, int], positions_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is converted at a time: over groups, positions, windows and their two ends, which
    leave a quarter (at least one position) between them."""
    h, group_of = gaussian(1, 2, 5, 8, 3), torch.tensor([0, 2, 2, 1, 2])
    monkeypatch.setitem(moments.BLOCK_BYTES, "cpu", 8 * 5 * 3 * positions_at_a_time)
    found = sums(h, window, group_of, groups=4, second=True, product_dtype=F64)
    start, end = window
    half = (end - start - max(1, (end - start) // 4)) // 2
    assert found.counts.tolist() == [1, 1, 3, 0]
    for state in range(2):
        for group in range(4):
            rows = h[state][group_of == group]
            assert torch.allclose(found.sums[group, state], rows.sum(0))
            assert torch.allclose(found.squares[group, state], rows.square().sum((0, 2)))
            inside = rows[:, start:end]
            expected = inside.mean(1).square().sum()
            assert float(found.context_squares[group, state]) == pytest.approx(float(expected))
            pair = [inside[:, :half].mean(1), inside[:, end - start - half :].mean(1)]
            ends = [0.0, 0.0, 0.0]
            if half:
                ends = [float((a * b).sum()) for a, b in (pair[:1] * 2, pair[1:] * 2, pair)]
            assert found.halves[group, state].tolist() == pytest.approx(ends)
        flat = h[state, :, start:end].reshape(-1, 3)
        assert found.tail[state, 0].sum() == len(flat)
        assert float(found.tail[state, 1].sum()) == pytest.approx(float(flat.square().sum()))
        centre = gaussian(2, 3)
        about = (flat - centre).T @ (flat - centre)
        assert torch.allclose(found.centred_second(state, centre), about)
    assert torch.allclose(found.window_sum(), h[:, :, start:end].sum((1, 2)))


def test_a_batch_gives_back_means_and_whether_all_is_finite() -> None:
    """And shows the states and norms of the window to whoever asks."""
    h = gaussian(3, 1, 4, 6, 3)
    found = Moments.zeros(states=1, length=6, d_model=3, window=(1, 5), groups=3)
    seen: list[Tensor] = []
    group_of = torch.tensor([1, 1, 2, 2])
    means, finite = found.add(0, h[0], group_of, lambda *both: seen.extend(both), slice(1, 3))
    assert torch.allclose(means, h[0, :, 1:5].mean(1))
    assert bool(finite)
    assert torch.equal(seen[0], h[0, :, 1:5])
    assert torch.allclose(seen[1], h[0, :, 1:5].norm(dim=-1))
    assert torch.allclose(
        found.sums[:, 0], torch.stack([0 * h[0, 0], h[0, :2].sum(0), h[0, 2:].sum(0)])
    )
    assert found.scratch.busy is False
    for position in (0, 3, 5):  # outside the window too
        broken = h[0].clone()
        broken[2, position, 1] = torch.inf
        assert not found.add(0, broken, group_of)[1]


def test_what_runs_out_of_memory_before_the_sums_change_leaves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every large buffer is asked for first: none of them fails while sums are changing."""
    h, get = gaussian(4, 1, 4, 6, 3), Scratch.get
    for name in ("block", "rows"):
        found = Moments.zeros(states=1, length=6, d_model=3, window=(1, 5), second=True)

        def short(self: Scratch, asked: str, *size: Any, name: str = name) -> Tensor:
            if asked == name:
                raise torch.OutOfMemoryError("planted")
            return get(self, asked, *size)

        monkeypatch.setattr(Scratch, "get", short)
        found.scratch.busy = True  # as an interrupted batch before would leave it
        with pytest.raises(torch.OutOfMemoryError):
            found.add(0, h[0], torch.zeros(4).long())
        assert found.scratch.busy is False
        assert not found.sums.any()
    monkeypatch.setattr(Scratch, "get", get)
    states: list[bool] = []
    found.add(0, h[0], torch.zeros(4).long(), lambda *_: states.append(found.scratch.busy))
    assert states == [True]


def test_buffers_are_given_again_where_they_fit() -> None:
    """The same memory for a smaller size, another for a larger one or another dtype."""
    scratch, cpu = Scratch(), torch.device("cpu")
    first = scratch.get("a", (2, 3), F64, cpu)
    assert first.shape == (2, 3)
    places = [
        scratch.get(*request, cpu).data_ptr() == first.data_ptr()
        for request in (("a", (3, 2), F64), ("a", (5,), F64), ("b", (2,), F64))
    ]
    assert places == [True, True, False]
    assert scratch.get("a", (5,), torch.float32, cpu).dtype == torch.float32
    assert scratch.get("a", (7,), torch.float32, cpu).shape == (7,)
    assert sorted(scratch.held) == ["a", "b"]


@pytest.mark.parametrize(("mean", "centred"), [(2.875, False), (3.125, True), (-3.125, True)])
def test_half_precision_is_centred_from_three_deviations_on(mean: float, centred: bool) -> None:
    """Only there; float32 always is."""
    signs = torch.tensor([1.0, -1.0]).repeat(8)[:, None, None]
    h = (mean + signs).expand(16, 3, 2)
    half = sums(h.half()[None], (0, 3), second=True)
    assert half.shift is not None
    assert half.shift.tolist() == [[mean if centred else 0.0] * 2]
    single = sums(h.float()[None], (0, 3), second=True)
    assert single.shift is not None
    assert single.shift[0].tolist() == pytest.approx([mean] * 2, rel=1e-6)
    for found, states in ((half, h.half()), (single, h)):
        flat = states.double().reshape(-1, 2)
        expected = flat.T @ flat
        assert torch.allclose(found.centred_second(0, torch.zeros(2)), expected, rtol=1e-4)


def test_moments_of_two_corpora_add_about_one_shift() -> None:
    """Products of two dtypes count as the coarser; an empty side changes nothing."""
    h = gaussian(5, 1, 6, 4, 3) + 50
    first, second = (
        sums(part, (1, 4), groups=2, second=True, product_dtype=dtype)
        for part, dtype in ((h[:, :2], F64), (h[:, 2:] - 3, torch.float32))
    )
    added = first + second
    everything = torch.cat([h[:, :2], h[:, 2:] - 3], 1)[0, :, 1:].reshape(-1, 3)
    assert torch.allclose(
        added.centred_second(0, torch.zeros(3)), everything.T @ everything, rtol=1e-6
    )
    assert (added.contexts, added.product_dtype) == (6, torch.float32)
    assert (second + first).product_dtype == torch.float32
    assert added.shift is not None
    assert first.shift is not None
    assert torch.equal(added.shift, first.shift)
    empty = Moments.zeros(states=1, length=4, d_model=3, window=(1, 4), groups=2, second=True)
    assert first + empty is first
    assert empty + first is first
    joined = added.regrouped(torch.tensor([0, 0]), 3)
    assert joined.counts.tolist() == [6, 0, 0]
    assert torch.allclose(joined.sums[0], added.sums.sum(0))
    assert torch.equal(joined.tail, added.tail)
    shifted = Moments.zeros(states=1, length=4, d_model=3, window=(1, 4), second=True)
    shifted.fixed.add(0)
    assert shifted.regrouped(torch.arange(8), 8).fixed == {0}
    assert joined.fixed == {0}


def test_moments_of_other_sizes_do_not_add() -> None:
    """The window, the sizes, and products on one side only."""
    h = gaussian(6, 1, 3, 4, 3)
    one, narrow, short, products = (
        sums(h, (1, 4)),
        sums(h, (2, 4)),
        sums(h[:, :, :3], (1, 3)),
        sums(h, (1, 4), second=True),
    )
    use = "Use partial results of one corpus."
    expected = "merge: expected window (1, 4) and sums of shape (8, 1, 4, 3)"
    assert refused(lambda: one + narrow) == f"{expected}, got window (2, 4) and (8, 1, 4, 3). {use}"
    assert refused(lambda: one + short) == f"{expected}, got window (1, 3) and (8, 1, 3, 3). {use}"
    for pair in ((one, products), (products, one)):
        assert refused(lambda p=pair: p[0] + p[1]) == (
            "merge: expected second moments in both or in neither, got in one. "
            "Use the same second_moments= for both."
        )


# ---- the analysis of variance


def test_states_without_any_variation_have_no_shares() -> None:
    """Zeros and constants: shares, agreement and the correction are unknown; sums are zero."""
    for h in (torch.zeros(12, 5, 3), torch.full((12, 5, 3), 0.1)):
        basis = decompose_activations(h, moments_dtype=F64)
        table = basis.anova()
        assert [float(x) for x in (table.total, table.pos, table.ctx, table.resid)] == [0] * 4
        values = [*table.shares.values(), table.pos_debiased, table.ctx_agreement]
        assert all(bool(v.isnan()) for v in values)
        assert float(table.pos_reliability) == 0


def test_one_end_that_is_the_same_in_all_contexts_has_no_agreement() -> None:
    """Whichever end it is."""
    h = gaussian(7, 12, 8, 3)
    assert bool(decompose_activations(h).anova().ctx_agreement.isfinite())
    for part in (slice(0, 3), slice(5, 8)):
        still = h.clone()
        still[:, part] = 1.0
        assert bool(decompose_activations(still).anova().ctx_agreement.isnan())
    for positions, defined in ((3, True), (2, False), (1, False)):
        found = decompose_activations(h[:, :positions]).anova().ctx_agreement
        assert bool(found.isfinite()) is defined
    two = decompose_activations(h[:2]).anova().ctx_agreement
    a, b = h[:2, :3].mean(1), h[:2, 5:].mean(1)
    a, b = a - a.mean(0), b - b.mean(0)
    assert float(two) == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())))
    assert bool(decompose_activations(h[:1]).anova().ctx_agreement.isnan())


def test_the_correction_takes_the_noise_off_by_hand() -> None:
    """``(SS_pos - SS_resid / (C - 1)) / SS_total``, and nothing below zero."""
    for h in (gaussian(8, 3, 5, 2) + 2 * gaussian(9, 5, 2), gaussian(8, 3, 5, 2) * 1.0):
        total = h - h.mean((0, 1))
        pos = 3 * float(total.mean(0).square().sum())
        ctx = 5 * float(total.mean(1).square().sum())
        size = float(total.square().sum())
        expected = max(0.0, pos - (size - pos - ctx) / 2) / size
        table = decompose_activations(h).anova()
        assert float(table.pos_debiased) == pytest.approx(expected)
        assert table.columns()[5] == "pos_debiased"
        assert float(table.shares["resid"]) == pytest.approx(1 - (pos + ctx) / size)


def test_a_table_made_by_hand_has_no_remarks_and_no_blocks() -> None:
    """And position that can be told from content."""
    one = dict.fromkeys(("total", "pos", "ctx", "resid"), torch.ones(2))
    names = ("pos_debiased", "pos_reliability", "ctx_agreement", "top_share")
    one |= dict.fromkeys(names, torch.zeros(2))
    table = Anova(provenance=Provenance(), states=(1, 2), contexts=4, positions=3, **one)
    assert (table.blocks, table.identifiable, table.intervals) == (0, True, {})
    assert [row[-1] for row in table.rows()] == ["", ""]
    assert table.rows()[0][:5] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 4], "3, 4"),
        ([4, 3, 5], "3 to 5"),
        ([0, 2, 3, 5, 6, 7, 9], "0, 2, 3, 5 to 7, 9"),
    ],
)
def test_runs_of_three_states_are_spans(states: list[int], text: str) -> None:
    """In any order."""
    assert variance.spans(states) == text
