"""The group of terms (or the term) that drives a head: the one that comes first both by covariance
and by gain. Every table of shares prints it.

A covariance share counts all cells of a row alike, a gain share by the attention that is paid to
them. Removing a term matters only as far as it changes attention, so a label by covariance alone
can name a term that the head does not need: in a published induction circuit it says position where
gain and removal say content. Where the two disagree there is no label, and both are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

UNCLEAR, UNIFORM = "unclear", "uniform"
"""Labels of a head without a clear winner, and of one that spreads its attention evenly."""
SHARE_OVER, MARGIN_OVER = 0.5, 0.1
"""A label needs more than half of the covariance, so that its term outweighs all others together,
and a lead of more than 0.1 over the second by both shares, about the difference between repeated
samples of a corpus."""


class Dominant(NamedTuple):
    """Label of each head, and what it rests on: the name that comes first by covariance
    (``by_cs``), its ``share`` and its lead over the second (``margin``); the same by gain; and a
    flag where the two name different terms. The order of the fields is that of columns in a sweep.
    """

    labels: tuple[str, ...]
    by_cs: tuple[str, ...]
    share: Float[Tensor, " head"]
    margin: Float[Tensor, " head"]
    by_gs: tuple[str, ...]
    gain: Float[Tensor, " head"]
    gain_margin: Float[Tensor, " head"]
    flags: tuple[str, ...]


def dominant(
    cs: Float[Tensor, "head term"],
    gs: Float[Tensor, "head term"],
    names: Sequence[str],
    *,
    certain: Sequence[Bool[Tensor, " head"]] = (),
) -> Dominant:
    """The name that has the largest covariance share and the largest gain share, if the first is
    over :data:`SHARE_OVER` and both lead by more than :data:`MARGIN_OVER` (and the head is among
    all ``certain`` ones: those whose interval of the lead excludes zero), else ``"unclear"``.

    Heads whose covariance shares are NaN are ``"uniform"``.

    >>> cs, gs = torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([[0.6, 0.4], [0.4, 0.6]])
    >>> best = dominant(cs, gs, ["position", "content"])
    >>> best.labels, best.flags
    (('position', 'unclear'), ('', 'position by cs, content by gs'))
    """
    (first_cs, share, margin), (first_gs, gain, gain_margin) = _leading(cs), _leading(gs)
    uniform, no_gain = torch.isnan(share), torch.isnan(gain)
    # without a gain share nothing disagrees, so there is no flag (and, without a lead, no label)
    agree = (first_cs == first_gs) | no_gain
    clear = agree & (share > SHARE_OVER) & (margin > MARGIN_OVER) & (gain_margin > MARGIN_OVER)
    clear = uniform | reduce(torch.logical_and, certain, clear)
    leads_cs: list[int] = first_cs.tolist()
    leads_gs: list[int] = first_gs.tolist()
    by_cs = [UNIFORM if u else names[i] for i, u in zip(leads_cs, uniform, strict=True)]
    by_gs = [
        UNIFORM if u else "" if n else names[i]
        for i, u, n in zip(leads_gs, uniform, no_gain, strict=True)
    ]
    flags = [
        "" if same else f"{a} by cs, {b} by gs"
        for a, b, same in zip(by_cs, by_gs, agree, strict=True)
    ]
    labels = [name if sure else UNCLEAR for name, sure in zip(by_cs, clear, strict=True)]
    gains = (tuple(by_gs), gain, gain_margin)
    return Dominant(tuple(labels), tuple(by_cs), share, margin, *gains, tuple(flags))


def _leading(
    shares: Float[Tensor, "head term"],
) -> tuple[Int[Tensor, " head"], Float[Tensor, " head"], Float[Tensor, " head"]]:
    """The first term of each head, its share, and its lead over the second; share and lead are NaN
    for a head with any NaN share."""
    ranked, order = shares.sort(dim=-1, descending=True, stable=True)
    unknown = torch.where(shares.isnan().any(-1), torch.nan, 0.0)
    return order[:, 0], ranked[:, 0] + unknown, ranked[:, 0] - ranked[:, 1] + unknown
