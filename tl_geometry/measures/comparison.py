"""Do two positional bases agree? :func:`compare_bases` compares those of two checkpoints, corpora
or states, of a model loaded in two ways, or of a model and its untrained control. Beside each
agreement stands a floor: how far halves of the contexts of one basis agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.variance import LOW_RELIABILITY, half_pos, reliability, spans
from tl_geometry.measures import rank as ranks

Pair = tuple[int, int]
"""A state of one basis and a state of another."""
NAN = torch.tensor(torch.nan, dtype=torch.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class BasisComparison(Result):
    """What :func:`compare_bases` returns: one row for each of ``pairs`` (state of a, state of b).

    ``angle_mean`` and ``angle_max`` are principal angles in radians between the leading ``rank``
    directions; ``overlap`` their mean squared cosine, ``overlap_random`` that of random subspaces;
    ``procrustes`` the similarity of the two curves over positions after the best rotation and
    scale, 0 to 1; ``difference`` the relative distance ``|P_a - P_b| / sqrt(|P_a| |P_b|)`` without
    rotation (Frobenius norms); ``mean_cosine`` the cosine of the two mean vectors.
    ``overlap_floor``, ``procrustes_floor`` and ``difference_floor`` compare the two halves of one
    basis, the noisier of a and b; NaN where position is not reliable. ``provenance`` is that of
    ``a``; ``other`` says what ``b`` was made from.
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

    table_axes = ("row",)
    table_values = (
        *("angle_mean", "angle_max", "overlap", "overlap_floor", "overlap_random", "procrustes"),
        *("procrustes_floor", "difference", "difference_floor", "mean_cosine"),
    )

    def axis_labels(self, axis: str) -> dict[str, Sequence[object]]:
        """The two states of a row, and how many directions of them are compared."""
        a, b = zip(*self.pairs, strict=True)
        return {"state_a": a, "state_b": b, "rank": self.rank}


def procrustes_similarity(a: linalg.SVD, b: linalg.SVD) -> Float[Tensor, "*batch"]:
    """``|A^T B|_* / (|A| |B|)`` (nuclear over Frobenius norms): how alike two sets of rows are
    after the best rotation and scaling, from their thin SVDs.

    1 for rotated and scaled copies, also of different d_model; invariant to rotation of either
    side. 0 where one is zero.
    """
    cross = einsum(a.S, a.U, b.U, b.S, "... i, ... row i, ... row j, ... j -> ... i j")
    size = torch.linalg.vector_norm(a.S, dim=-1) * torch.linalg.vector_norm(b.S, dim=-1)
    return torch.where(size > 0, torch.linalg.svdvals(cross).sum(-1) / size, 0.0)


def compare_bases(
    a: PositionContext,
    b: PositionContext,
    *,
    states: Sequence[int | Pair] | None = None,
    rank: int | None = None,
) -> BasisComparison:
    """How far two positional bases agree, state by state, beside how far each agrees with itself
    over halves of its contexts.

    Args:
        a: a basis.
        b: another with a window of equal length, or the same one to compare its states. Where
            d_model differs only ``procrustes`` is defined, which compares the curves; the rest is
            NaN.
        states: states common to both, by default all, or pairs (state of a, state of b).
        rank: number of leading directions, by default the ScreeNOT rank of a, at least 1.

    The floors are conservative: a half has half the contexts, so the difference between halves
    carries twice the noise variance of the difference of two whole bases of that size. Bases that
    agree at least as well as the floor may be equal but for sampling noise. Where the halves of
    either basis have a mean cosine below 0.5 there are no floors (a flag names the states): any two
    bases of pure noise would agree as well as such a floor. Halves are made of whole blocks of 8
    contexts, so that floors need 16 contexts.

    Raises ``GeometryError`` for windows of different lengths, one basis of normalised states and
    one of raw ones, and more directions than there are.

    >>> from tl_geometry import decompose_activations
    >>> g = torch.Generator().manual_seed(0)
    >>> h = torch.randn(16, 6, 4, generator=g) + 3 * torch.randn(6, 4, generator=g)
    >>> a, b = decompose_activations(h), decompose_activations(-2 * h)
    >>> c = compare_bases(a, b, rank=2)
    >>> round(float(c.procrustes), 6), round(float(c.angle_max), 6)
    (1.0, 0.0)
    """
    for basis in (a, b):
        require_basis(basis)
    pairs = _checked_pairs(a, b, states)
    halves = [half_pos(basis.moments) for basis in (a, b)]
    reliabilities = [reliability(basis.moments) for basis in (a, b)]
    positions, d_model = a.pos.shape[1:]
    rows: list[dict[str, Tensor]] = []
    used_ranks: list[int] = []
    unreliable: dict[str, set[int]] = {"a": set(), "b": set()}
    for state_a, state_b in pairs:
        i, j = a.index(state_a), b.index(state_b)
        factors = (linalg.svd(a.pos[i]), linalg.svd(b.pos[j]))
        n_directions = _rank(factors[0].S, (positions, d_model)) if rank is None else rank
        limit = min(len(svd.S) for svd in factors)
        require(
            1 <= n_directions <= limit,
            "rank",
            expected=f"1 to {limit} directions",
            got=n_directions,
        )
        same_space = d_model == b.mean.shape[1]
        mean = torch.cosine_similarity(a.mean[i], b.mean[j], dim=0) if same_space else NAN
        random = torch.tensor(n_directions / d_model, dtype=torch.float64)
        halves_of_row = [
            (h[0][k], h[1][k]) for h, k in zip(halves, (i, j), strict=True) if h is not None
        ]
        for name, cosines, k, state in zip(
            "ab", reliabilities, (i, j), (state_a, state_b), strict=True
        ):
            if cosines[k] < LOW_RELIABILITY:
                unreliable[name].add(state)
                halves_of_row = []
        baselines = {"overlap_random": random, "mean_cosine": mean}
        rows.append(
            _agreement(*factors, n_directions) | _floors(halves_of_row, n_directions) | baselines
        )
        used_ranks.append(n_directions)
    flags = [
        f"position is not reliable in state {spans(list(states))} of {name}: no floors there"
        for name, states in unreliable.items()
        if states
    ]
    flags = (*a.flags(), *flags)
    return BasisComparison(
        provenance=a.provenance.flagged(*flags),
        other=b.provenance.line(),
        pairs=pairs,
        rank=tuple(used_ranks),
        **{name: torch.stack([row[name] for row in rows]) for name in rows[0]},
    )


def _checked_pairs(
    a: PositionContext, b: PositionContext, states: Sequence[int | Pair] | None
) -> tuple[Pair, ...]:
    """The pairs of states to compare, of two bases that can be compared."""
    normalized = [f"normalized={basis.provenance.normalized}" for basis in (a, b)]
    require(
        normalized[0] == normalized[1],
        "bases",
        expected=f"states of one kind, {normalized[0]}",
        got=normalized[1],
        instead="the same normalize= for both",
    )
    lengths = a.pos.shape[1], b.pos.shape[1]
    require(
        lengths[0] == lengths[1],
        "windows",
        expected=f"equal lengths, {lengths[0]} positions",
        got=lengths[1],
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
    return pairs


def _floors(halves: Sequence[tuple[Tensor, Tensor]], rank: int) -> dict[str, Tensor]:
    """The agreement of the two halves of each basis, the worse of the two bases; NaN where no basis
    has halves."""
    agreements = [
        _agreement(linalg.svd(first), linalg.svd(second), rank) for first, second in halves
    ]
    # the noisier basis overlaps less with itself, and differs more
    worst = {"overlap": torch.amin, "procrustes": torch.amin, "difference": torch.amax}
    return {
        f"{name}_floor": noisier(torch.stack([agreement[name] for agreement in agreements]))
        if agreements
        else NAN
        for name, noisier in worst.items()
    }


def _rank(singular_values: Tensor, shape: tuple[int, int]) -> int:
    """The ScreeNOT rank, at least 1, with the bound of 20 of Song & Zhong 2023 where the basis is
    large enough for it."""
    k = ranks.usable_k(20, min(shape))
    return max(1, int(ranks.screenot(singular_values, shape, k=k).rank)) if k >= 1 else 1


def _agreement(a: linalg.SVD, b: linalg.SVD, n_directions: int) -> dict[str, Tensor]:
    """Mean and largest angle, overlap, Procrustes similarity, relative difference, from the thin
    SVDs of two bases."""
    similar = procrustes_similarity(a, b)
    if a.V.shape[0] != b.V.shape[0]:
        unknown = ("angle_mean", "angle_max", "overlap", "difference")
        return {"procrustes": similar, **dict.fromkeys(unknown, NAN)}
    angles = linalg.principal_angles(a.V[:, :n_directions], b.V[:, :n_directions])
    pos_vectors = [svd.U * svd.S @ svd.V.mT for svd in (a, b)]
    # from the SVD factors, which each pair of states computes once
    size = torch.linalg.vector_norm(a.S) * torch.linalg.vector_norm(b.S)
    distance = torch.linalg.vector_norm(pos_vectors[0] - pos_vectors[1])
    return {
        "angle_mean": angles.mean(),
        "angle_max": angles.max(),
        "overlap": angles.cos().square().mean(),
        "procrustes": similar,
        "difference": torch.where(size > 0, distance / size.sqrt(), torch.nan),
    }
