"""How sure are the shares of a sweep? Covariance and gain shares with groups of contexts left out
of the corpus and of the basis, from which jackknife intervals follow. Called by ``sweep_heads`` for
``detail="intervals"``, and by :mod:`tl_geometry.scores.position_null`, which uses the same sums.

Mean and positional vectors are estimates, often from the very contexts whose shares are measured.
Shares of position are then too high, and resampling contexts alone does not show it. So in the
share s every context uses a basis without its own group, and a delete-group jackknife leaves group
g out of the contexts and of every basis::

    s_(-g)   contexts outside g; a context of group o uses the basis of all groups but o and g

No such basis is projected by itself, because parts are linear in the sums of the groups. Let
``w_g = n_g / C`` be the share of the contexts in group g, and ``M_g`` and ``P_g`` the queries (or
keys) of ``w_g`` times the mean and the positional vectors of group g. The basis without the groups
in L has::

    bias = c sum_(g not in L) M_g,   pos = c sum_(g not in L) P_g,   c = 1 / (1 - sum_(g in L) w_g)

and cvec is the rest. So the sums of all pairs of 2 G + 1 parts (all ``M_g``, all ``P_g``, and what
remains), kept apart by the own group of the contexts, give every ``s_(-g)``.

Contexts that are not in the basis have no own group. Basis and contexts are then two independent
sources of error, each with its own jackknife: over the groups of the basis, and over contiguous
blocks of contexts. Contexts of the basis that lie in few of its groups are treated alike.
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
"""Contexts are summed in at least this many contiguous blocks (given as many contexts) and at most
twice as many: about as many as a basis has groups by default."""
UNEVEN = 2.0
"""One jackknife serves basis and contexts only if each group's share of the sweep's contexts is its
share of the basis within this factor."""


def group_basis(basis: PositionContext, layer: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``[group d_model]`` and positional vectors ``[group position d_model]`` of one state in
    each group of contexts that holds any, over the first ``length`` positions (each mean over the
    window of the basis), and the groups' shares of the contexts."""
    used = basis.group_counts.nonzero().flatten()
    counts = basis.group_counts[used].double()
    means = basis.group_sums[used, basis.index(layer)] / counts[:, None, None]
    mean = means[:, slice(*basis.window)].mean(1)
    return mean, means[:, :length] - mean.unsqueeze(1), counts / counts.sum()


def own_groups(
    basis: PositionContext, tokens: Int[Tensor, "batch position"]
) -> Int[Tensor, " batch"]:
    """The group of the basis that each context belongs to, found by the hash of its tokens; -1 for
    contexts that are not in the basis. Groups are numbered as in :func:`group_basis`, without
    empty ones."""
    unknown = torch.full((len(tokens),), -1)
    groups, hashes = basis.group_of, basis.token_hashes
    if groups is None or hashes is None:
        return unknown
    index_among_used = (basis.group_counts > 0).long().cumsum(0) - 1
    order = hashes.argsort(stable=True)
    context_hashes = row_hashes(tokens)
    # a hash above all others is clamped to the last place, whose hash differs from it
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
    """The 2 G + 1 parts whose sum is ``q`` (queries or keys): the bias of each group times its
    share, the pos of each, and the rest."""
    weight = share.to(q).reshape(-1, 1, 1, 1, 1)
    bias_and_pos = torch.cat([bias * weight, pos * weight])
    return torch.cat([bias_and_pos, (q - bias_and_pos.sum(0)).unsqueeze(0)])


def without(share: Float[Tensor, " group"], left_out: Set[int]) -> Float[Tensor, "part column"]:
    """Bias, pos and cvec (``part``) of the basis without some groups, as weighted sums of the
    2 G + 1 parts of :func:`group_parts` (``column``).

    >>> without(torch.tensor([0.25, 0.75]), {0})[:2, :4].round(decimals=2).tolist()
    [[0.0, 1.3300000429153442, 0.0, 0.0], [0.0, 0.0, 0.0, 1.3300000429153442]]
    """
    groups = len(share)
    used = torch.tensor([float(g not in left_out) for g in range(groups)]).to(share)
    change = share.new_zeros(3, 2 * groups + 1)
    change[0, :groups] = change[1, groups:-1] = used / (share * used).sum()
    # the three rows must sum to one in every column, so that bias + pos + cvec is the whole query
    change[2] = 1 - change[:2].sum(0)
    return change


def sets_of(member: Bool[Tensor, "row group"]) -> list[frozenset[int]]:
    """The numbers of the groups in each row."""
    return [frozenset(row.nonzero().flatten().tolist()) for row in member]


@dataclass(frozen=True, eq=False)
class Resampled:
    """Covariance and gain shares, as samples: the first from all contexts, then one with each group
    left out, jackknife after jackknife. ``sizes`` holds, for each jackknife, the share of the
    contexts in each of its groups."""

    cs: Float[Tensor, "head sample term"]
    gs: Float[Tensor, "head sample term"]
    sizes: tuple[tuple[float, ...], ...]

    def interval(self, values: Float[Tensor, "head sample *batch"]) -> Interval:
        """Jackknife interval of a linear function of the shares, from its value in each sample."""
        samples = values[:, 1:].split([len(sizes) for sizes in self.sizes], dim=1)
        jackknives = [
            LeftOut(sample.transpose(0, 1), values.new_tensor(sizes))
            for sample, sizes in zip(samples, self.sizes, strict=True)
        ]
        return jackknife_interval(values[:, 0], jackknives)

    def grouped(self, member: Float[Tensor, "term group"]) -> Resampled:
        """The same for groups of terms (position, content, mixed)."""
        return Resampled(self.cs @ member, self.gs @ member, self.sizes)

    def select(self, heads: Int[Tensor, " head"]) -> Resampled:
        """The same for some heads, in the given order."""
        return Resampled(self.cs[heads], self.gs[heads], self.sizes)


class LeaveOut:
    """Sums in progress of one layer: numerators and gains of all pairs of the 2 G + 1 parts, by
    (own group, block of contexts).

    ``counts`` are the contexts behind each sum, ``done`` all contexts so far, ``block`` the
    contexts per block, which doubles whenever 2 :data:`BLOCKS` blocks are full.
    """

    def __init__(self, share: Float[Tensor, " group"]) -> None:
        self.share = share
        self.sums: dict[tuple[int, int], ShareSums] = {}
        self.counts: dict[tuple[int, int], int] = {}
        self.done, self.block = 0, 1

    def add(self, sums: ShareSums, own: Sequence[int]) -> None:
        """Take in the sums of the next contexts of the corpus, on their device. ``own`` is the
        group of each; consecutive contexts of one group and block are added at once."""
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
        """Copy the sums into one piece of memory. Scattered among the temporaries of a layer they
        would prevent the allocator from reusing its memory (2 GB on SmolLM2)."""
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
        """Contexts by own group (``axis`` 0) or by block (1)."""
        contexts: dict[int, int] = {}
        for key, count in self.counts.items():
            contexts[key[axis]] = contexts.get(key[axis], 0) + count
        return contexts

    @property
    def spread(self) -> bool:
        """Whether the contexts are all in the basis and spread over its groups as the basis is,
        within :data:`UNEVEN`: then a group is left out of both at once."""
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
        """Covariance and gain shares ``[2 head term]``, with ``left_out`` groups removed from every
        basis (with ``contexts`` also from the contexts), or with some ``blocks`` of contexts
        removed. ``joined`` maps each group to all groups left out with it; a context uses a basis
        without those joined with its own."""
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
        """The shares with each group left out. ``contexts`` is the number of contexts in the basis;
        NaN where basis or sweep have too few contexts or groups for an interval.

        Groups of fewer than 8 contexts are left out together with their neighbours, because topics
        continue over several windows; with fewer than four such blocks there is no interval.
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
            # all contexts and two groups, the fewest that a jackknife takes: its interval is NaN
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
    and rotated by position, without the frozen scales. In ``mapped`` the ``part`` axis is mean and
    pos."""

    def __init__(self, layer: LayerView, basis: PositionContext) -> None:
        means, pos_vectors, self.share = group_basis(basis, layer.layer, layer.h.shape[1])
        self.normalized = basis.provenance.normalized
        self.mapped: dict[str, Float[Tensor, "part group position head d_head"]] = {}
        for which in ("q", "k"):
            mean = layer.projected(means.unsqueeze(1).to(layer.h), which)
            pos = layer.projected(pos_vectors.to(layer.h), which)
            # expanded before the rotation, which makes the mean differ by position
            mean_and_pos = torch.stack([mean.expand_as(pos), pos])
            self.mapped[which] = layer.turned(mean_and_pos, which)

    def sums(self, layer: LayerView, rows: slice, drop: int) -> ShareSums:
        """Numerators and gains of all pairs of the 2 G + 1 parts, for the contexts ``rows`` of the
        batch; the first ``drop`` positions are left out."""
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
