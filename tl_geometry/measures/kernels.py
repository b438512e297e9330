"""Attention as a kernel that factorises over position and context (Song & Zhong 2023, section 4,
Eq. 9 to 12, Theorem 2).

With ``K_W(z, z') = exp(z^T W z')`` and states x = c + t (context plus position):

1. for one matrix W, ``K_W(c + t, c' + t')`` is exactly the product of the four kernels of (c, t)
   and (c', t');
2. if W is the sum of four sparse matrices, one for each pair of bases, and the bases are
   incoherent, each kernel sees only its own matrix: ``log K_W(x, x') = sum_ab q_a^T W_ab k_b + r``
   with ``|r| <= A (2 incoh + incoh^2)``, A the sum of all |coefficients|.

Everything is a log kernel: exponentials are taken only inside a softmax. Indices 1 and 2 are the
bases of context and position.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, require
from tl_geometry.base.linalg import normalize_rows

PARTS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Pairs (query basis, key basis), 0 the first basis (context), 1 the second (position)."""


def log_kernel(
    z: Float[Tensor, "*batch query d_model"],
    other: Float[Tensor, "*batch key d_model"],
    W: Float[Tensor, "... d_model d_model"],
) -> Float[Tensor, "*batch query key"]:
    """``log K_W(z_i, z'_j) = z_i^T W z'_j`` for all pairs; W = W_Q W_K^T / sqrt(d_head) (Eq. 9).

    >>> log_kernel(torch.eye(2), torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    return z @ W @ other.mT


def kernel_attention(
    x: Float[Tensor, "*batch position d_model"],
    values: Float[Tensor, "*batch position d_head"],
    W: Float[Tensor, "... d_model d_model"],
    *,
    causal: bool = True,
) -> Float[Tensor, "*batch position d_head"]:
    """Attention as kernel smoothing, ``sum_k K_W(x_t, x_k) v_k / sum_k K_W(x_t, x_k)`` over k <= t
    (all k if not causal).

    Query first; the paper writes the key first, which with its own W = W_Q W_K^T is attention with
    the roles exchanged. Evaluated in log space, so that scores of thousands do not overflow.

    >>> v = torch.tensor([[1.0], [3.0]])
    >>> kernel_attention(torch.zeros(2, 1), v, torch.eye(1)).flatten().tolist()
    [1.0, 2.0]
    """
    scores = log_kernel(x, x, W)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ values


class SparseWeight(NamedTuple):
    """``W_ab = sum_k a_k u_k v_k^T``: the matrix, its coefficients a and the atoms u, v, one row
    each."""

    matrix: Float[Tensor, "d_model d_model"]
    coefficients: Float[Tensor, " rank"]
    left: Float[Tensor, "rank d_model"]
    right: Float[Tensor, "rank d_model"]


def random_sparse_weight(
    basis: Float[Tensor, "row d_model"],
    other: Float[Tensor, "column d_model"],
    s: int,
    *,
    seed: int = 0,
) -> SparseWeight:
    """A random s-sparse matrix between two bases (Eq. 11): ``sum_(k<=s) a_k u_k v_k^T``, a_k
    uniform in [-1, 1].

    Atoms are drawn from the rows with replacement, each scaled by a uniform number in [-1, 1]. Rows
    of norm above 1 are refused.

    >>> w = random_sparse_weight(torch.eye(3).double(), torch.eye(3).double(), 2)
    >>> w.matrix.shape, bool((w.coefficients.abs() <= 1).all())
    (torch.Size([3, 3]), True)
    """
    require(s >= 1, "s", expected="1 or more terms", got=s)
    for rows in (basis, other):
        _check_basis(rows)
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1

    left, right = (
        rows.double()[torch.randint(len(rows), (s,), generator=generator)] * uniform(s, 1)
        for rows in (basis, other)
    )
    a = uniform(s)
    return SparseWeight(einsum(a, left, right, "rank, rank i, rank j -> i j"), a, left, right)


def _check_basis(rows: Tensor) -> None:
    require(
        rows.dim() == 2 and len(rows) > 0,
        "basis",
        expected="at least one row [row d_model]",
        got=describe(rows),
    )
    largest = float(torch.linalg.vector_norm(rows.double(), dim=-1).amax())
    require(
        largest <= 1 + 1e-9,
        "basis",
        expected="rows of norm at most 1",
        got=f"norm {largest:.3g}",
        instead="linalg.normalize_rows",
    )


class FactorisationGap(NamedTuple):
    """Both sides of Theorem 2 for every pair: log K_W(x_q, x_k), the sum of the four own terms, r
    their difference, and its bound."""

    log_lhs: Float[Tensor, "query key"]
    log_rhs: Float[Tensor, "query key"]
    r: Float[Tensor, "query key"]
    bound: float
    incoh: float


def factorisation_gap(
    queries: tuple[Float[Tensor, "query d_model"], Float[Tensor, "query d_model"]],
    keys: tuple[Float[Tensor, "key d_model"], Float[Tensor, "key d_model"]],
    weights: dict[tuple[int, int], SparseWeight],
    bases: tuple[Float[Tensor, "row d_model"], Float[Tensor, "column d_model"]],
) -> FactorisationGap:
    """How far attention is from factorising (Theorem 2):
    ``r = log K_W(q_1 + q_2, k_1 + k_2) - sum_ab q_a^T W_ab k_b``.

    ``queries`` and ``keys`` are (context part, position part), each a multiple in [-1, 1] of a row
    of its basis; ``weights`` maps (query basis, key basis) to sparse matrices, W their sum;
    ``bases`` are the two bases with rows of norm at most 1, ``incoh`` the largest |<u, v>| between
    them (the *maximum*: averages as in Table 1 bound nothing). Then with A = sum of all |a_k|, at
    most 4 s,

        |r| <= A (2 incoh + incoh^2)

    since each of the 12 mismatched products q_a^T W_cd k_b has at least one factor between
    different bases. ``r = 0`` for orthogonal bases. The paper states the order only; this is its
    explicit constant.

    >>> e = torch.eye(4).double()
    >>> parts = e[:2], e[2:]
    >>> w = {(a, b): random_sparse_weight(parts[a], parts[b], 3, seed=a) for a, b in PARTS}
    >>> gap = factorisation_gap(parts, parts, w, parts)
    >>> gap.incoh, round(gap.bound, 6), round(float(gap.r.abs().max()), 12)
    (0.0, 0.0, 0.0)
    """
    for rows in (*bases, *queries, *keys):
        _check_basis(rows)
    require(
        set(weights) == set(PARTS),
        "weights",
        expected=f"one for each of {PARTS}",
        got=sorted(weights),
    )
    own = torch.stack(
        [
            log_kernel(queries[a].double(), keys[b].double(), w.matrix)
            for (a, b), w in weights.items()
        ]
    ).sum(0)
    whole = torch.stack([w.matrix for w in weights.values()]).sum(0)
    lhs = log_kernel(sum_parts(queries), sum_parts(keys), whole)
    incoh = float((bases[0].double() @ bases[1].double().T).abs().amax())
    size = float(sum(w.coefficients.abs().sum() for w in weights.values()))
    return FactorisationGap(lhs, own, lhs - own, size * (2 * incoh + incoh**2), incoh)


def sum_parts(parts: tuple[Tensor, Tensor]) -> Tensor:
    """Context part plus position part, in float64."""
    return parts[0].double() + parts[1].double()


class NoiseCheck(NamedTuple):
    """Monte Carlo of one noise term: the draws, and for each level x the share beyond it beside the
    bound ``2 exp(-d x^2 / 2)``."""

    draws: Float[Tensor, " sample"]
    levels: Float[Tensor, " row"]
    share: Float[Tensor, " row"]
    bound: Float[Tensor, " row"]


def noise_tail(
    query: Float[Tensor, " d_model"],
    key: Float[Tensor, " d_model"],
    *,
    samples: int = 2000,
    noise: str = "gaussian",
    seed: int = 0,
) -> NoiseCheck:
    """Size of a term ``q^T Z k / sqrt(d)`` of a noisy matrix W + Z / sqrt(d), Z independent, mean
    zero, 1-subgaussian (Theorem 2).

    With |q|, |k| <= 1 its variance proxy is at most 1/d:
    ``P(|q^T Z k| / sqrt(d) > x) <= 2 exp(-d x^2 / 2)``. The paper's probability
    ``1 - O(|B_1||B_2| exp(-incoh^2 d))`` is the union of such events over all pairs, and says
    something only while |B_1||B_2| is small against exp(incoh^2 d). ``noise`` is ``"gaussian"`` or
    ``"sign"`` (random signs).

    >>> n = noise_tail(torch.eye(16).double()[0], torch.full((16,), 0.25).double())
    >>> bool((n.share <= n.bound).all())
    True
    """
    choice(noise, ("gaussian", "sign"), "noise")
    for vector in (query, key):
        _check_basis(vector.unsqueeze(0))
    d = query.shape[0]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.empty(samples, dtype=torch.float64)
    step = max(1, 2**22 // d**2)  # 32 MiB of noise at a time
    for low in range(0, samples, step):
        shape = (min(step, samples - low), d, d)
        Z = torch.randn(shape, generator=generator, dtype=torch.float64)
        Z = Z.sign() if noise == "sign" else Z
        draws[low : low + step] = einsum(
            query.double(), Z, key.double(), "i, sample i j, j -> sample"
        ) / math.sqrt(d)
    levels = torch.linspace(0.5, 4, 8, dtype=torch.float64) / math.sqrt(d)
    share = (draws.abs().unsqueeze(0) > levels.unsqueeze(1)).double().mean(1)
    return NoiseCheck(draws, levels, share, 2 * torch.exp(-d * levels.square() / 2))


class EmpiricalGap(NamedTuple):
    """Theorem 2 on a model's own bases: gap over sampled pairs (rms, largest, against the rms of
    the scores) and incoherence."""

    r_rms: float
    r_max: float
    score_rms: float
    incoh_max: float
    incoh_avg: float

    @property
    def relative(self) -> float:
        """RMS of the gap over RMS of the scores: 0 if attention factorises, NaN for zero scores."""
        return self.r_rms / self.score_rms if self.score_rms > 0 else math.nan


def unit_bases(
    pos: Float[Tensor, "position d_model"], cvec: Float[Tensor, "sample d_model"]
) -> list[Tensor]:
    """Unit rows of cvec (index 0) and pos (index 1), zero rows left out, in float64."""
    rows = [x[~zero] for x, zero in (normalize_rows(cvec.double()), normalize_rows(pos.double()))]
    require(
        all(len(x) > 0 for x in rows),
        "bases",
        expected="at least one direction in each",
        got="only zero rows",
    )
    return rows


def draw_pairs(rows: list[Tensor], pairs: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Random queries and keys: for each a row of either basis, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        [x[torch.randint(len(x), (pairs,), generator=generator)] for x in rows] for _ in range(2)
    )
    return q, k


def empirical_gap(
    pos: Float[Tensor, "position d_model"],
    cvec: Float[Tensor, "sample d_model"],
    weights: dict[tuple[int, int], Float[Tensor, "d_model d_model"]],
    *,
    pairs: int = 4096,
    seed: int = 0,
) -> EmpiricalGap:
    """How nearly a model's scores factorise: unit vectors of its own bases, W split as low rank
    plus diagonal or in any other way.

    Bases are the unit rows of ``cvec`` (context, index 0) and ``pos`` (position, index 1); zero
    rows are left out. ``weights`` maps (query basis, key basis) to the part of W meant for it,
    missing pairs are zero: with Eq. 8, W = V L V^T + D, give ``{(1, 1): V L V^T, (0, 0): D}``.
    Queries and keys are random pairs of rows, drawn with ``seed``.

    >>> e = torch.eye(4).double()
    >>> empirical_gap(e[:2], e[2:], {(0, 0): torch.diag(e[2] + e[3])}).relative
    0.0
    """
    rows = unit_bases(pos, cvec)
    require(
        len(weights) > 0 and set(weights) <= set(PARTS),
        "weights",
        expected=f"some of {PARTS}",
        got=sorted(weights),
    )
    q, k = draw_pairs(rows, pairs, seed)
    whole = torch.stack([w.double() for w in weights.values()]).sum(0)
    score = ((q[0] + q[1]) @ whole * (k[0] + k[1])).sum(-1)
    own = torch.stack([(q[a] @ w.double() * k[b]).sum(-1) for (a, b), w in weights.items()]).sum(0)
    gap, cosine = score - own, (rows[0] @ rows[1].T).abs()
    return EmpiricalGap(
        r_rms=float(gap.square().mean().sqrt()),
        r_max=float(gap.abs().amax()),
        score_rms=float(score.square().mean().sqrt()),
        incoh_max=float(cosine.amax()),
        incoh_avg=float(cosine.mean()),
    )


class StructuredGaps(NamedTuple):
    """:class:`EmpiricalGap` of many heads at once: root mean square and largest gap, root mean
    square score, one number per head."""

    r_rms: Float[Tensor, " head"]
    r_max: Float[Tensor, " head"]
    score_rms: Float[Tensor, " head"]


def structured_gaps(
    pos: Float[Tensor, "position d_model"],
    cvec: Float[Tensor, "sample d_model"],
    V: Float[Tensor, "d_model rank"],
    L: Float[Tensor, "head rank rank"],
    delta: Float[Tensor, "head d_model"],
    *,
    pairs: int = 4096,
    seed: int = 0,
) -> StructuredGaps:
    """:func:`empirical_gap` for ``W = V L V^T + diag(delta)`` of every head, position seeing the
    first part and context the second.

    No d_model x d_model matrix is formed: directions are projected on V once for all heads.

    >>> e = torch.eye(4).double()
    >>> L, delta = torch.ones(1, 2, 2).double(), (e[2] + e[3])[None]
    >>> g = structured_gaps(e[:2], e[2:], e[:, :2], L, delta)
    >>> g.r_max.tolist()
    [0.0]
    """
    (q_context, q_position), (k_context, k_position) = draw_pairs(
        unit_bases(pos, cvec), pairs, seed
    )
    V, L, delta = V.double(), L.double(), delta.double()

    def low_rank(q: Tensor, k: Tensor) -> Float[Tensor, "head sample"]:
        return einsum(q @ V, L, k @ V, "sample i, head i j, sample j -> head sample")

    def diagonal(q: Tensor, k: Tensor) -> Float[Tensor, "head sample"]:
        return einsum(q * k, delta, "sample d_model, head d_model -> head sample")

    q, k = q_context + q_position, k_context + k_position
    total = low_rank(q, k) + diagonal(q, k)
    gap = total - low_rank(q_position, k_position) - diagonal(q_context, k_context)
    return StructuredGaps(
        r_rms=gap.square().mean(-1).sqrt(),
        r_max=gap.abs().amax(-1),
        score_rms=total.square().mean(-1).sqrt(),
    )
