"""What does a term do besides its share? How far does the pattern move without it, how much of it
depends on the offset alone, and is it larger at equal tokens? Called for ``detail=`` of a sweep and
for the offset share of relative position.

All functions take scores as matrices (``[batch head query key]``), row-centred where they say so,
and return sums that add up over contexts. The shares, which need no matrices, are in
:mod:`tl_geometry.scores.sums`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.sums import Sums


class Pattern:
    """``softmax(scores)`` over the allowed keys, and the distance of other patterns from it. The
    KL divergence comes from the scores, not from logarithms of probabilities that may underflow.

    >>> scores = torch.tensor([[0.0, 0.0], [50.0, 0.0]])  # all on key 0
    >>> pattern = Pattern(scores, torch.ones(2, 2, dtype=torch.bool).tril())
    >>> [round(float(v), 3) for v in pattern.distance(0 * scores)]  # one half
    [0.5, 0.693]
    """

    def __init__(
        self, scores: Float[Tensor, "*batch query key"], allowed: Bool[Tensor, "..."]
    ) -> None:
        self.allowed = allowed.expand(scores.shape)
        masked = self._masked(scores)
        self.log_p = masked.log_softmax(-1)
        self.p = torch.where(self.allowed, masked.softmax(-1), 0)
        self.several = self.allowed.sum(-1) > 1
        self.rows = self.several.sum(-1).clamp(min=1)

    def _masked(self, scores: Tensor) -> Tensor:
        # finite, so that a row without an allowed key does not become NaN
        return torch.where(self.allowed, scores, torch.finfo(scores.dtype).min)

    def distance(self, other: Float[Tensor, "*batch query key"]) -> Float[Tensor, " row *batch"]:
        """Distance from this pattern p to ``q = softmax(other)``: total variation
        ``sum |p - q| / 2`` (0 to 1) and ``KL(p || q)`` in nats, means over rows that allow at least
        two keys."""
        masked = self._masked(other)
        masked -= masked.amax(-1, keepdim=True)
        # the largest score is zero now, so that -log(max q) is the log of the softmax's sum
        q = masked.softmax(-1)
        kl = (self.log_p - masked).mul_(self.p).sum(-1) - q.amax(-1).log()
        # rounding may leave a divergence just below zero
        by_row = torch.stack([q.sub_(self.p).abs_().sum(-1) / 2, kl.clamp(min=0)])
        return (by_row * self.several).sum(-1, dtype=torch.float64) / self.rows


@dataclass(frozen=True, eq=False, kw_only=True)
class OffsetSums(Sums):
    """Sums of a row-centred term by offset i - j, per head; ``+`` adds contexts. The offset axis
    runs from -(T - 1) to T - 1.

    ``sums`` is the term summed over the cells at each offset, ``counts`` the number of allowed
    cells there, ``gram`` the inner products of the row-centred offset dummies (indicators of each
    offset), ``energy`` the term's sum of squares.
    """

    sums: Float[Tensor, "*head offset"]
    counts: Float[Tensor, " offset"]
    gram: Float[Tensor, "offset offset"]
    energy: Float[Tensor, "*head"]

    @property
    def profile(self) -> Float[Tensor, "*head offset"]:
        """Mean of the row-centred term at each offset; NaN where the mask allows none."""
        return self.sums / torch.where(self.counts > 0, self.counts, torch.nan)

    @property
    def toeplitz_r2(self) -> Float[Tensor, "*head"]:
        """Share of the term's energy that is a function of the offset alone: R^2 of its regression
        on offset dummies and row means.

        The row means belong to the regression because a centred row of ``f(i - j)`` is no longer a
        function of ``i - j``; without them a term that is exactly Toeplitz would score below one.
        NaN for a term without energy.
        """
        used = self.counts > 0
        # the dummies sum to a row constant, so the Gram matrix is singular: eigenvalues below 1e-10
        # of the largest are rounding
        inverse = torch.linalg.pinv(self.gram[used][:, used], hermitian=True, rtol=1e-10)
        sums = self.sums[..., used]
        fitted = einsum(sums, inverse, sums, "... offset, offset other, ... other -> ...")
        return (fitted / torch.where(self.energy > 0, self.energy, torch.nan)).clamp(max=1)


class Offsets(NamedTuple):
    """What :func:`offset_sums` needs of a mask: the index of each cell's offset on the offset axis
    (``places``), the allowed cells at each offset, and the inner products of the row-centred offset
    dummies."""

    places: Int[Tensor, "query key"]
    counts: Float[Tensor, " offset"]
    gram: Float[Tensor, "offset offset"]

    @staticmethod
    def of(allowed: Bool[Tensor, "query key"]) -> Offsets:
        """The offsets of a mask."""
        queries, keys = allowed.shape
        query_positions, key_positions = (
            torch.arange(n, device=allowed.device) for n in (queries, keys)
        )
        places = query_positions.unsqueeze(1) - key_positions + keys - 1
        inside = allowed.double()
        dummies = inside.new_zeros(queries, queries + keys - 1).scatter_(1, places, inside)
        shares = dummies / inside.sum(-1, keepdim=True).clamp(min=1)
        counts = dummies.sum(0)
        # sum over rows of (d - mean d)(d' - mean d'), where each row has each offset at most once
        return Offsets(places, counts, torch.diag(counts) - dummies.mT @ shares)


def offset_sums(
    centred: Float[Tensor, "batch head query key"],
    allowed: Bool[Tensor, "query key"],
    offsets: Offsets | None = None,
) -> OffsetSums:
    """Sums by offset of row-centred terms (zero outside ``allowed``), over the contexts given;
    ``offsets`` are those of the mask, where they are known.

    >>> offset = torch.arange(4.0).unsqueeze(1) - torch.arange(4.0)
    >>> allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> term = torch.where(allowed, offset**2, 0)
    >>> mean = term.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)
    >>> centred = torch.where(allowed, term - mean, 0)
    >>> round(float(offset_sums(centred[None, None], allowed).toeplitz_r2), 6)
    1.0
    """
    places, counts, gram = Offsets.of(allowed) if offsets is None else offsets
    summed = centred.sum(0, dtype=torch.float64).flatten(1)
    sums = summed.new_zeros(len(summed), len(counts)).index_add_(1, places.flatten(), summed)
    n_contexts = len(centred)
    return OffsetSums(
        sums=sums, counts=n_contexts * counts, gram=n_contexts * gram, energy=_squares(centred)
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ContrastSums(Sums):
    """Statistics of a row-centred term at cells whose key has the query's token (``row`` 0) and at
    cells whose key has another (``row`` 1); ``column`` is number of cells, sum, sum of squares."""

    values: Float[Tensor, "row column *head"]

    @property
    def contrast(self) -> Float[Tensor, "*head"]:
        """Mean over same-token pairs minus mean over different-token pairs, in units of their
        pooled standard deviation; NaN where either has fewer than two pairs."""
        n, total, squares = self.values.unbind(1)
        mean = total / torch.where(n > 1, n, torch.nan)
        pooled = (squares - n * mean.square()).clamp(min=0).sum(0) / (n.sum(0) - 2)
        return (mean[0] - mean[1]) / torch.where(pooled > 0, pooled, torch.nan).sqrt()


def contrast_sums(
    centred: Float[Tensor, "batch head query key"],
    tokens: Int[Tensor, "batch position"],
    allowed: Bool[Tensor, "query key"],
) -> ContrastSums:
    """Sums behind the token-identity contrast, over allowed cells (query, key) off the diagonal.

    >>> tokens = torch.tensor([[3, 4, 3, 4]])
    >>> match = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).float() + 0.1 * torch.arange(4.0)
    >>> allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    >>> bool(contrast_sums(match[:, None], tokens, allowed).contrast > 3)
    True
    """
    distinct = allowed & ~torch.eye(*allowed.shape, dtype=torch.bool, device=allowed.device)
    equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    statistics = []
    for cells in (equal & distinct, ~equal & distinct):
        chosen = torch.where(cells.unsqueeze(1), centred, 0)
        count = cells.sum(dtype=torch.float64).expand(centred.shape[1])
        total = chosen.sum((0, 2, 3), dtype=torch.float64)
        statistics.append(torch.stack([count, total, _squares(chosen)]))
    return ContrastSums(values=torch.stack(statistics))


def _squares(scores: Float[Tensor, "batch head query key"]) -> Float[Tensor, " head"]:
    """Sums of squares for each head, in float64."""
    norms = torch.linalg.vector_norm(scores, dim=(2, 3), dtype=torch.float64)
    return norms.square().sum(0)
