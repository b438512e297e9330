"""Which group of terms (or which term) drives a head? Its label is the one that comes first both by
covariance and by gain. Every table of shares prints it.

A covariance share counts all cells of a row alike, a gain share by the attention that is paid to
them. Removing a term matters only as far as it changes attention, so a label by covariance alone
can name a term that the head does not need: in a published induction circuit it says position where
gain and removal say content. Where the two disagree there is no label, and both are named.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Ranking(NamedTuple):
    """The term that comes first by one kind of share, for each head: its index, its share, its lead
    over the second (``margin``), and whether the lead is clear."""

    first: Int[Tensor, " head"]
    share: Float[Tensor, " head"]
    margin: Float[Tensor, " head"]
    clear: Bool[Tensor, " head"]

    @staticmethod
    def of(
        shares: Float[Tensor, "head term"], certain: Bool[Tensor, " head"] | None = None
    ) -> Ranking:
        """``certain`` says for which heads the interval of the lead excludes zero; ``None`` where
        no intervals were computed."""
        ranked, order = shares.sort(dim=-1, descending=True, stable=True)
        several = shares.shape[1] > 1
        margin = (
            ranked[:, 0] - ranked[:, 1] if several else torch.full_like(ranked[:, 0], torch.inf)
        )
        clear = margin > MARGIN_OVER
        clear = clear if certain is None else clear & certain
        # added below: a head with any NaN share gets a NaN share and margin
        nan_or_zero = torch.where(torch.isnan(shares).any(-1), torch.nan, 0.0)
        return Ranking(order[:, 0], ranked[:, 0] + nan_or_zero, margin + nan_or_zero, clear)


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
    certain: tuple[Bool[Tensor, " head"] | None, Bool[Tensor, " head"] | None] = (None, None),
) -> Dominant:
    """The name that has the largest covariance share and the largest gain share, if the first is
    over :data:`SHARE_OVER` and both lead by more than :data:`MARGIN_OVER` (and the head is among
    the ``certain`` of each share, where they are given), else ``"unclear"``.

    Heads whose covariance shares are NaN are ``"uniform"``.

    >>> cs, gs = torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([[0.6, 0.4], [0.4, 0.6]])
    >>> best = dominant(cs, gs, ["position", "content"])
    >>> best.labels, best.flags
    (('position', 'unclear'), ('', 'position by cs, content by gs'))
    """
    if not names:
        unknown, no_names = torch.full((len(cs),), torch.nan, dtype=cs.dtype), ("",) * len(cs)
        return Dominant(no_names, no_names, unknown, unknown, no_names, unknown, unknown, no_names)
    by_cs, by_gs = (Ranking.of(x, c) for x, c in zip((cs, gs), certain, strict=True))
    uniform, no_gain = torch.isnan(by_cs.share), torch.isnan(by_gs.share)
    # without a gain share nothing disagrees, so there is no flag (and, without a lead, no label)
    agree = (by_cs.first == by_gs.first) | no_gain
    clear = by_cs.clear & by_gs.clear & agree & (by_cs.share > SHARE_OVER)
    labels, first_by_cs, first_by_gs, flags = [], [], [], []
    for head in range(len(cs)):
        name_by_cs, name_by_gs = names[int(by_cs.first[head])], names[int(by_gs.first[head])]
        if uniform[head]:
            name_by_cs = name_by_gs = UNIFORM
        elif no_gain[head]:
            name_by_gs = ""
        first_by_cs.append(name_by_cs)
        first_by_gs.append(name_by_gs)
        labels.append(name_by_cs if uniform[head] or clear[head] else UNCLEAR)
        flags.append("" if agree[head] else f"{name_by_cs} by cs, {name_by_gs} by gs")
    return Dominant(
        tuple(labels),
        tuple(first_by_cs),
        by_cs.share,
        by_cs.margin,
        tuple(first_by_gs),
        by_gs.share,
        by_gs.margin,
        tuple(flags),
    )
