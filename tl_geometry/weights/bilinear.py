"""How much of a head's W_QK or W_OV is a diagonal, and how much is a small block in the directions
of a basis? The formulas of :func:`tl_geometry.weight_geometry` (Song & Zhong 2023, Eq. 8).

A head's matrix is kept as two factors, ``W = left @ right.mT`` with ``left, right [head d_model
d_head]``; no d_model x d_model product of a head is formed. With V a basis of the stream (top
singular directions of the positional means) and ``W_o = W - diag(W)``:

1. :func:`structure`: the block V^T W_o V, the size of an entry of W_o in any basis that starts with
   V, the threshold, the entries above the threshold;
2. :func:`haar_null`: the share of ``|W_o|^2`` that a random subspace is expected to hold;
3. :func:`tl_geometry.weights.low_rank_diagonal.fit_low_rank_diagonal`: the best L and D in
   ``W = V L V^T + D``, jointly.

Everything is computed in float64 and batched over leading axes; a basis ``[d_model rank]`` has no
head axis. Zero columns of a basis count as absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.models.norms import NormWeights, remove_mean
from tl_geometry.models.parameters import HeadWeights

PRODUCT = "... d_model d_head, ... d_head -> ... d_model"
"""Pattern of a product: the factor of each head times a vector of that head."""
MATRICES = ("QK", "OV")
"""W_QK = W_Q W_K^T and W_OV = W_V W_O."""


@dataclass(frozen=True, eq=False)
class Factors:
    """``W = left @ right.mT`` per head: the query side of W_QK (or the reading side of W_OV) on the
    left, the key side (or writing side) on the right.

    Properties of W are computed from the factors, without forming W, and cached.

    >>> f = Factors(torch.eye(3).double()[None], 2 * torch.eye(3).double()[None])
    >>> f.diagonal.tolist(), f.energy.tolist(), f.off_diagonal_energy.tolist()
    ([[2.0, 2.0, 2.0]], [12.0], [0.0])
    """

    left: Float[Tensor, "*batch head d_model d_head"]
    right: Float[Tensor, "*batch head d_model d_head"]

    @cached_property
    def diagonal(self) -> Float[Tensor, "*batch head d_model"]:
        """``diag(W)``: dot products of corresponding rows of the factors."""
        return (self.left * self.right).sum(-1)

    @cached_property
    def energy(self) -> Float[Tensor, "*batch head"]:
        """``|W|_F^2 = <left^T left, right^T right>``."""
        return ((self.left.mT @ self.left) * (self.right.mT @ self.right)).sum((-2, -1))

    @cached_property
    def off_diagonal_energy(self) -> Float[Tensor, "*batch head"]:
        """``|W_o|_F^2``, W_o the matrix without its diagonal; exactly zero where it is only the
        rounding (below 1e-12) of ``|W|^2``, from which it is subtracted."""
        rest = self.energy - self.diagonal.square().sum(-1)
        return torch.where(rest > 1e-12 * self.energy, rest, 0.0)


def fold(
    weights: HeadWeights,
    norm: NormWeights,
    matrix: str,
    *,
    scale: float | None = None,
    written: str | None = "LN",
) -> Factors:
    """Factors of ``W_QK = W_Q W_K^T scale`` or ``W_OV = W_V W_O`` of one layer in canonical form:
    the same however TransformerLens processed the weights at loading.

    ``W_Q, W_K, W_V <- A diag(gain) W``, with A the centring over d_model of a LayerNorm (identity
    for RMSNorm and for no norm), and ``W_O`` centred over its output where ``written``, the model's
    type of norm, is ``"LN"`` (also where that norm comes after attention). ``scale`` multiplies
    scores (default ``1 / sqrt(d_head)``).
    """

    def read(weight: Tensor) -> Tensor:
        product = weight.double() * norm.gain.double()[:, None]
        return remove_mean(product.mT, norm.norm_type).mT

    if matrix == "OV":
        return Factors(read(weights.W_V), remove_mean(weights.W_O.double(), written).mT)
    size = weights.W_Q.shape[-1] ** -0.5 if scale is None else scale
    return Factors(size * read(weights.W_Q), read(weights.W_K))


def rotated_block(
    factors: Factors,
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"],
    *,
    remove: Float[Tensor, "*batch head d_model"] | None = None,
) -> Float[Tensor, "*batch head row column"]:
    """``V_left^T (W - diag(remove)) V_right`` of every head; ``remove`` defaults to the diagonal of
    W."""
    diag = factors.diagonal if remove is None else remove
    pattern = "... d_model rank, ... head d_model d_head -> ... head rank d_head"
    rows, columns = einsum(left, factors.left, pattern), einsum(right, factors.right, pattern)
    pattern = "... d row, ... head d, ... d column -> ... head row column"
    return rows @ columns.mT - einsum(left, diag, right, pattern)


def structure(
    factors: Factors,
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"],
    *,
    k: int,
) -> dict[str, Tensor]:
    """The diagonal of W and the rotated off-diagonal matrix ``Q^T W_o Q``, where Q is the basis
    completed to a square matrix, for all heads at once (Song & Zhong 2023, Fig. 5).

    ``left`` and ``right`` (one and the same for W_QK) hold orthonormal columns, strongest direction
    first. The first ``k`` span the subspace; all of them are shown in ``block = V^T W_o V``.
    ``std`` is the root mean square of all d^2 rotated entries, the same for every completion of the
    basis; ``threshold = sqrt(2 ln d^2) std`` is about the largest of d^2 Gaussian entries;
    ``above_threshold`` counts entries of the first k x k whose absolute value exceeds it.
    ``concentration`` is ``|V_k^T W_o V_k|^2 / |W_o|^2``, NaN where W_o is zero.

    Returns these by name, each ``[head]``, and ``block [head row column]``.

    >>> g = torch.Generator().manual_seed(0)
    >>> V = torch.linalg.qr(torch.randn(30, 3, generator=g, dtype=torch.float64)).Q
    >>> s = structure(Factors(V[None], V[None]), V, V, k=3)
    >>> round(float(s["concentration"]), 2), int(s["above_threshold"])
    (0.85, 3)
    """
    size, energy = left.shape[-2], factors.off_diagonal_energy
    block = rotated_block(factors, left, right)
    std = energy.sqrt() / size  # a rotation keeps the sum of squares
    threshold = math.sqrt(2 * math.log(size**2)) * std
    inside = block[..., :k, :k]
    above = inside.abs() > rearrange(threshold, "... head -> ... head 1 1")
    return {
        "block": block,
        "std": std,
        "threshold": threshold,
        "above_threshold": above.sum((-2, -1)),
        "concentration": linalg.ratio(inside.square().sum((-2, -1)), energy),
    }


def haar_null(
    factors: Factors,
    k: int,
    *,
    off_diagonal: bool = True,
    one_basis: bool = True,
    centered: bool = False,
) -> Float[Tensor, "*batch head"]:
    """Expected ``|V^T W V|^2 / |W|^2`` for a uniformly random k-dimensional subspace V, exactly
    (NaN for a zero matrix).

    ``[alpha |W|^2 + beta (tr(WW) + (tr W)^2)] / |W|^2`` with
    ``alpha = k((d+1)k - 2) / (d(d-1)(d+2))`` and ``beta = k(d-k) / (d(d-1)(d+2))``.
    With ``off_diagonal`` W is taken without its diagonal. With ``one_basis=False`` the two sides
    are independent random subspaces, which gives ``(k / d)^2``; for one basis that is wrong by a
    large factor where the trace is large. With ``centered`` V lies among the vectors whose
    coordinates sum to zero, as all outputs of a LayerNorm do: d is then d_model - 1, and P W P
    takes the place of W in the numerator, P the centring.

    >>> eye = torch.eye(50)[None]
    >>> round(float(haar_null(Factors(eye, eye), 5, off_diagonal=False)), 6)
    0.1
    """
    size, diag = factors.left.shape[-2], factors.diagonal
    whole = energy = factors.off_diagonal_energy if off_diagonal else factors.energy
    # tr(W W) = tr((right^T left)^2); W_o has no trace
    product, removed = factors.right.mT @ factors.left, off_diagonal * diag
    trace_of_square = (product * product.mT).sum((-2, -1)) - removed.square().sum(-1)
    trace = (diag - removed).sum(-1)
    if centered:  # the same of P W P, from W u, W^T u and u^T W u; u has entries 1 / sqrt(d_model)
        row_means = (einsum(factors.left, factors.right.sum(-2), PRODUCT) - removed) / size**0.5
        column_means = (einsum(factors.right, factors.left.sum(-2), PRODUCT) - removed) / size**0.5
        corner = row_means.sum(-1) / size**0.5
        energy = energy - (row_means.square() + column_means.square()).sum(-1) + corner.square()
        trace_of_square = trace_of_square - 2 * (row_means * column_means).sum(-1) + corner.square()
        trace = trace - corner
    # vectors whose coordinates sum to zero span one dimension fewer
    d = size - 1 if centered else size
    alpha, beta = (k / d) ** 2, 0.0
    if one_basis and d > 1:
        alpha = k * ((d + 1) * k - 2) / (d * (d - 1) * (d + 2))
        beta = k * (d - k) / (d * (d - 1) * (d + 2))
    return linalg.ratio(alpha * energy + beta * (trace_of_square + trace.square()), whole)


def leading_directions(
    rows: Float[Tensor, "row d_model"], width: int, *, centered: bool = False
) -> tuple[Float[Tensor, "d_model column"], Float[Tensor, " rank"], int]:
    """The first ``width`` right singular vectors of ``rows`` as columns, all singular values, and
    the numerical rank.

    Columns beyond the numerical rank are zero (absent), because there the singular vectors are
    arbitrary. ``centered`` first removes each row's mean over d_model, as a LayerNorm does. Signs:
    the largest-magnitude coordinate is positive.
    """
    _, values, vectors = linalg.svd(remove_mean(rows.double(), "LN" if centered else None))
    rank = int(linalg.numerical_rank(values, rows.shape))
    directions = vectors[:, : min(width, rank)]
    return torch.nn.functional.pad(directions, (0, width - directions.shape[-1])), values, rank
