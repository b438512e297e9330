"""Rows of scores: the causal mask, and scores centred over the keys that a query may see."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def causal_mask(queries: int) -> Bool[Tensor, "query key"]:
    """Keys up to and including the query's own position."""
    return torch.ones(queries, queries, dtype=torch.bool).tril()


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
