"""What shape has the curve of positional vectors, how large and how smooth is it, and how many of
its singular values are signal? The formulas for a positional basis ``P [position d_model]``,
batched over states, for :func:`tl_geometry.positional_report`, views and papers (Song & Zhong 2023,
sections 2 and 3).

One thin SVD of each P (:func:`tl_geometry.base.linalg.svd`) serves ranks, explained ratio, relative
norm, spectra and PCA views. Rows of P sum to zero over the window; where a measure needs that, its
docstring says so. A rotation of d_model changes none of them.

Ranks are by ScreeNOT, scale-free and batched (Donoho, Gavish & Romanov 2023, arXiv:2009.12297):

1. The k largest singular values are taken as possible signal. Replacing them by values of noise
   gives the pseudo-noise spectrum f.
2. With phi(y) = mean y / (y^2 - f^2) and D(y) = phi (g phi + (1 - g) / y), g the ratio of the
   smaller to the larger side, Psi(y) = y D'(y) / D(y) increases from -inf to -2 beyond max f. The
   threshold is the root of Psi = -4.
3. Singular values above the threshold are signal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.checks import count, describe, finite
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import dct_matrix, normalize_rows, ratio


def explained_ratio(
    singular_values: Float[Tensor, "*batch rank"], r: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Share of the r leading singular values, ``sum_(i<=r) s_i / sum s_i`` (not squared, as in the
    published code): in [0, 1], nondecreasing in r. NaN for zero.

    >>> float(explained_ratio(torch.tensor([3.0, 1.0, 0.0]), torch.tensor(1)))
    0.75
    """
    s = singular_values
    leading = torch.arange(s.shape[-1], device=s.device) < r.unsqueeze(-1)
    return ratio((s * leading).sum(-1), s.sum(-1))


def normalized_gram(
    pos: Float[Tensor, "*batch position d_model"],
) -> Float[Tensor, "*batch position position"]:
    """Cosines of all pairs of positions (Song & Zhong 2023, Fig. 2): positive semidefinite, ones on
    the diagonal. Zero rows have zeros.

    >>> normalized_gram(torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))[0].tolist()
    [1.0, 0.0, 0.7071067690849304]
    """
    unit, _ = normalize_rows(pos)
    return unit @ unit.mT


def fourier(gram: Float[Tensor, "*batch position position"]) -> Float[Tensor, "*batch row column"]:
    """Two-dimensional orthonormal DCT-II of a Gram matrix, ``F = D G D^T`` (Song & Zhong 2023, Fig.
    3 right).

    Symmetric and positive semidefinite like G, with the same trace; invariant to rotation of
    d_model. The figure uses the Gram matrix of the *unit* rows, whose rows do not sum to zero, so
    that F_00 is not zero in general.

    >>> fourier(torch.ones(4, 4).double()).round(decimals=6)[0, :2].abs().tolist()
    [4.0, 0.0]
    """
    transform = dct_matrix(gram.shape[-1], gram.dtype).to(gram.device)
    return transform @ gram @ transform.T


def low_frequency_share(
    pos: Float[Tensor, "*batch position d_model"], frequencies: int = 10
) -> Float[Tensor, "*batch"]:
    """Share of the first K = ``frequencies`` cosines in the unit rows of P,
    ``sum_(k<K) F_kk / tr F`` (F of :func:`fourier`), without forming F. In [0, 1].

    Rows in random order give about K / T. NaN for a zero basis.

    >>> cosines, axes = dct_matrix(32)[1:3].T, torch.eye(32).double()
    >>> [round(float(low_frequency_share(rows, 8)), 2) for rows in (cosines, axes)]
    [1.0, 0.25]
    """
    unit, degenerate = normalize_rows(pos)
    low = dct_matrix(pos.shape[-2], pos.dtype).to(pos.device)[:frequencies] @ unit
    return ratio(low.square().sum((-2, -1)), (~degenerate).sum(-1))


def off_diagonal_share(fourier_gram: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    """Share of the squares of F (:func:`fourier`) off its diagonal: 0 where the DCT cosines are the
    principal components. NaN for zero.

    >>> float(off_diagonal_share(torch.ones(2, 2)))
    0.5
    """
    diagonal = fourier_gram.diagonal(dim1=-2, dim2=-1)
    return 1 - ratio(diagonal.square().sum(-1), fourier_gram.square().sum((-2, -1)))


def adjacent_step(pos: Float[Tensor, "*batch position d_model"]) -> Float[Tensor, "*batch row"]:
    """``1 - cos(pos_t, pos_(t+1))`` [T - 1], as half the squared chord: accurate also for nearly
    parallel rows. NaN where one of them is zero.

    >>> adjacent_step(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).tolist()
    [0.0, 1.0]
    """
    unit, zero = normalize_rows(pos)
    step = unit.diff(dim=-2).square().sum(-1) / 2
    return torch.where(zero[..., 1:] | zero[..., :-1], torch.nan, step)


class Fracture(NamedTuple):
    """Largest break between neighbouring positions: its score, and the row t after which it comes
    (between t and t + 1)."""

    score: Float[Tensor, "*batch"]
    argmax: Int[Tensor, "*batch"]


def fracture_score(pos: Float[Tensor, "*batch position d_model"]) -> Fracture:
    """Largest step over the median step, ``max_t s_t / median_t s_t``, s_t the
    :func:`adjacent_step`.

    Near 1 for an even curve, large where the curve is broken. Counted from row 0 of the window.
    Infinite where more than half of the steps are zero and one is not, NaN where all are zero or
    fewer than two rows exist; steps from or to a zero row are left out.

    >>> turn = torch.tensor([0.0, 0.1, 0.2, 1.8, 1.9, 2.0])
    >>> f = fracture_score(torch.stack([turn.cos(), turn.sin()], dim=-1))
    >>> round(float(f.score)), int(f.argmax)
    (206, 2)
    """
    step = adjacent_step(pos)
    if step.shape[-1] == 0:
        unknown = pos.new_full(pos.shape[:-2], torch.nan)
        return Fracture(unknown, torch.zeros_like(unknown, dtype=torch.int64))
    # -1 is below every step: a step from or to a zero row is never the largest
    largest, row = torch.nan_to_num(step, nan=-1.0).max(-1)
    score = torch.where(largest >= 0, largest / step.nanquantile(0.5, dim=-1), torch.nan)
    return Fracture(score, row)


def roughness(pos: Float[Tensor, "*batch position d_model"]) -> Float[Tensor, "*batch"]:
    """``sum_t |pos_(t+1) - pos_t|^2 / sum_t |pos_t|^2``: between 0 and 4, about 2 for independent
    rows. NaN for a zero basis.

    >>> float(roughness(torch.tensor([[1.0], [-1.0]])))
    2.0
    """
    return ratio(pos.diff(dim=-2).square().sum((-2, -1)), pos.square().sum((-2, -1)))


def smoothness(
    pos: Float[Tensor, "*batch position d_model"], m: int = 1
) -> Float[Tensor, "*batch"]:
    """Size of the m-th differences relative to the Gram matrix,
    ``|Delta^(m,m) G~|_max / |G|_max``: small for a smooth basis. Song & Zhong 2023, section 3.

    The Gram matrix ``G = P P^T`` of a centred basis, extended evenly to period 2T, is
    ``G~ = P~ P~^T`` with the reflected rows ``P~ = [P; J P]`` (J reverses the order). Differences
    of G~ along both of its axes are differences of the rows, ``Delta^(m,m) G~ = X X^T``, X the
    m-fold periodic backward difference of P~, times T each. As X X^T is positive semidefinite, its
    largest entry is the largest squared row norm of X. Only this factored form is used: iterating
    the two-dimensional stencil multiplies rounding errors by (4 T^2)^m and is useless in float64
    from m = 4 on.

    Dimensionless and invariant to rotation and scale of d_model; a curve of one DCT frequency j has
    about (pi j)^(2m). Sampling noise of C contexts adds about ``2 T^2 tr(noise covariance) / C`` to
    the numerator at m = 1, so values are comparable at one C only. NaN for a zero basis.

    >>> t = (torch.arange(64) + 0.5) / 64
    >>> round(float(smoothness(torch.cos(torch.pi * t)[:, None].double())), 2)
    9.87
    """
    m = count(m, "m", 0)
    largest = torch.linalg.vector_norm(pos, dim=-1).amax(-1)
    # [P; J P]: repeated periodically, these rows have no jump at the ends
    rows = torch.cat([pos, pos.flip(-2)], dim=-2)
    for _ in range(m):
        rows = pos.shape[-2] * (rows - rows.roll(1, dims=-2))
    size = torch.linalg.vector_norm(rows, dim=-1).amax(-1)
    return ratio(size, largest).square()


class RankEstimate(NamedTuple):
    """Number of singular values above the ``threshold`` (in units of the singular values), with the
    upper bound ``k`` used."""

    rank: Int[Tensor, "*batch"]
    threshold: Float[Tensor, "*batch"]
    k: int


def usable_k(k: int, smaller_side: int) -> int:
    """The upper bound k, lowered where the matrix is too small for imputation:
    ``min(k, (p - 2) // 2)``, p the smaller side (the largest k with 2k + 1 < p), 0 for none.

    >>> usable_k(20, 511), usable_k(20, 30), usable_k(20, 1)
    (20, 14, 0)
    """
    return max(0, min(k, (smaller_side - 2) // 2))


def _pseudo_noise(s: Tensor, k: int) -> Tensor:
    """Singular values with the k largest replaced by values of noise, imputed as
    ``f_l = s_(k+1) + a_l (s_(k+1) - s_(2k+1))`` with
    ``a_l = (1 - ((l - 1) / k)^(2/3)) / (2^(2/3) - 1)``, l = 1..k: the l-th largest value of a noise
    spectrum lies below its edge by an amount that grows as l^(2/3). Needs 2k + 1 < p, with p
    singular values.
    """
    p = s.shape[-1]
    expected, most = f"k >= 1 and 2k + 1 < {p} (the smaller side of the matrix)", usable_k(k, p)
    instead = f"k={most}" if most > 0 else "a larger matrix"
    require(k >= 1 and 2 * k + 1 < p, "k", expected=expected, got=k, instead=instead)
    edge, l = s[..., k : k + 1], torch.arange(k, dtype=s.dtype, device=s.device)
    a = (1 - (l / k) ** (2 / 3)) / (2 ** (2 / 3) - 1)
    return torch.cat([edge + a * (edge - s[..., 2 * k : 2 * k + 1]), s[..., k:]], dim=-1)


def _psi(y: Tensor, f: Tensor, g: float) -> Tensor:
    """Psi(y) = y D'(y) / D(y) for each y of the batch, f [*batch rank], g the ratio of the sides
    (the names of the module's docstring)."""
    square, noise = y.square().unsqueeze(-1), f.square()
    phi = (y.unsqueeze(-1) / (square - noise)).mean(-1)
    slope = -((square + noise) / (square - noise).square()).mean(-1)
    factor = g * phi + (1 - g) / y  # D = phi * factor
    factor_slope = g * slope - (1 - g) / y.square()
    return y * (slope * factor + phi * factor_slope) / (phi * factor)


def screenot(
    singular_values: Float[Tensor, "*batch rank"], shape: tuple[int, int], *, k: int = 20
) -> RankEstimate:
    """Rank and threshold of matrices of ``shape`` from their singular values (descending), for a
    whole batch at once.

    Invariant to rotation and transposition, and to scale: the spectrum is divided by the largest
    pseudo-noise value and the threshold found by bisection to 1e-12 relative (the authors' package
    stops at 1e-5 absolute, so that its answer for very small matrices depends on their units).
    White noise of variance 1/n and m = n gives a threshold near 2.309. Zero matrices have rank 0.
    The error of a positional basis falls as one over the square root of the number of contexts, so
    rank estimates grow with the corpus: read them beside the learning curve.

    Of the package's ways to replace the largest values this is imputation, which Song & Zhong 2023
    use with k=20 on 511 x d_model. The bound k should stay well below p, the smaller side: with
    four strong spikes in 80 x 100 and k = 20, imputation finds 4 in 100 of 100 seeds, winsorising
    in 63, zeroing in none. Raises GeometryError when k is too large
    (:func:`usable_k`).

    >>> g = torch.Generator().manual_seed(0)
    >>> noise = torch.randn(60, 80, dtype=torch.float64, generator=g) / 80**0.5
    >>> noise[:2, :2] += 9 * torch.eye(2)
    >>> int(screenot(torch.linalg.svdvals(noise), (60, 80), k=10).rank)
    2
    """
    most, s = min(shape), singular_values.double()
    expected, got = f"{most} of a matrix of shape {shape}", describe(singular_values)
    require(s.shape[-1] == most, "singular_values", expected=expected, got=got)
    noise = _pseudo_noise(finite(s, "singular_values"), k)
    edge = noise.amax(-1)
    # a zero matrix in the batch is searched with f = 1, and its threshold set to 0 afterwards
    scale = torch.where(edge > 0, edge, 1.0)
    scaled = torch.where(edge[..., None] > 0, noise / scale[..., None], 1.0)
    sides = most / max(shape)
    low, high = torch.ones_like(edge), torch.full_like(edge, 2.0)
    # Psi increases with y: while it is below -4 at the upper end, that end doubles
    while bool((below := _psi(high, scaled, sides) < -4).any()):
        low, high = torch.where(below, high, low), torch.where(below, 2 * high, high)
    while bool(((high - low) > 1e-12 * high).any()):
        middle = (low + high) / 2
        below = _psi(middle, scaled, sides) < -4
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    threshold = torch.where(edge > 0, high * scale, 0.0)
    return RankEstimate((s > threshold[..., None]).sum(-1), threshold, k)
