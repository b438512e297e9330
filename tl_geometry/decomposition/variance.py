"""How much of each state is position, context and the rest? The analysis of variance of a
decomposition, which :meth:`tl_geometry.PositionContext.anova` returns, from the sums of a pass
(SPEC A.2 to A.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.guarded import Guarded
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.base.linalg import normalize_rows
from tl_geometry.base.results import Result
from tl_geometry.decomposition.groups import blocks, jackknife_blocks
from tl_geometry.decomposition.moments import Moments

LOW_RELIABILITY = 0.5
"""Split-half reliability below which a positional basis counts as mostly noise: the cosine of two
halves s + noise is |s|^2 / (|s|^2 + |noise|^2), and at one half each holds as much noise as signal.
"""


SHARES = ("pos", "ctx", "resid")
"""Parts of the total sum of squares, in the order of the ``part`` axis in this module."""
BOUNDED = (*SHARES, "ctx_null")
"""Shares that may have an interval, in the order of the table."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Anova(Guarded, Result):
    """Analysis of variance of each state: sums of squares, shares, and how far to trust them.

    Sums of squares (units of the activations squared) over C ``contexts`` and T ``positions``:
    ``total = pos + ctx + resid``, with T - 1, C - 1 and (C - 1)(T - 1) degrees of freedom per
    coordinate for the three parts. ``pos_reliability`` is the mean cosine of pos from two disjoint
    halves of the contexts.

    The shares of this very sample (:attr:`shares`, columns ``pos``, ``ctx``, ``resid``) contain the
    noise that an average over C contexts leaves. ``intervals`` are for the shares of infinitely
    many contexts: a value corrected by a jackknife over ``blocks`` of contexts, and its 95% bounds,
    ``[state 3]`` (columns ``pos_corrected``, ``pos_corrected_low`` and so on; empty below 10
    contexts or 4 groups, without bounds of ctx and resid below 32;
    :func:`anova_intervals`). ``pos_debiased`` is the correction by formula,
    ``max(0, SS_pos - SS_resid / (C - 1)) / SS_total``, which assumes residuals independent across
    contexts; it is in the table where there are no intervals.

    A large context share alone means little, because residuals are correlated along a text: any
    slowly varying text has one. ``ctx_null`` is the context share of windows spliced from random
    places of the same corpus, where it was asked for.

    ``top_share`` is the part of the raw sum of squares in the largest 0.1% of the tokens (at least
    one). ``remarks`` say for each state what to be careful about: such tokens, a reliability below
    0.5, a single context.

    With one context ``identifiable`` is false, and the shares of pos are NaN.
    """

    states: tuple[int, ...]
    contexts: int
    positions: int
    total: Float[Tensor, " state"]
    pos: Float[Tensor, " state"]
    ctx: Float[Tensor, " state"]
    resid: Float[Tensor, " state"]
    pos_debiased: Float[Tensor, " state"]
    pos_reliability: Float[Tensor, " state"]
    ctx_null: Float[Tensor, " state"] | None = None
    identifiable: bool = True
    top_share: Float[Tensor, " state"]
    remarks: tuple[str, ...] = ()
    intervals: Mapping[str, Float[Tensor, "state 3"]] = field(default_factory=dict)
    blocks: int = 0

    @property
    def shares(self) -> dict[str, Float[Tensor, " state"]]:
        """Each sum of squares over the total (NaN where the total is zero); they add up to one.

        With one context ``pos`` is NaN: its 100% would be position and content together.
        """
        total = torch.where(self.total > 0, self.total, torch.nan)
        pos = self.pos if self.identifiable else torch.full_like(total, torch.nan)
        return {"pos": pos / total, "ctx": self.ctx / total, "resid": self.resid / total}

    def _columns(self) -> dict[str, Tensor]:
        """The numbers of the table, by column: each corrected value beside its bounds, without
        intervals the correction by formula."""
        columns = {"ss_total": self.total, **self.shares}
        for name in [n for n in BOUNDED if n in self.intervals]:
            for end, values in zip(("", "_low", "_high"), self.intervals[name].unbind(1)):
                columns[f"{name}_corrected{end}"] = values
        columns |= {} if self.intervals else {"pos_debiased": self.pos_debiased}
        columns |= {"pos_reliability": self.pos_reliability}
        columns |= {} if self.ctx_null is None else {"ctx_null": self.ctx_null}
        return columns | {"top_share": self.top_share}

    def columns(self) -> Sequence[str]:
        return ["state", *self._columns(), "remarks"]

    def rows(self) -> Sequence[Sequence[object]]:
        values, texts = self._columns().values(), self.remarks or ("",) * len(self.states)
        return [[s, *(float(v[i]) for v in values), texts[i]] for i, s in enumerate(self.states)]


def sums_of_squares(m: Moments) -> dict[str, Float[Tensor, " state"]]:
    """``total``, its parts ``pos``, ``ctx`` and ``resid``, and the share ``pos_debiased``."""
    start, end = m.window
    c, t = m.contexts, end - start
    mean = m.window_mean()
    curve = m.sums[:, :, start:end].sum(0) / c - mean.unsqueeze(1)
    raw, squares = m.squares[:, :, start:end].sum((0, 2)), mean.square().sum(-1)

    # a difference of sums of squares below 1e-12 of them is rounding of float64
    def above_rounding(difference: Tensor) -> Tensor:
        return torch.where(difference > 1e-12 * raw, difference, 0.0)

    total = above_rounding(raw - c * t * squares)
    # rounding must not make a part exceed the total
    pos = torch.minimum(c * curve.square().sum((1, 2)), total)
    ctx = above_rounding(t * (m.context_squares.sum(0) - c * squares)).minimum(total)
    resid = (total - pos - ctx).clamp(min=0)
    if c == 1 or t == 1:  # all of the variation is between positions, or between contexts
        resid = nothing = torch.zeros_like(total)
        pos, ctx = (nothing, total) if t == 1 else (total, nothing)
    debiased = torch.full_like(total, torch.nan)
    if c > 1:
        noise = resid / (c - 1)
        debiased = (pos - noise).clamp(min=0) / torch.where(total > 0, total, torch.nan)
    return {"total": total, "pos": pos, "ctx": ctx, "resid": resid, "pos_debiased": debiased}


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
    """The :data:`SHARES` of the total sum of squares, on the CPU (NaN where the total is zero)."""
    values = sums_of_squares(m)
    total = torch.where(values["total"] > 0, values["total"], torch.nan)
    return torch.stack([values[name] / total for name in SHARES], dim=1).cpu()


def half_pos(
    m: Moments,
) -> tuple[Float[Tensor, "state position d_model"], Float[Tensor, "state position d_model"]] | None:
    """The positional basis from every other block of contexts and from the rest, or ``None`` where
    there is only one group.

    Blocks hold at least 8 contexts (single groups where there are not two such blocks). If windows
    of one topic were in both halves, the halves would agree on the curve of that topic, which is
    not that of all text: with topics of 8 windows and 32 contexts, halves made of single groups
    agreed to 0.87 when two independent bases agreed to 0.33.
    """
    halves = []
    member = blocks(m.counts)
    member = member if len(member) > 1 else blocks(m.counts, 1)
    if len(member) < 2:
        return None
    for part in (member[0::2].any(0), member[1::2].any(0)):
        mean = m.sums[part, :, slice(*m.window)].sum(0) / m.counts[part].sum()
        halves.append(mean - mean.mean(1, keepdim=True))
    return halves[0], halves[1]


def reliability(m: Moments) -> Float[Tensor, " state"]:
    """Mean over positions of the cosine between the positional bases of two halves of the contexts;
    NaN with one group."""
    halves = half_pos(m)
    if halves is None:
        return torch.full((m.sums.shape[1],), torch.nan, dtype=torch.float64)
    a, b = (normalize_rows(half)[0] for half in halves)
    return (a * b).sum(-1).mean(-1)


def spans(states: Sequence[int]) -> str:
    """Integers as text, with runs of three or more as spans.

    >>> spans([0, 12, 13, 14, 20, 21])
    '0, 12 to 14, 20, 21'
    """
    runs: list[list[int]] = []
    for s in sorted(states):
        if runs and s == runs[-1][-1] + 1:
            runs[-1].append(s)
        else:
            runs.append([s])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
