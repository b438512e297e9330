"""How much runs at once: batches, blocks of rows, copies and widened weights fill what they may,
and no more."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.models import next_token, row_pass, view
from tl_geometry.models.batches import another_row, batch_of, default_batch
from tl_geometry.models.next_token import log_probabilities, output_batch, pilot_runs
from tl_geometry.models.precision import can_widen

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


@pytest.mark.parametrize(
    ("positions", "cpu", "gpu"), [(1, 4096, 16384), (300, 13, 54), (4096, 1, 4), (20000, 1, 1)]
)
def test_a_batch_is_of_4096_tokens_or_of_16384_on_a_gpu(positions: int, cpu: int, gpu: int) -> None:
    assert (default_batch(positions, CPU), default_batch(positions, GPU)) == (cpu, gpu)
    assert (batch_of(None, positions, CPU), batch_of(None, positions, GPU)) == (cpu, gpu)
    assert [batch_of(size, positions, GPU) for size in (1, 2, 99999)] == [1, 2, 99999]
    for size in (0, -1):
        with pytest.raises(GeometryError, match="batch_size: expected a whole number, at least 1"):
            batch_of(size, positions, CPU)


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_the_next_row_is_any_but_the_last_and_the_same_again(rows: int) -> None:
    for last in range(rows):
        draws = torch.Generator().manual_seed(0)
        found = [another_row(last, rows, draws) for _ in range(100)]
        assert set(found) == set(range(rows)) - {last}
        again = torch.Generator().manual_seed(0)
        assert found == [another_row(last, rows, again) for _ in range(100)]


def test_the_only_row_is_taken_again() -> None:
    draws = torch.Generator()
    assert another_row(0, 1, draws) == another_row(7, 1, draws) == 0


def test_logits_of_one_pass_are_at_most_half_a_gib() -> None:
    seen = view(tiny("bridge", "gpt2"))
    for vocabulary, positions, everywhere, last in (
        (61, 16, 256, 256),
        (2**20, 16, 8, 128),
        (2**20, 10, 12, 128),
        (2**28, 16, 1, 1),
    ):
        large = dataclasses.replace(seen, d_vocab=vocabulary)
        assert output_batch(large, positions, all_positions=True) == everywhere
        assert output_batch(large, positions, all_positions=False) == last


def test_prompts_of_1448_tokens_with_four_heads_are_the_longest_that_run_whole() -> None:
    seen = view(tiny("bridge", "llama"))
    assert seen.n_heads == 4
    assert not seen.in_rows(1448)
    assert seen.in_rows(1449)


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 12, 4096), (3, 8, 2000), (2, 32, 8000)])
def test_rows_of_scores_take_32_to_40_mib_at_a_time(batch: int, heads: int, length: int) -> None:
    slices = list(row_pass.query_slices(torch.empty(batch, length, heads, 8, device="meta")))
    rows = [range(length)[some] for some in slices]
    assert [i for some in rows for i in some] == list(range(length))
    for some in rows[:-1]:
        assert 32 * MIB < 4 * batch * heads * length * len(some) <= 40 * MIB
    assert len(rows[-1]) <= len(rows[0])


def test_one_row_is_taken_where_none_fits() -> None:
    q = torch.empty(4000, 3, 4000, 1, device="meta")
    assert [list(range(3)[some]) for some in row_pass.query_slices(q)] == [[0], [1], [2]]


@pytest.mark.parametrize(("batch", "cells"), [(2, 480), (2, 512), (3, 700), (2, 1)])
def test_a_block_of_rows_is_as_large_as_it_may_be(
    batch: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pass, "LONG", 0)
    monkeypatch.setattr(row_pass, "ROW_CELLS", cells)
    shapes: list[torch.Size] = []
    seen, ids = view(tiny("bridge", "llama")), tokens(batch, 24)

    def take(layer: int, start: int, pattern: Tensor) -> None:
        assert start == sum(shape[2] for shape in shapes)
        shapes.append(pattern.shape)

    seen.run_layers(ids, [1], lambda layer: None, verify=False, on_rows=take)
    assert len(shapes) > 1
    assert sum(shape[2] for shape in shapes) == 24
    for shape in shapes:
        rows, keys = shape[2:]
        assert rows == 1 or batch * 4 * rows * keys <= cells
        assert keys == 24 or batch * 4 * (rows + 1) * (keys + 1) > cells


def test_weights_of_four_gib_are_widened_and_no_more() -> None:
    """Of what is in half precision: other weights take nothing more."""

    def model(halves: int, singles: int) -> Any:
        sizes = {torch.float16: halves, torch.bfloat16: 2**20, torch.float32: singles}
        weights = [torch.empty(n, dtype=d, device="meta") for d, n in sizes.items()]
        return SimpleNamespace(parameters=lambda: iter(weights))

    most = 2**30 - 2**20
    assert can_widen(model(most, 2**31))
    assert not can_widen(model(most + 1, 0))


def test_copies_of_the_pilot_fill_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ids = view(tiny("bridge", "gpt2")), tokens(3, 10)
    own = log_probabilities(seen, ids, {})
    runs = pilot_runs(seen, ids, own, 8)
    assert runs.kept is not None
    # keys and values of 3 contexts, 9 tokens, 32 coordinates and 2 layers in float32
    size = 2 * 3 * 9 * 32 * 2 * 4
    assert runs.kept.size == size
    assert runs.copies == 512 // 3
    for bytes_, copies in ((2**28 + 1, 1), (2**28, 1), (2**26 + 1, 3), (2**26, 4)):
        large = dataclasses.replace(runs.kept, size=bytes_)
        monkeypatch.setattr(next_token, "behind", lambda *_, large=large: large)
        assert pilot_runs(seen, ids, own, 8).copies == copies


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_a_pilot_is_off_by_the_tolerance_at_most(dtype: torch.dtype, tolerance: float) -> None:
    """Relative to the largest log-probability. Beyond it all tokens run in each pass."""
    seen, ids = view(tiny("bridge", "gpt2", dtype=dtype)), tokens(3, 10)
    right = pilot_runs(seen, ids, log_probabilities(seen, ids, {}), 8).log_probabilities(1, {})
    assert float(right.min()) < -2
    for share in (0.9, 1.1):
        wrong = right.flatten().clone()
        wrong[wrong.argmin()] *= 1 + share * tolerance
        runs = pilot_runs(seen, ids, wrong.view_as(right), 8)
        assert (runs.kept is not None, runs.positions) == ((True, 1) if share < 1 else (False, 10))
        if runs.kept is None:
            sizes = [pilot_runs(seen, ids, 2 * right, limit).copies for limit in (2, 3, 8, 9)]
            assert sizes == [1, 1, 2, 3]
