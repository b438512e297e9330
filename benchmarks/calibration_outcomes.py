"""One row of the calibration: where its data come from, what was measured, what is promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import made_on
from tl_geometry.base.intervals import Interval


class Goal(NamedTuple):
    """What is counted, and between which values it must lie."""

    name: str
    low: float
    high: float


COVERAGE = Goal("coverage 95%", 0.90, 0.98)
SIZE = Goal("size 5%", 0.03, 0.07)
AT_MOST = Goal("size at most 5%", 0.0, 0.07)
"""Of floors and nulls without a level of their own, which are to err on the safe side."""
HALF = Goal("half", 0.45, 0.55)
"""Of a null that is one more draw: it is exceeded as often as not."""
SINGLE = 0.85
"""Coverage that no single term of a row may be below."""


class Origin(NamedTuple):
    """What generates the data, their strongest autocorrelation (along positions, and from sample
    to sample), and the fewest samples."""

    generator: str
    autocorrelation: str
    fewest: str


@dataclass(frozen=True)
class Outcome:
    """Coverage (or size) over repeats, its Monte-Carlo error, and the worst single term."""

    name: str
    goal: Goal
    origin: Origin
    value: float
    error: float
    worst: float
    repeats: int
    seconds: float
    promised: bool = True

    @property
    def kept(self) -> bool:
        """Whether the promise is kept, within three Monte-Carlo errors."""
        reach = 3 * self.error
        inside = self.goal.low - reach <= self.value <= self.goal.high + reach
        lowest = SINGLE - 0.1 * (self.repeats < 300)
        return inside and (self.goal != COVERAGE or self.worst >= lowest)

    @property
    def promise(self) -> str:
        """What the table says of the promise."""
        return "" if not self.promised else "kept" if self.kept else "**not kept**"


def outcome(
    name: str,
    hits: Tensor,
    start: float,
    origin: Origin,
    *,
    goal: Goal = COVERAGE,
    promised: bool = True,
) -> Outcome:
    """From hits ``[repeat term]`` (NaN where nothing was printed); terms of a repeat are not
    independent."""
    per_repeat = hits.nanmean(1)
    per_repeat = per_repeat[torch.isfinite(per_repeat)]
    error = float(per_repeat.std() / len(per_repeat) ** 0.5)
    terms = hits.nanmean(0)
    worst = float(terms.min() if goal == COVERAGE else terms.max())
    value, spent = float(per_repeat.mean()), time.perf_counter() - start
    return Outcome(name, goal, origin, value, error, worst, len(hits), spent, promised)


def covered(found: Interval, truth: Tensor) -> Tensor:
    """One where the truth is inside, NaN where there is no interval."""
    inside = ((found.low <= truth) & (truth <= found.high)).double()
    return torch.where(torch.isnan(found.low), torch.nan, inside).flatten()


def lag_one(h: Tensor) -> float:
    """Correlation of states ``[... context position d_model]`` about the mean of each position with
    those of the position before, the strongest over leading axes."""
    centred = (h - h.mean(-3, keepdim=True)).double()
    before, after = centred[..., :-1, :], centred[..., 1:, :]
    axes = (-3, -2, -1)
    size = (before.square().sum(axes) * after.square().sum(axes)).sqrt()
    return float(((before * after).sum(axes) / size).max())


def markdown(rows: Iterable[Outcome], report: Callable[[str], object]) -> str:
    """The table of ``benchmarks/calibration.md``; ``report`` receives each row when it is there."""
    lines = [
        "# Calibration of printed intervals and p-values",
        "",
        "Made by `python -m benchmarks.calibration > benchmarks/calibration.md` "
        f"({made_on()}). Each row simulates an interval, a p-value or a null in its own setting, "
        "in which the truth is known. What is promised, each within three Monte-Carlo errors:",
        "",
        f"- a nominal 95% interval covers the truth in {COVERAGE.low:.0%} to {COVERAGE.high:.0%} "
        f"of the repeats, and for no single term in fewer than {SINGLE:.0%} ({SINGLE - 0.1:.0%} in "
        "rows of fewer than 300 repeats; this bound is exact);",
        f"- a nominal 5% test rejects a true null in {SIZE.low:.0%} to {SIZE.high:.0%} of the "
        f"repeats, a test of size at most 5% in at most {AT_MOST.high:.0%};",
        f"- a null that is one more random draw is exceeded in {HALF.low:.0%} to {HALF.high:.0%} "
        "of the repeats.",
        "",
        "A larger coverage or a smaller size errs on the safe side. *Autocorrelation* is the "
        "strongest in the row: the correlation of neighbouring positions, or what consecutive "
        "samples have in common. *Fewest* is the smallest number of samples in the row, *worst "
        "term* the term with the least coverage or the largest size. Rows without a promise: those "
        "'of before' are methods that a correction replaced; the others show where an interval or "
        "a test would be wrong, and why the library does not offer it or seldom prints it.",
        "",
        "| setting | generator | autocorrelation | fewest | nominal | measured "
        "| Monte-Carlo error | worst term | repeats | promise |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in rows:
        numbers = f"{o.value:.3f} | {o.error:.3f} | {o.worst:.3f} | {o.repeats}"
        about = " | ".join([o.name, *o.origin, o.goal.name])
        lines.append(f"| {about} | {numbers} | {o.promise} |")
        report(f"{lines[-1]} {o.seconds:.0f} s\n")
    return "\n".join(lines) + "\n"
