"""How cost grows: streamed decomposition and sweep against the plain forward pass, for contexts,
length, width and heads; peak memory.

Each point is a random GPT-2 of four layers, both routes timed batch by batch beside the forward
pass without the output head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.decomposition import gpt2
from benchmarks.harness import Row, grown, paired
from tl_geometry.models.model_view import ModelView
from tl_geometry.scores.sweep import sweep_heads

BASE = {"layers": 4, "width": 256, "length": 128, "contexts": 32}
"""What stays fixed while one size varies."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {"contexts": (8, 16), "length": (16, 32), "width": (64, 128), "heads": (2, 4)},
    "cpu": {
        "contexts": (64, 256, 1024, 4096, 8192),
        "length": (64, 128, 256, 512, 1024),
        "width": (128, 256, 512, 1024),
        "heads": (1, 4, 16, 64),
    },
    "gpu": {
        "contexts": (64, 1024, 8192),
        "length": (64, 128, 256, 512, 1024),
        "width": (128, 256, 512, 1024, 2048),
        "heads": (1, 4, 16, 64),
    },
}
TOKENS = {"smoke": 256, "cpu": 8192, "gpu": 65536}
"""Tokens of every point that is not about their number."""


def model_of(
    size: str, *, layers: int, width: int, length: int, heads: int | None = None
) -> ModelView:
    """A random model on the device that the size means."""
    model: Any = gpt2(layers, width, length, heads)
    return tlg.view(model.to("cuda") if size == "gpu" else model)


def batches(view: ModelView, contexts: int, length: int, size: str) -> list[Tensor]:
    """Random tokens in batches of about 2,048 tokens (16,384 on a GPU)."""
    tokens = torch.randint(
        0, view.d_vocab, (contexts, length), generator=torch.Generator().manual_seed(0)
    )
    return list(tokens.split(max(1, (16384 if size == "gpu" else 2048) // length)))


def run(size: str) -> list[Row]:
    """A curve for each of contexts, length, d_model and heads."""
    rows: list[Row] = []
    for contexts in SIZES[size]["contexts"]:
        rows += decomposition(
            f"contexts {contexts}", size, contexts=contexts, length=64, width=BASE["width"]
        )
    for length in SIZES[size]["length"]:
        contexts = max(2, TOKENS[size] // length)
        rows += decomposition(
            f"length {length}", size, contexts=contexts, length=length, width=BASE["width"]
        )
        rows += sweep(f"length {length}", size, contexts=contexts, length=length, heads=4)
    for width in SIZES[size]["width"]:
        rows += decomposition(
            f"d_model {width}", size, contexts=max(2, TOKENS[size] // 128), length=128, width=width
        )
    for heads in SIZES[size]["heads"]:
        rows += sweep(
            f"heads {heads}", size, contexts=max(2, TOKENS[size] // 128), length=128, heads=heads
        )
    return rows


def decomposition(point: str, size: str, *, contexts: int, length: int, width: int) -> list[Row]:
    """Ratio with and without second moments, and the memory that the longest stream added to the
    process."""
    view = model_of(size, layers=BASE["layers"], width=width, length=length)
    tokens = batches(view, contexts, length, size)
    rounds = 1 if size == "smoke" or contexts > 1024 else 3
    rows = []
    for second in (False, True):
        with grown() as note:
            found = paired(
                f"scaling, {point}",
                "decompose, second moments" if second else "decompose",
                view,
                tokens,
                lambda stream, second=second: tlg.decompose(
                    view, stream, second_moments=second, keep_ctx=False, keep=4, progress=False
                ),
                rounds=rounds,
            )
        rows += [note.on(row) for row in found[1:]]
    return rows


def sweep(point: str, size: str, *, contexts: int, length: int, heads: int) -> list[Row]:
    """Ratio of the sweep over all heads with shares."""
    view = model_of(size, layers=BASE["layers"], width=BASE["width"], length=length, heads=heads)
    tokens = batches(view, contexts, length, size)
    basis = tlg.decompose(view, tokens[0], second_moments=False, progress=False)
    rounds = 1 if size == "smoke" else 3
    return paired(
        f"scaling, {point}",
        "sweep_heads",
        view,
        tokens,
        lambda stream: sweep_heads(view, stream, basis, progress=False),
        rounds=rounds,
    )[1:]
