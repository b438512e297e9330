"""Do two positional bases agree? :func:`compare_bases` compares those of two checkpoints, corpora,
of a model loaded in two ways, or of a model and its untrained control. Beside each agreement stands
a floor: how far halves of the contexts of one basis agree."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks, linalg
from tl_geometry.base.errors import require
from tl_geometry.base.tables import Table
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.variance import LOW_RELIABILITY, half_pos, reliability, spans
from tl_geometry.measures import positional
from tl_geometry.measures.state_tables import Values, table_of

WORST = {"overlap": min, "procrustes": min, "difference": max}
"""The noisier basis overlaps less with itself, and differs more."""


def compare_bases(a: PositionContext, b: PositionContext, *, rank: int | None = None) -> Table:
    """How far two positional bases agree, a row for each state that both have, beside how far each
    agrees with itself over halves of its contexts.

    - ``angle_mean`` and ``angle_max``: principal angles in radians between the leading ``rank``
      directions; ``overlap`` their mean squared cosine, ``overlap_random`` that of random
      subspaces;
    - ``procrustes``: the similarity of the two curves over positions after the best rotation and
      scale, ``|A^T B|_* / (|A| |B|)`` (nuclear over Frobenius norms), 0 to 1;
    - ``difference``: the relative distance ``|A - B| / sqrt(|A| |B|)`` without rotation;
    - ``mean_cosine``: the cosine of the two mean vectors;
    - ``overlap_floor``, ``procrustes_floor`` and ``difference_floor`` compare the two halves of one
      basis, the noisier of a and b.

    The floors are conservative: a half has half the contexts, so the difference between halves
    carries twice the noise variance of the difference of two whole bases of that size. Bases that
    agree at least as well as the floor may be equal but for sampling noise. Where the halves of
    either basis have a mean cosine below 0.5 there are no floors (NaN, and a flag names the
    states): any two bases of pure noise would agree as well as such a floor. Nor are there any
    where one of the bases has a single group, as one saved without ``full=True`` has.

    Args:
        a: a basis.
        b: another with a window of equal length, of states of the same width.
        rank: number of leading directions, by default the ScreeNOT rank of a, at least 1.

    Raises ``GeometryError`` for bases that cannot be compared, and more directions than there are.

    >>> from tl_geometry import decompose_activations
    >>> g = torch.Generator().manual_seed(0)
    >>> h = torch.randn(16, 6, 4, generator=g) + 3 * torch.randn(6, 4, generator=g)
    >>> a, b = decompose_activations(h), decompose_activations(-2 * h)
    >>> c = compare_bases(a, b, rank=2).df.round(6)
    >>> float(c["procrustes"][0]), float(c["angle_max"][0])
    (1.0, 0.0)
    """
    for basis in (a, b):
        require_basis(basis)
    kinds = [(x.provenance.normalized, *x.pos.shape[1:]) for x in (a, b)]
    same = "bases of one kind: (normalized, positions, d_model) "
    instead = "the same normalize= and window= for both"
    require(kinds[0] == kinds[1], "b", expected=f"{same}{kinds[0]}", got=kinds[1], instead=instead)
    states = [state for state in a.states if state in b.states]
    expected = f"states of both bases ({a.states} and {b.states})"
    require(states, "states", expected=expected, got="none")
    halves = [half_pos(basis.moments) for basis in (a, b)]
    noisy = [reliability(basis.moments) < LOW_RELIABILITY for basis in (a, b)]
    rows: list[Values] = []
    for state in states:
        i, j = a.index(state), b.index(state)
        P, Q = a.pos[i], b.pos[j]
        # T centred rows have at most T - 1 directions
        most = max(1, min(len(P) - 1, P.shape[1]))
        n = checks.count(_rank(P) if rank is None else rank, "rank", most=most)
        row = _agreement(P, Q, n) | {"overlap_random": torch.tensor(n / P.shape[1]).double()}
        pairs = zip(halves, (i, j), strict=True)
        within = [_agreement(h[0][k], h[1][k], n) for h, k in pairs if h is not None]
        known = len(within) == 2 and not (noisy[0][i] or noisy[1][j])
        for name, worst in WORST.items():
            floor = worst(x[name] for x in within) if known else P.new_tensor(torch.nan)
            row[f"{name}_floor"] = floor
        row["mean_cosine"] = torch.cosine_similarity(a.mean[i], b.mean[j], dim=0)
        rows.append({"state": torch.tensor(state), "rank": torch.tensor(n), **row})
    flags = [f"compared with {b.provenance.line()}"]
    for name, basis, is_noisy in zip("ab", (a, b), noisy, strict=True):
        if some := [state for state in states if is_noisy[basis.index(state)]]:
            flags.append(f"position is not reliable in state {spans(some)} of {name}: no floors")
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    chance = "_floor: halves of one basis; overlap_random: random subspaces"
    return table_of(a, columns, flags, chance)


def _rank(pos: Float[Tensor, "position d_model"]) -> int:
    """The ScreeNOT rank, at least 1, with the bound of 20 of Song & Zhong 2023 where the basis is
    large enough for it."""
    k, shape = positional.usable_k(20, min(pos.shape)), (pos.shape[0], pos.shape[1])
    values = torch.linalg.svdvals(pos)
    return max(1, int(positional.screenot(values, shape, k=k).rank)) if k >= 1 else 1


def _agreement(P: Tensor, Q: Tensor, n: int) -> Values:
    """Mean and largest angle, overlap, Procrustes similarity, relative difference."""
    a, b = linalg.svd(P), linalg.svd(Q)
    angles = linalg.principal_angles(a.V[:, :n], b.V[:, :n])
    size = torch.linalg.vector_norm(P) * torch.linalg.vector_norm(Q)
    nuclear = torch.linalg.svdvals(a.S[:, None] * (a.U.mT @ b.U) * b.S).sum()
    return {
        "angle_mean": angles.mean(),
        "angle_max": angles.max(),
        "overlap": angles.cos().square().mean(),
        "procrustes": torch.where(size > 0, nuclear / size, 0.0),
        "difference": torch.linalg.vector_norm(P - Q) / size.sqrt(),
    }
