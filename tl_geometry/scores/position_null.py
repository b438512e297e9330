"""Does position explain more of a head's scores than noise would? The null share and the p-value of
``detail="nulls"``, from draws in which the groups of a basis no longer agree on what a position is.

A basis is the average of G groups of contexts. Without position the mean vectors ``M_g`` of the
groups are noise, and as sums of contexts about normal, so that any rotation of the G groups among
each other is as likely as what was seen (Langsrud 2005, rotation tests)::

    M(r) = sum_g r_g sqrt(w_g) M_g,   |r| = 1,   w_g the share of the contexts in group g

The basis is ``r_g = sqrt(w_g)``. With position this direction stands out, as all groups hold the
same vectors. The p-value is the share of random directions r in which position explains as much;
the null share is the mean over directions without their part along the basis, in which what all
groups have in common cancels while noise stays as large. Nothing is shifted along the window, so
that correlation between positions, however strong, is kept.

What moves is what the label calls position: ``pos`` of queries and keys; in a rotary model also the
rotated means of the keys (relative position), and those of the queries as far as they are noise.
Contexts of the basis turn with their groups: sums of queries times keys over contexts stay what
they are, but for products with the mean query, which are linear in the keys (:func:`odd_products`).
All draws are bilinear forms in one table of pairs of groups, which the intervals need as well
(:mod:`tl_geometry.scores.leave_out`).
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
"""Random directions: the smallest p-value is 1 / 2000, with which 3 of 270 heads are below 0.05
after correction for all 270."""
CHUNK = 256
"""Directions at a time, so that a table of groups for each stays small."""
DEPENDENT = 0.1
"""Groups are not independent where at most this share of random orders has neighbours as alike as
those of the corpus: topics of two groups each reject in 13% of the cases, and are let through in
2%."""


class Turned(NamedTuple):
    """What the draws of one layer are made of; part 0 is the mean, then what turns of each group
    (times its share of the contexts).

    ``kept`` is how far the mean query is known from noise (one where it does not turn).
    """

    odd: Float[Tensor, "head part part group"]
    kept: Float[Tensor, " head"]
    independence: float


def mean_parts(
    layer: LayerView, groups: GroupProjections, which: str
) -> tuple[Float[Tensor, "group position head d_head"], Tensor]:
    """Bias and pos of each group as an average context of the batch scales them."""
    side = Side.of(layer, which, normalized=groups.normalized)
    frozen = side.frozen.square().mean(0, keepdim=True).sqrt()  # they enter as squares
    side = replace(side, frozen=frozen, constant=side.constant.mean(0, keepdim=True))
    scale = layer.scale if which == "q" else 1.0
    bias, pos = side.bias_and_pos(groups.mapped[which].unsqueeze(2), scale=scale)
    return bias[:, 0], pos[:, 0]


def odd_products(
    query: Float[Tensor, "part position head d_head"],
    key: Float[Tensor, "part position head d_head"],
    allowed: Bool[Tensor, "query key"],
    drop: int,
) -> Float[Tensor, "head part part group"]:
    """``sum X~_ab . Y~_g``: terms of all parts times the mean query (part 0) with the keys of each
    group (parts 1 on).

    The groups stand as contexts of :func:`~tl_geometry.scores.sums.share_sums`; a last part makes
    the whole query the mean, and the whole key that of the group.
    """
    groups, parts = len(key) - 1, len(key)
    q = query.unsqueeze(1).expand(-1, groups, -1, -1, -1)
    k = key.unsqueeze(1).expand(-1, groups, -1, -1, -1)
    q = torch.cat([q, (query[:1] - query.sum(0, keepdim=True)).expand_as(q[0]).unsqueeze(0)])
    k = torch.cat([k, (key[1:] - key.sum(0)).unsqueeze(0)])
    sums = share_sums(q, k, allowed, drop=drop, energy=False, gain=False)
    table = sums.numerators.unflatten(-1, (parts + 1, parts + 1))[..., :parts, :parts]
    return rearrange(table, "g h a b -> h a b g").cpu()


def independence(
    vectors: Float[Tensor, "group column"],
    share: Float[Tensor, " group"],
    seed: int,
    *,
    ordered: bool,
) -> float:
    """The share of orders of the groups in which neighbours are as alike as in that of the corpus
    (one unless ``ordered``): small where a topic goes on from one group to the next. Zero where all
    groups are the same (one prompt many times), as they tell nothing of noise."""
    deviations = vectors - share.to(vectors) @ vectors
    gram = (deviations @ deviations.mT).double().cpu()
    # float32 projections of equal groups differ by rounding, about 1e-6 of their size
    identical = float(deviations.norm()) <= 1e-5 * float(vectors.norm())
    if identical or not ordered:
        return float(not identical)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(gram), generator=generator) for _ in range(DRAWS)]
    order = torch.stack([torch.arange(len(gram)), *orders])
    alike = gram[order[:, :-1], order[:, 1:]].sum(1)
    tie = 1e-9 * gram.abs().sum()  # orders that differ by rounding alone are equal
    return float((alike >= alike[0] - tie).double().mean())


def turned(layer: LayerView, groups: GroupProjections, drop: int, seed: int) -> Turned:
    """What the draws of a layer need beside the table of pairs of its groups."""
    weight = groups.share.to(layer.h).reshape(-1, 1, 1, 1)
    (q_bias, q_pos), (k_bias, k_pos) = (mean_parts(layer, groups, w) for w in "qk")
    mean, zero = (q_bias * weight).sum(0, keepdim=True), torch.zeros_like(k_bias[:1])
    reliability = torch.ones(q_bias.shape[2]).double()
    if layer.rotary:
        noise = ((q_bias - mean).square() * weight).sum((0, 1, 3)) / max(1, len(weight) - 1)
        reliability = (1 - noise / mean.square().sum((0, 1, 3)).clamp(min=1e-30)).clamp(min=0)
        q_pos, k_pos = q_pos + q_bias, k_pos + k_bias
    query, key = torch.cat([mean, q_pos * weight]), torch.cat([zero, k_pos * weight])
    # topics are constant along the window: only rotated means hold them
    key_vectors = k_pos[:, drop:].flatten(1)
    p_independent = independence(key_vectors, groups.share, seed, ordered=layer.rotary)
    return Turned(
        odd_products(query, key, layer.allowed, drop), reliability.double().cpu(), p_independent
    )


class PositionNull:
    """The draws of one layer, made once; its table follows from the sums of the intervals."""

    def __init__(self, layer: LayerView, groups: GroupProjections, drop: int, seed: int) -> None:
        self.share, self.rotary, self.seed = groups.share.cpu(), layer.rotary, seed
        self.turned = turned(layer, groups, drop, seed)

    def directions(self) -> tuple[Float[Tensor, "sample group"], Float[Tensor, "row group"]]:
        """The basis and random directions, and the latter without their part along the basis, as
        multiples of each group's share."""
        generator = torch.Generator().manual_seed(self.seed)
        of_basis = self.share.sqrt()
        r = torch.randn(DRAWS, len(of_basis), generator=generator, dtype=torch.float64)
        r = r / r.norm(dim=1, keepdim=True)
        off_basis = r - (r @ of_basis).unsqueeze(1) * of_basis
        off_basis = off_basis / off_basis.norm(dim=1, keepdim=True)
        return torch.cat([of_basis.unsqueeze(0), r]) / of_basis, off_basis / of_basis

    def pairs(self, sums: LeaveOut) -> tuple[Tensor, Tensor, Tensor]:
        """Numerators of all pairs of the mean and of what turns of each group, what no draw holds
        (ALiBi), and the totals, over all contexts."""
        entries = list(sums.sums.values())
        numerators = torch.stack([s.numerators for s in entries]).sum(0)
        total = torch.stack([torch.where(s.uniform, 0.0, s.total) for s in entries]).sum(0)
        n_parts = 2 * len(self.share) + 1
        identity = torch.eye(len(self.share)).double()
        zero_column = torch.zeros(len(self.share), 1).double()
        zero_row = torch.zeros(1, len(self.share)).double()
        mean = torch.cat([zero_row + 1, zero_row, zero_row[:, :1]], 1)
        each_group = torch.cat(
            [identity if self.rotary else 0 * identity, identity, zero_column], 1
        )
        # the mean sums the bias of all groups; of a group turns pos, and bias where it is rotated
        change = torch.cat([mean, each_group])
        table = numerators[:, : n_parts * n_parts].unflatten(1, (n_parts, n_parts))
        pairs = einsum(change, table, change, "a m, h m n, b n -> h a b")
        return pairs, numerators[:, n_parts * n_parts :].sum(1), total

    def numerators(
        self,
        pairs: Float[Tensor, "head part part"],
        known: int,
        draws: Float[Tensor, "sample group"],
    ) -> Float[Tensor, "head sample"]:
        """``sum X~ . S~`` of the position terms in every draw; ``known`` contexts are the basis's
        and turn with it."""
        chunks, reliability = [], self.turned.kept
        for c in draws.split(CHUNK):
            # the turned group means hold the mean too: it keeps what they do not sum up to
            mean = (1 - c @ self.share) if self.rotary else torch.ones(len(c)).double()
            mean_weight = mean * reliability.unsqueeze(1)  # [head sample]
            query = torch.cat([mean_weight.unsqueeze(-1), c.expand(len(reliability), -1, -1)], -1)
            key = torch.cat([torch.full_like(c[:, :1], float(not self.rotary)), c], 1)
            moved = einsum(self.turned.odd, c - 1, "h a b g, s g -> h s a b")
            table = pairs.unsqueeze(1) + known * reliability.reshape(-1, 1, 1, 1) * moved
            chunks.append(einsum(query, table, key, "h s a, h s a b, s b -> h s"))
        return torch.cat(chunks, 1)

    def table(self, sums: LeaveOut, contexts: int) -> dict[str, Float[Tensor, " head"]]:
        """Mean and 95% point of the null share, and the p-value of position: NaN where the sweep or
        its basis (of ``contexts``) has too few contexts or groups, and where the groups are not
        independent (:func:`independence`)."""
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
        unknown = torch.isnan(position[:, 0]) | few | (self.turned.independence <= DEPENDENT)
        # a quantile takes no NaN: it comes back with 0 * null
        return {
            "cs_position_null": null.mean(1),
            "cs_position_null_95": null.nan_to_num().quantile(0.95, 1) + 0 * null[:, 0],
            "p_position": torch.where(unknown, torch.nan, p),
        }


def adjusted(p: Float[Tensor, " head"]) -> Float[Tensor, " head"]:
    """p-values adjusted for the number of heads by Benjamini and Hochberg 1995: of the heads below
    0.05 at most 5% have no position, on average. NaN stays and counts for nothing.

    >>> adjusted(torch.tensor([0.01, 0.04, torch.nan, 0.02], dtype=torch.float64)).tolist()
    [0.03, 0.04, nan, 0.03]
    """
    finite = torch.isfinite(p)
    corrected = torch.full_like(p, torch.nan)
    corrected[finite] = torch.as_tensor(stats.false_discovery_control(p[finite].numpy())).to(p)
    return corrected
