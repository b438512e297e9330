"""Which ``L`` and diagonal ``D`` in ``W = V L V^T + D`` describe W_QK or W_OV best (Song & Zhong
2023, Eq. 8)? Solved for all heads of a layer with one factorisation, for
:func:`tl_geometry.weight_geometry` and the surrogates of live heads
(:mod:`tl_geometry.interventions`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.linalg import ratio
from tl_geometry.weights.bilinear import Factors, rotated_block


class LowRankDiagonal(NamedTuple):
    """``W = V_left L V_right^T + diag(delta) + residual``, fitted; ``r2_*`` are shares of ``|W|^2``
    explained by V L V^T alone, by diag(W) alone and by both (NaN for a zero matrix).

    ``singular`` marks layers where the diagonal is not determined (a coordinate axis lies in both
    subspaces): the minimum-norm solution is given.
    """

    L: Float[Tensor, "*batch head row column"]
    delta: Float[Tensor, "*batch head d_model"]
    r2_low_rank: Float[Tensor, "*batch head"]
    r2_diagonal: Float[Tensor, "*batch head"]
    r2_joint: Float[Tensor, "*batch head"]
    singular: Bool[Tensor, "..."]


def fit_low_rank_diagonal(
    factors: Factors,
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"] | None = None,
) -> LowRankDiagonal:
    """Joint least squares ``min |W - V_left L V_right^T - diag(delta)|^2`` over L and delta, for
    all heads at once.

    With projectors P = V V^T: ``(I - P_left o P_right) delta = diag(W) - diag(P_left W P_right)``
    (o is the entrywise product), then ``L = V_left^T (W - diag delta) V_right``. The matrix on the
    left depends on the layer alone, so it is factored once for all heads.

    >>> g = torch.Generator().manual_seed(0)
    >>> V = torch.linalg.qr(torch.randn(20, 2, generator=g, dtype=torch.float64)).Q
    >>> eye = torch.eye(20).double()
    >>> W = V @ torch.tensor([[1.0, 2.0], [0.0, 3.0]]).double() @ V.T + 0.5 * eye
    >>> fit = fit_low_rank_diagonal(Factors(W[None], eye[None]), V)
    >>> (fit.L[0].round(decimals=6) + 0.0).tolist(), round(float(fit.r2_joint), 6)
    ([[1.0, 2.0], [0.0, 3.0]], 1.0)
    """
    right = left if right is None else right
    diag, energy = factors.diagonal, factors.energy
    product = rotated_block(factors, left, right, remove=torch.zeros_like(diag))
    pattern = "... d row, ... head row column, ... d column -> ... head d"
    target = diag - einsum(left, product, right, pattern)
    delta, singular = solve_diagonal(left, right, target.mT)
    delta = delta.mT
    L = rotated_block(factors, left, right, remove=delta)
    block_energy = L.square().sum((-2, -1))
    # |W - D|^2 - |L|^2, as V_left L V_right^T is the projection of W - D
    residual = energy - 2 * (diag * delta).sum(-1) + delta.square().sum(-1) - block_energy
    return LowRankDiagonal(
        L=L,
        delta=delta,
        r2_low_rank=ratio(product.square().sum((-2, -1)), energy),
        r2_diagonal=ratio(diag.square().sum(-1), energy),
        r2_joint=1 - ratio(residual.clamp(min=0), energy),
        singular=singular,
    )


def solve_diagonal(
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"],
    target: Float[Tensor, "... d_model head"],
) -> tuple[Float[Tensor, "... d_model head"], Bool[Tensor, "..."]]:
    """Minimum-norm solution of ``(I - P_left o P_right) x = target``, and whether the matrix is
    singular.

    The matrix is positive semidefinite, its smallest eigenvalue at least
    ``1 - max_i sqrt(P_left[i, i] P_right[i, i])`` (Gershgorin and Cauchy-Schwarz). Where that bound
    is above zero, a Cholesky factor solves it; where it is about zero, eigenvectors.
    """
    eye = torch.eye(left.shape[-2], dtype=left.dtype, device=left.device)
    matrix = eye - (left @ left.mT) * (right @ right.mT)
    bound = 1 - (left.square().sum(-1) * right.square().sum(-1)).sqrt().amax(-1)
    if bool((bound > 1e-6).all()):  # a condition number of 1e6: float64 keeps ten digits
        solution = torch.cholesky_solve(target, torch.linalg.cholesky(matrix))
        return solution, torch.zeros_like(bound, dtype=torch.bool)
    values, vectors = torch.linalg.eigh(matrix)
    determined = values > 1e-10  # smaller ones are rounding errors of the projectors
    inverse = torch.where(determined, 1 / torch.where(determined, values, 1.0), 0.0)
    return vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ target)), ~determined.all(-1)
