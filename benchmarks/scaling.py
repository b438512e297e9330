"""How cost grows: streamed decomposition and sweep against the forward pass without the output head
as transformers runs it, for length, layers, heads, width and contexts; peak memory.

Each point is a random GPT-2, every route timed batch by batch beside the same weights with eager
attention; peak memory is that of a process of its own, without eager attention.
``python -m benchmarks --only scaling --json > docs/scaling.json`` and ``python docs/growth.py``
draw the curves.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.decomposition import EAGER, SDPA, gpt2_weights, plain_models
from benchmarks.harness import Row, child, grown, paired, synchronize
from tl_geometry.models import from_hf
from tl_geometry.models.model_view import ModelView

BASE = {"layers": 4, "width": 512, "length": 128, "heads": 8}
"""What stays fixed while one size varies."""
CONTEXTS = {"layers": 4, "width": 256, "length": 64, "heads": 4}
"""The same for the number of contexts, where passes are many."""
SMOKE = {"layers": 1, "width": 64, "length": 16, "heads": 1}
"""The same in the small size."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {"length": (32,), "contexts": (8,)},
    "cpu": {
        "length": (64, 128, 256, 512, 1024, 2048, 4096),
        "layers": (1, 2, 4, 8),
        "heads": (1, 4, 8, 32),
        "width": (128, 256, 512, 1024),
        "contexts": (64, 256, 1024, 4096),
    },
    "gpu": {
        "length": (64, 128, 256, 512, 1024, 2048),
        "layers": (1, 4, 16),
        "heads": (1, 4, 8, 32),
        "width": (128, 256, 512, 1024, 2048),
        "contexts": (64, 1024, 8192),
    },
}
TOKENS = {"smoke": 256, "cpu": 4096, "gpu": 65536}
"""Tokens of every point that is not about their number."""
BATCH = {"smoke": 128, "cpu": 2048, "gpu": 16384}
"""Tokens of one forward pass."""
Route = Callable[[Iterator[Tensor]], object]
"""What is measured, over batches of tokens."""
LONG = 4096
"""Positions from which on a pass takes so long that each route runs once, over one window."""
ALONE = """
import dataclasses, json, sys
from benchmarks.scaling import alone
name, size, contexts, shape = sys.argv[1:]
rows = alone(name, size, int(contexts), json.loads(shape))
print(json.dumps([dataclasses.asdict(row) for row in rows]))
"""
"""A process of its own, with the allocator as users have it."""


def run(size: str) -> list[Row]:
    """Every route at every point of every axis."""
    rows: list[Row] = []
    for axis, values in SIZES[size].items():
        for value in values:
            fixed = CONTEXTS if axis == "contexts" else BASE
            fixed = SMOKE if size == "smoke" else fixed
            sys.stderr.write(f"{axis} {value}\n")  # the rows come at the end
            rows += point(f"scaling, {axis} {value}", size, **{**fixed, axis: value})
    return rows


def point(name: str, size: str, *, contexts: int | None = None, **shape: int) -> list[Row]:
    """Ratio to eager attention of SDPA, of the decomposition with and without second moments and of
    the sweep, and the memory that each adds to the process."""
    count = contexts or TOKENS[size] // shape["length"]
    rows = [Row(**row) for row in json.loads(child(ALONE, name, size, count, json.dumps(shape)))]
    if shape["length"] >= LONG:
        return rows
    view, tokens, plain, routes = work_of(size, count, **shape)
    rounds = 1 if size == "smoke" or (contexts or 0) > 1024 else 3
    for i, row in enumerate(rows):
        work = routes[row.route]
        work(iter(tokens[:1]))
        found = paired(name, row.route, view, tokens, work, rounds=rounds, plain=plain)[1]
        rows[i] = dataclasses.replace(found, note=row.note, mib=row.mib)
    return rows


def alone(name: str, size: str, contexts: int, shape: dict[str, int]) -> list[Row]:
    """Every route once: peak memory, and the ratio to eager attention's pass over the same tokens
    (on a CPU of the time that the process had, which other work does not stretch)."""
    clock = time.perf_counter if size == "gpu" else time.process_time
    _, tokens, plain, routes = work_of(size, contexts, **shape)
    tokens = tokens[:1] if shape["length"] >= LONG else tokens

    def seconds(work: Route) -> float:
        synchronize()
        start = clock()
        work(iter(tokens))
        synchronize()
        return clock() - start

    plain(tokens[0][:, :16])  # what happens in the first pass only
    base = seconds(lambda stream: [plain(batch) for batch in stream])
    rows = []
    for route, work in routes.items():
        with grown() as note:
            spent = seconds(work)
        rows.append(note.on(Row(name, route, spent, spent / base)))
    return rows


def work_of(
    size: str, contexts: int, *, layers: int, width: int, length: int, heads: int
) -> tuple[ModelView, list[Tensor], Callable[[Tensor], object], dict[str, Route]]:
    """The model, its tokens in batches, eager attention's pass over one, and the routes over
    several."""
    device = "cuda" if size == "gpu" else "cpu"
    weights: Any = gpt2_weights(layers, width, length, heads)
    plain = plain_models(weights, device)
    view = tlg.view(from_hf(weights.to(device), None, name="random-gpt2"))
    tokens = batches(view, contexts, length, size)
    basis = tlg.decompose(view, torch.cat(tokens[:2]), second_moments=False, progress=False)

    @torch.inference_mode()
    def eager(batch: Tensor) -> None:
        plain[EAGER](batch.to(device), use_cache=False)

    @torch.inference_mode()
    def sdpa(stream: Iterator[Tensor]) -> None:
        for batch in stream:
            plain[SDPA](batch.to(device), use_cache=False)

    few: dict[str, Any] = {"keep_ctx": False, "keep": 4, "progress": False}
    routes: dict[str, Route] = {
        SDPA: sdpa,
        "decompose, sums alone": lambda stream: tlg.decompose(
            view, stream, second_moments=False, **few
        ),
        "decompose, second moments": lambda stream: tlg.decompose(
            view, stream, second_moments=True, **few
        ),
        "sweep of all heads": lambda stream: tlg.sweep_heads(view, stream, basis, progress=False),
    }
    return view, tokens, eager, routes


def batches(view: ModelView, contexts: int, length: int, size: str) -> list[Tensor]:
    """Random tokens in batches of :data:`BATCH` tokens; at least two contexts."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, view.d_vocab, (max(2, contexts), length), generator=generator)
    return list(tokens.split(max(1, BATCH[size] // length)))
