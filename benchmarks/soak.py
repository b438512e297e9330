"""A long run with flat memory: 20,000 contexts through the streamed decomposition, with second
moments, samples and checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

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

    def stream() -> Iterator[Tensor]:
        for first in range(0, contexts, BATCH):
            if first >= len(marks) * contexts / 10:
                marks.append((first, resident()))
            yield torch.randint(
                0, view.d_vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(first)
            )

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        basis = tlg.decompose(
            view,
            stream(),
            second_moments=True,
            keep_ctx=False,
            checkpoint=Path(folder, "run"),
            progress=False,
        )
        seconds = time.perf_counter() - start
    marks.append((basis.contexts, resident()))
    assert basis.contexts == contexts
    settled = [memory for first, memory in marks if first >= contexts / 10]
    assert size == "smoke" or max(settled) - settled[0] <= ALLOWED, f"memory grew: {marks}"
    note = ", ".join(f"{first}: {memory:.0f} MiB" for first, memory in marks)
    return [Row("soak", f"{contexts} contexts", seconds, max(settled) / settled[0], note)]
