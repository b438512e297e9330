"""What does the page of a report look like? One self-contained document, made from one template:
the findings first, then the sections with their figures, tables and cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from tl_geometry.base import html
from tl_geometry.base.results import SOURCES
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.findings import Finding, number
from tl_geometry.report.items import Item, Section, words

SHOWN = 5
"""Most findings at the head of a report; the others are folded."""
LONGEST, OPEN = 200, 16
"""Most rows of a table on the page, and most that are shown unfolded; the file has all."""
WORKS = ("song2023", "sarfati2025", "molina2023")
"""The works whose measures a report uses."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Takes the place of something that is missing, with the reason; ``trace`` is that of an
    unexpected error."""

    what: str
    why: str
    trace: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """An item that is made: its table, the HTML of its figures with the hashes of their scripts,
    and its findings."""

    item: Item
    table: pd.DataFrame
    figures: str
    scripts: Sequence[str] = ()
    findings: Sequence[Finding] = ()

    @cached_property
    def columns(self) -> list[tuple[str, bool]]:
        """The columns on the page, and whether they hold numbers; bounds stand in the cell of their
        number."""
        names = [n for n in self.item.words["columns"] or self.table if n in self.table]
        bounds = {f"{name}_{end}" for name in names for end in ("low", "high", "se")}
        numbers = set(self.table.select_dtypes("number"))
        return [(name, name in numbers) for name in names if name not in bounds]

    @cached_property
    def rows(self) -> list[list[str]]:
        """The cells as a reader sees them."""
        records = self.table.head(LONGEST).to_dict("records")
        return [[cell(row, name) for name, _ in self.columns] for row in records]


def cell(row: Any, name: str) -> str:
    """One cell, with its interval or its standard error.

    >>> cell({"x": 0.51234, "x_low": 0.5, "x_high": 0.6}, "x")
    '0.512 [0.5, 0.6]'
    """
    keys = (name, *(f"{name}_{end}" for end in ("low", "high", "se")))
    values = [row.get(key) for key in keys]
    # what is smaller is rounding
    rounded = [round(value, 12) + 0.0 if isinstance(value, float) else value for value in values]
    value, low, high, error = (number(value) for value in rounded)
    if "–" not in (low, high):
        return f"{value} [{low}, {high}]"
    return value if error in ("–", "0") else f"{value} ± {error}"


def heading(column: str) -> str:
    """The name of a column in words.

    >>> heading("ctx_corrected"), heading("loss_increase")
    ('context', 'loss (nats)')
    """
    names = words()["names"]
    parts = [column] if column in names else column.split("_")
    return " ".join(filter(None, (names.get(part, part) for part in parts)))


def document(
    a: Analysis,
    parts: Sequence[tuple[Section, Sequence[Block | Card]]],
    coming: Sequence[Section] = (),
) -> str:
    """The whole page; ``coming`` are sections that are not made yet."""
    environment = Environment(
        loader=PackageLoader("tl_geometry.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        # jinja2 marks HTML as a subclass of str: only plain str is made visible
        finalize=lambda value: html.visible(value) if type(value) is str else value,
    )
    blocks = [block for _, made in parts for block in made if isinstance(block, Block)]
    found = [finding for block in blocks for finding in block.findings]
    # first the head that does most and what it needs, then what excludes its null
    first = {"removal": 0, "terms": 1}
    found.sort(key=lambda finding: (first.get(finding.item, 2), not finding.clear))
    return environment.get_template("page.html").render(
        view=a.view,
        windows=a.windows,
        head=found[:SHOWN],
        rest=found[SHOWN:],
        parts=parts,
        coming=[section.title for section in coming],
        allowed=" ".join(dict.fromkeys(text for block in blocks for text in block.scripts)),
        sources=[SOURCES[key] for key in WORKS],
        heading=heading,
        open=OPEN,
    )
