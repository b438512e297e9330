"""Where the numbers of a report's sentences come from: each is read from a cell of a table that the
report writes, has the digits that its error allows, and carries the cell's place to the page
(``data-source="anova.csv:2:pos"``: file, row from 0 under the heading, column).
"""

from __future__ import annotations

import math
import re

from tl_geometry.base.results import Result
from tl_geometry.report.tables import by_error

OPEN, BETWEEN, CLOSE = "\ue000", "\ue001", "\ue002"
"""Characters for private use that stand around a place and its number until the page is written:
sentences stay plain text, which is escaped as a whole."""
MARKED = re.compile(f"{OPEN}([\\w.:-]+){BETWEEN}([^{OPEN}{BETWEEN}{CLOSE}]*){CLOSE}")


class Cells:
    """The cells of the table that is written to ``name.csv``, as numbers of sentences."""

    def __init__(self, name: str, table: Result) -> None:
        self.name, self.table_rows = name, table.rows()
        self.place = {column: i for i, column in enumerate(table.columns())}

    def __call__(self, row: int, column: str, *, percent: bool = False) -> str:
        """A number and its place; with ``percent`` a share as such."""
        factor = 100.0 if percent else 1.0
        value, error = factor * self._value(row, column), factor * self._error(row, column)
        text = by_error(value, error) + "%" * percent
        return f"{OPEN}{self.name}.csv:{row}:{column}{BETWEEN}{text}{CLOSE}"

    def _value(self, row: int, column: str) -> float:
        value = self.table_rows[row][self.place[column]] if column in self.place else None
        return float(value) if isinstance(value, int | float) else math.nan

    def _error(self, row: int, column: str) -> float:
        """The standard error, or half of half an interval, where the table has one."""
        low, high = (self._value(row, f"{column}_{end}") for end in ("low", "high"))
        error = self._value(row, f"{column}_se")
        return error if math.isfinite(error) else (high - low) / 4


def linked(escaped: str) -> str:
    r"""Escaped text with its numbers in elements that name their cells.

    >>> linked("a \ue000t.csv:0:x\ue0013.2\ue002 b")
    'a <span data-source="t.csv:0:x">3.2</span> b'
    """
    return MARKED.sub(r'<span data-source="\1">\2</span>', escaped)


def plain(text: str) -> str:
    r"""Text without the places.

    >>> plain("a \ue000t.csv:0:x\ue0013.2\ue002 b")
    'a 3.2 b'
    """
    return MARKED.sub(r"\2", text)
