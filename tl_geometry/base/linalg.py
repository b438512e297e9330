"""Linear algebra that measures, weights, flow, scores and circuits share: deterministic SVDs (also
of a product, from its factors), angles.

Functions batch over leading axes and compute in the dtype they are given, unless they say
otherwise. One rule fixes the signs of singular vectors in the whole library: the coordinate of
largest magnitude of each right singular vector is positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.fft
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Left = Float[Tensor, "*batch row rank"]
Right = Float[Tensor, "*batch column rank"]
Rows = Float[Tensor, "*batch d_model"]
Values = Float[Tensor, "*batch rank"]


class SVD(NamedTuple):
    """``U @ diag(S) @ V.mT``; ``V`` holds the right singular vectors as columns (not
    transposed)."""

    U: Float[Tensor, "*batch row rank"]
    S: Float[Tensor, "*batch rank"]
    V: Float[Tensor, "*batch column rank"]


def fix_signs(U: Left, V: Right) -> tuple[Tensor, Tensor]:
    """Flip pairs of singular vectors so that the largest-magnitude coordinate (the first of equals)
    of each column of ``V`` is positive.

    >>> U, V = fix_signs(torch.eye(2), torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))
    >>> V.tolist() == torch.tensor([[-0.6, 0.8], [0.8, 0.6]]).tolist()
    True
    """
    pivots = V.gather(-2, V.abs().argmax(-2, keepdim=True))
    sign = torch.where(pivots < 0, -1.0, 1.0).to(V.dtype)
    return U * sign, V * sign


def svd(matrix: Float[Tensor, "*batch row column"]) -> SVD:
    """Thin SVD, singular values descending, signs fixed by :func:`fix_signs`.

    >>> s = svd(torch.diag(torch.tensor([1.0, -3.0])))
    >>> s.S.tolist()
    [3.0, 1.0]
    """
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    U, V = fix_signs(U, Vh.mT)
    return SVD(U, S, V)


def product_svd(left: Left, right: Right) -> SVD:
    """SVD of ``left @ right.mT`` from its factors, without forming the product (rank at most the
    factors' width).

    Two thin orthonormalisations and one small SVD: cost row * rank^2 + rank^3 in place of row^3.

    >>> left, right = torch.tensor([[3.0], [4.0]]), torch.tensor([[0.0], [2.0], [0.0]])
    >>> round(float(product_svd(left, right).S), 4)
    10.0
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(r_left @ r_right.mT)
    U, V = fix_signs(q_left @ u, q_right @ vh.mT)
    return SVD(U, s, V)


def numerical_rank(singular_values: Values, shape: Sequence[int]) -> Int[Tensor, "*batch"]:
    """Number of singular values (given descending) above rounding, ``s_i > max(rows, columns) eps
    s_1``, of matrices of ``shape``: the library's one threshold, that of NumPy's ``matrix_rank``.

    >>> int(numerical_rank(torch.tensor([3.0, 1.0, 1e-7]), (20, 3)))
    2
    """
    eps = torch.finfo(singular_values.dtype).eps
    return (singular_values > max(shape[-2:]) * eps * singular_values[..., :1]).sum(-1)


def transposed(linear: Callable[[Tensor], Tensor], cotangent: Tensor) -> Tensor:
    """The transpose of a linear map from a space into itself, applied to ``cotangent``.

    >>> transposed(lambda x: x.roll(1), torch.tensor([1.0, 2.0, 3.0])).tolist()
    [2.0, 3.0, 1.0]
    """
    # autograd of a linear map gives its transpose, at zero as anywhere
    with torch.enable_grad():
        start = torch.zeros_like(cotangent, requires_grad=True)
        return torch.autograd.grad(linear(start), start, cotangent)[0]


def gram_spectrum(gram: Float[Tensor, "*batch row row"]) -> Float[Tensor, "*batch row"]:
    """Singular values of X, descending, from ``X^T X`` (or ``X X^T``). Squaring halves the digits:
    in float64, values below 1e-8 of the largest are wrong.

    >>> gram_spectrum(torch.diag(torch.tensor([1.0, 9.0]))).tolist()
    [3.0, 1.0]
    """
    # rounding may leave an eigenvalue just below zero
    return torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0).sqrt()


def dct_matrix(positions: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "row position"]:
    """Orthonormal DCT-II: row j is ``a_j cos(pi j (t + 1/2) / T)``, t = 0..T-1,
    ``a_0 = sqrt(1/T)``, else ``sqrt(2/T)``.

    >>> C = dct_matrix(4)
    >>> torch.allclose(C @ C.T, torch.eye(4, dtype=C.dtype))
    True
    """
    return torch.from_numpy(scipy.fft.dct(np.eye(positions), axis=0, norm="ortho")).to(dtype)


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``, NaN unless the whole is positive.

    >>> ratio(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])).tolist()
    [0.5, nan]
    """
    return torch.where(whole > 0, part / whole, torch.nan)


def stable_rank(singular_values: Values) -> Float[Tensor, "*batch"]:
    """Stable rank ``sum s_i^2 / s_1^2`` of a matrix with singular values ``s`` (NaN when all are
    zero).

    >>> float(stable_rank(torch.tensor([2.0, 1.0])))
    1.25
    """
    squares = singular_values.square()
    return squares.sum(-1) / squares.amax(-1)


def normalize_rows(rows: Rows) -> tuple[Rows, Bool[Tensor, "*batch"]]:
    """Rows of unit Euclidean norm, and a mask of the degenerate (zero) rows, which stay zero.

    >>> rows, zero = normalize_rows(torch.tensor([[0.0, 5.0], [0.0, 0.0]]))
    >>> rows.tolist(), zero.tolist()
    ([[0.0, 1.0], [0.0, 0.0]], [False, True])
    """
    largest = rows.abs().amax(-1, keepdim=True)
    # divided first: rows of any magnitude, without overflow or underflow of the squares
    scaled = rows / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(norm > 0, norm, 1.0), largest[..., 0] == 0


def angle(a: Rows, b: Rows) -> Float[Tensor, "*batch"]:
    """Angle between vectors in radians, ``2 atan2(|a^ - b^|, |a^ + b^|)``: accurate also near 0 and
    pi. NaN where a vector is zero.

    >>> round(float(angle(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 7.0]))), 4)
    1.5708
    """
    (a, zero_a), (b, zero_b) = normalize_rows(a), normalize_rows(b)
    theta = 2 * torch.atan2(
        torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1)
    )
    return torch.where(zero_a | zero_b, torch.nan, theta)


def principal_angles(
    a: Float[Tensor, "*batch d_model row"], b: Float[Tensor, "*batch d_model column"]
) -> Values:
    """Principal angles (radians, ascending) between the subspaces spanned by orthonormal columns
    ``a`` and ``b``.

    Small angles come from the sine, large ones from the cosine (Bjoerck & Golub 1973), so that
    equal subspaces give 0 to rounding.

    >>> axes = torch.eye(3)
    >>> [round(v, 4) for v in principal_angles(axes[:, :2], axes[:, 1:]).tolist()]
    [0.0, 1.5708]
    """
    # there are as many angles as the smaller space has dimensions
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    overlap = a.mT @ b
    cosine = torch.linalg.svdvals(overlap).clamp(max=1)
    # flipped: sines ascend where cosines descend
    sine = torch.linalg.svdvals(b - a @ overlap).clamp(max=1).flip(-1)
    # either is inaccurate where its derivative is large: they change over at 45 degrees
    return torch.where(cosine.square() > 0.5, torch.asin(sine), torch.acos(cosine))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a floating dtype: 2^-53 (float64), 2^-24 (float32), 2^-11 (float16), 2^-8
    (bfloat16).

    >>> unit_roundoff(torch.float32) == 2**-24
    True
    """
    return torch.finfo(dtype).eps / 2
