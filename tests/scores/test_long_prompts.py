"""Prompts that run in blocks of query rows give what they give whole, are verified as closely, and
take memory that grows with their length."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.scores.long_prompt_memory import FUNCTIONS, long_llama
from tests.splits import synthetic
from tests.tiny import ARCHITECTURES, loadable, tiny, tokens
from tl_geometry import decompose, explain_logit, split_scores, sweep_heads, trace_logit, view
from tl_geometry.base.errors import (
    BudgetError,
    GeometryError,
    ReconstructionError,
    UnsupportedModelError,
)
from tl_geometry.base.rows import KeyRanges, after, causal_mask
from tl_geometry.models import row_pass
from tl_geometry.models.forward import Runner
from tl_geometry.models.layers import Layers
from tl_geometry.scores.sums import share_sums
from tl_geometry.scores.top_cells import NO_KEY, largest_first

PROMPTS = tokens(batch=2, length=24, seed=7)
WHOLE = ("bert", "mpt", "bloom", "bloom6", "falcon-alibi", "gpt-oss")
"""Encoders, ALiBi, sinks: these run whole."""
WAYS = [
    (c, a) for a in ARCHITECTURES if a not in (*WHOLE, "roberta") for c, p in loadable(a) if not p
]


@pytest.fixture
def in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is a long one, and a block a few rows of it."""
    monkeypatch.setattr(row_pass, "LONG", 0)
    monkeypatch.setattr(row_pass, "ROW_CELLS", 4 * 2 * 60)


def basis_of(model: Any) -> Any:
    return decompose(model, tokens(batch=8, length=24, seed=3), groups=2, progress=False)


@pytest.mark.parametrize(("model_class", "architecture"), WAYS)
def test_a_split_in_blocks_is_the_split_of_the_whole(
    model_class: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(model_class, architecture)
    basis = basis_of(model)
    whole = split_scores(model, PROMPTS, basis)
    monkeypatch.setattr(row_pass, "LONG", 0)
    monkeypatch.setattr(row_pass, "ROW_CELLS", 4 * 2 * 60)
    rows = split_scores(model, PROMPTS, basis)
    assert isinstance(rows.mask, KeyRanges)
    assert isinstance(whole.mask, Tensor)
    assert torch.equal(rows.allowed, whole.allowed)
    assert torch.allclose(rows.q, whole.q, atol=2e-5)
    assert torch.allclose(rows.k, whole.k, atol=2e-5)
    assert torch.allclose(rows.pattern(), whole.pattern(), atol=2e-5)
    checks = [{check[:2]: check[3] for check in split.checks} for split in (rows, whole)]
    shared = checks[0].keys() & checks[1].keys()
    names = {"q", "k", "pattern", "pattern sum", "q parts", "k parts"}
    assert names <= {name for _, name in shared}
    for check in shared:  # bounds are those of one comparison of all cells
        assert checks[0][check] == pytest.approx(checks[1][check], rel=1e-4), check


@pytest.mark.parametrize("architecture", WHOLE)
@pytest.mark.usefixtures("in_rows")
def test_what_has_no_blocks_runs_whole(architecture: str) -> None:
    model = tiny(loadable(architecture)[0][0], architecture)
    assert not view(model).in_rows(8000)
    seen: list[Any] = []
    view(model).run_layers(PROMPTS, [0], seen.append, on_rows=row_pass.no_rows)
    assert seen[0].pattern is not None


@pytest.mark.usefixtures("in_rows")
def test_hooks_and_a_cache_that_is_ignored_make_prompts_run_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("bridge", "llama")
    assert view(model).in_rows(24)
    point = model.hook_dict["blocks.0.hook_resid_pre"]
    point.add_hook(lambda value, hook: value)
    try:
        assert not view(model).in_rows(24)
    finally:
        point.remove_hooks()
    assert view(model).in_rows(24)
    seen = view(model)
    seen._layers.memo.pop("rows")
    monkeypatch.setattr(Runner, "behind", lambda self, cache, ids: self)
    assert not seen.in_rows(24)
    seen._layers.memo.pop("rows")


def test_short_prompts_run_whole() -> None:
    assert not view(tiny("bridge", "llama")).in_rows(64)


def rolled(block: Any) -> Any:
    return dataclasses.replace(block, k=block.k.roll(1, 1))


FAULTS = {
    "keys off by one position": rolled,
    "key bias dropped": lambda x: dataclasses.replace(x, k=x.k - x.k_constant),
    "one query in a thousandth": lambda x: dataclasses.replace(x, q=1.001 * x.q),
    "scale of scores": lambda x: dataclasses.replace(x, scale=1.01 * x.scale),
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
@pytest.mark.usefixtures("in_rows")
def test_a_fault_in_one_block_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_of = row_pass.RowCheck._block

    def planted(self: Any, rows: slice, *about: Any) -> Any:
        block = block_of(self, rows, *about)
        # one block in the middle, of the second layer
        chosen = fault and self.layer == 1 and rows.start > 0 and rows.stop < 24
        return FAULTS[fault](block) if chosen else block

    monkeypatch.setattr(row_pass.RowCheck, "_block", planted)
    model = tiny("bridge", "qwen2")
    if fault:
        with pytest.raises(ReconstructionError, match="layer 1"):
            split_scores(model, PROMPTS, basis_of(model))
    else:
        assert split_scores(model, PROMPTS, basis_of(model)).reconstruction.adds_up


@pytest.mark.parametrize("queries", [1, 5, 6, 8, 24])
def test_the_queries_of_a_sample_are_compared_in_blocks_as_whole(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one follows on the last row of a block. The largest scores are the same."""
    seen = view(tiny("bridge", "llama"))

    def report() -> dict[str, float]:
        found: list[Any] = []
        options: dict[str, Any] = {"sample": (1, found.append), "queries": queries}
        seen.run_layers(
            PROMPTS, [1], lambda _: None, verify=False, on_rows=row_pass.no_rows, **options
        )
        assert found[0].reconstruction.adds_up
        return {"scale": found[0].reconstruction.scale, **found[0].reconstruction.sizes}

    whole = report()
    monkeypatch.setattr(row_pass, "LONG", 0)
    monkeypatch.setattr(row_pass, "ROW_CELLS", 4 * 2 * 60)
    assert report() == pytest.approx(whole, rel=1e-5)


@pytest.mark.usefixtures("in_rows")
def test_parts_that_do_not_add_up_are_refused_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_geometry.scores.splitter import Splitter

    model, project = tiny("bridge", "llama"), Splitter._project
    basis = basis_of(model)

    def wrong(self: Any, layer: Any, which: str) -> Tensor:
        return project(self, layer, which) * (1.01 if which == "k" else 1.0)

    monkeypatch.setattr(Splitter, "_project", wrong)
    with pytest.raises(ReconstructionError, match="sum scores"):
        split_scores(model, PROMPTS, basis)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt-neo"])
def test_a_sweep_in_blocks_is_the_sweep_of_the_whole(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny("bridge", architecture), tokens(batch=5, length=24, seed=9)
    basis = basis_of(model)
    options: dict[str, Any] = {"progress": False, "batch_size": 2, "detail": ("energy", "planes")}
    whole = sweep_heads(model, ids, basis, **options).to_dataframe()
    monkeypatch.setattr(row_pass, "LONG", 0)
    monkeypatch.setattr(row_pass, "ROW_CELLS", 4 * 2 * 60)
    rows = sweep_heads(model, ids, basis, **options).to_dataframe()
    numbers = whole.select_dtypes("float").columns
    assert "dropped_mass" in numbers
    assert float(whole["dropped_mass"].to_numpy().max()) > 0.01
    assert abs(rows[numbers] - whole[numbers]).max().max() < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_logits_in_blocks_are_explained_and_traced_as_whole(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("bridge", architecture)

    def answers() -> tuple[Any, Any]:
        explained = explain_logit(model, PROMPTS[:1], 20, 5, top=4)
        return explained, trace_logit(model, PROMPTS[:1], 5, position=20)

    whole = answers()
    monkeypatch.setattr(row_pass, "LONG", 0)
    monkeypatch.setattr(row_pass, "ROW_CELLS", 4 * 60)
    rows = answers()
    assert rows[0].pairs == whole[0].pairs
    assert rows[1].names == whole[1].names
    for name in ("heads", "others", "pair_values", "pair_terms", "pair_patterns"):
        assert torch.allclose(getattr(rows[0], name), getattr(whole[0], name), atol=1e-5), name
    assert rows[0].logit == pytest.approx(whole[0].logit, abs=1e-5)
    assert rows[1].value == pytest.approx(whole[1].value, abs=1e-5)
    for name in ("leaf_values", "head_values", "mlp_values", "head_moved"):
        assert torch.allclose(getattr(rows[1], name), getattr(whole[1], name), atol=2e-5), name


# ---- decompose


def differences(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far sums in blocks of rows are from those of whole prompts, of the largest number."""
    bases = []
    for long in (2**62, 0):
        monkeypatch.setattr(row_pass, "LONG", long)
        bases.append(decompose(model, ids, groups=2, second_moments=True, progress=False))
    last = bases[0].states[-1]
    arrays = [(x.mean, x.pos, x.ctx, x.samples, x.second_moment(last)) for x in bases]
    pairs = zip(*arrays, strict=True)
    return [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]


@pytest.mark.parametrize(("model_class", "architecture"), WAYS)
def test_a_basis_in_blocks_is_the_basis_of_the_whole(
    model_class: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pass, "ROW_CELLS", 4 * 2 * 60)
    model = tiny(model_class, architecture)
    assert not view(model).in_rows(24)
    monkeypatch.setattr(row_pass, "LONG", 0)
    assert view(model).in_rows(24)
    assert max(differences(model, PROMPTS, monkeypatch)) < 1e-5


def test_a_basis_of_512_positions_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = long_llama(512)
    ids = torch.randint(3, 256, (3, 512), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(row_pass, "ROW_CELLS", 2**18)
    assert max(differences(model, ids, monkeypatch)) < 1e-5
    # without the keys before it a block gives other states
    monkeypatch.setattr(Runner, "behind", lambda self, cache, ids: self)
    assert min(differences(model, ids, monkeypatch)) > 1e-3


def test_a_basis_of_an_unknown_attention_is_made_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(self: Any, layer: int) -> Any:
        raise UnsupportedModelError("no such attention")

    monkeypatch.setattr(Layers, "spec", unknown)
    model = tiny("bridge", "llama")
    assert differences(model, PROMPTS, monkeypatch) == [0.0] * 5
    with pytest.raises(UnsupportedModelError):
        split_scores(model, PROMPTS, basis_of(model))


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


def masks() -> Iterator[Tensor]:
    causal = causal_mask(210)
    window, wide = (causal & ~causal.tril(-width) for width in (20, 100))
    # in the wide window a whole block of rows sees the first keys, and later blocks do not
    yield from (causal, window, wide, torch.ones_like(causal))
    yield window.clone().fill_diagonal_(False)


def test_ranges_are_the_masks_that_they_were_made_of() -> None:
    for mask in masks():
        ranges = KeyRanges.of(mask)
        assert ranges is not None
        assert torch.equal(ranges.cells, mask)
        assert torch.equal(ranges[40:50], mask[40:50])
        assert torch.equal(ranges[7], mask[7])
        rest = after(ranges, 30)
        assert isinstance(rest, KeyRanges)
        assert torch.equal(rest.cells, mask[30:, 30:])
    assert KeyRanges.of(torch.eye(5).bool() | torch.eye(5).flip(1).bool()) is None


def test_shares_of_ranges_are_those_of_cells() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(3, 2, 210, 2, 8, generator=generator) for _ in "qk")
    for mask in masks():
        ranges = KeyRanges.of(mask)
        for options in ({}, {"drop": 3, "softcap": 5.0}):
            of_cells, of_ranges = (share_sums(q, k, m, **options) for m in (mask, ranges))
            for name in ("numerators", "energies", "gains", "total", "cells"):
                pair = getattr(of_cells, name), getattr(of_ranges, name)
                assert torch.allclose(*pair, rtol=1e-5, atol=1e-4), name


def test_blocks_cover_all_queries_once() -> None:
    for length, cells in ((10, 24), (100, 7), (5, 1000), (333, 4000)):
        blocks = list(row_pass.row_blocks(length, cells))
        assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
        assert blocks[-1][1] == length
        sizes = [(stop - start) * stop for start, stop in blocks]
        assert all(size <= max(cells, stop) for size, (_, stop) in zip(sizes, blocks, strict=True))


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


@pytest.mark.slow
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
