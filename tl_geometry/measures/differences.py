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

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import require


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
