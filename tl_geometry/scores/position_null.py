"""Does position explain more of a head's scores than noise would? The null share and the p-value
that ``sweep_heads`` gives for ``detail="nulls"``, from draws in which the groups of a basis no
longer agree on the vector of a position.

A basis is the average of G groups of contexts, with mean vectors ``M_g`` of each group. Without
position these are noise, about normal because each is an average of many contexts. The
``sqrt(w_g) M_g``, with w_g the share of the contexts in group g, then have one covariance, so that
every orthogonal mixture of them is as likely as what was seen (Langsrud 2005, rotation tests)::

    M(r) = sum_g r_g sqrt(w_g) M_g,   |r| = 1

The basis is ``r_g = sqrt(w_g)``. Where there is position this direction stands out, because all
groups contain the same vectors. The p-value is the share of random directions r in which position
explains as much. The null share is the mean over directions orthogonal to that of the basis: there
whatever all groups share cancels, and noise keeps its size. Nothing is shifted along the window, so
correlation between positions is kept, however strong.

What is mixed is what the label calls position: ``pos`` of queries and keys; in a rotary model also
the rotated means of the keys (relative position), and of the rotated mean of the queries the part
that is noise. Contexts of the basis change with their groups. Sums over them of queries times keys
stay the same, because the mixture is orthogonal, except for products with the mean query, which are
linear in the keys (:func:`odd_products`). All draws are bilinear forms in one table of pairs of
groups, which the intervals need as well (:mod:`tl_geometry.scores.leave_out`).

The bias of ALiBi is position that no noise makes: it is in the scores of every draw and in the
share of the basis, but in the position share of no draw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.leave_out import GroupProjections, LeaveOut
from tl_geometry.scores.projection import Side
from tl_geometry.scores.sums import share_sums

DRAWS = 1_999
"""Random directions. The smallest p-value is then 1 / 2000: three such heads among 270 are below
0.05 after the correction for all 270 (1 / 2000 * 270 / 3 = 0.045)."""
CHUNK = 256
"""Directions computed at a time, which bounds the tables ``[head direction part part]``: 2 MB with
12 heads and 8 groups."""
DEPENDENT = 0.1
"""No p-value where at most this share of random orders of the groups has neighbours as similar as
the order of the corpus: the groups are then not independent. Topics that cover two groups each
would make the test reject in 13% of the cases; with this check 2% of them get a p-value."""


class DrawTerms(NamedTuple):
    """What the draws of one layer need besides sums over contexts, on the layer's device.

    ``odd`` are the products of :func:`odd_products`; its parts are the mean, then what is mixed of
    each group, times the group's share of the contexts. ``reliability`` is the share of the mean
    query's squared norm that is not sampling noise (one where the mean is not mixed).
    ``gram`` are the products of the groups' keys less their mean, and ``size`` is their sum of
    squares with it (for :func:`independence`).
    """

    odd: Float[Tensor, "head part part group"]
    reliability: Float[Tensor, " head"]
    gram: Float[Tensor, "group column"]
    size: Float[Tensor, ""]


def mean_parts(
    layer: LayerView, groups: GroupProjections, which: str
) -> tuple[Float[Tensor, "group position head d_head"], Tensor]:
    """Bias and pos of each group, both ``[group position head d_head]``, with the frozen scales and
    constants averaged over the contexts of the batch."""
    side = Side.of(layer, which, normalized=groups.normalized)
    # root mean square, because the scales enter the sums of squares squared
    frozen = side.frozen.square().mean(0, keepdim=True).sqrt()
    side = replace(side, frozen=frozen, constant=side.constant.mean(0, keepdim=True))
    scale = layer.scale if which == "q" else 1.0
    bias, pos = side.bias_and_pos(groups.mapped[which].unsqueeze(2), scale=scale)
    return bias[:, 0], pos[:, 0]


def odd_products(
    query: Float[Tensor, "part position head d_head"],
    key: Float[Tensor, "part position head d_head"],
    allowed: Bool[Tensor, "query key"],
    drop: int,
    form: str | None,
) -> Float[Tensor, "head part part group"]:
    """``sum X~_ab . Y~_g`` over rows and keys: every term X_ab of the parts, times the scores Y_g
    of the mean query (part 0) with the keys of group g (part g + 1).

    :func:`~tl_geometry.scores.sums.share_sums` multiplies terms by total scores. So each group
    takes the place of a context, and one more part is added to queries and keys, such that the
    total query is the mean and the total key that of the group.
    """
    groups, parts = len(key) - 1, len(key)
    q = query.unsqueeze(1).expand(-1, groups, -1, -1, -1)
    k = key.unsqueeze(1).expand(-1, groups, -1, -1, -1)
    q = torch.cat([q, (query[:1] - query.sum(0, keepdim=True)).expand_as(q[0]).unsqueeze(0)])
    k = torch.cat([k, (key[1:] - key.sum(0)).unsqueeze(0)])
    sums = share_sums(q, k, allowed, drop=drop, energy=False, gain=False, form=form)
    table = sums.numerators.unflatten(-1, (parts + 1, parts + 1))[..., :parts, :parts]
    return rearrange(table, "g h a b -> h a b g")


def independence(
    gram: Float[Tensor, "group column"], size: Float[Tensor, ""], seed: int, *, ordered: bool
) -> float:
    """The share of random orders of the groups in which neighbours are as similar as in the order
    of the corpus (one unless ``ordered``). It is small where a topic continues from one group to
    the next. Zero where all groups are the same (one prompt many times): they show no noise to
    compare with."""
    # float32 projections of equal groups differ by rounding, about 1e-6 of their norm
    identical = float(gram.trace()) <= 1e-10 * float(size)
    if identical or not ordered:
        return float(not identical)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(gram), generator=generator) for _ in range(DRAWS)]
    order = torch.stack([torch.arange(len(gram)), *orders])
    alike = gram[order[:, :-1], order[:, 1:]].sum(1)
    tie = 1e-9 * gram.abs().sum()  # orders that differ by less differ by rounding: ties count
    return float((alike >= alike[0] - tie).double().mean())


def draw_terms(layer: LayerView, groups: GroupProjections, drop: int) -> DrawTerms:
    """:class:`DrawTerms` of one layer, from one batch."""
    weight = groups.share.to(layer.h).reshape(-1, 1, 1, 1)
    (q_bias, q_pos), (k_bias, k_pos) = (mean_parts(layer, groups, w) for w in "qk")
    mean, zero = (q_bias * weight).sum(0, keepdim=True), torch.zeros_like(k_bias[:1])
    reliability = torch.ones_like(q_bias[0, 0, :, 0])
    if layer.rotary:
        # the mean's sampling variance, by the spread of the groups (G - 1 degrees of freedom)
        noise = ((q_bias - mean).square() * weight).sum((0, 1, 3)) / max(1, len(weight) - 1)
        # 1e-30 only avoids 0 / 0 for a head whose mean query is zero
        reliability = (1 - noise / mean.square().sum((0, 1, 3)).clamp(min=1e-30)).clamp(min=0)
        q_pos, k_pos = q_pos + q_bias, k_pos + k_bias
    query, key = torch.cat([mean, q_pos * weight]), torch.cat([zero, k_pos * weight])
    # a topic shifts the mean of its contexts; pos has no mean, so only rotated means contain topics
    vectors = k_pos[:, drop:].flatten(1)
    deviations = vectors - weight.flatten() @ vectors
    return DrawTerms(
        odd=odd_products(query, key, layer.allowed, drop, layer.mask_form),
        reliability=reliability.double(),
        gram=(deviations @ deviations.mT).double(),
        size=vectors.square().sum().double(),
    )


class PositionNull:
    """The null of one layer: call :meth:`add` for each batch; :meth:`table` evaluates the draws on
    the sums that :class:`~tl_geometry.scores.leave_out.LeaveOut` has collected."""

    terms: DrawTerms
    rotary: bool

    def __init__(self, share: Float[Tensor, " group"], drop: int, seed: int) -> None:
        self.share, self.drop, self.seed = share.cpu(), drop, seed
        self.contexts = 0

    def add(self, layer: LayerView, groups: GroupProjections) -> None:
        """Take in a batch. The terms of the draws are averaged over batches, weighted by contexts,
        because the scales that they are made from grow with the window."""
        terms = draw_terms(layer, groups, self.drop)
        self.rotary, self.terms = layer.rotary, self.terms if self.contexts else terms
        self.contexts += len(layer.h)
        for mean, new in zip(self.terms, terms, strict=True):
            mean.lerp_(new, len(layer.h) / self.contexts)

    def to_cpu(self) -> None:
        """Move the terms of the draws to the CPU, where :meth:`table` is made."""
        self.terms = DrawTerms(*(term.cpu() for term in self.terms))

    def directions(self) -> tuple[Float[Tensor, "sample group"], Float[Tensor, "row group"]]:
        """``c_g = r_g / sqrt(w_g)``, so that ``M(r) = sum_g c_g w_g M_g``: for the basis (all ones)
        and :data:`DRAWS` random directions, and for these made orthogonal to the basis."""
        generator = torch.Generator().manual_seed(self.seed)
        of_basis = self.share.sqrt()
        r = torch.randn(DRAWS, len(of_basis), generator=generator, dtype=torch.float64)
        r = r / r.norm(dim=1, keepdim=True)
        off_basis = r - (r @ of_basis).unsqueeze(1) * of_basis
        off_basis = off_basis / off_basis.norm(dim=1, keepdim=True)
        return torch.cat([of_basis.unsqueeze(0), r]) / of_basis, off_basis / of_basis

    def pairs(self, sums: LeaveOut) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over all contexts: numerators ``[head part part]`` of all pairs of the mean and of
        what is mixed of each group; those of ALiBi ``[head]``, which is position in the model and
        in no draw; and the totals ``[head]``."""
        entries = list(sums.sums.values())
        numerators = torch.stack([s.numerators for s in entries]).sum(0)
        total = torch.stack([torch.where(s.uniform, 0.0, s.total) for s in entries]).sum(0)
        groups = len(self.share)
        n_parts = 2 * groups + 1
        # rows: the mean is the bias of all groups; of each group pos is mixed, and bias if rotary
        change = torch.zeros(1 + groups, n_parts, dtype=torch.float64)
        change[0, :groups] = 1
        change[1:, groups:-1] = torch.eye(groups)
        if self.rotary:
            change[1:, :groups] = torch.eye(groups)
        table = numerators[:, : n_parts * n_parts].unflatten(1, (n_parts, n_parts))
        pairs = einsum(change, table, change, "a m, h m n, b n -> h a b")
        return pairs, numerators[:, n_parts * n_parts :].sum(1), total

    def numerators(
        self,
        pairs: Float[Tensor, "head part part"],
        known: int,
        draws: Float[Tensor, "sample group"],
    ) -> Float[Tensor, "head sample"]:
        """``sum X~ . S~`` of the position terms in every draw; ``known`` is the number of contexts
        that are in the basis and change with their groups."""
        chunks, reliability = [], self.terms.reliability
        for c in draws.split(CHUNK):
            # with rotation what is mixed of each group contains the mean, c . w times in all: the
            # part "mean" keeps the rest
            mean = (1 - c @ self.share) if self.rotary else torch.ones(len(c)).double()
            mean_weight = mean * reliability.unsqueeze(1)  # [head sample]
            query = torch.cat([mean_weight.unsqueeze(-1), c.expand(len(reliability), -1, -1)], -1)
            key = torch.cat([torch.full_like(c[:, :1], float(not self.rotary)), c], 1)
            # summed over the contexts of the basis, keys change by known sum_g (c_g - 1) w_g M_g
            moved = einsum(self.terms.odd, c - 1, "h a b g, s g -> h s a b")
            table = pairs.unsqueeze(1) + known * reliability.reshape(-1, 1, 1, 1) * moved
            chunks.append(einsum(query, table, key, "h s a, h s a b, s b -> h s"))
        return torch.cat(chunks, 1)

    def table(self, sums: LeaveOut, contexts: int) -> dict[str, Float[Tensor, " head"]]:
        """Mean and 95% quantile of the null share, and the p-value of position. The p-value is NaN
        where the sweep or its basis (of ``contexts``) has too few contexts or groups, and where the
        groups are not independent (:func:`independence`)."""
        pairs, alibi, total = self.pairs(sums)
        total = torch.where(total > 0, total, torch.nan).unsqueeze(1)
        n_own = sum(count for (group, _), count in sums.counts.items() if group >= 0)
        draws, off_basis = self.directions()
        cs = self.numerators(pairs, n_own, draws) / total
        null = self.numerators(pairs, n_own, off_basis) / total
        position = cs[:, :1] + alibi.unsqueeze(1) / total
        # the basis counts as one of the draws, so that p is never zero
        p = (1 + (cs[:, 1:] >= position).sum(1)).double() / (1 + DRAWS)
        few = min(sums.done, contexts) < FEWEST or len(self.share) < FEWEST_GROUPS
        p_independent = independence(
            self.terms.gram, self.terms.size, self.seed, ordered=self.rotary
        )
        unknown = torch.isnan(position[:, 0]) | few | (p_independent <= DEPENDENT)
        # quantile refuses NaN, so it is replaced first; adding 0 * null restores it
        return {
            "cs_position_null": null.mean(1),
            "cs_position_null_95": null.nan_to_num().quantile(0.95, 1) + 0 * null[:, 0],
            "p_position": torch.where(unknown, torch.nan, p),
        }


def adjusted(p: Float[Tensor, " head"]) -> Float[Tensor, " head"]:
    """p-values adjusted for the number of heads (Benjamini and Hochberg 1995): of the heads below
    0.05 at most 5%, on average, have no effect of position. NaN stays NaN and is not counted as a
    head.

    >>> adjusted(torch.tensor([0.01, 0.04, torch.nan, 0.02], dtype=torch.float64)).tolist()
    [0.03, 0.04, nan, 0.03]
    """
    finite = torch.isfinite(p)
    corrected = torch.full_like(p, torch.nan)
    corrected[finite] = torch.as_tensor(stats.false_discovery_control(p[finite].numpy())).to(p)
    return corrected
