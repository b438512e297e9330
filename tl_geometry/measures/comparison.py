"""Two bases compared: checkpoints, corpora, states, foldings, a model and its untrained control;
with their own noise as the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import rank as ranks

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class BasisComparison(Result):
    """What :func:`compare_bases` returns: a row per pair of states (``pairs``: of a, of b);
    ``provenance`` is that of ``a``.

    ``angle_mean`` and ``angle_max`` are principal angles in radians between the leading ``rank``
    directions; ``overlap`` their mean squared cosine; ``procrustes`` the similarity of the two
    curves after the best rotation and scale, 0 to 1; ``difference`` the relative distance
    ``|P_a - P_b| / sqrt(|P_a| |P_b|)`` with no rotation; ``mean_cosine`` that of the two mean
    vectors. ``overlap_floor``, ``procrustes_floor`` and ``difference_floor`` compare the halves of
    each basis with each other (the noisier of the two).
    """

    pairs: tuple[Pair, ...]
    rank: tuple[int, ...]
    angle_mean: Float[Tensor, " row"]
    angle_max: Float[Tensor, " row"]
    overlap: Float[Tensor, " row"]
    overlap_floor: Float[Tensor, " row"]
    overlap_random: Float[Tensor, " row"]
    procrustes: Float[Tensor, " row"]
    procrustes_floor: Float[Tensor, " row"]
    difference: Float[Tensor, " row"]
    difference_floor: Float[Tensor, " row"]
    mean_cosine: Float[Tensor, " row"]
    other: str

    def _table(self) -> dict[str, Tensor]:
        names = (
            "angle_mean",
            "angle_max",
            "overlap",
            "overlap_floor",
            "overlap_random",
            "procrustes",
            "procrustes_floor",
        )
        return {
            n: getattr(self, n) for n in (*names, "difference", "difference_floor", "mean_cosine")
        }

    def columns(self) -> Sequence[str]:
        return ("state_a", "state_b", "rank", *self._table())

    def rows(self) -> Sequence[Sequence[object]]:
        values = self._table().values()
        return [
            [*pair, self.rank[i], *(float(v[i]) for v in values)]
            for i, pair in enumerate(self.pairs)
        ]


def procrustes_similarity(a: linalg.SVD, b: linalg.SVD) -> Float[Tensor, "*batch"]:
    """``|A^T B|_* / (|A| |B|)``: how alike two sets of rows are after the best rotation and
    scaling, from their thin SVDs.

    1 for rotated and scaled copies, also of different d_model; invariant to rotation of either
    side. 0 where one is zero.
    """
    small = a.S.unsqueeze(-1) * (a.U.mT @ b.U) * b.S.unsqueeze(-2)
    size = torch.linalg.vector_norm(a.S, dim=-1) * torch.linalg.vector_norm(b.S, dim=-1)
    return torch.where(size > 0, torch.linalg.svdvals(small).sum(-1) / size, 0.0)


def compare_bases(
    a: PositionContext,
    b: PositionContext,
    *,
    states: Sequence[int | Pair] | None = None,
    rank: int | None = None,
) -> BasisComparison:
    """How far two positional bases agree, state by state, beside how far each agrees with itself
    over halves of its contexts.

    Args: ``states`` common to both (all by default) or pairs (state of a, state of b), also of one
    basis given twice; ``rank`` the number of leading directions (by default the ScreeNOT rank of a,
    at least 1). Both need windows of equal length. With different d_model there are no angles
    (NaN): ``procrustes`` compares the curves only.

    The floors are conservative: a half has half the contexts, so the difference between halves
    carries twice the noise variance of the difference of two whole bases of that size. Agreement
    above the floor cannot be told from identity.

    >>> from tl_geometry import decompose_activations
    >>> h = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(0)) + 3 * torch.randn(6, 4)
    >>> a, b = decompose_activations(h), decompose_activations(-2 * h)
    >>> c = compare_bases(a, b, rank=2)
    >>> round(float(c.procrustes), 6), round(float(c.angle_max), 6)
    (1.0, 0.0)
    """
    kinds = [f"normalized={x.provenance.normalized}" for x in (a, b)]
    same = kinds[0] == kinds[1]
    require(
        same,
        "bases",
        expected=f"states of one kind, {kinds[0]}",
        got=kinds[1],
        instead="the same normalize= for both",
    )
    t = a.pos.shape[1], b.pos.shape[1]
    require(
        t[0] == t[1],
        "windows",
        expected=f"equal lengths, {t[0]} positions",
        got=t[1],
        instead="decompose(..., window=) for both",
    )
    chosen = [s for s in a.states if s in b.states] if states is None else states
    pairs = tuple(s if isinstance(s, tuple) else (s, s) for s in chosen)
    require(
        len(pairs) > 0,
        "states",
        expected=f"states of both bases ({a.states} and {b.states})",
        got="none",
        instead="pairs of states",
    )
    halves = [x.half_pos() for x in (a, b)]
    rows: list[list[Tensor]] = []
    used: list[int] = []
    for state_a, state_b in pairs:
        i, j = a.index(state_a), b.index(state_b)
        parts = (linalg.svd(a.pos[i]), linalg.svd(b.pos[j]))
        r = rank or _rank(parts[0].S, (t[0], a.pos.shape[2]))
        limit = min(len(p.S) for p in parts)
        require(1 <= r <= limit, "rank", expected=f"1 to {limit} directions", got=r)
        own = [
            _pair(linalg.svd(h[0][k]), linalg.svd(h[1][k]), r)
            for h, k in zip(halves, (i, j), strict=True)
            if h is not None
        ]
        nothing = [torch.tensor(torch.nan, dtype=torch.float64)] * 3
        floor = (
            [
                torch.stack([o[2] for o in own]).amin(),
                *(torch.stack([o[n] for o in own]) for n in (3, 4)),
            ]
            if own
            else nothing
        )
        same_space = a.mean.shape[1] == b.mean.shape[1]
        mean = torch.cosine_similarity(a.mean[i], b.mean[j], dim=0) if same_space else nothing[0]
        floors = [floor[0], floor[1].amin(), floor[2].amax()]
        rows.append(
            [
                *_pair(*parts, r),
                *floors,
                torch.tensor(r / a.pos.shape[2], dtype=torch.float64),
                mean,
            ]
        )
        used.append(r)
    names = ("angle_mean", "angle_max", "overlap", "procrustes", "difference")
    names += (
        "overlap_floor",
        "procrustes_floor",
        "difference_floor",
        "overlap_random",
        "mean_cosine",
    )
    table = {n: torch.stack([row[k] for row in rows]) for k, n in enumerate(names)}
    return BasisComparison(
        provenance=a.provenance.flagged(*a.flags()),
        other=b.provenance.line(),
        pairs=pairs,
        rank=tuple(used),
        **table,
    )


def _rank(s: Tensor, shape: tuple[int, int]) -> int:
    k = ranks.usable_k(20, min(shape))
    return max(1, int(ranks.screenot(s, shape, k=k).rank)) if k >= 1 else 1


def _pair(a: linalg.SVD, b: linalg.SVD, r: int) -> list[Tensor]:
    """Mean and largest angle, overlap, Procrustes similarity, relative difference."""
    nan = torch.tensor(torch.nan, dtype=torch.float64)
    similar = procrustes_similarity(a, b)
    if a.V.shape[0] != b.V.shape[0]:
        return [nan, nan, nan, similar, nan]
    angles = linalg.principal_angles(a.V[:, :r], b.V[:, :r])
    rows = [p.U * p.S @ p.V.mT for p in (a, b)]
    size = torch.linalg.vector_norm(a.S) * torch.linalg.vector_norm(b.S)
    difference = torch.where(
        size > 0, torch.linalg.vector_norm(rows[0] - rows[1]) / size.sqrt(), torch.nan
    )
    return [angles.mean(), angles.max(), angles.cos().square().mean(), similar, difference]
