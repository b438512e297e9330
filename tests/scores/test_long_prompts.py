"""Long prompts: dense requests are refused, and memory grows with the length of a prompt."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from tests.scores.long_prompt_memory import FUNCTIONS
from tests.splits import synthetic
from tl_geometry.base.errors import (
    BudgetError,
    GeometryError,
)
from tl_geometry.scores.top_cells import NO_KEY, largest_first

# ---- decompose


# ---- top cells


def test_top_cells_are_those_of_the_dense_term() -> None:
    split = synthetic(heads=3, tokens=512)
    for term in ("pos-cvec", "cvec-cvec", None):
        cells = split.total() if term is None else split[term].abs()
        dense = torch.where(split.allowed, cells, -torch.inf).topk(7)
        top = split.top_cells(7, term)
        there = top.keys != NO_KEY
        assert torch.equal(there, torch.isfinite(dense.values))
        values = top.values if term is None else top.values.abs()
        assert torch.equal(values[there], dense.values[there])
        # random numbers have no ties
        assert torch.equal(top.keys[there], dense.indices[there])
        assert bool(torch.isnan(top.values[~there]).all())
    assert int((~there).sum()) == 3 * sum(range(7))
    assert split.top_cells(1).to_dataframe().shape == (3 * 512, 7)


def test_equal_cells_come_in_the_order_of_their_keys() -> None:
    x = torch.randint(0, 3, (50, 200), generator=torch.Generator().manual_seed(0)).float()
    by_hand = [sorted(range(200), key=lambda j, row=row: (-float(row[j]), j))[:9] for row in x]
    assert largest_first(x, 9).tolist() == by_hand
    assert x.topk(9).indices.tolist() != by_hand  # topk alone takes any
    split = synthetic(heads=1, tokens=40)
    split.k[:, :, 10] = split.k[:, :, 30]
    split.k[:, :, 20] = split.k[:, :, 30]
    keys = split.top_cells(40).keys[0, 0, 39].tolist()
    at = keys.index(10)
    assert keys[at : at + 3] == [10, 20, 30]


def test_dense_requests_of_long_splits_are_refused() -> None:
    split = dataclasses.replace(synthetic(heads=2, tokens=64), memory_budget=2 * 64 * 64 * 4 - 1)
    for ask in (split.total, split.pattern, lambda: split["pos-pos"], split.model_scores):
        with pytest.raises(BudgetError, match="top_cells"):
            ask()
    enough = dataclasses.replace(split, memory_budget=2 * 64 * 64 * 4)
    assert enough["pos-pos"].shape == enough.pattern().shape
    assert split.shares().sums.total.shape == (2,)
    assert split.top_cells(2).keys.shape[-1] == 2
    for k in (0, 65):
        with pytest.raises(GeometryError, match="k: expected 1 to 64"):
            split.top_cells(k)


# ---- masks as ranges


# ---- memory


@pytest.fixture(scope="module")
def peaks() -> dict[str, list[float]]:
    """MiB of each function for 1,024 and 2,048 tokens, in small blocks: of the library's own size,
    a block of 36 MiB would hide a matrix of all cells."""
    # tensors of 64 KiB come from the kernel and go back to it; of a heap, the peak is chance
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    found: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    for length in (1024, 2048):
        module = [sys.executable, "-m", "tests.scores.long_prompt_memory"]
        command = [*module, *FUNCTIONS, str(length), "--cells", "1000000"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for line in out.stdout.splitlines():
            name, _, mib = line.split()
            found[name].append(float(mib))
    return found


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_grows_with_the_length_of_a_prompt(name: str, peaks: dict[str, list[float]]) -> None:
    """Twice the tokens, at most twice the memory; a whole pass takes more than three times as much.
    (Of 8,192 tokens: the page of scale.)"""
    short, long = peaks[name]
    if name == "whole":
        assert long > 3 * short
    else:
        assert long < 2 * short
