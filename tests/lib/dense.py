"""Covariance and gain shares of terms that are held as matrices, by the definition: what the
contraction of :mod:`tl_geometry.scores` is compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """Shares ``[head term]`` and their denominators ``[head]``, over all contexts and rows."""

    cs: Tensor
    gs: Tensor
    total: Tensor
    gain_total: Tensor


def dense_shares(terms: Tensor, allowed: Tensor, *, drop: int = 0) -> Dense:
    """From terms ``[term batch head query key]`` and the mask ``[query key]``; float64."""
    terms, allowed = terms[..., drop:, drop:].double(), allowed[drop:, drop:]
    counts = allowed.sum(-1, keepdim=True).clamp(min=1)
    inside = torch.where(allowed, terms, 0)
    centred = torch.where(allowed, inside - inside.sum(-1, keepdim=True) / counts, 0)
    score = torch.where(allowed, terms.sum(0), torch.finfo(terms.dtype).min)
    moved = torch.where(allowed, score.softmax(-1) - 1 / counts, 0)
    total, gain_total = (
        (weight * centred.sum(0)).sum((0, 2, 3)) for weight in (centred.sum(0), moved)
    )
    cs, gs = (
        ((weight * centred).sum((1, 3, 4)) / size).mT
        for weight, size in ((centred.sum(0), total), (moved, gain_total))
    )
    return Dense(cs, gs, total, gain_total)


def marginals(table: Any) -> SimpleNamespace:
    """Shares of the ``parts`` of a share table by side: ``cs`` and ``gs`` ``[head side part]``,
    summed over the parts of the other side. ALiBi counts as a part on both."""
    parts = tuple(dict.fromkeys(part for pair in table.pairs for part in pair))
    member = torch.tensor(
        [[[pair[side] == name for name in parts] for side in (0, 1)] for pair in table.pairs]
    ).double()
    cs, gs = (torch.einsum("ht,tsp->hsp", x, member) for x in (table.cs, table.gs))
    return SimpleNamespace(parts=parts, cs=cs, gs=gs)
