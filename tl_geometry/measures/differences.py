"""How smooth is a positional basis along its positions? Finite differences of its reflected Gram
matrix, for :func:`tl_geometry.positional_report`, and the bound on what the first cosines leave
unexplained (:func:`theorem1`; Song & Zhong 2023, Theorem 1).

The Gram matrix ``G = P P^T`` of a centred basis, extended evenly to period 2T, is ``G~ = P~ P~^T``
with the reflected rows ``P~ = [P; J P]`` (J reverses the order). Differences of G~ along both of
its axes are differences of the rows:

    Delta^(m,m) G~ = X X^T,   X = m-fold periodic backward difference of P~, times T each.

Only this factored form is used. Iterating the two-dimensional stencil multiplies rounding errors by
(4 T^2)^m and is useless in float64 from m = 4 on. As X X^T is positive semidefinite, its largest
entry is the largest squared row norm of X.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import svd


def _halved_difference(pos: Tensor, m: int) -> Tensor:
    """The m-fold periodic difference of the reflected rows divided by 2^m: never larger than its
    input, whatever m."""
    # [P; J P]: repeated periodically, these rows have no jump at the ends
    rows = torch.cat([pos, pos.flip(-2)], dim=-2)
    for _ in range(m):
        # halved at each step, so that large m does not overflow
        rows = (rows - rows.roll(1, dims=-2)) / 2
    return rows


def smoothness(
    pos: Float[Tensor, "*batch position d_model"], m: int = 1
) -> Float[Tensor, "*batch"]:
    """Size of the m-th differences relative to the Gram matrix,
    ``|Delta^(m,m) G~|_max / |G|_max``: small for a smooth basis.

    Dimensionless and invariant to rotation and scale of d_model; a curve of one DCT frequency j has
    about (pi j)^(2m). Sampling noise of C contexts adds about ``2 T^2 tr(noise covariance) / C`` to
    the numerator at m = 1, so values are comparable at one C only. NaN for a zero basis. Song &
    Zhong 2023, section 3.

    >>> t = (torch.arange(64) + 0.5) / 64
    >>> round(float(smoothness(torch.cos(torch.pi * t)[:, None].double())), 2)
    9.87
    """
    require(m >= 0, "m", expected="0 or more differences", got=m)
    largest = torch.linalg.vector_norm(pos, dim=-1).amax(-1)
    positions = pos.shape[-2]
    if m <= positions:  # T + m differences suffice: by symmetry the others repeat them, up to sign
        before, after = pos[..., :m, :].flip(-2), pos[..., positions - m :, :].flip(-2)
        differences = torch.cat([before, pos, after], dim=-2).diff(n=m, dim=-2)
    else:
        differences = _halved_difference(pos, m) * 2.0**m
    size = torch.linalg.vector_norm(differences, dim=-1).amax(-1)
    ratio = size / largest * float(positions) ** m
    return torch.where(largest > 0, ratio.square(), torch.nan)


def dct_vectors(positions: int, k: int, *, printed: bool = False) -> Float[Tensor, "position rank"]:
    """First k DCT-II vectors ``c_j(t) = cos(pi (j - 1)(t - 1/2) / T)``, t = 1..T, as columns, not
    normalised, in float64.

    ``printed=True`` gives the vectors as the paper prints them, ``cos((j - 1/2)(t - 1) pi / T)``
    with j the number of the vector: time and frequency have changed places, and with these vectors
    the theorem is false (see :func:`theorem1`).

    >>> (dct_vectors(4, 2).T @ dct_vectors(4, 2)).round(decimals=6).abs().tolist()
    [[4.0, 0.0], [0.0, 2.0]]
    """
    t = torch.arange(positions, dtype=torch.float64)[:, None]
    j = torch.arange(k, dtype=torch.float64)
    turns = (j + 0.5) * t if printed else j * (t + 0.5)
    return torch.cos(torch.pi * turns / positions)


class LowFrequencyBound(NamedTuple):
    """Both sides of Theorem 1 for one basis; ``delta_max`` is ``|Delta^(m,m) G~|_max``. See
    :func:`theorem1`."""

    lhs: float
    bound_tight: float
    bound_safe: float
    bound_operator: float
    bound_paper: float
    lhs_paper: float
    delta_max: float
    B: Float[Tensor, "rank column"]
    F: Float[Tensor, "position rank"]


def theorem1(pos: Float[Tensor, "position d_model"], k: int, m: int) -> LowFrequencyBound:
    r"""Theorem 1 of Song & Zhong 2023, corrected: a smooth positional basis is close to its first k
    cosines.

    Statement. Let P be centred (rows sum to zero), G = P P^T, c_1..c_k the first DCT-II vectors
    (:func:`dct_vectors`), F = [c_1..c_k], Pi the orthogonal projector on their span, and
    g_j = 1 / (2T sin(pi j / 2T)). With B B^T = T^-2 W F^T G F W, W = diag(1, 2, ..., 2):

        (1/T) |G - F B B^T F^T|_op  <=  [(g_k g_1)^m + g_k^(2m)] |Delta^(m,m) G~|_max
                                    <=  6 / (4k)^m |Delta^(m,m) G~|_max

    Derivation:

    1. |c_1|^2 = T and |c_j|^2 = T/2 otherwise, so Pi = F W F^T / T and F B B^T F^T = Pi G Pi
       exactly.
    2. The reflected rows P~ are even about the half sample, so their discrete Fourier transform of
       length 2T holds only the cosines c_(j+1), j = 0..T-1, and the j = 0 term vanishes since P is
       centred. One periodic difference times T multiplies frequency j by
       T |1 - exp(-i pi j / T)| = 2T sin(pi j / 2T) = 1 / g_j, which increases with j.
    3. Write D for the diagonal of g_j over j = 1..T-1 and split it in low (j < k) and high (j >= k)
       frequencies. In the Fourier basis G~ = D^m H D^m with H = Delta^(m,m) G~ up to unit phases,
       positive semidefinite. G - Pi G Pi has the blocks (low, high), (high, low) and (high, high).
       Their norms are at most g_1^m g_k^m |H|_op and g_k^(2m) |H|_op, the two off-diagonal blocks
       together have the norm of one of them, and |G~|_op = 2 |G|_op.
    4. |H|_op <= 2T |H|_max. Dividing by T gives the first inequality, or its sharper form with
       |Delta|_op / 2T in place of |Delta|_max (``bound_operator``).
    5. sin x >= 2x/pi gives g_j <= 1/(2j), so the bracket is at most 2 / (4k)^m.

    Errata. The paper prints 6 / (8k)^m (``bound_paper``) and the vectors of
    ``dct_vectors(printed=True)``. With those vectors the claim is false: T = 64, G = c_2 c_2^T,
    k = 8, m = 4 leaves at least 1.8e-2 for any B (``lhs_paper``) against a bound of 3.4e-3. With
    the right vectors 8k still fails for k close to T and large m. It also writes (F B)^T F B for
    the T x T matrix F B (F B)^T.

    Args:
        pos: centred basis ``[T d_model]``.
        k: frequencies, 1 to T.
        m: differences, at least 1.

    Returns both sides, B ``[k rank]`` and F ``[T k]``. ``lhs_paper`` is a lower bound of the left
    side with the printed vectors, for any B. ``lhs`` is zero at k = T and need not fall
    monotonically with k.
    Raises ``GeometryError`` for an uncentred basis.

    >>> c = dct_vectors(64, 2)[:, 1:]
    >>> r = theorem1(c, k=8, m=4)
    >>> round(r.lhs, 6), r.lhs_paper > r.bound_paper, round(theorem1(c, k=1, m=1).lhs, 3)
    (0.0, True, 0.5)
    """
    positions = pos.shape[0]
    require(pos.dim() == 2, "pos", expected="one basis [position d_model]", got=describe(pos))
    require(1 <= k <= positions, "k", expected=f"1 to {positions} frequencies", got=k)
    require(m >= 1, "m", expected="1 or more differences", got=m)
    pos = pos.double()
    offset = float(torch.linalg.vector_norm(pos.mean(0))) * math.sqrt(positions)
    scale = float(torch.linalg.vector_norm(pos))
    expected, got = "rows that sum to zero", f"mean {offset / (scale or 1):.1e}"
    require(offset <= 1e-8 * scale, "pos", expected=expected, got=got, instead="pos - pos.mean(0)")
    F = dct_vectors(positions, k)
    weight = torch.full((k, 1), 2.0, dtype=torch.float64)
    weight[0] = 1
    # B only enters as B B^T = T^-2 W F^T G F W: singular vectors times values are one such B
    factor = svd(weight * (F.T @ pos) / positions)
    halved = _halved_difference(pos, m)  # X / (2T)^m
    largest = float(halved.square().sum(-1).amax())
    spectral = float(torch.linalg.svdvals(halved)[0]) ** 2 / (2 * positions)
    sines = [math.sin(math.pi * j / (2 * positions)) for j in (1, k)]
    bracket = (sines[0] * sines[1]) ** -m + sines[1] ** (-2 * m)  # [(g_k g_1)^m + g_k^2m] (2T)^2m
    # any B leaves at least (I - Pi') G (I - Pi'), Pi' the projector on the printed vectors
    paper = torch.linalg.qr(dct_vectors(positions, k, printed=True)).Q
    remainder = pos - paper @ (paper.T @ pos)
    per_frequency = float(2 * positions) ** 2
    return LowFrequencyBound(
        lhs=_remainder(pos, F, weight),
        bound_tight=bracket * largest,
        bound_safe=6 * (per_frequency / (4 * k)) ** m * largest,
        bound_operator=bracket * spectral,
        bound_paper=6 * (per_frequency / (8 * k)) ** m * largest,
        lhs_paper=float(torch.linalg.matrix_norm(remainder, 2)) ** 2 / positions,
        delta_max=largest * per_frequency**m,
        B=factor.U * factor.S.unsqueeze(-2),
        F=F,
    )


def _remainder(pos: Tensor, F: Tensor, weight: Tensor) -> float:
    """(1/T) |G - Pi G Pi|_op."""
    positions = len(pos)
    pattern = "position rank, rank, rank d_model -> position d_model"
    low = einsum(F, weight[:, 0], F.T @ pos, pattern) / positions  # Pi P
    difference = pos @ pos.T - low @ low.T
    return float(torch.linalg.eigvalsh(difference).abs().amax()) / positions
