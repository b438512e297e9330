"""Shapes of attention scores: what ablating a term does to the pattern, how far a term depends on
the offset, or on equal tokens.

All work on scores held as matrices (``[batch head query key]``), row-centred where they say so, and
give sums that add up over contexts; :mod:`tl_geometry.scores.sums` has the shares, which need no
matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor


def pattern_of(
    scores: Float[Tensor, "*batch query key"], allowed: Bool[Tensor, "..."]
) -> Float[Tensor, "*batch query key"]:
    """Softmax over the allowed keys; rows without one are zero.

    >>> pattern_of(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool).tril()).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    return torch.where(
        allowed, torch.where(allowed, scores, torch.finfo(scores.dtype).min).softmax(-1), 0
    )


class Distance(NamedTuple):
    """Total variation ``sum |p - q| / 2`` (0 to 1) and ``KL(p || q)`` in nats, means over rows that
    allow at least two keys."""

    tv: Float[Tensor, "*batch"]
    kl: Float[Tensor, "*batch"]


def pattern_distance(
    scores: Float[Tensor, "*batch query key"],
    other: Float[Tensor, "*batch query key"],
    allowed: Bool[Tensor, "..."],
) -> Distance:
    """Distance from ``softmax(scores)`` to ``softmax(other)``, from the scores themselves so that
    tiny probabilities do no harm."""
    allowed = allowed.expand(scores.shape)
    low = torch.finfo(scores.dtype).min
    log_p, log_q = (torch.where(allowed, s, low).log_softmax(-1) for s in (scores, other))
    p = torch.where(allowed, log_p.exp(), 0)
    several = allowed.sum(-1) > 1
    rows = several.sum(-1).clamp(min=1)
    tv = torch.where(allowed, (p - log_q.exp()).abs(), 0).sum(-1) / 2
    kl = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1).clamp(min=0)
    return Distance(*((v * several).sum(-1, dtype=torch.float64) / rows for v in (tv, kl)))


def ablation_effect(
    scores: Float[Tensor, "*batch query key"],
    term: Float[Tensor, "*batch query key"],
    allowed: Bool[Tensor, "..."],
) -> Distance:
    """Effect of taking a term out of the scores: distance from ``softmax(S)`` to
    ``softmax(S - X)``, mean over rows.

    >>> allowed = torch.ones(2, 2, dtype=torch.bool).tril()
    >>> scores = torch.tensor([[0.0, 0.0], [50.0, 0.0]])
    >>> effect = ablation_effect(scores, scores, allowed)  # all on key 0, against one half
    >>> [round(float(v), 3) for v in effect]
    [0.5, 0.693]
    """
    return pattern_distance(scores, scores - torch.where(allowed, term, 0), allowed)


@dataclass(frozen=True, eq=False)
class OffsetSums:
    """Sums of a row-centred term by offset i - j, per head; ``+`` adds contexts. Offsets run from
    -(T - 1) to T - 1."""

    sums: Float[Tensor, "*head offset"]
    counts: Float[Tensor, " offset"]
    gram: Float[Tensor, "offset offset"]
    energy: Float[Tensor, "*head"]

    def __add__(self, other: OffsetSums) -> OffsetSums:
        return OffsetSums(
            self.sums + other.sums,
            self.counts + other.counts,
            self.gram + other.gram,
            self.energy + other.energy,
        )

    @property
    def profile(self) -> Float[Tensor, "*head offset"]:
        """Mean of the row-centred term at each offset; NaN where the mask allows none."""
        return self.sums / torch.where(self.counts > 0, self.counts, torch.nan)

    @property
    def toeplitz_r2(self) -> Float[Tensor, "*head"]:
        """Share of the term's energy that is a function of the offset alone: R2 of its regression
        on offset dummies and row means.

        The row means belong to the regression because a centred row of ``f(i - j)`` is no longer a
        function of ``i - j``; without them a term that is exactly Toeplitz would score below one.
        NaN for a term without energy.
        """
        used = self.counts > 0
        gram = torch.linalg.pinv(self.gram[used][:, used], hermitian=True, rtol=1e-10)
        sums = self.sums[..., used]
        fitted = einsum(sums, gram, sums, "... offset, offset other, ... other -> ...")
        return (fitted / torch.where(self.energy > 0, self.energy, torch.nan)).clamp(max=1)


def offset_sums(
    centred: Float[Tensor, "batch head query key"], allowed: Bool[Tensor, "query key"]
) -> OffsetSums:
    """Sums by offset of row-centred terms (zero outside ``allowed``), over the contexts given.

    >>> offset = torch.arange(4.0).unsqueeze(1) - torch.arange(4.0)
    >>> allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> term = torch.where(allowed, offset**2, 0)
    >>> mean = term.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)
    >>> centred = torch.where(allowed, term - mean, 0)
    >>> round(float(offset_sums(centred[None, None], allowed).toeplitz_r2), 6)
    1.0
    """
    batch, heads, queries, keys = centred.shape
    device = centred.device
    index = (
        torch.arange(queries, device=device).unsqueeze(1)
        - torch.arange(keys, device=device)
        + keys
        - 1
    )
    size = queries + keys - 1
    summed = centred.double().sum(0)
    sums = torch.zeros(heads, size, dtype=torch.float64, device=device).index_add_(
        1, index.flatten(), summed.flatten(1)
    )
    counts = torch.zeros(size, dtype=torch.float64, device=device).index_add_(
        0, index.flatten(), allowed.double().flatten()
    )
    dummies = torch.zeros(queries, size, dtype=torch.float64, device=device).scatter_(
        1, index, allowed.double()
    )
    gram = torch.diag(counts) - dummies.mT @ (dummies / allowed.sum(-1, keepdim=True).clamp(min=1))
    return OffsetSums(sums, batch * counts, batch * gram, centred.double().square().sum((0, 2, 3)))


@dataclass(frozen=True, eq=False)
class ContrastSums:
    """Counts, sums and squares of a row-centred term over earlier keys with the query's token (row
    0) and with another (row 1)."""

    values: Float[Tensor, "row column *head"]

    def __add__(self, other: ContrastSums) -> ContrastSums:
        return ContrastSums(self.values + other.values)

    @property
    def contrast(self) -> Float[Tensor, "*head"]:
        """Mean over same-token pairs minus mean over different-token pairs, in pooled standard
        deviations; NaN without either."""
        n, total, squares = self.values.unbind(1)
        mean = total / torch.where(n > 1, n, torch.nan)
        pooled = (squares - n * mean.square()).clamp(min=0).sum(0) / (n.sum(0) - 2)
        return (mean[0] - mean[1]) / torch.where(pooled > 0, pooled, torch.nan).sqrt()


def contrast_sums(
    centred: Float[Tensor, "batch head query key"],
    tokens: Int[Tensor, "batch position"],
    allowed: Bool[Tensor, "query key"],
) -> ContrastSums:
    """Sums behind the token-identity contrast, over pairs of different positions that the mask
    allows.

    >>> tokens = torch.tensor([[3, 4, 3, 4]])
    >>> match = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).float() + 0.1 * torch.arange(4.0)
    >>> allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> bool(contrast_sums(match[:, None], tokens, allowed).contrast > 3)
    True
    """
    apart = allowed & ~torch.eye(*allowed.shape, dtype=torch.bool, device=allowed.device)
    equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    kinds = torch.stack([equal & apart, ~equal & apart]).double()
    wide = centred.double()
    counts = kinds.sum((1, 2, 3)).unsqueeze(1).expand(-1, centred.shape[1])
    formula = "kind batch query key, batch head query key -> kind head"
    powers = [einsum(kinds, x, formula) for x in (wide, wide.square())]
    return ContrastSums(torch.stack([counts, *powers], dim=1))
