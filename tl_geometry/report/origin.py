"""Where do the numbers in the sentences of a report come from? Each is read from a cell of a table
that the report writes, and has the digits that its error allows. It names that cell on the page.

- ``data-source="anova.csv:2:pos"`` is file, row (from 0, below the heading) and column.
- ``data-source="positional.csv:1:rank:low:8"`` is the lower end of an interval, where the table has
  a standard error instead: ``rank`` minus Student's t of 8 samples times ``rank_se``.

Sections write numbers by :class:`Cells`; :mod:`tl_geometry.report.templates` makes HTML of them by
:func:`linked`."""

from __future__ import annotations

import math
import re

import torch

from tl_geometry.base.intervals import t_quantile
from tl_geometry.base.results import Result

OPEN, BETWEEN, CLOSE = "\ue000", "\ue001", "\ue002"
"""Private-use characters around the place of a cell and its number. With them sentences stay plain
text until the page is written, and can be escaped as a whole."""
MARKED = re.compile(f"{OPEN}([\\w.:-]+){BETWEEN}([^{OPEN}{BETWEEN}{CLOSE}]*){CLOSE}")
ATTRIBUTE = re.compile('alt="[^"]*"')
"""The attribute that may hold numbers with places: the title of a figure, as text of its image."""


class Cells:
    """The cells of the table that is written to ``name.csv``, as text for sentences. Numbers have
    the digits that their errors allow, or three with ``rounded``."""

    def __init__(self, name: str, table: Result, *, rounded: bool = False) -> None:
        self.name, self.table_rows, self.rounded = name, table.rows(), rounded
        self.place = {column: i for i, column in enumerate(table.columns())}

    def __call__(self, row: int, column: str, *, percent: bool = False) -> str:
        """A number with its place. ``percent`` writes a share as a percentage."""
        factor = 100.0 if percent else 1.0
        value = factor * self._value(row, column)
        error = math.nan if self.rounded else factor * self._error(row, column)
        return self._placed(f"{row}:{column}", by_error(value, error), percent)

    def interval(
        self, row: int, column: str, *, percent: bool = False, samples: int | None = None
    ) -> str:
        """The 95% interval of a cell. The table holds its bounds; or, if ``samples`` is given, the
        standard error that they follow from."""
        places = [f"{row}:{column}_{end}" for end in ("low", "high")]
        ends = [self._value(row, f"{column}_{end}") for end in ("low", "high")]
        if samples is not None:
            places = [f"{row}:{column}:{end}:{samples}" for end in ("low", "high")]
            value, error = (self._value(row, f"{column}{end}") for end in ("", "_se"))
            ends = list(around(value, error, samples))
        factor = 100.0 if percent else 1.0
        placed_ends = zip(places, ends, strict=True)
        texts = [self._placed(place, number(factor * end), percent) for place, end in placed_ends]
        return f"95% interval {' to '.join(texts)}"

    def _placed(self, place: str, text: str, percent: bool) -> str:
        return f"{OPEN}{self.name}.csv:{place}{BETWEEN}{text}{'%' * percent}{CLOSE}"

    def _value(self, row: int, column: str) -> float:
        value = self.table_rows[row][self.place[column]] if column in self.place else None
        return float(value) if isinstance(value, int | float) else math.nan

    def _error(self, row: int, column: str) -> float:
        """The standard error, or a quarter of the width of the 95% interval, which is about two
        errors to either side. NaN if the table has neither."""
        low, high = (self._value(row, f"{column}_{end}") for end in ("low", "high"))
        error = self._value(row, f"{column}_se")
        return error if math.isfinite(error) else (high - low) / 4


def number(value: object) -> str:
    """A cell as readers see it: three significant digits of a float, a minus sign in place of a
    hyphen, groups of thousands, and a dash for a missing value.

    >>> [number(v) for v in (0.123456, -3, 12345.6, 1e-7, True, None, float("nan"), "a_b")]
    ['0.123', '−3', '12,300', '1.00e−07', 'yes', '–', '–', 'a_b']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        # rounded first: 9.996 becomes 10.0, with one decimal place fewer than its logarithm says
        rounded = float(f"{value:.3g}")
        places = 0 if not rounded else max(0, 2 - math.floor(math.log10(abs(rounded))))
        return f"{rounded:,.{places}f}".replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


def by_error(value: float, error: float) -> str:
    """A number to the second digit of its error; three digits if it has none.

    >>> by_error(17.2361, 0.04), by_error(0.93149, 0.012), by_error(5.0, 0.0)
    ('17.236', '0.931', '5')
    """
    if float(value).is_integer() and abs(value) < 1e6:
        return number(int(value))
    if not (math.isfinite(error) and error > 0):
        return number(value)
    places = max(0, 1 - math.floor(math.log10(error)))
    # + 0.0 turns a negative zero into zero
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "−")


def around(value: float, error: float, samples: int) -> tuple[float, float]:
    """Student's 95% interval of a mean of ``samples`` samples with this standard error.

    >>> [round(end, 3) for end in around(1.0, 0.1, 8)]
    [0.764, 1.236]
    """
    reach = float(t_quantile(torch.tensor(samples - 1.0))) * error
    return value - reach, value + reach


def linked(escaped: str) -> str:
    r"""Escaped text (or HTML made from it), with each number in an element that names its cell.
    Attributes have the numbers alone.

    >>> linked("a \ue000t.csv:0:x\ue0013.2\ue002 b")
    'a <span data-source="t.csv:0:x">3.2</span> b'
    """
    # an element inside an attribute would not be HTML
    without_attributes = ATTRIBUTE.sub(lambda match: plain(match[0]), escaped)
    return MARKED.sub(r'<span data-source="\1">\2</span>', without_attributes)


def plain(text: str) -> str:
    r"""Text with the numbers, but without the places of their cells.

    >>> plain("a \ue000t.csv:0:x\ue0013.2\ue002 b")
    'a 3.2 b'
    """
    return MARKED.sub(r"\2", text)
