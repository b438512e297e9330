"""W_QK and W_OV of every head in the geometry of a basis: low rank plus diagonal (Song & Zhong
2023, Eq. 8), from their factors.

A head's matrix is kept as two factors, ``W = left @ right.mT`` with
``left, right [head d_model d_head]``; no d_model x d_model product of a head is formed except where
the full rotation is asked for. With V a basis of the stream (top singular directions of the
positional means) and ``W_o = W - diag(W)``:

1. :func:`structure`: diag(W), the block V^T W_o V, mean and standard deviation of all rotated
   entries, the threshold, the entries above the threshold;
2. :func:`haar_null`, :func:`subspace_null`: how much of ``|W_o|^2`` a random subspace would hold;
3. :func:`fit_low_rank_diagonal`: the best L and D in ``W = V L V^T + D``, jointly, with one
   factorisation for all heads of a layer.

Everything is computed in float64 and batches over leading axes; bases have no head axis. Basis
columns that are zero count as absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, require
from tl_geometry.models.layer_view import HeadWeights
from tl_geometry.models.norms import NormWeights

KINDS = ("QK", "OV")
DENSE_BYTES = 2**28
"""Memory of the dense rotated matrices that exist at one time when the full rotation is asked
for."""


@dataclass(frozen=True, eq=False)
class Factors:
    """``W = left @ right.mT`` per head: the query (or reading) side on the left, the key (or
    writing) side on the right.

    What follows from the factors without forming W is computed once: ``diagonal``, ``energy`` and
    the rest.

    >>> f = Factors(torch.eye(3).double()[None], 2 * torch.eye(3).double()[None])
    >>> f.diagonal.tolist(), f.energy.tolist(), f.off_diagonal_energy.tolist()
    ([[2.0, 2.0, 2.0]], [12.0], [0.0])
    """

    left: Float[Tensor, "*batch head d_model d_head"]
    right: Float[Tensor, "*batch head d_model d_head"]

    @cached_property
    def diagonal(self) -> Float[Tensor, "*batch head d_model"]:
        """``diag(W)``: the row-wise products of the factors."""
        return einsum(
            self.left, self.right, "... d_model d_head, ... d_model d_head -> ... d_model"
        )

    @cached_property
    def energy(self) -> Float[Tensor, "*batch head"]:
        """``|W|_F^2 = <left^T left, right^T right>``."""
        return ((self.left.mT @ self.left) * (self.right.mT @ self.right)).sum((-2, -1))

    @cached_property
    def trace_of_square(self) -> Float[Tensor, "*batch head"]:
        """``tr(W W) = tr((right^T left)^2)``."""
        small = self.right.mT @ self.left
        return (small * small.mT).sum((-2, -1))

    @cached_property
    def off_diagonal_energy(self) -> Float[Tensor, "*batch head"]:
        """``|W_o|_F^2``, W_o the matrix without its diagonal; exactly zero where it is below the
        rounding of ``|W|^2``."""
        rest = self.energy - self.diagonal.square().sum(-1)
        return torch.where(rest > 1e-12 * self.energy, rest, 0.0)


def as_factors(value: Any) -> Factors:
    """A :class:`Factors`, a pair of tensors, or a TransformerLens ``FactoredMatrix`` (``.A @ .B``),
    as float64 factors with a head axis.

    >>> class FactoredMatrix:  # what TransformerLens returns for model.OV
    ...     A, B = torch.ones(5, 2), torch.ones(2, 5)
    >>> as_factors(FactoredMatrix()).right.shape
    torch.Size([1, 5, 2])
    """
    if hasattr(value, "A") and hasattr(value, "B"):
        value = (value.A, value.B.mT)
    pair = (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(v, Tensor) and v.dim() >= 2 for v in value)
    )
    require(
        pair,
        "factors",
        expected="a FactoredMatrix or a pair of tensors [head d_model d_head]",
        got=describe(value),
    )
    left, right = (v.detach().double() for v in value)
    require(
        left.shape == right.shape,
        "factors",
        expected="two factors of one shape [head d_model d_head]",
        got=f"{tuple(left.shape)} and {tuple(right.shape)}",
    )
    return Factors(left, right) if left.dim() > 2 else Factors(left[None], right[None])


def fold(
    weights: HeadWeights,
    norm: NormWeights,
    kind: str,
    *,
    scale: float | None = None,
    raw: bool = False,
    centre_output: bool | None = None,
) -> Factors:
    """Factors of ``W_QK = W_Q W_K^T scale`` or ``W_OV = W_V W_O`` of one layer, in the form that
    every loading of a model agrees on.

    Canonical: ``W_Q, W_K, W_V <- A diag(gain) W``, and ``W_O`` centred over its output, A the
    centring over d_model of a LayerNorm (identity for RMSNorm and for no norm). ``raw`` leaves the
    gain and the centring out, as the published figure does. ``scale`` multiplies scores (default
    ``1 / sqrt(d_head)``). ``centre_output`` overrides the centring of ``W_O``: in a model with its
    LayerNorm after the attention, what is written is centred although what is read is not.
    """
    choice(kind, KINDS, "kind")
    gain = torch.ones_like(norm.gain).double() if raw else norm.gain.double()
    layer_norm = norm.norm_type == "LN" and not raw

    def read(matrix: Tensor) -> Tensor:
        product = matrix.to(torch.float64, copy=True).mul_(gain.unsqueeze(-1))
        return product.sub_(product.mean(-2, keepdim=True)) if layer_norm else product

    if kind == "OV":
        written = weights.W_O.to(torch.float64, copy=True)
        if not raw and (layer_norm if centre_output is None else centre_output):
            written.sub_(written.mean(-1, keepdim=True))
        return Factors(
            read(weights.W_V), rearrange(written, "head d_head d_model -> head d_model d_head")
        )
    left = read(weights.W_Q).mul_(weights.W_Q.shape[-1] ** -0.5 if scale is None else scale)
    return Factors(left, read(weights.W_K))


def centre(
    matrix: Float[Tensor, "*batch d_model column"], yes: bool = True
) -> Float[Tensor, "*batch d_model column"]:
    """Columns without their mean over d_model (what LayerNorm's centring does to a matrix that
    reads its output)."""
    return matrix - reduce(matrix, "... d_model column -> ... 1 column", "mean") if yes else matrix


def _project(basis: Tensor, factor: Tensor) -> Tensor:
    """``V^T W`` for every head: [rank d_model] by [head d_model d_head]."""
    return basis.mT.unsqueeze(-3) @ factor


def _rotate_diagonal(left: Tensor, diag: Tensor, right: Tensor) -> Tensor:
    """``V_left^T diag V_right`` for every head."""
    return (left.mT.unsqueeze(-3) * diag.unsqueeze(-2)) @ (
        right if right.dim() == 2 else right.unsqueeze(-3)
    )


def rotated_block(
    factors: Factors,
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"] | None = None,
    *,
    remove: Float[Tensor, "*batch head d_model"] | None = None,
) -> Float[Tensor, "*batch head row column"]:
    """``V_left^T (W - diag(remove)) V_right``; ``remove`` defaults to the diagonal of W, and
    ``right`` to ``left``."""
    right = left if right is None else right
    diag = factors.diagonal if remove is None else remove
    return _project(left, factors.left) @ _project(right, factors.right).mT - _rotate_diagonal(
        left, diag, right
    )


def complete(
    basis: Float[Tensor, "*batch d_model rank"], vectors: Float[Tensor, "d_model column"]
) -> Float[Tensor, "*batch d_model column"]:
    """``Q @ vectors`` where Q is square orthogonal and starts with the orthonormal columns of
    ``basis``.

    The remaining columns are Householder's: an arbitrary but deterministic completion, applied
    without being formed.
    """
    reflectors, tau = torch.geqrf(basis)
    sign = torch.where(reflectors.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(basis.dtype)
    sign = torch.nn.functional.pad(sign, (0, basis.shape[-2] - sign.shape[-1]), value=1.0)
    return torch.ormqr(reflectors, tau, sign.unsqueeze(-1) * vectors.to(basis))


class Structure(NamedTuple):
    """Numbers of the rotated off-diagonal matrix ``Q^T W_o Q`` (Q starts with the basis): see
    :func:`structure`.

    ``block`` is its part in the basis, ``product`` the same with the diagonal of W left in.
    ``highest``, ``lowest`` and ``above_threshold_outside`` cover the full d_model x d_model matrix
    where the full rotation was asked for; otherwise the shown block only, and
    ``above_threshold_outside`` is -1.
    """

    diagonal: Float[Tensor, "*batch head d_model"]
    block: Float[Tensor, "*batch head row column"]
    product: Float[Tensor, "*batch head row column"]
    mean: Float[Tensor, "*batch head"]
    std: Float[Tensor, "*batch head"]
    threshold: Float[Tensor, "*batch head"]
    highest: Float[Tensor, "*batch head"]
    lowest: Float[Tensor, "*batch head"]
    above_threshold: Int[Tensor, "*batch head"]
    above_threshold_outside: Int[Tensor, "*batch head"]
    concentration: Float[Tensor, "*batch head"]


def structure(
    factors: Factors,
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"] | None = None,
    *,
    k: int = 20,
    outside: bool = False,
) -> Structure:
    """The diagonal and the rotated off-diagonal part of W (Song & Zhong 2023, Fig. 5), for all
    heads at once.

    ``left`` and ``right`` hold orthonormal columns, strongest direction first; the first ``k`` are
    the subspace, all of them the shown ``block = V^T W_o V``. ``threshold = sqrt(2 ln d^2) std``
    with the population standard deviation over all d^2 rotated entries, and ``above_threshold``
    counts entries of the first k x k above it. ``concentration`` is
    ``|V_k^T W_o V_k|^2 / |W_o|^2``, NaN where W_o is zero. ``outside=True`` rotates every head
    densely, in chunks.

    >>> g = torch.Generator().manual_seed(0)
    >>> V = torch.linalg.qr(torch.randn(30, 3, generator=g, dtype=torch.float64)).Q
    >>> s = structure(Factors(V[None], V[None]), V, k=3)
    >>> round(float(s.concentration), 2), int(s.above_threshold)
    (0.85, 3)
    """
    right = left if right is None else right
    size = left.shape[-2]
    require(
        1 <= k <= min(left.shape[-1], right.shape[-1]),
        "k",
        expected=f"1 to {min(left.shape[-1], right.shape[-1])} columns",
        got=k,
    )
    total = factors.off_diagonal_energy
    ones = torch.ones(size, 1, dtype=left.dtype, device=left.device)
    wide_left = torch.cat(
        [left, complete(left, ones)], dim=-1
    )  # the last column is the sum of the whole rotation's columns
    wide_right = wide_left if right is left else torch.cat([right, complete(right, ones)], dim=-1)
    product = _project(wide_left, factors.left) @ _project(wide_right, factors.right).mT
    rotated = product - _rotate_diagonal(wide_left, factors.diagonal, wide_right)
    block, mean = rotated[..., :-1, :-1], rotated[..., -1, -1] / size**2
    std = (total / size**2 - mean.square()).clamp(min=0).sqrt()
    threshold = math.sqrt(2 * math.log(size**2)) * std
    above = block.abs() > rearrange(threshold, "... head -> ... head 1 1")
    inner = block[..., :k, :k]
    energy_ratio = torch.where(total > 0, inner.square().sum((-2, -1)) / total, torch.nan)
    above_threshold = above[..., :k, :k].sum((-2, -1))
    highest, lowest, beyond = (
        block.amax((-2, -1)),
        block.amin((-2, -1)),
        torch.full_like(above_threshold, -1),
    )
    if outside:
        highest, lowest, every = _dense_extremes(factors, left, right, threshold)
        beyond = every - above_threshold
    return Structure(
        factors.diagonal,
        block,
        product[..., :-1, :-1],
        mean,
        std,
        threshold,
        highest,
        lowest,
        above_threshold,
        beyond,
        energy_ratio,
    )


def _dense_extremes(
    factors: Factors, left: Tensor, right: Tensor, threshold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest and smallest entry, and the number above the threshold in magnitude, of the full
    rotated off-diagonal matrix."""
    size, n_heads = left.shape[-2], factors.left.shape[-3]
    eye = torch.eye(size, dtype=left.dtype, device=left.device)
    q_left, q_right = complete(left, eye), complete(right, eye)
    chunk = max(1, DENSE_BYTES // (3 * 8 * size**2 * math.prod(factors.left.shape[:-3])))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, n_heads, chunk):
        part = Factors(
            factors.left[..., start : start + chunk, :, :],
            factors.right[..., start : start + chunk, :, :],
        )
        scaled = rearrange(part.diagonal, "... head d -> ... head d 1") * q_right.unsqueeze(-3)
        dense = (
            _project(q_left, part.left) @ _project(q_right, part.right).mT
            - q_left.mT.unsqueeze(-3) @ scaled
        )
        above = dense.abs() > rearrange(
            threshold[..., start : start + chunk], "... head -> ... head 1 1"
        )
        found.append((dense.amax((-2, -1)), dense.amin((-2, -1)), above.sum((-2, -1))))
    highest, lowest, count = (torch.cat(parts, dim=-1) for parts in zip(*found, strict=True))
    return highest, lowest, count


def haar_null(
    factors: Factors,
    k: int,
    k_right: int | None = None,
    *,
    off_diagonal: bool = True,
    one_basis: bool = True,
) -> Float[Tensor, "*batch head"]:
    """Expected ``|V^T W V|^2 / |W|^2`` for a uniformly random k-dimensional subspace V, exactly
    (NaN for a zero matrix).

    ``alpha + beta (tr(WW) + (tr W)^2) / |W|^2`` with ``alpha = k((d+1)k - 2) / (d(d-1)(d+2))`` and
    ``beta = k(d-k) / (d(d-1)(d+2))``; ``off_diagonal`` uses W without its diagonal. With
    ``one_basis=False`` the two sides are independent random subspaces of ``k`` and ``k_right``
    dimensions: ``k k_right / d^2``. (k/d)^2 alone can be wrong by a large factor for a matrix with
    a large trace.

    >>> round(float(haar_null(Factors(torch.eye(50)[None], torch.eye(50)[None]), 5, off_diagonal=False)), 6)
    0.1
    """
    d = factors.left.shape[-2]
    total = factors.off_diagonal_energy if off_diagonal else factors.energy
    if not one_basis or d == 1:
        other = k if k_right is None else k_right
        return torch.where(total > 0, torch.full_like(total, k * other / d**2), torch.nan)
    diag = factors.diagonal
    squares = factors.trace_of_square + (
        -diag.square().sum(-1) if off_diagonal else diag.sum(-1).square()
    )
    alpha = k * ((d + 1) * k - 2) / (d * (d - 1) * (d + 2))
    beta = k * (d - k) / (d * (d - 1) * (d + 2))
    return torch.where(total > 0, alpha + beta * squares / total, torch.nan)


def subspace_null(
    factors: Factors,
    left: Float[Tensor, "row d_model"],
    right: Float[Tensor, "column d_model"] | None = None,
    *,
    k: int,
    draws: int = 8,
    seed: int = 0,
) -> Float[Tensor, "sample *batch head"]:
    """Concentration of W_o in random k-dimensional subspaces of an activation distribution, one row
    per draw.

    Each subspace is spanned by k Gaussian combinations of the rows of ``left`` (centred
    activations), so that it follows their covariance: weights and activations share outlier
    coordinates, and a uniformly random subspace does not. With ``right`` (activations on the
    writing side) the two sides are drawn separately.
    """
    generator = torch.Generator().manual_seed(seed)
    total = factors.off_diagonal_energy

    def draw(rows: Tensor) -> Tensor:
        weights = torch.randn(draws * k, len(rows), generator=generator, dtype=torch.float64).to(
            rows.device
        )
        mixed = rearrange(weights @ rows.double(), "(sample k) d -> sample d k", sample=draws)
        return torch.linalg.qr(mixed).Q

    bases = draw(left)
    bases_right = bases if right is None else draw(right)
    blocks = [
        rotated_block(factors, v, u).square().sum((-2, -1))
        for v, u in zip(bases, bases_right, strict=True)
    ]
    return torch.where(total > 0, torch.stack(blocks) / total, torch.nan)


class LowRankDiagonal(NamedTuple):
    """``W = V_left L V_right^T + diag(delta) + residual``; shares of ``|W|^2`` explained (NaN for a
    zero matrix).

    ``singular`` marks layers where the diagonal is not determined (a coordinate axis lies in both
    subspaces): the minimum-norm solution is given. ``symmetric`` is the share of ``|L|^2`` in its
    symmetric part.
    """

    L: Float[Tensor, "*batch head row column"]
    delta: Float[Tensor, "*batch head d_model"]
    r2_low_rank: Float[Tensor, "*batch head"]
    r2_diagonal: Float[Tensor, "*batch head"]
    r2_joint: Float[Tensor, "*batch head"]
    symmetric: Float[Tensor, "*batch head"]
    singular: Bool[Tensor, "..."]

    @property
    def gain_low_rank(self) -> Tensor:
        """What L adds to the share that the diagonal alone explains."""
        return self.r2_joint - self.r2_diagonal

    @property
    def gain_diagonal(self) -> Tensor:
        """What the diagonal adds to the share that L alone explains."""
        return self.r2_joint - self.r2_low_rank


def fit_low_rank_diagonal(
    factors: Factors,
    left: Float[Tensor, "... d_model row"],
    right: Float[Tensor, "... d_model column"] | None = None,
    *,
    product: Float[Tensor, "*batch head row column"] | None = None,
) -> LowRankDiagonal:
    """Joint least squares ``min |W - V_left L V_right^T - diag(delta)|^2`` over L and delta, for
    all heads at once.

    With projectors P = V V^T: ``(I - P_left o P_right) delta = diag(W) - diag(P_left W P_right)``
    (o entrywise), then ``L = V_left^T (W - diag delta) V_right``. The matrix belongs to the layer,
    so it is factored once for all heads. ``product = V_left^T W V_right`` may be given where it is
    known (:class:`Structure` holds it).

    >>> V = torch.linalg.qr(torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    >>> W = V @ torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64) @ V.T + 0.5 * torch.eye(20)
    >>> fit = fit_low_rank_diagonal(Factors(W[None], torch.eye(20, dtype=torch.float64)[None]), V)
    >>> (fit.L[0].round(decimals=6) + 0.0).tolist(), round(float(fit.r2_joint), 6)
    ([[1.0, 2.0], [0.0, 3.0]], 1.0)
    """
    right_basis = left if right is None else right
    diag, total = factors.diagonal, factors.energy
    full = (
        _project(left, factors.left) @ _project(right_basis, factors.right).mT
        if product is None
        else product
    )
    target = diag - ((left.unsqueeze(-3) @ full) * right_basis.unsqueeze(-3)).sum(-1)
    delta, singular = solve_diagonal(left, right_basis, target.mT)
    delta = delta.mT
    L = full - _rotate_diagonal(left, delta, right_basis)
    residual = (
        total - 2 * (diag * delta).sum(-1) + delta.square().sum(-1) - L.square().sum((-2, -1))
    )

    def share(value: Tensor) -> Tensor:
        return torch.where(total > 0, value / total, torch.nan)

    square = L.shape[-1] == L.shape[-2]
    symmetric = (
        ((L + L.mT) / 2).square().sum((-2, -1)) / L.square().sum((-2, -1))
        if square
        else torch.full_like(total, torch.nan)
    )
    return LowRankDiagonal(
        L,
        delta,
        share(full.square().sum((-2, -1))),
        share(diag.square().sum(-1)),
        1 - share(residual.clamp(min=0)),
        symmetric,
        singular,
    )


def random_fits(
    factors: Factors, k: int, *, draws: int = 4, seed: int = 0
) -> Float[Tensor, "sample *batch head"]:
    """Null of the joint fit: ``r2_joint`` in uniformly random k-dimensional subspaces, one row per
    draw.

    The mean of ``r2_low_rank`` in such subspaces is known exactly (:func:`haar_null` with
    ``off_diagonal=False``); the joint share is larger by what the diagonal explains.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (draws, factors.left.shape[-2], k)
    bases = torch.linalg.qr(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(factors.left)
    ).Q
    return torch.stack([fit_low_rank_diagonal(factors, V).r2_joint for V in bases])


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
    is well above zero: a Cholesky factor of the smaller ``I - Z^T Z`` (Woodbury); near zero, of the
    matrix itself; at zero, eigenvectors.
    """
    size = left.shape[-2]
    eye = torch.eye(size, dtype=left.dtype, device=left.device)
    bound = 1 - (left.square().sum(-1) * right.square().sum(-1)).sqrt().amax(-1)
    if bool((bound > 0.05).all()) and left.shape[-1] * right.shape[-1] < size:
        pairs = _pairs(left, right)
        small = eye[: pairs.shape[-1], : pairs.shape[-1]] - pairs.mT @ pairs
        return target + pairs @ torch.cholesky_solve(
            pairs.mT @ target, torch.linalg.cholesky(small)
        ), bound < 0
    matrix = eye - (left @ left.mT) * (right @ right.mT)
    if bool((bound > 1e-6).all()):
        return torch.cholesky_solve(target, torch.linalg.cholesky(matrix)), bound < 0
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > 1e-10
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    return vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ target)), ~kept.all(-1)


def _pairs(left: Tensor, right: Tensor) -> Float[Tensor, "*batch d_model column"]:
    """Z with ``P_left o P_right = Z Z^T``; for one basis only pairs a <= b, those with a < b
    counted twice."""
    if right is left:
        a, b = torch.triu_indices(left.shape[-1], left.shape[-1], device=left.device)
        return left[..., a] * left[..., b] * (1 + (a != b).to(left)).sqrt()
    return rearrange(
        rearrange(left, "... d a -> ... d a 1") * rearrange(right, "... d b -> ... d 1 b"),
        "... d a b -> ... d (a b)",
    )


def leading_directions(
    rows: Float[Tensor, "row d_model"], width: int, *, centred: bool = False
) -> tuple[Float[Tensor, "d_model column"], Float[Tensor, " rank"], int]:
    """The first ``width`` right singular vectors of ``rows`` as columns, all singular values, and
    the numerical rank.

    Columns beyond the numerical rank are zero (absent): no direction is invented. ``centred`` first
    removes each row's mean over d_model, as a LayerNorm does. Signs: the largest-magnitude
    coordinate is positive.
    """
    rows = rows.double()
    if centred:
        rows = rows - reduce(rows, "row d_model -> row 1", "mean")
    _, values, vectors = linalg.svd(rows)
    rank = int((values > max(rows.shape) * torch.finfo(torch.float64).eps * values.amax()).sum())
    vectors = torch.nn.functional.pad(vectors, (0, max(0, width - vectors.shape[-1])))[
        :, :width
    ].clone()
    vectors[:, rank:] = 0
    return vectors, values, rank
