"""Intervals of the analysis of variance of each state: groups of contexts left out in turn."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.decomposition.moments import GROUPED, Moments
from tl_geometry.decomposition.variance import analysis

SHARES = ("pos", "ctx", "resid")
"""Parts of the total sum of squares, in the order of their axis here."""


def anova_intervals(m: Moments) -> dict[str, Float[Tensor, "state 3"]]:
    """For the shares of pos, ctx and resid of each state the jackknife's corrected value and its
    95% bounds; empty below 10 contexts or 4 groups.

    What is covered is the share that infinitely many contexts would give: the correction takes out
    what C contexts of noise leave in pos (and takes from resid). The corrected shares sum to one.
    """
    used = m.counts.nonzero().flatten()
    if m.contexts < FEWEST or len(used) < FEWEST_GROUPS:
        return {}
    whole = _shares(_total(m))
    rest = torch.stack([_shares(_total(m, int(g))) for g in used])
    found = jackknife_interval(whole, [LeftOut(rest, m.counts[used].double())])
    return {
        name: torch.stack([found.value[:, i], found.low[:, i], found.high[:, i]], dim=1)
        for i, name in enumerate(SHARES)
    }


def _total(m: Moments, without: int | None = None) -> Moments:
    """All groups, or all but one, as a single group."""
    made = {}
    for name in GROUPED:
        values = getattr(m, name)
        total = values.sum(0, keepdim=True)
        made[name] = total if without is None else total - values[without]
    return dataclasses.replace(m, **made, second=None, shift=None, tail=None)


def _shares(m: Moments) -> Float[Tensor, "state part"]:
    """Shares of the total sum of squares (NaN where that is zero)."""
    values = analysis(m)
    total = torch.where(values["total"] > 0, values["total"], torch.nan)
    return torch.stack([values[name] / total for name in SHARES], dim=1).cpu()
