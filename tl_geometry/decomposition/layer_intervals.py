"""How well do the contexts determine the shares of position, context and residual? 95% intervals
for :meth:`tl_geometry.PositionContext.anova`, by a jackknife that leaves out blocks of contexts in
turn; and the blocks, which other measures leave out too."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.variance import sums_of_squares

SHARES = ("pos", "ctx", "resid")
"""Parts of the total sum of squares, in the order of their axis here."""
BLOCK = 8
"""Contexts that a block holds at least. Consecutive windows are often of one topic. With topics of
8 windows, 95% intervals covered 0.86 to 0.91 with groups of 4 and 0.93 to 0.95 with these blocks;
with 16 contexts, of two topics, they cover 0.39 to 0.88 however they are grouped."""


def blocks(counts: Int[Tensor, " group"], least: int = BLOCK) -> Bool[Tensor, "row group"]:
    """Neighbouring groups joined to blocks of at least so many contexts, the last with what is
    left; empty groups belong to none.

    >>> blocks(torch.tensor([4, 4, 4, 0, 4, 4, 4])).int().tolist()
    [[1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1]]
    """
    number, block_size, block_of = 0, 0, torch.full((len(counts),), -1)
    remaining = int(counts.sum())
    for group, count in enumerate(counts.tolist()):
        if count:
            block_of[group] = number
            block_size, remaining = block_size + count, remaining - count
            # a block ends only where what remains fills another
            if block_size >= least and remaining >= least:
                number, block_size = number + 1, 0
    return block_of == torch.arange(number + 1).unsqueeze(1)


def jackknife_blocks(counts: Int[Tensor, " group"]) -> Bool[Tensor, "row group"]:
    """What a jackknife leaves out in turn: blocks of at least 8 contexts, or single groups where
    there are not four of them."""
    joined = blocks(counts)
    return joined if len(joined) >= FEWEST_GROUPS else blocks(counts, 1)


def anova_intervals(m: Moments) -> dict[str, Float[Tensor, "state 3"]]:
    """For the shares of pos, ctx and resid of each state the jackknife's corrected value and its
    95% bounds; empty below 10 contexts or 4 groups.

    What is covered is the share that infinitely many contexts would give: the correction takes out
    what C contexts of noise leave in pos (and takes from resid). The corrected shares sum to one.
    Blocks hold 8 contexts at least; where that leaves fewer than four of them (always below 32
    contexts), groups are left out as they are, and only pos has bounds: how contexts differ cannot
    be known from so few, which may be of two topics.
    """
    if m.contexts < FEWEST or int((m.counts > 0).sum()) < FEWEST_GROUPS:
        return {}
    member = jackknife_blocks(m.counts)
    left_out = torch.stack([_shares(m.select(~block, "group")) for block in member])
    sizes = (member * m.counts).sum(1).double()
    bounds = torch.stack(jackknife_interval(_shares(m), [LeftOut(left_out, sizes)])[:3], dim=-1)
    if len(blocks(m.counts)) < FEWEST_GROUPS:
        bounds[:, 1:, 1:] = torch.nan
    return dict(zip(SHARES, bounds.unbind(1), strict=True))


def _shares(m: Moments) -> Float[Tensor, "state part"]:
    """Shares of the total sum of squares (NaN where that is zero)."""
    values = sums_of_squares(m)
    total = torch.where(values["total"] > 0, values["total"], torch.nan)
    return torch.stack([values[name] / total for name in SHARES], dim=1).cpu()
