"""What do the two theorems of Song & Zhong 2023 (arXiv:2310.04861) state, corrected where the paper
errs? Both sides of Theorem 1 (a smooth positional basis is close to its first cosines,
:func:`theorem1`) and of Theorem 2 (attention's kernel factorises where position and content are
incoherent, :func:`factorisation_gap`), as numbers for given matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import svd

PARTS = ("content", "position")
CENTRED, UNIT = 1e-8, 1 + 1e-6
"""Largest mean of a centred basis over its size, and largest norm of a row of norm one: rounding of
float64 sums, and of float32 rows."""


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

    Statement. Let P be centred (rows sum to zero), G = P P^T, G~ = P~ P~^T its even extension to
    period 2T (P~ = [P; J P], J reverses the order), Delta^(m,m) the m-fold periodic difference
    along both axes times T each, c_j(t) = cos(pi (j - 1)(t - 1/2) / T) the DCT-II vectors,
    F = [c_1..c_k], Pi the orthogonal projector on their span, and g_j = 1 / (2T sin(pi j / 2T)).
    With B B^T = T^-2 W F^T G F W, W = diag(1, 2, ..., 2):

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

    Errata. The paper prints 6 / (8k)^m (``bound_paper``) and the vectors
    cos((j - 1/2)(t - 1) pi / T), where time and frequency have changed places. With those vectors
    the claim is false: T = 64, G = c_2 c_2^T, k = 8, m = 4 leaves at least 1.8e-2 for any B
    (``lhs_paper``) against a bound of 3.4e-3. With the right vectors 8k still fails for k close to
    T and large m. It also writes (F B)^T F B for the T x T matrix F B (F B)^T.

    Args:
        pos: centred basis ``[T d_model]``.
        k: frequencies, 1 to T.
        m: differences, from 1 to 32 (beyond, float64 overflows).

    Returns both sides, B ``[k rank]`` and F ``[T k]``. ``lhs_paper`` is a lower bound of the left
    side with the printed vectors, for any B. ``lhs`` is zero at k = T and need not fall
    monotonically with k.
    Raises ``GeometryError`` for an uncentred basis.

    >>> t = torch.arange(64, dtype=torch.float64)[:, None]
    >>> r = theorem1(torch.cos(torch.pi * (t + 0.5) / 64), k=8, m=4)
    >>> round(r.lhs, 6), r.lhs_paper > r.bound_paper
    (0.0, True)
    """
    positions = pos.shape[0]
    k, m = checks.count(k, "k", most=positions), checks.count(m, "m", most=32)
    pos = pos.double()
    offset = float(torch.linalg.vector_norm(pos.mean(0))) * math.sqrt(positions)
    scale = float(torch.linalg.vector_norm(pos))
    expected, got = "rows that sum to zero", f"mean {offset / (scale or 1):.1e}"
    centred = offset <= CENTRED * scale
    require(centred, "pos", expected=expected, got=got, instead="pos - pos.mean(0)")
    F, printed = _cosines(positions, k)
    weight = torch.full((k, 1), 2.0, dtype=torch.float64)
    weight[0] = 1
    # B only enters as B B^T = T^-2 W F^T G F W: singular vectors times values are one such B
    factor = svd(weight * (F.T @ pos) / positions)
    # X / (2T)^m with Delta^(m,m) G~ = X X^T: differences of the rows alone, as the stencil in two
    # dimensions multiplies rounding by (4 T^2)^m. Halved at each step, it does not overflow
    halved = torch.cat([pos, pos.flip(0)])
    for _ in range(m):
        halved = (halved - halved.roll(1, dims=0)) / 2
    largest = float(halved.square().sum(-1).amax())
    spectral = float(torch.linalg.svdvals(halved)[0]) ** 2 / (2 * positions)
    sines = [math.sin(math.pi * j / (2 * positions)) for j in (1, k)]
    bracket = (sines[0] * sines[1]) ** -m + sines[1] ** (-2 * m)  # [(g_k g_1)^m + g_k^2m] (2T)^2m
    low = F @ (weight * (F.T @ pos)) / positions  # Pi P
    # any B leaves at least (I - Pi') G (I - Pi'), Pi' the projector on the printed vectors
    basis = torch.linalg.qr(printed).Q
    remainder = pos - basis @ (basis.T @ pos)
    per_frequency = float(2 * positions) ** 2
    return LowFrequencyBound(
        lhs=float(torch.linalg.eigvalsh(pos @ pos.T - low @ low.T).abs().amax()) / positions,
        bound_tight=bracket * largest,
        bound_safe=6 * (per_frequency / (4 * k)) ** m * largest,
        bound_operator=bracket * spectral,
        bound_paper=6 * (per_frequency / (8 * k)) ** m * largest,
        lhs_paper=float(torch.linalg.matrix_norm(remainder, 2)) ** 2 / positions,
        delta_max=largest * per_frequency**m,
        B=factor.U * factor.S.unsqueeze(-2),
        F=F,
    )


def _cosines(
    positions: int, k: int
) -> tuple[Float[Tensor, "position rank"], Float[Tensor, "position rank"]]:
    """The first k DCT-II vectors as columns, not normalised, and those that the paper prints."""
    t = torch.arange(positions, dtype=torch.float64)[:, None]
    j = torch.arange(k, dtype=torch.float64)
    right, printed = (torch.cos(torch.pi * x / positions) for x in (j * (t + 0.5), (j + 0.5) * t))
    return right, printed


class FactorisationGap(NamedTuple):
    """Both sides of Theorem 2 for every pair of tokens; ``r = log_lhs - log_rhs``, at most
    ``bound`` in size. See :func:`factorisation_gap`."""

    log_lhs: Float[Tensor, "query key"]
    log_rhs: Float[Tensor, "query key"]
    r: Float[Tensor, "query key"]
    bound: float
    incoherence: float


def factorisation_gap(
    content: Float[Tensor, "token d_model"],
    position: Float[Tensor, "token d_model"],
    coefficients: Mapping[tuple[str, str], Float[Tensor, "token token"]],
) -> FactorisationGap:
    r"""Theorem 2 of Song & Zhong 2023 with its constant: where content and position are incoherent,
    attention's kernel is nearly a product of four kernels, one for each pair of parts.

    Statement. Tokens are x_i = c_i + t_i with \|c_i\|, \|t_i\| <= 1 and
    incoherence mu = max \|<c_i, t_j>\|. Let K_W(x, y) = exp(x^T W y), and W = sum of W_ab over a, b
    among content and position, where W_ab = sum_kl A_ab[k, l] a_k b_l^T is written in the vectors
    of its own parts. Then

        r = log K_W(x_q, x_k) - sum_ab log K_W_ab(a_q, b_k),    |r| <= (2 mu + mu^2) sum_ab |A_ab|_1

    Derivation. x_q^T W_ab x_k has four terms. That of (a, b) itself is on the right. In two others
    one side meets vectors of the other part, in the last both do: each entry of A_ab then counts at
    most mu, mu and mu^2. For s-sparse W_ab with entries of at most 1 in size, as the paper has it,
    the bound is 4 s (2 mu + mu^2): it hides the constant, and repeats W_21 for W_22 in its last
    line. Noise in W, of independent entries of variance 1 / d_model, adds sub-Gaussian terms of
    variance at most 1 / d_model each, which the bound does not hold.

    Attention smooths values with this kernel, query first:
    sum_k K(x_q, x_k) v(x_k) / sum_k K(x_q, x_k); W is W_Q W_K^T / sqrt(d_head).

    Args:
        content: rows c_i, of norm at most 1, such as unit rows of cvec.
        position: rows t_i alike, such as unit rows of pos.
        coefficients: A_ab by ("content", "position") and so on; a pair that is absent is zero.

    Returns both logarithms, r, its bound and mu, in float64.
    Raises ``GeometryError`` for longer rows, parts of two shapes and other names.

    >>> c, t = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8]])
    >>> gap = factorisation_gap(c, t, {("content", "content"): torch.ones(1, 1)})
    >>> round(float(gap.r), 4), round(gap.bound, 4)  # here the bound is met
    (1.56, 1.56)
    """
    parts = {"content": content.double(), "position": position.double()}
    longest = max(float(rows.norm(dim=-1).max()) for rows in parts.values())
    expected, instead = "rows of norm at most 1", "rows / rows.norm(dim=-1, keepdim=True)"
    require(longest <= UNIT, "rows", expected=expected, got=f"{longest:.4g}", instead=instead)
    shapes, expected = [tuple(rows.shape) for rows in parts.values()], "two parts of one shape"
    require(shapes[0] == shapes[1], "rows", expected=expected, got=shapes)
    unknown = sorted(map(str, set(coefficients) - set(product(PARTS, PARTS))))
    expected = "pairs of 'content' and 'position'"
    require(not unknown, "coefficients", expected=expected, got=", ".join(unknown))
    whole, size = parts["content"] + parts["position"], 0.0
    log_lhs = torch.zeros(len(whole), len(whole), dtype=torch.float64)
    log_rhs = log_lhs.clone()
    pattern = "q i, k j, i j -> q k"
    for (a, b), A in coefficients.items():
        left, right, A = parts[a], parts[b], A.double()
        log_lhs += einsum(whole @ left.T, whole @ right.T, A, pattern)
        log_rhs += einsum(left @ left.T, right @ right.T, A, pattern)
        size += float(A.abs().sum())
    mu = float((parts["content"] @ parts["position"].T).abs().max())
    bound = (2 * mu + mu**2) * size
    return FactorisationGap(log_lhs, log_rhs, log_lhs - log_rhs, bound, mu)
