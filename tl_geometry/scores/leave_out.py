"""The samples behind the intervals of a sweep (``detail="intervals"``): covariance and gain shares
with groups of contexts left out of the corpus and of the basis.

Mean and positional vectors are estimates, often from the very contexts whose shares are asked for,
so that shares of position are too high, and no resampling of contexts alone sees it. With s the
share in which every context uses a basis without its own group, a delete-group jackknife leaves
group g out of the contexts and of every basis::

    s_(-g)   contexts outside g; a context of group o uses the basis of all groups but o and g

Parts are linear in the sums of the groups: with the shares ``w_g = n_g / C`` and the queries (or
keys) ``M_g`` and ``P_g`` of ``w_g`` times mean and positional vectors of group g, any such basis L
has ``bias = sum_(g not in L) c M_g``, ``pos = sum_(g not in L) c P_g``, ``c = 1 / (1 - sum_(g in L)
w_g)``, and cvec is the rest. So one contraction with 2 G + 1 parts, added up by the contexts' own
groups, gives all of them.

Contexts that the basis does not hold have no own group. Then basis and contexts are two independent
sources of error, each with its jackknife: over the groups of the basis, and over contiguous blocks
of contexts. The same holds for contexts of the basis that lie in few of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, Interval, LeftOut, jackknife_interval
from tl_geometry.base.results import row_hashes
from tl_geometry.decomposition.groups import blocks
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.projection import Side
from tl_geometry.scores.sums import ShareSums, share_sums

NONE: frozenset[int] = frozenset()
BLOCKS = 8
"""Blocks of contexts, at least (twice as many at most), that are left out in turn: as many as a
basis has groups by default."""
UNEVEN = 2.0
"""For one jackknife to serve both, each group of the basis must hold its share of the sweep's
contexts within this factor."""


@dataclass(frozen=True, eq=False)
class GroupBasis:
    """Mean and positional vectors of each group of contexts of one state, and the share of the
    contexts in each."""

    mean: Float[Tensor, "group d_model"]
    pos: Float[Tensor, "group position d_model"]
    share: Float[Tensor, " group"]

    @staticmethod
    def of(basis: PositionContext, layer: int, length: int) -> GroupBasis:
        """The groups of a basis that hold contexts, in their order."""
        used = basis.group_counts.nonzero().flatten()
        counts = basis.group_counts[used].double()
        means = basis.group_sums[used, basis.index(layer)] / counts[:, None, None]
        mean = means[:, slice(*basis.window)].mean(1)
        return GroupBasis(mean, means[:, :length] - mean.unsqueeze(1), counts / counts.sum())


def own_groups(
    basis: PositionContext, tokens: Int[Tensor, "batch position"]
) -> Int[Tensor, " batch"]:
    """The group of the basis (counted among those that hold contexts) of each context, by the hash
    of its tokens; -1 for contexts that the basis does not hold."""
    unknown = torch.full((len(tokens),), -1)
    groups, hashes = basis.group_of, basis.token_hashes
    if groups is None or hashes is None:
        return unknown
    index_among_used = (basis.group_counts > 0).long().cumsum(0) - 1
    order = hashes.argsort(stable=True)
    context_hashes = row_hashes(tokens)
    # a hash above all of the basis is clamped to the last, which it does not equal
    nearest = torch.searchsorted(hashes[order], context_hashes).clamp(max=len(order) - 1)
    return torch.where(
        hashes[order][nearest] == context_hashes, index_among_used[groups[order[nearest]]], unknown
    )


def group_parts(
    q: Float[Tensor, "batch position head d_head"],
    bias: Float[Tensor, "group batch position head d_head"],
    pos: Float[Tensor, "group batch position head d_head"],
    share: Float[Tensor, " group"],
) -> Float[Tensor, "part batch position head d_head"]:
    """The 2 G + 1 parts whose sum is ``q``: bias and pos of each group times its share, and the
    rest."""
    weight = share.to(q).reshape(-1, 1, 1, 1, 1)
    bias_and_pos = torch.cat([bias * weight, pos * weight])
    return torch.cat([bias_and_pos, (q - bias_and_pos.sum(0)).unsqueeze(0)])


def without(share: Float[Tensor, " group"], left_out: Set[int]) -> Float[Tensor, "part column"]:
    """Bias, pos and cvec of the basis without some groups as sums of the parts of
    :func:`group_parts`.

    >>> without(torch.tensor([0.25, 0.75]), {0})[:2, :4].round(decimals=2).tolist()
    [[0.0, 1.3300000429153442, 0.0, 0.0], [0.0, 0.0, 0.0, 1.3300000429153442]]
    """
    used = torch.tensor([float(g not in left_out) for g in range(len(share))]).to(share)
    weight = used / (share * used).sum()
    nothing = torch.zeros_like(weight)
    bias, pos = torch.cat([weight, nothing]), torch.cat([nothing, weight])
    bias_and_pos = torch.stack(
        [torch.cat([bias, share.new_zeros(1)]), torch.cat([pos, share.new_zeros(1)])]
    )
    # all parts sum to the query with weight one, so that cvec takes what bias and pos leave
    return torch.cat(
        [bias_and_pos, (torch.ones_like(bias_and_pos[0]) - bias_and_pos.sum(0)).unsqueeze(0)]
    )


def sets_of(member: Bool[Tensor, "row group"]) -> list[frozenset[int]]:
    """The groups of each row."""
    return [frozenset(row.nonzero().flatten().tolist()) for row in member]


@dataclass(frozen=True, eq=False)
class Resampled:
    """Covariance and gain shares of all contexts (the first sample), then with each group left out,
    jackknife by jackknife; ``sizes`` are the groups' shares of the contexts, by jackknife."""

    cs: Float[Tensor, "head sample term"]
    gs: Float[Tensor, "head sample term"]
    sizes: tuple[tuple[float, ...], ...]

    def interval(self, values: Float[Tensor, "head sample *batch"]) -> Interval:
        """Interval of anything linear in the shares, from its value in each sample."""
        samples = values[:, 1:].split([len(sizes) for sizes in self.sizes], dim=1)
        jackknives = [
            LeftOut(sample.transpose(0, 1), values.new_tensor(sizes))
            for sample, sizes in zip(samples, self.sizes, strict=True)
        ]
        return jackknife_interval(values[:, 0], jackknives)

    def grouped(self, member: Float[Tensor, "term group"]) -> Resampled:
        """The same for groups of terms."""
        return Resampled(self.cs @ member, self.gs @ member, self.sizes)

    def select(self, heads: Int[Tensor, " head"]) -> Resampled:
        """The same for some heads, in the given order."""
        return Resampled(self.cs[heads], self.gs[heads], self.sizes)


class LeaveOut:
    """Sums in progress of one layer: numerators and gains of all pairs of the 2 G + 1 parts, by own
    group and block of contexts."""

    def __init__(self, share: Float[Tensor, " group"]) -> None:
        self.share = share
        self.sums: dict[tuple[int, int], ShareSums] = {}
        self.counts: dict[tuple[int, int], int] = {}
        self.done, self.block = 0, 1

    def add(self, sums: ShareSums, own: Sequence[int]) -> None:
        """Take in the sums of some contexts, in the order of the corpus, where they are: neighbours
        of one group and block together."""
        start = 0
        while start < len(own):
            block = self.done // self.block
            if block == 2 * BLOCKS:  # all blocks are full
                self._merge_pairs()
                block = BLOCKS
            group, stop = own[start], start + (block + 1) * self.block - self.done
            same = next((i for i in range(start, len(own)) if own[i] != group), len(own))
            stop = min(stop, same)
            key, together = (group, block), sums.select(slice(start, stop)).pooled()
            self.sums[key] = self.sums[key] + together if key in self.sums else together
            self.counts[key] = self.counts.get(key, 0) + stop - start
            self.done += stop - start
            start = stop

    def settle(self) -> None:
        """Move the sums together: strewn among the temporaries of a layer they would keep its
        memory from being used again (2 GB on SmolLM2)."""
        self._moved(ShareSums.stack(list(self.sums.values())))

    def to_cpu(self) -> None:
        """Move the sums to the CPU, where intervals and nulls are made of them."""
        self._moved(ShareSums.stack(list(self.sums.values())).to("cpu"))

    def _moved(self, together: ShareSums) -> None:
        self.sums = {key: together.select(i) for i, key in enumerate(self.sums)}

    def _merge_pairs(self) -> None:
        """Join neighbouring blocks: a corpus of any length has a bounded number of them."""
        sums, counts = self.sums, self.counts
        self.sums, self.counts, self.block = {}, {}, 2 * self.block
        for (group, block), block_sums in sums.items():
            key = (group, block // 2)
            self.sums[key] = self.sums[key] + block_sums if key in self.sums else block_sums
            self.counts[key] = self.counts.get(key, 0) + counts[group, block]

    def _counted(self, axis: int) -> dict[int, int]:
        """Contexts by own group or by block."""
        contexts: dict[int, int] = {}
        for key, count in self.counts.items():
            contexts[key[axis]] = contexts.get(key[axis], 0) + count
        return contexts

    @property
    def spread(self) -> bool:
        """Whether the contexts are those of the basis, about evenly: then a group is left out of
        both at once."""
        owned = self._counted(0)
        expected = (self.share * self.done).tolist()
        return -1 not in owned and all(
            e / UNEVEN <= owned.get(g, 0) <= e * UNEVEN for g, e in enumerate(expected)
        )

    def _shares(
        self,
        joined: Mapping[int, frozenset[int]],
        left_out: frozenset[int] = NONE,
        *,
        contexts: bool = False,
        blocks: frozenset[int] = NONE,
    ) -> Tensor:
        """Covariance and gain shares ``[2 head term]`` without some groups of the basis (and, with
        ``contexts``, without their contexts), or without some blocks of contexts; each context by
        the basis without all groups that are ``joined`` with its own."""
        numerators, totals = torch.zeros(()), torch.zeros(())
        for (group, block), sums in self.sums.items():
            if (contexts and group in left_out) or block in blocks:
                continue
            change = without(self.share, joined.get(group, NONE) | left_out)
            n_parts = change.shape[1]
            numerators_and_gains = torch.stack([sums.numerators, sums.gains])
            table = numerators_and_gains[..., : n_parts * n_parts].unflatten(-1, (n_parts, n_parts))
            terms = einsum(change, table, change, "a m, s h m n, b n -> s h a b").flatten(2)
            numerators = numerators + torch.cat(
                [terms, numerators_and_gains[..., n_parts * n_parts :]], -1
            )
            total = torch.stack([sums.total, sums.gain_total])
            # the total of a uniform context is rounding
            totals = totals + torch.where(sums.uniform, 0.0, total)
        return numerators / torch.where(totals > 0, totals, torch.nan).unsqueeze(-1)

    def table(self, contexts: int) -> Resampled:
        """The shares with each group left out; NaN where basis or sweep have too few contexts or
        groups for an interval (``contexts`` of the basis).

        Groups of fewer than 8 contexts are left out together with their neighbours, as topics go on
        over several windows; with fewer than four such blocks there is no interval.
        """
        counts = (self.share * contexts).round().long()
        groups, together = sets_of(blocks(counts)), self.spread
        counted = self._counted(1)
        block_sizes = torch.tensor([counted[b] for b in sorted(counted)])
        context_blocks = [] if together else sets_of(blocks(block_sizes))
        joined = {group: members for members in groups for group in members}
        complete = self._shares(joined)
        fewest = min(len(groups), len(groups if together else context_blocks))
        if fewest < FEWEST_GROUPS or self.done < FEWEST:
            # two groups without shares, so that intervals come out as NaN
            unknown = complete.new_full((*complete.shape[:2], 3, complete.shape[2]), torch.nan)
            return Resampled(unknown[0], unknown[1], ((0.5, 0.5),))
        samples = [self._shares(joined, members, contexts=together) for members in groups]
        samples += [self._shares(joined, blocks=members) for members in context_blocks]
        sizes = [tuple(float(self.share[list(members)].sum()) for members in groups)]
        if context_blocks:
            sizes.append(
                tuple(float(block_sizes[list(b)].sum()) / self.done for b in context_blocks)
            )
        cs, gs = torch.stack([complete, *samples], dim=2)
        return Resampled(cs, gs, tuple(sizes))


class GroupProjections:
    """Mean and positional vectors of the groups of one layer's input, projected to queries and keys
    and turned with the position."""

    def __init__(self, layer: LayerView, basis: PositionContext) -> None:
        groups = GroupBasis.of(basis, layer.layer, layer.h.shape[1])
        self.share, self.normalized = groups.share, basis.provenance.normalized
        self.mapped: dict[str, Float[Tensor, "part group position head d_head"]] = {}
        for which in ("q", "k"):
            mean = layer.projected(groups.mean.unsqueeze(1).to(layer.h), which)
            pos = layer.projected(groups.pos.to(layer.h), which)
            # the mean is the same at every position until it is turned
            mean_and_pos = torch.stack([mean.expand_as(pos), pos])
            self.mapped[which] = layer.turned(mean_and_pos, which)

    def sums(self, layer: LayerView, rows: slice, drop: int) -> ShareSums:
        """Numerators and gains of all pairs of the parts for some contexts."""
        parts: list[Tensor] = []
        for which, projected in (("q", layer.q), ("k", layer.k)):
            scale = layer.scale if which == "q" else 1.0
            side = Side.of(layer, which, normalized=self.normalized)
            side = side.select(rows, slice(None), slice(None))
            bias, pos = side.bias_and_pos(self.mapped[which].unsqueeze(2), scale=scale)
            parts.append(group_parts(projected[rows] * scale, bias, pos, self.share))
        options: dict[str, Any] = {"bias": layer.bias, "drop": drop, "softcap": layer.softcap}
        options |= {"energy": False, "form": layer.mask_form}
        return share_sums(parts[0], parts[1], layer.mask, **options)
