"""Rows of scores: the causal mask, scores centred over the keys that a query may see, and query
rows a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ROW_CELLS = 9 * 2**20
"""Cells ``[batch head row key]`` that are held at a time: 36 MiB in float32. Tensors above 32 MiB,
glibc's largest threshold, come from the kernel and go back to it; smaller ones of changing sizes
leave holes in the heap."""


def query_slices(q: Float[Tensor, "batch query head d_head"]) -> Iterator[slice]:
    """All query rows in slices, so that ``[batch head row key]`` has at most :data:`ROW_CELLS`
    cells (but at least one row)."""
    batch, length, heads, _ = q.shape
    step = max(1, ROW_CELLS // (batch * heads * length))
    return (slice(start, start + step) for start in range(0, length, step))


def causal_mask(
    queries: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, "query key"]:
    """Keys up to and including the query's own position."""
    return torch.ones(queries, queries, dtype=torch.bool, device=device).tril()


def row_center(
    scores: Float[Tensor, "*batch query key"], allowed: Bool[Tensor, "..."]
) -> Float[Tensor, "*batch query key"]:
    """Scores minus the mean of their row over the allowed keys; zero elsewhere. This leaves their
    softmax over the allowed keys as it was.

    ``allowed [... query key]`` broadcasts against the scores, which may be infinite outside it.

    >>> row_center(torch.tensor([[5.0, 9.0], [1.0, 3.0]]), causal_mask(2)).tolist()
    [[0.0, 0.0], [-1.0, 1.0]]
    """
    # zeros first: an infinite score outside would make the mean NaN
    inside = torch.where(allowed, scores, 0)
    mean = inside.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, inside - mean, 0)
