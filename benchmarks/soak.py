"""A long run with flat memory: 20,000 contexts through the streamed decomposition, with second
moments."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.decomposition import gpt2
from benchmarks.harness import Row, resident

SIZES = {"smoke": 320, "cpu": 20_000, "gpu": 20_000}
"""Contexts."""
LENGTH, BATCH = 32, 16
ALLOWED = 8.0
"""MiB by which the process may grow between a tenth of the run and its end."""


def run(size: str) -> list[Row]:
    """Resident memory at each tenth of the run; the last nine must be equal within
    :data:`ALLOWED`."""
    contexts = SIZES[size]
    model = gpt2(2, 64, LENGTH)
    view = tlg.view(model.to("cuda") if size == "gpu" else model)
    marks: list[tuple[int, float]] = []

    tokens = torch.randint(
        0, view.d_vocab, (contexts, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    seen = 0

    def mark(h: Tensor, hook: Any) -> None:
        nonlocal seen
        if seen >= len(marks) * contexts / 10:
            marks.append((seen, resident()))
        seen += len(h)

    model.add_hook("blocks.0.hook_resid_pre", mark)
    start = time.perf_counter()
    basis = tlg.decompose(
        view, tokens, second_moments=True, keep_ctx=False, batch_size=BATCH, progress=False
    )
    seconds = time.perf_counter() - start
    marks.append((basis.contexts, resident()))
    assert basis.contexts == contexts
    settled = [memory for first, memory in marks if first >= contexts / 10]
    assert size == "smoke" or max(settled) - settled[0] <= ALLOWED, f"memory grew: {marks}"
    note = ", ".join(f"{first}: {memory:.0f} MiB" for first, memory in marks)
    return [Row("soak", f"{contexts} contexts", seconds, max(settled) / settled[0], note)]
