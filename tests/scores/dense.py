"""Terms of scores as matrices, and their shares by the definition: the oracle that the contractions
of :mod:`tl_geometry.scores.sums` are tested against."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import row_center
from tl_geometry.scores.sums import ShareSums


def terms(q: Tensor, k: Tensor) -> Tensor:
    """All terms ``X_ab[i, j] = q_a[i] . k_b[j]``, ``[part part batch head query key]``."""
    return einsum(q, k, "a batch query head e, b batch key head e -> a b batch head query key")


def share_sums_dense(
    terms: Tensor, allowed: Tensor, *, drop: int = 0, softcap: float | None = None
) -> ShareSums:
    """The sums of :func:`tl_geometry.scores.sums.share_sums` from terms ``[term batch head query
    key]``, ``allowed`` broadcasting to ``[batch head query key]``; float64."""
    allowed = allowed.expand(terms.shape[1:])[..., drop:, drop:]
    centred = row_center(terms[..., drop:, drop:].double(), allowed)
    scores = centred.sum(0)
    many = allowed[:, 0].sum(-1)
    several = torch.where(many > 1, many, 0)
    energies = centred.square().sum((-2, -1))
    whole = torch.where(allowed, terms[..., drop:, drop:].double(), 0).sum(0)
    entered = whole if softcap is None else softcap * torch.tanh(whole / softcap)
    even = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    moved = (
        torch.where(allowed, entered, torch.finfo(entered.dtype).min).softmax(-1) * allowed - even
    )
    unit = 32 * unit_roundoff(terms.dtype)
    size = torch.where(allowed, terms[..., drop:, drop:].double(), 0).square().sum((0, -2, -1))
    return ShareSums(
        numerators=rearrange(
            (centred * scores).sum((-2, -1)), "term batch head -> batch head term"
        ),
        energies=rearrange(energies, "term batch head -> batch head term"),
        gains=rearrange((moved * centred).sum((-2, -1)), "term batch head -> batch head term"),
        total=scores.square().sum((-2, -1)),
        gain_total=(moved * scores).sum((-2, -1)),
        floor=size * unit**2,
        cells=several.sum(-1, keepdim=True).double().expand(energies.shape[1:]),
    )
