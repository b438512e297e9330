"""How much would a basis differ with other contexts? Bases of some of its contexts: all but one
block (jackknife), an eighth, a quarter and half of them (learning curve), and half the difference
of two halves (noise). The reports of position and context and the positional subspaces of weights
use them.

A bootstrap over contexts would need each context. A basis holds only the sums of disjoint,
contiguous groups of contexts, so groups are resampled. Each resampled basis is a weighted sum of
group sums, and one product gives all resampled bases of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.checks import seeded
from tl_geometry.decomposition.groups import jackknife_blocks
from tl_geometry.decomposition.position_context import PositionContext

TRIES = 8
"""Random halves that are tried for each that is wanted, so that 19 of 35 pairs are found."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Subsets:
    """Sets of groups, ``member [sample group]``: row 0 holds all groups, each row of ``jackknife``
    lacks one block, and the rows of a level are disjoint parts of all groups.

    ``levels`` are pairs of a number of contexts
    (C/8, C/4, C/2, as far as there are enough groups) and the rows of the parts of that size.
    """

    member: Bool[Tensor, "sample group"]
    jackknife: slice
    levels: tuple[tuple[int, slice], ...]

    @property
    def blocks(self) -> int:
        """Number of blocks that are left out in turn."""
        return self.jackknife.stop - self.jackknife.start


def subsets(basis: PositionContext, *, jackknife: bool = True) -> Subsets:
    """The sets of groups that a report needs: all groups; with ``jackknife`` also all groups but
    one block in turn (:func:`tl_geometry.decomposition.groups.jackknife_blocks`), and the levels.

    Empty groups are left out. With fewer than two groups there is row 0 alone.
    """
    counts = basis.group_counts
    full = counts > 0
    used = full.nonzero().flatten()
    members = [full]
    levels: list[tuple[int, slice]] = []
    jackknife_rows = slice(1, 1)
    if jackknife and len(used) > 1:
        members += list(full & ~jackknife_blocks(counts))
        jackknife_rows = slice(1, len(members))
        for share in (8, 4, 2):
            if len(used) >= share:
                parts = used.tensor_split(share)
                contexts_each = round(int(counts.sum()) / share)  # the mean over the parts
                levels.append((contexts_each, slice(len(members), len(members) + share)))
                members += [torch.zeros_like(full).index_fill(0, part, True) for part in parts]
    return Subsets(member=torch.stack(members), jackknife=jackknife_rows, levels=tuple(levels))


def window_means(
    basis: PositionContext, row: int, weights: Float[Tensor, "sample group"]
) -> Float[Tensor, "sample position d_model"]:
    """``sum_g w_g sums_g / sum_g |w_g| n_g`` at each window position, for one state (``row``):
    means over sets of groups, or signed combinations of groups."""
    sums = basis.moments.sums[:, row, slice(*basis.window)]
    total = weights.abs() @ basis.group_counts.to(weights)
    pattern = "sample group, group position d_model -> sample position d_model"
    return einsum(weights, sums, pattern) / total[:, None, None]


def noise_weights(basis: PositionContext, draws: int, seed: int) -> Float[Tensor, "sample group"]:
    """Weights of groups for :func:`window_means`, a random half positive and the rest negative:
    half the difference of two halves of the contexts, whose noise is about as large as that of the
    mean over all.

    A basis made with these weights holds no positional effect, which cancels, only the noise that C
    contexts leave. No two draws are the same pair of halves, so that there are fewer where few
    groups are (4 groups have 3 pairs of halves, 8 have 35); none without two groups.
    """
    counts = basis.group_counts
    used = counts.nonzero().flatten()
    half, generator = len(used) // 2, seeded(seed)
    tries = range(TRIES * draws if half else 0)
    tried = [used[torch.randperm(len(used), generator=generator)].tolist() for _ in tries]
    # halves that change places are the same pair
    orders = {frozenset(map(frozenset, (order[:half], order[half:]))): order for order in tried}
    weights = torch.zeros(min(draws, len(orders)), len(counts), dtype=torch.float64)
    for row, order in zip(weights, orders.values(), strict=False):
        row[order[:half]] = 1.0
        # both halves get the same total weight, so that what they have in common cancels
        row[order[half:]] = -counts[order[:half]].sum().double() / counts[order[half:]].sum()
    return weights
