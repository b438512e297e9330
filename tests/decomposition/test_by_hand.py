"""Groups, limits, largest tokens and what a basis says, by loops over the contexts themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import tiny, tokens
from tl_geometry import decompose_activations
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition import accumulator, resampling
from tl_geometry.decomposition.groups import blocks, jackknife_blocks
from tl_geometry.decomposition.largest import (
    KEPT,
    Largest,
    log_histogram,
    median_norm,
    sinks_of,
    top_share,
)
from tl_geometry.decomposition.moments import half_width
from tl_geometry.decomposition.position_context import PositionContext


def states(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---- groups


def blocks_by_hand(counts: list[int], least: int) -> list[set[int]]:
    """Groups one after another; a block ends where it and what remains are large enough."""
    found: list[set[int]] = [set()]
    for group, count in enumerate(counts):
        if not count:
            continue
        size = sum(counts[g] for g in found[-1])
        if size >= least and sum(counts[group:]) >= least:
            found.append(set())
        found[-1].add(group)
    return found


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=9), least=st.sampled_from([1, 4, 8]))
def test_blocks_join_groups_until_they_are_large_enough(counts: list[int], least: int) -> None:
    rows = [set(row.nonzero()[:, 0].tolist()) for row in blocks(torch.tensor(counts), least)]
    assert rows == blocks_by_hand(counts, least)


@pytest.mark.parametrize(("counts", "rows"), [([8] * 4, 4), ([8] * 3 + [7], 4), ([4] * 8, 4)])
def test_a_jackknife_leaves_out_four_blocks_of_eight_or_single_groups(
    counts: list[int], rows: int
) -> None:
    joined = jackknife_blocks(torch.tensor(counts))
    assert len(joined) == rows
    assert bool((joined.sum(0) == 1).all())
    assert torch.equal(blocks(torch.tensor(counts)), blocks(torch.tensor(counts), 8))
    fewer = [4] * 7 + [3]  # 31 contexts: three blocks of eight, so that groups stay single
    assert torch.equal(jackknife_blocks(torch.tensor(fewer)), torch.eye(8).bool())


def test_the_sets_of_a_report_are_all_but_a_block_and_parts_of_a_size() -> None:
    basis = decompose_activations(states(36, 4, 3), groups=9)
    counts = basis.group_counts
    assert counts.tolist() == [4] * 9
    found = resampling.subsets(basis)
    without = [{0, 1}, {2, 3}, {4, 5}, {6, 7, 8}]
    parts = {
        8: [{0, 1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}],
        4: [{0, 1, 2}, {3, 4}, {5, 6}, {7, 8}],
        2: [{0, 1, 2, 3, 4}, {5, 6, 7, 8}],
    }
    every = set(range(9))
    expected = [every, *(every - block for block in without)]
    expected += [part for level in parts.values() for part in level]
    assert [set(row.nonzero()[:, 0].tolist()) for row in found.member] == expected
    assert found.blocks == 4
    assert found.jackknife == slice(1, 5)
    levels = ((4, slice(5, 13)), (9, slice(13, 17)), (18, slice(17, 19)))  # 36 / 8 = 4.5, to even
    assert found.levels == levels
    alone = resampling.subsets(basis, jackknife=False)
    assert alone.member.tolist() == [[True] * 9]
    assert (alone.blocks, alone.levels) == (0, ())
    single = resampling.subsets(decompose_activations(states(3, 4, 3), groups=1))
    assert single.member.tolist() == [[True]]
    assert single.blocks == 0
    assert resampling.noise_weights(
        decompose_activations(states(3, 4, 3), groups=1), 5, 0
    ).shape == (0, 1)


@settings(deadline=None, max_examples=12)
@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), groups=st.integers(1, 5))
def test_a_group_of_a_part_goes_where_its_middle_context_is(sizes: list[int], groups: int) -> None:
    h = states(1, sum(sizes), 3, 2, seed=sum(sizes))
    parts = [decompose_activations(part, groups=groups) for part in h.split(sizes, dim=1)]
    merged, start = PositionContext.merge(parts), 0
    expected = torch.zeros(max(len(p.group_counts) for p in parts), 2, dtype=torch.float64)
    for part in parts:
        for count in part.group_counts.tolist():
            if count:
                group = (start + count // 2) * len(expected) // sum(sizes)
                expected[group] += h[0, start : start + count].sum((0, 1))
            start += count
    assert torch.allclose(merged.group_sums.sum((1, 2)), expected, atol=1e-10)


@pytest.mark.parametrize(("last", "sizes"), [(1, [4] * 4 + [5]), (2, [4] * 5 + [2])])
def test_a_last_block_of_half_the_size_stays(last: int, sizes: list[int]) -> None:
    """Of contexts whose number is not known, in blocks of four at the end."""
    count = sum(sizes)
    assert count == 20 + last
    rows = tokens(count, 5)
    basis = tlg.decompose(tiny("bridge", "gpt2"), iter(rows.split(3)), groups=4, progress=False)
    assert basis.group_counts.tolist() == sizes


@pytest.mark.parametrize("width", range(1, 40))
def test_ends_of_a_window_leave_a_quarter_between_them(width: int) -> None:
    half = half_width(width)
    between = max(1, width // 4)
    assert 2 * half + between <= width < 2 * (half + 1) + between


# ---- limits


def test_what_takes_as_much_as_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second moments, context means (of a known and an unknown number of contexts) and samples,
    by the bytes that they take."""
    model, rows = tiny("bridge", "gpt2"), tokens(20, 12)
    options: dict[str, Any] = {"states": [0, 2], "progress": False, "batch_size": 4}
    whole = tlg.decompose(model, rows, **options)
    assert whole.moments.second is not None
    assert whole.context_means is not None
    sources = (lambda: rows, lambda: iter(rows.split(4)))
    for kept, name in ((whole.moments.second, "second moments"), (whole.context_means, "context")):
        for less in (0, 1):
            monkeypatch.setattr(accumulator, "KEEP_LIMIT", kept.nbytes - less)
            for source in sources:
                basis = tlg.decompose(model, source(), **options)
                there = basis.has_second_moments if name[0] == "s" else basis.ctx is not None
                assert there == (less == 0), (name, less)
                said = [f for f in basis.provenance.flags if name in f]
                assert len(said) == less
    assert whole.samples is not None
    one = whole.samples[:1].nbytes
    for limit, number in ((7 * one, 7), (7 * one - 1, 6)):
        monkeypatch.setattr(accumulator, "KEEP_LIMIT", limit)
        basis = tlg.decompose(model, rows, keep=7, **options)
        assert basis.samples is not None
        assert len(basis.samples) == number
        assert ("6 of 7 samples kept (1 GiB)" in basis.provenance.flags) == (number == 6)


def test_defaults_are_eight_groups_and_thirty_two_samples() -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(40, 6)
    h = states(40, 6, 4)
    for plain in (tlg.decompose(model, rows, progress=False), decompose_activations(h)):
        assert plain.group_counts.tolist() == [5] * 8
        assert plain.samples is not None
        assert len(plain.samples) == 32
        assert plain.moments.product_dtype == torch.float32
    assert decompose_activations(h, keep=0).samples is None
    starts = {1: "position 0 left out", 3: "positions 0 to 2 left out"}
    for start, text in starts.items():
        flags = decompose_activations(h, window=(start, 6)).provenance.flags
        assert flags == (f"{text} of the statistics",)
    assert decompose_activations(h, window=(0, 4)).provenance.flags == ()
    for name in ("keep", "seed"):
        options: dict[str, Any] = {name: -1}
        with pytest.raises(GeometryError, match=f"{name}: expected at least 0, got -1"):
            decompose_activations(h, **options)


# ---- largest tokens


def of_squares(*squares: float) -> tuple[Tensor, Largest]:
    """The histogram and the largest tokens of states of these squared norms, each at a position
    and with a token id of its own."""
    values = torch.tensor(squares, dtype=torch.float64)
    order = values.argsort(descending=True, stable=True)[:KEPT]
    largest = Largest.empty(1)
    fields = {"norm": values[order].sqrt(), "position": order, "token": 100 + order}
    fields |= {"context": torch.zeros_like(order), "coordinate": torch.zeros_like(order)}
    for name, of in largest.tensors().items():
        of[0, : len(order)] = fields[name]
    return log_histogram(values), largest


@pytest.mark.parametrize(
    ("tokens", "largest", "said"),
    [(1000, 256.0, False), (1000, 289.0, True), (20, 16.0, False), (20, 25.0, True)],
)
def test_a_remark_needs_more_than_a_quarter_and_ten_times_the_share(
    tokens: int, largest: float, said: bool
) -> None:
    """A quarter of the squares with 1,000 tokens, a half with 20, of which one is 5%."""
    ones = 768 if tokens == 1000 else 16
    held = sinks_of(*of_squares(*[1.0] * ones, *[0.0] * (tokens - 1 - ones), largest), 0)
    assert (held.tokens, held.of) == (1, tokens)
    assert held.share == pytest.approx(largest / (ones + largest))
    assert bool(held.remark) == said
    assert (held.positions, held.ids) == ((tokens - 1,), (100 + tokens - 1,))


def test_a_remark_names_three_places_and_tokens() -> None:
    histogram, largest = of_squares(*[1.0] * 3996, 9e3, 8e3, 7e3, 6e3)
    held = sinks_of(histogram, largest, 0, ["a", "b\n", "c"])
    assert held.remark == (
        "4 of 4000 tokens hold 88% of the sum of squares (positions 3996, 3997, 3998, ..., "
        r"tokens 'a', 'b\n', 'c', ...)"
    )
    largest.position[0, :4] = torch.tensor([5, 7, 7, 6])
    largest.token[0, :4] = torch.tensor([-1, 8, 9, 8])
    held = sinks_of(histogram, largest, 0)
    assert (held.positions, held.ids) == ((7, 5, 6), (8, 9))
    assert held.remark.endswith("(positions 7, 5, 6, tokens 8, 9)")
    largest.token[0] = -1
    largest.position[0, :4] = 7
    assert sinks_of(histogram, largest, 0).remark.endswith("squares (position 7)")


def test_a_thousandth_of_the_tokens_is_whole_and_at_least_one() -> None:
    """Up to the tokens that are kept the share is exact, beyond them that of the histogram."""
    for count, largest in ((1999, 1), (2000, 2), (32_999, 32)):
        squares = [1.0] * (count - 40) + [50.0 + i for i in range(40)]
        histogram, kept = of_squares(*squares)
        exact = sum(sorted(squares)[-largest:]) / sum(squares)
        assert float(top_share(histogram, kept.norm[0])) == pytest.approx(exact, rel=1e-12)
        assert sinks_of(histogram, kept, 0).tokens == largest
    # 33 of the 40 in a bin of their own: their mean square in place of the largest
    histogram, kept = of_squares(*[1.0] * 32_960, *[64.0 + i / 10 for i in range(40)])
    total = 32_960 + 40 * 65.95
    assert float(top_share(histogram, kept.norm[0])) == pytest.approx(33 * 65.95 / total, rel=1e-12)


def test_the_median_norm_is_that_of_the_bin_in_the_middle() -> None:
    for below, above, median in ((2, 2, 1.0), (2, 3, 4.0), (3, 2, 1.0)):
        histogram, _ = of_squares(*[1.0] * below, *[16.0] * above)
        assert float(median_norm(histogram)) == median


# ---- what a basis says


def test_a_basis_says_what_it_is_of_and_what_it_keeps() -> None:
    h = states(3, 9, 6, 4)
    basis = decompose_activations(h, states=[0, 2], window=(1, 6), keep=5)
    where = "activations, 9 contexts, window (1, 6), float64"
    flag = "position 0 left out of the statistics"
    assert repr(basis) == (
        f"PositionContext({where}, {flag}; states 0..2; 1 of 6 positions outside the window; "
        "kept: second moments, ctx, 5 sampled contexts)"
    )
    bare = decompose_activations(h, second_moments=False, keep_ctx=False, keep=0)
    assert repr(bare).endswith("all positions in the statistics; kept: sums)")
    assert repr(basis.reservoir) == "Reservoir(5 of 5 contexts, seed 0)"
    expected = "Moments(9 contexts in 8 groups, 2 states of 6 positions and d_model 4)"
    assert repr(basis.moments) == expected


def test_new_states_are_placed_in_the_window_where_they_are_as_long() -> None:
    h = states(1, 9, 6, 4)
    basis, new = decompose_activations(h, window=(2, 5)), states(1, 2, 6, 4, seed=1)
    mean = h[:, :, 2:5].mean((1, 2))
    curve = h.mean(1) - mean
    for length, first in ((3, 2), (4, 0), (6, 0)):
        given, pos = new[:, :, :length], curve[:, first : first + length]
        parts = basis.transform(given)
        assert torch.allclose(parts.pos, pos)
        ctx = (given - mean - pos.unsqueeze(1)).mean(2)
        assert torch.allclose(parts.ctx, ctx)
        assert torch.allclose(parts.total(), given)
        single = basis.transform(given[0])
        assert torch.allclose(single.ctx, ctx[0])
        assert torch.allclose(single.resid, parts.resid[0])
    ends = basis.transform(new[:, :, :2], positions=[5, 0])
    assert torch.allclose(ends.pos, curve[:, [5, 0]])
    for bad in ([6, 0], [-1, 0], [0]):
        with pytest.raises(GeometryError, match="positions: expected 2 from 0 to 5"):
            basis.transform(new[:, :, :2], positions=bad)


def test_half_of_the_contexts_in_common_is_a_remark_and_more_is_refused() -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(12, 6)
    first = tlg.decompose(model, rows, progress=False)
    for shared, fits in ((3, True), (4, False)):
        other = torch.cat([rows[:shared], tokens(6 - shared, 6, seed=9)])
        second = tlg.decompose(model, other, progress=False)
        for parts in ((first, second), (second, first)):
            if fits:
                text = "3 contexts are in more than one of the merged parts"
                assert text in PositionContext.merge(parts).provenance.flags
                continue
            with pytest.raises(GeometryError, match="got 4 contexts that are in parts 0 and 1"):
                PositionContext.merge(parts)


def test_a_basis_belongs_to_a_width_and_a_setting_of_bos() -> None:
    view = tlg.view(tiny("bridge", "gpt2"))
    basis = decompose_activations(states(4, 6, view.d_model))
    basis.check_model(view, has_bos=True)
    for has_bos, known in ((True, False), (False, True)):
        about = dataclasses.replace(basis.provenance, has_bos=known)
        marked = dataclasses.replace(basis, provenance=about)
        marked.check_model(view)
        marked.check_model(view, has_bos=known)
        with pytest.raises(GeometryError, match=f"has_bos={known}, as in the basis, got has_bos"):
            marked.check_model(view, has_bos=has_bos)
    with pytest.raises(GeometryError, match=f"d_model {view.d_model} of tiny-gpt2, got 5"):
        decompose_activations(states(4, 6, 5)).check_model(view)
