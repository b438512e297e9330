"""What does a table say, and does it exclude what chance gives? An :class:`Ask` answers by one
rule, and numbers are written as a reader reads them.

1. It asks of every row whether the 95% interval excludes every null. The interval is Student's, and
   it is widened by Bonferroni's rule, because one row of many is chosen, and by the error of the
   null. Rows where it does are clear.
2. Of the clear rows it takes the one where the number is furthest beyond its nulls, or one that is
   least in another way, such as the fewest directions.
3. If no row is clear, the sentence says "no evidence that", of the row that is furthest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scipy import stats

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]
RELIABLE = 0.5
"""A column that marks rows as evidence (1 or 0, or a reliability between halves of the corpus)
counts from here on."""


def number(value: object) -> str:
    """A cell in words: three significant digits, a dash for nothing.

    >>> [number(v) for v in (243768.8, -0.012345, 12, True, float("nan"), "a")]
    ['244,000', '−0.0123', '12', 'yes', '–', 'a']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else f"{value:g}".replace("-", "−").replace("inf", "∞")
    text = f"{value:.3g}"
    return (f"{float(text):,.0f}" if "e+" in text else text).replace("-", "−")


def percent(value: float) -> str:
    """A share as a percentage, with at most three significant digits and two decimals.

    >>> [percent(v) for v in (0.33452, 0.00005, 0.99999, -0.002)]
    ['33.5%', '0.01%', '100%', '−0.2%']
    """
    return f"{number(round(100 * value, 2) + 0.0)}%" if math.isfinite(value) else "–"


class Shown(float):
    """A number that a sentence writes by :func:`number`, or by :func:`percent` after ``:%``."""

    def __format__(self, form: str) -> str:
        return percent(self) if form == "%" else number(float(self))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer: the sentence, its number, the interval and the null beside it, and whether the
    null is excluded. ``item`` is the key of the item whose table holds it."""

    said: str
    value: str
    beside: str
    clear: bool
    item: str = ""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question to a table, whether the ``value`` of some row is beyond its ``nulls``.

    Nulls are columns; none of them means zero.

    - ``side``: 1 for above the nulls, -1 for below, 0 for either (``{more}`` in the sentence).
    - ``shown``: the number of the sentence as a template; ``yes``, ``no`` and ``beside`` are
      sentences. Fields are the columns of the row, ``low`` and ``high`` (the interval), ``among``
      (rows looked at) and ``more``.
    - ``p``: a column of p-values, corrected for all rows, which then decides.
    - ``evidence``: a column; only rows where it is :data:`RELIABLE` can be clear.
    - ``least``: a column; of the clear rows that with the smallest number there is taken.

    The table holds ``x_low`` and ``x_high``, or ``x_se``, of the value x, and ``x_samples`` or
    ``samples``, the number that its interval rests on; a null has ``_low`` or ``_sd`` (of
    ``draws``) where it is an estimate.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"head": ["L0H1", "L1H0"], "x": [0.1, 0.5], "x_se": 0.05})
    >>> ask = Ask(value="x", shown="{x}", yes="{head} has {x}.", no="No evidence.", beside="{low}")
    >>> ask.answer(table.assign(samples=8))
    Finding(said='L1H0 has 0.5.', value='0.5', beside='0.382', clear=True, item='')
    """

    value: str
    shown: str
    yes: str
    no: str
    beside: str
    nulls: Sequence[str] = ()
    side: int = 1
    p: str = ""
    evidence: str = ""
    least: str = ""

    def answer(self, table: pd.DataFrame, item: str = "") -> Finding | None:
        """The finding; ``None`` where the table lacks a column, or every number."""
        needed = {self.value, *self.nulls, *filter(None, (self.p, self.evidence))}
        if not needed <= set(table):
            return None
        rows: list[Row] = [dict(row) for row in table.to_dict("records")]
        rows = [row for row in rows if math.isfinite(self._gap(row))]
        proven = [row for row in rows if not self.evidence or float(row[self.evidence]) >= RELIABLE]
        if not rows:
            return None
        clear_rows = [row for row in proven if self._clear(row, len(rows))]
        far = max(clear_rows or proven or rows, key=self._gap)
        row = min(clear_rows, key=lambda r: r[self.least]) if self.least and clear_rows else far
        low, high = self._ends(row)
        more = "more" if all(row[self.value] > null for null in self._nulls(row)) else "less"
        fields = {**row, "low": low, "high": high, "among": len(rows), "more": more}
        fields = {k: Shown(v) if isinstance(v, float) else v for k, v in fields.items()}
        wide = proven and not clear_rows and self._clear(row, 1)
        beside = self.beside + "; clear alone, but not as one of {among}" * bool(wide)
        further = 0 if self.least else sum(self._gap(r) > self._gap(row) for r in proven)
        beside += f"; more extreme, but not clear: {further}" * bool(further)
        texts = (self.yes if clear_rows else self.no, self.shown, beside)
        said, value, beside = (text.format(**fields) for text in texts)
        beside = re.sub("95% interval(.*?) – to –", r"no interval\1", beside)
        return Finding(said=said, value=value, beside=beside, clear=bool(clear_rows), item=item)

    def _nulls(self, row: Row) -> list[float]:
        """The values of the nulls."""
        return [float(row[name]) for name in self.nulls] or [0.0]

    def _gap(self, row: Row) -> float:
        """How far the number is beyond its nearest null, on the side that is asked for."""
        gaps = [float(row[self.value]) - null for null in self._nulls(row)]
        # one null that is not a number must not be passed over by min
        smallest = min(self.side * gap if self.side else abs(gap) for gap in gaps)
        return smallest if all(map(math.isfinite, gaps)) else math.nan

    def _samples(self, row: Row) -> float:
        """How many samples the interval rests on."""
        return float(row.get(f"{self.value}_samples", row.get("samples", math.nan)))

    def _ends(self, row: Row) -> tuple[float, float]:
        """The 95% interval, as the table has it or from its standard error."""
        value, error = float(row[self.value]), float(row.get(f"{self.value}_se", math.nan))
        reach = float(stats.t.ppf(0.975, self._samples(row) - 1)) * error
        low, high = (row.get(f"{self.value}_{end}") for end in ("low", "high"))
        return (
            value - reach if low is None else float(low),
            value + reach if high is None else float(high),
        )

    def _clear(self, row: Row, among: int) -> bool:
        """Whether the interval, widened, excludes every null."""
        if self.p:
            return self._gap(row) > 0 and float(row[self.p]) <= 0.05
        value, (low, high) = float(row[self.value]), self._ends(row)
        level = 1 - 0.05 / among / 2  # Bonferroni's rule, two-sided
        freedom = self._samples(row) - 1
        wider = float(stats.t.ppf(level, freedom) / stats.t.ppf(0.975, freedom))
        names = self.nulls or ("zero",)
        for name, null in zip(names, self._nulls(row), strict=True):
            beyond = value - null if null < value else null - value
            reach = wider * (value - low if null < value else high - value)
            of_null = wider * (null - float(row.get(f"{name}_low", null)))
            # one more draw: sqrt(1 + 1/n) for the error of the mean of n draws
            spread, draws = float(row.get(f"{name}_sd", 0.0)), float(row.get("draws", 0))
            more = spread * math.sqrt(1 + 1 / draws) if draws > 1 else 0.0
            more *= float(stats.t.ppf(level, draws - 1)) if more else 0.0
            if not beyond > math.hypot(reach, of_null, more):
                return False
        above = [value > null for null in self._nulls(row)]
        return self._gap(row) > 0 and (self.side != 0 or len(set(above)) == 1)
