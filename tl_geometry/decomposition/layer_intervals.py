"""How well do the contexts determine the shares of position, context and residual? 95% intervals
for :meth:`tl_geometry.PositionContext.anova`, by a jackknife that leaves out blocks of contexts in
turn."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.decomposition.groups import blocks, jackknife_blocks
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.variance import sums_of_squares

SHARES = ("pos", "ctx", "resid")
"""Parts of the total sum of squares, in the order of their axis here."""


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
