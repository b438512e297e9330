"""How cost grows: streamed decomposition and sweep against the forward pass without the output head
as transformers runs it, for length, layers, heads, width and contexts; peak memory.

Each point is a random GPT-2, every route timed batch by batch beside the same weights with eager
attention. ``python -m benchmarks --only scaling --json > docs/scaling.json`` and
``python docs/growth.py`` draw the curves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.costs import EAGER, SDPA, plain_models
from benchmarks.decomposition import gpt2_weights
from benchmarks.harness import Row, grown, paired
from tl_geometry.models import from_hf
from tl_geometry.models.model_view import ModelView

BASE = {"layers": 4, "width": 512, "length": 128, "heads": 8}
"""What stays fixed while one size varies."""
CONTEXTS = {"layers": 4, "width": 256, "length": 64, "heads": 4}
"""The same for the number of contexts, where passes are many."""
SMOKE = {"layers": 1, "width": 64, "length": 16, "heads": 1}
"""The same in the small size."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {"length": (16, 32), "contexts": (8, 16)},
    "cpu": {
        "length": (64, 128, 256, 512, 1024, 2048),
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


def run(size: str) -> list[Row]:
    """Every route at every point of every axis."""
    rows: list[Row] = []
    for axis, values in SIZES[size].items():
        for value in values:
            fixed = CONTEXTS if axis == "contexts" else BASE
            fixed = SMOKE if size == "smoke" else fixed
            rows += point(f"scaling, {axis} {value}", size, **{**fixed, axis: value})
    return rows


def point(
    name: str,
    size: str,
    *,
    layers: int,
    width: int,
    length: int,
    heads: int,
    contexts: int | None = None,
) -> list[Row]:
    """Ratio to eager attention of SDPA, of the decomposition with and without second moments and of
    the sweep, and the memory that each adds to the process."""
    device = "cuda" if size == "gpu" else "cpu"
    weights: Any = gpt2_weights(layers, width, length, heads)
    plain = plain_models(weights, device)
    view = tlg.view(from_hf(weights.to(device), None, model_class="bridge", name="random-gpt2"))
    many = name.startswith("scaling, contexts")
    tokens = batches(view, contexts if many and contexts else TOKENS[size] // length, length, size)
    basis = tlg.decompose(view, torch.cat(tokens[:2]), second_moments=False, progress=False)

    def forward(kind: str) -> Callable[[Tensor], object]:
        return lambda batch: plain[kind](batch.to(device), use_cache=False)

    def sdpa(stream: Iterator[Tensor]) -> None:
        with torch.inference_mode():
            for batch in stream:
                forward(SDPA)(batch)

    few: dict[str, Any] = {"keep_ctx": False, "keep": 4, "progress": False}
    routes: dict[str, Callable[[Iterator[Tensor]], object]] = {
        SDPA: sdpa,
        "decompose, sums alone": lambda stream: tlg.decompose(
            view, stream, second_moments=False, **few
        ),
        "decompose, second moments": lambda stream: tlg.decompose(
            view, stream, second_moments=True, **few
        ),
        "sweep of all heads": lambda stream: tlg.sweep_heads(view, stream, basis, progress=False),
    }
    rounds = 1 if size == "smoke" or (contexts or 0) > 1024 else 3
    rows = []
    for route, work in routes.items():
        work(iter(tokens[:1]))
        with grown() as note:
            found = paired(name, route, view, tokens, work, rounds=rounds, plain=forward(EAGER))
        rows.append(note.on(found[1]))
    return rows


def batches(view: ModelView, contexts: int, length: int, size: str) -> list[Tensor]:
    """Random tokens in batches of :data:`BATCH` tokens; at least two contexts."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, view.d_vocab, (max(2, contexts), length), generator=generator)
    return list(tokens.split(max(1, BATCH[size] // length)))
