"""Which ``L`` and diagonal ``D`` in ``W = V L V^T + D`` describe W_QK or W_OV best (Song & Zhong
2023, Eq. 8)? Solved for all heads of a layer with one factorisation, for
:func:`tl_geometry.weight_geometry` and the surrogates of live heads
(:mod:`tl_geometry.interventions`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.weights.bilinear import Factors, project, rotate_diagonal


class LowRankDiagonal(NamedTuple):
    """``W = V_left L V_right^T + diag(delta) + residual``, fitted; ``r2_*`` are shares of ``|W|^2``
    explained by V L V^T alone, by diag(W) alone and by both (NaN for a zero matrix).

    ``singular`` marks layers where the diagonal is not determined (a coordinate axis lies in both
    subspaces): the minimum-norm solution is given. ``symmetric`` is the share of ``|L|^2`` in its
    symmetric part, NaN where L is not square.
    """

    L: Float[Tensor, "*batch head row column"]
    delta: Float[Tensor, "*batch head d_model"]
    r2_low_rank: Float[Tensor, "*batch head"]
    r2_diagonal: Float[Tensor, "*batch head"]
    r2_joint: Float[Tensor, "*batch head"]
    symmetric: Float[Tensor, "*batch head"]
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
    right_basis = left if right is None else right
    diag, total_energy = factors.diagonal, factors.energy
    rotated_product = project(left, factors.left) @ project(right_basis, factors.right).mT
    pattern = "... d row, ... head row column, ... d column -> ... head d"
    target = diag - einsum(left, rotated_product, right_basis, pattern)
    delta, singular = solve_diagonal(left, right_basis, target.mT)
    delta = delta.mT
    L = rotated_product - rotate_diagonal(left, delta, right_basis)
    block_energy = L.square().sum((-2, -1))
    # |W - D|^2 - |L|^2, as V_left L V_right^T is the projection of W - D
    residual = total_energy - 2 * (diag * delta).sum(-1) + delta.square().sum(-1) - block_energy

    def share(value: Tensor) -> Tensor:
        return torch.where(total_energy > 0, value / total_energy, torch.nan)

    symmetric = torch.full_like(total_energy, torch.nan)
    if L.shape[-1] == L.shape[-2]:
        symmetric = ((L + L.mT) / 2).square().sum((-2, -1)) / block_energy
    return LowRankDiagonal(
        L=L,
        delta=delta,
        r2_low_rank=share(rotated_product.square().sum((-2, -1))),
        r2_diagonal=share(diag.square().sum(-1)),
        r2_joint=1 - share(residual.clamp(min=0)),
        symmetric=symmetric,
        singular=singular,
    )


def solve_diagonal(
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"],
    target: Float[Tensor, "... d_model head"],
) -> tuple[Float[Tensor, "... d_model head"], Bool[Tensor, "..."]]:
    """Minimum-norm solution of ``(I - P_left o P_right) x = target``, and whether the matrix is
    singular.

    ``P_left o P_right = Z Z^T`` with ``Z[i, (a, b)] = left[i, a] right[i, b]``. The matrix is
    positive semidefinite, its smallest eigenvalue at least
    ``1 - max_i sqrt(P_left[i, i] P_right[i, i])`` (Gershgorin and Cauchy-Schwarz). Where that bound
    is well above zero, a Cholesky factor of the smaller ``I - Z^T Z`` solves it (Woodbury); where
    it is small, a Cholesky factor of the matrix itself; where it is about zero, eigenvectors.
    """
    size = left.shape[-2]
    eye = torch.eye(size, dtype=left.dtype, device=left.device)
    bound = 1 - (left.square().sum(-1) * right.square().sum(-1)).sqrt().amax(-1)
    # above 0.05 the condition number of the smaller system is at most 20
    if bool((bound > 0.05).all()) and left.shape[-1] * right.shape[-1] < size:
        pairs = _column_products(left, right)
        small = eye[: pairs.shape[-1], : pairs.shape[-1]] - pairs.mT @ pairs
        correction = torch.cholesky_solve(pairs.mT @ target, torch.linalg.cholesky(small))
        return target + pairs @ correction, bound < 0
    matrix = eye - (left @ left.mT) * (right @ right.mT)
    if bool((bound > 1e-6).all()):  # a condition number of 1e6: float64 keeps ten digits
        return torch.cholesky_solve(target, torch.linalg.cholesky(matrix)), bound < 0
    values, vectors = torch.linalg.eigh(matrix)
    determined = values > 1e-10  # smaller ones are rounding errors of the projectors
    inverse = torch.where(determined, 1 / torch.where(determined, values, 1.0), 0.0)
    return vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ target)), ~determined.all(-1)


def _column_products(left: Tensor, right: Tensor) -> Float[Tensor, "*batch d_model column"]:
    """Z with ``P_left o P_right = Z Z^T``; for one basis only pairs a <= b, those with a < b
    counted twice."""
    if right is left:
        a, b = torch.triu_indices(left.shape[-1], left.shape[-1], device=left.device)
        return left[..., a] * left[..., b] * (1 + (a != b).to(left)).sqrt()
    pairs = einsum(left, right, "... d a, ... d b -> ... d a b")
    return rearrange(pairs, "... d a b -> ... d (a b)")
