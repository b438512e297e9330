"""Which direction of one state continues which direction of the state before? Fits the aligned
singular bases of an ensemble of trajectories; maps of rotation and stretch, the stochastic flow and
the truncation of states start from them.

An ensemble is ``X [trajectory state d_model]``. At state t its matrix is ``M_t = X[:, t].T``
(d_model x N) ``= U_t S_t V_t^T``; the basis of t is ``(U_t, S_t)``. Singular vectors are defined up
to sign, and their order is that of the singular values; alignment chooses order and signs so that
direction i of one state continues direction i of the state before, and permutes the singular values
with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tl_geometry.base.checks import describe, finite, index
from tl_geometry.base.errors import choice, require
from tl_geometry.base.linalg import svd

ALIGNMENTS = ("greedy", "hungarian")
"""How :func:`align_directions` chains singular directions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AlignedBases:
    """Aligned bases of all states: ``M_t = U_t diag(S_t) V_t^T``, float64. Directions are the
    columns of ``U``; they are not in the order of their singular values."""

    U: Float[Tensor, "state d_model rank"]
    S: Float[Tensor, "state rank"]

    @property
    def rank(self) -> int:
        """Directions of each basis, ``min(d_model, trajectories)``."""
        return self.S.shape[-1]


def fit_aligned_bases(
    X: Float[Tensor, "trajectory state d_model"], *, align: str = "greedy"
) -> AlignedBases:
    """Aligned bases of an ensemble, uncentred (as published), so that the first direction is nearly
    that of the ensemble mean.

    Computed in float64; ``align`` as in :func:`align_directions`. Source: Sarfati et al. 2025,
    section 2 ("latent space bases"). Raises ``GeometryError`` for states that are not finite.

    >>> X = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> f = fit_aligned_bases(X)
    >>> M = X[:, 1].mT
    >>> torch.allclose(f.U[1] * f.S[1] ** 2 @ f.U[1].mT, M @ M.mT)
    True
    """
    ok = X.dim() == 3 and X.is_floating_point() and X.numel() > 0
    expected, instead = "a floating tensor [trajectory state d_model]", "tl_geometry.trajectories"
    require(ok, "trajectories", expected=expected, got=describe(X), instead=instead)
    for s, state in enumerate(X.unbind(1)):
        finite(state, f"trajectories, state row {s}")
    choice(align, ALIGNMENTS, "align")
    # state by state: no float64 copy of the whole ensemble exists; M_t^T = V_t S_t U_t^T
    factors = [svd(state.double()) for state in X.unbind(1)]
    U, S = torch.stack([f.V for f in factors]), torch.stack([f.S for f in factors])
    order, sign = align_directions(U, align)
    U = U.gather(2, order[:, None].expand_as(U)) * sign[:, None]
    return AlignedBases(U=U, S=S.gather(1, order))


def inverse_values(
    S: Float[Tensor, "*batch rank"], rtol: float = 1e-10
) -> Float[Tensor, "*batch rank"]:
    """``1 / S``, and 0 for singular values below ``rtol`` times the largest: maps drop those
    directions.

    Directions in which the states do not vary are dropped; the rounding of float32 states, about
    1e-7 of the largest, stays. ``rtol`` lies above the float64 rounding that
    :func:`tl_geometry.base.linalg.numerical_rank` cuts at.

    >>> inverse_values(torch.tensor([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    large = S.amax(-1, keepdim=True) * rtol < S
    return torch.where(large, 1 / torch.where(large, S, 1.0), 0.0)


def align_directions(
    U: Float[Tensor, "state d_model rank"], method: str = "greedy"
) -> tuple[Int[Tensor, "state rank"], Float[Tensor, "state rank"]]:
    """Order and signs that make column i of each state continue column i of the state before. The
    aligned columns are ``psi_t = U_t[:, order_t] * sign_t``, ``psi_0 = U_0``.

    ``"greedy"`` (as published): for i = 1, 2, ... the unused column with the largest
    ``|psi_i(t-1).u_j(t)|``, the later one on a tie. ``"hungarian"``: the permutation with the
    largest sum of absolute cosines. Both then choose signs that make the cosines positive. Singular
    values must be permuted with the columns (the published code does not;
    :func:`fit_aligned_bases` does).

    >>> U = torch.stack([torch.eye(2), -torch.eye(2).flip(1)])
    >>> order, sign = align_directions(U)
    >>> order[1].tolist(), sign[1].tolist()
    ([1, 0], [-1.0, -1.0])
    """
    order = torch.arange(U.shape[2], device=U.device).repeat(len(U), 1)
    sign = torch.ones(order.shape, dtype=U.dtype, device=U.device)
    previous = U[0]
    for t in range(1, len(U)):
        cosines = previous.mT @ U[t]
        order[t] = torch.tensor(_continued(cosines.abs().cpu().numpy(), method))
        matched = cosines.gather(1, order[t][:, None])[:, 0]
        # a cosine of 0 counts as positive: a sign of 0 would erase the direction
        sign[t] = torch.where(matched < 0, -1.0, 1.0).to(sign)
        previous = U[t][:, order[t]] * sign[t]
    return order, sign


def _continued(similarity: np.ndarray, method: str) -> list[int]:
    """The column that continues each row of ``similarity [row column]`` (absolute cosines)."""
    if method == "hungarian":
        return linear_sum_assignment(similarity, maximize=True)[1].tolist()
    order: list[int] = []
    for row in similarity:
        row[order] = -1  # below every absolute cosine: a column is used once
        order.append(len(row) - 1 - int(np.argmax(row[::-1])))  # reversed: the later one on a tie
    return order


def top_directions(aligned: AlignedBases, row: int, K: int) -> Float[Tensor, "d_model rank"]:
    """The ``K`` directions of one state with the largest singular values, strongest first."""
    index(row, len(aligned.S), "state row")
    expected = f"1 to {aligned.rank} directions"
    require(1 <= K <= aligned.rank, "K", expected=expected, got=K, instead="more trajectories")
    # aligned directions are not in the order of their singular values
    return aligned.U[row][:, aligned.S[row].argsort(descending=True, stable=True)[:K]]
