"""Which keys a query may see (the causal mask), and attention scores centred over these keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def causal_mask(
    queries: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, "query key"]:
    """Keys up to and including the query's own position."""
    return torch.ones(queries, queries, dtype=torch.bool, device=device).tril()


def mask_facts(mask: Bool[Tensor, "query key"]) -> dict[str, Bool[Tensor, ""]]:
    """What :func:`mask_form` asks of a mask, still on its device."""
    queries, keys = mask.shape
    causal = torch.tensor(False)
    if queries == keys:
        causal = (mask == causal_mask(keys, device=mask.device)).all()
    return {"causal mask": causal, "full mask": mask.all()}


def mask_form(facts: Mapping[str, float]) -> str:
    """``"causal"``, ``"full"`` (every query sees every key) or ``"other"``.

    >>> mask_form(mask_facts(causal_mask(3))), mask_form(mask_facts(causal_mask(3)[:2]))
    ('causal', 'other')
    """
    return "causal" if facts["causal mask"] else "full" if facts["full mask"] else "other"


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
