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
"""Parts of the total sum of squares, in the order of the ``part`` axis in this module."""


def anova_intervals(m: Moments) -> dict[str, Float[Tensor, "state 3"]]:
    """For each share (pos, ctx, resid) the value corrected by the jackknife and its 95% bounds (low
    and high), ``[state 3]``; empty below 10 contexts or 4 groups.

    The interval is for the share that infinitely many contexts would give: the correction removes
    the noise that C contexts leave in pos and gives it back to resid. The corrected shares sum to
    one. Blocks of at least 8 contexts are left out. Where these are fewer than four (always below
    32 contexts), single groups are left out and only pos has bounds: so few contexts, which may be
    of two topics, do not show how contexts differ.
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
    """Shares of the total sum of squares, on the CPU (NaN where the total is zero)."""
    values = sums_of_squares(m)
    total = torch.where(values["total"] > 0, values["total"], torch.nan)
    return torch.stack([values[name] / total for name in SHARES], dim=1).cpu()
