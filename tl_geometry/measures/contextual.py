"""How are the vectors of a context basis arranged, among themselves and relative to the positional
basis? The formulas of :func:`tl_geometry.contextual_report` (Song & Zhong 2023, sections 2 and 4).

Rows are context vectors ``ctx [context d_model]`` (or any points), batched over states. Each number
that is positive by chance alone has its value for random directions beside it. Zero rows have no
direction: they are left out and counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from scipy.special import betaincinv
from torch import Tensor

from tl_geometry.base.linalg import normalize_rows, numerical_rank, principal_angles, ratio, svd

AT_ONCE = 1024
"""Contexts whose cosines with all other rows exist at one time: bounds the memory."""


class Incoherence(NamedTuple):
    """Cosines of all (position, context) pairs: largest and mean absolute value, root mean
    square."""

    max: Float[Tensor, "*batch"]
    avg: Float[Tensor, "*batch"]
    rms: Float[Tensor, "*batch"]


def cosine_baseline(d_model: int, pairs: int) -> Incoherence:
    """What :func:`incoherence` gives for ``pairs`` of independent isotropic directions in d
    dimensions: ``E|cos| = G(d/2) / (sqrt(pi) G((d+1)/2))``, about sqrt(2 / (pi d)).

    RMS is 1/sqrt(d). The maximum is the level that one of the pairs exceeds on average (cos^2 is
    Beta(1/2, (d-1)/2)). Directions that share a low-dimensional subspace, or outlier coordinates,
    have larger cosines although nothing relates them.

    >>> [round(float(x), 4) for x in cosine_baseline(768, 127 * 256)]
    [0.1497, 0.0288, 0.0361]
    """
    avg = math.exp(math.lgamma(d_model / 2) - math.lgamma((d_model + 1) / 2)) / math.sqrt(math.pi)
    largest = 1.0
    if d_model > 1:  # 1 - cos^2 is Beta((d-1)/2, 1/2)
        largest = math.sqrt(1 - float(betaincinv((d_model - 1) / 2, 0.5, 1 / pairs)))
    return Incoherence(*torch.tensor([largest, avg, 1 / math.sqrt(d_model)], dtype=torch.float64))


def incoherence(
    pos: Float[Tensor, "*batch position d_model"], ctx: Float[Tensor, "*batch context d_model"]
) -> Incoherence:
    """How far positional and context directions are from orthogonal: statistics of cos(pos_t,
    ctx_c) over all pairs.

    ``0 <= avg <= rms <= max <= 1``. The source is ambiguous: section 4 of Song & Zhong
    2023 defines incoherence as the *maximum*, the caption of Table 1 says *average*, and the
    tabulated values (0.04 to 0.3) are only compatible with averages. Their Theorem 2 on kernel
    factorisation needs the maximum. Compare with :func:`cosine_baseline`. NaN where every pair has
    a zero row.

    >>> i = incoherence(torch.eye(2)[:1], torch.tensor([[3.0, 4.0], [0.0, -1.0]]))
    >>> [round(float(x), 3) for x in i]
    [0.6, 0.3, 0.424]
    """
    unit_pos, zero_pos = normalize_rows(pos)
    unit_ctx, zero_ctx = normalize_rows(ctx)
    sums = torch.zeros(2, *pos.shape[:-2], dtype=pos.dtype, device=pos.device)
    largest = torch.zeros_like(sums[0])
    # block by block: cosines of all contexts with all positions never exist at once
    for block in unit_ctx.split(AT_ONCE, dim=-2):
        size = (unit_pos @ block.mT).abs()
        sums += torch.stack([values.sum((-2, -1)) for values in (size, size.square())])
        largest = torch.maximum(largest, size.amax((-2, -1)))
    pairs = (~zero_pos).sum(-1) * (~zero_ctx).sum(-1)
    avg, square = ratio(sums, pairs)
    return Incoherence(torch.where(pairs > 0, largest, torch.nan), avg, square.sqrt())


def subspace_overlap(
    pos: Float[Tensor, "*batch position d_model"],
    ctx: Float[Tensor, "*batch context d_model"],
    rank: int,
) -> Float[Tensor, "*batch"]:
    """Mean of cos^2 over the principal angles between the spans of the ``rank`` leading directions
    of pos and of ctx (both centred): between 0 (orthogonal) and 1 (equal); random subspaces of d
    dimensions have ``rank / d``. NaN where pos or ctx has numerically fewer directions than
    ``rank``: n centred rows have at most n - 1.

    >>> x = torch.eye(3) - 1 / 3
    >>> round(float(subspace_overlap(x, x[:, [1, 2, 0]], 2)), 3)
    1.0
    """
    factors = [svd(rows) for rows in (pos, ctx)]
    shapes = (pos.shape, ctx.shape)
    ranks = [numerical_rank(f.S, shape) for f, shape in zip(factors, shapes, strict=True)]
    enough = (torch.minimum(*ranks) >= rank) & (rank < min(pos.shape[-2], ctx.shape[-2]))
    angles = principal_angles(*(f.V[..., :rank] for f in factors))
    return torch.where(enough, angles.cos().square().mean(-1), torch.nan)


class ClusterSimilarity(NamedTuple):
    """Mean |cos| between contexts of one document (``intra``) and of different ones (``inter``),
    and ``intra`` with self-pairs (``intra_reference``)."""

    intra: Float[Tensor, "*batch"]
    inter: Float[Tensor, "*batch"]
    intra_reference: Float[Tensor, "*batch"]


def cluster_similarity(
    ctx: Float[Tensor, "*batch context d_model"], labels: Int[Tensor, " context"]
) -> ClusterSimilarity:
    """Mean |cos| over pairs of contexts with the same label, and with different labels (Song &
    Zhong 2023, Table 1).

    Self-pairs are left out. The published number counts them, so that
    ``intra_reference = ((n - 1) intra + 1) / n`` for clusters of n.

    The 1.00 published for Llama-2 is an artefact: all 64 windows of a document were the same text.

    >>> ctx = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -2.0]])
    >>> s = cluster_similarity(ctx, torch.tensor([0, 0, 1, 1]))
    >>> float(s.intra), float(s.inter)
    (1.0, 0.0)
    """
    unit, zero = normalize_rows(ctx)
    # only labels that occur, in ascending order
    member = torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).to(unit)
    sums = torch.zeros(*unit.shape[:-2], *[member.shape[1]] * 2).to(unit)
    # block by block: cosines of all contexts with all others never exist at once
    for block, block_member in zip(unit.split(AT_ONCE, dim=-2), member.split(AT_ONCE), strict=True):
        sums += block_member.mT @ (block @ unit.mT).abs() @ member
    counts = einsum((~zero).to(unit), member, "... context, context label -> ... label")
    pairs = counts.unsqueeze(-1) * counts.unsqueeze(-2)
    # each nonzero row of a label makes one self-pair, with cosine 1
    own, within = torch.diag_embed(counts), torch.eye(member.shape[1]).to(unit)

    def mean(total: Tensor, count: Tensor, cells: Tensor) -> Tensor:
        return ratio((total * cells).sum((-2, -1)), (count * cells).sum((-2, -1)))

    intra, inter = mean(sums - own, pairs - own, within), mean(sums, pairs, 1 - within)
    return ClusterSimilarity(intra, inter, mean(sums, pairs, within))


def compactness(
    second_moment: Float[Tensor, "d_model d_model"],
    pos: Float[Tensor, "position d_model"],
    ctx: Float[Tensor, "context d_model"],
    labels: Int[Tensor, " context"],
    *,
    accuracy: float = 1e-12,
) -> tuple[Tensor, Tensor]:
    """Separation of labelled clusters, ``tr(S_B S_W^-1)``: between-cluster over within-cluster
    covariance, of cvec and of the raw states of a corpus, from accumulated sums alone (Song & Zhong
    2023, section 4).

    With N points x_i (one per context and position), clusters k of n_k points and mean m_k, and m
    the mean of all,
    ``S_W = (1/N) sum_k sum_(i in k) (x_i - m_k)(x_i - m_k)^T`` and
    ``S_B = (1/N) sum_k n_k (m_k - m)(m_k - m)^T``. The source gives neither normaliser nor space
    (its figure plots two principal components): times (N - K) / (K - 1) this is the ratio per
    degree of freedom. The value is at least 0, is 0 only for equal means, and is unchanged by any
    invertible affine map of the points. Computed as ``|L^-1 M|_F^2`` with S_W = L L^T and
    S_B = M M^T. NaN where S_W has no inverse: with ``N - K < d_model``, or clusters in a subspace.

    ``S_W(raw) = S_W(cvec) + P^T P / T`` with S_B the same, so **cvec is never less compact than
    raw**: what the paper observes at three layers is an inequality.

    Args:
        second_moment: the sum of (h - mean)(h - mean)^T over C contexts and T positions.
        pos: the positional basis.
        ctx: mean of h over each context minus the mean over all.
        labels: the cluster of each context.
        accuracy: relative accuracy of ``second_moment`` (about 1e-6 for float32 products): an
            eigenvalue of the within-cluster correlations below it counts as zero. States after a
            LayerNorm (BERT) have one such eigenvalue.

    >>> x = torch.tensor([[0.0], [2.0], [10.0], [12.0]]).double() - 6  # two clusters of two
    >>> cvec, raw = compactness(x.mT @ x, 0 * x[:1], x, torch.tensor([0, 0, 1, 1]))
    >>> round(float(raw), 6)
    25.0
    """
    member = torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).to(pos)
    counts = member.sum(0)
    # S_B = factor factor^T / N
    factor = (ctx.to(pos).mT @ member) * (len(pos) / counts).sqrt()
    raw = second_moment - factor @ factor.mT
    cvec = raw - len(ctx) * pos.mT @ pos
    freedom = float(len(ctx) * len(pos) - len(counts))
    found = [_separation(within, factor, freedom, accuracy) for within in (cvec, raw)]
    return found[0], found[1]


def _separation(within: Tensor, factor: Tensor, freedom: float, accuracy: float) -> Tensor:
    """``tr(S_B S_W^-1)`` from N S_W ``[d_model d_model]`` and the factor of N S_B ``[d_model
    label]``; ``freedom`` is N - K."""
    variance, size = within.diagonal(), len(within)
    # scaled to unit variances (correlations), so that outlier coordinates do not spoil the
    # conditioning
    scale = torch.where(variance > 0, variance, 1.0).rsqrt().unsqueeze(1)
    correlation = scale * (within + within.mT) / 2 * scale.mT
    root, info = torch.linalg.cholesky_ex(correlation)
    singular = int(info) > 0 or freedom < size
    # small pivots only suggest a singular matrix: then its smallest eigenvalue decides
    if not singular and not bool((root.diagonal().square() > accuracy * size).all()):
        singular = float(torch.linalg.eigvalsh(correlation)[0]) <= accuracy
    if singular:
        return within.new_tensor(torch.nan)
    return torch.linalg.solve_triangular(root, scale * factor, upper=False).square().sum()
