"""What does the page of a report look like? One self-contained document, made from one template:
the findings first, then the sections with their figures, tables and cards."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tl_geometry.base import html
from tl_geometry.base.results import SOURCES
from tl_geometry.report.findings import Finding, number

if TYPE_CHECKING:
    from tl_geometry.report.analysis import Analysis
    from tl_geometry.report.items import Item, Section

SHOWN = 5
"""Most findings at the head of a report; the others are folded."""
LONGEST, OPEN = 200, 16
"""Most rows of a table on the page, and most that are shown unfolded; the file has all."""
NAMES = {
    "pos": "position",
    "ctx": "context",
    "resid": "residual",
    "cs": "share",
    "gs": "share of gain",
    "kl": "KL (nats)",
    "change": "change (nats)",
    "others": "another head (nats)",
    "loss_increase": "loss (nats)",
    "top1": "same likeliest token",
    "incoherence": "|cos|",
    "corrected": "",
    "se": "standard error",
    "avg": "mean",
    "out": "held out",
}
"""Parts of a column's name -> words for the reader; "_" becomes a space."""
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

    @property
    def size(self) -> str:
        """How much of the table is on the page."""
        shown = min(len(self.table), LONGEST)
        return f"{shown} of {len(self.table)} rows" if shown < len(self.table) else f"{shown} rows"

    @property
    def open(self) -> bool:
        """Whether the table is shown unfolded."""
        return len(self.table) <= OPEN

    @property
    def head(self) -> list[tuple[str, bool]]:
        """Headings, and whether their column holds numbers."""
        return [(heading(name), name in self._numbers) for name in self._columns]

    @property
    def rows(self) -> list[list[str]]:
        """The cells as a reader sees them, each with its interval."""
        records = self.table.head(LONGEST).to_dict("records")
        return [[self._cell(row, name) for name in self._columns] for row in records]

    @property
    def _columns(self) -> list[str]:
        names = [n for n in self.item.columns or self.table.columns if n in self.table]
        ends = ("_low", "_high", "_se")
        return [n for n in names if not (n.endswith(ends) and n.rsplit("_", 1)[0] in names)]

    @property
    def _numbers(self) -> set[str]:
        return set(self.table.select_dtypes("number"))

    def _cell(self, row: Any, name: str) -> str:
        shown = number(row[name])
        low, high, error = (row.get(f"{name}_{end}", math.nan) for end in ("low", "high", "se"))
        if math.isfinite(low) and math.isfinite(high):
            return f"{shown} [{number(low)}, {number(high)}]"
        return f"{shown} ± {error:.1g}" if math.isfinite(error) else shown


def heading(column: str) -> str:
    """The name of a column in words.

    >>> heading("ctx_corrected"), heading("loss_increase")
    ('context', 'loss (nats)')
    """
    if column in NAMES:
        return NAMES[column]
    return " ".join(filter(None, (NAMES.get(part, part) for part in column.split("_"))))


@functools.cache
def environment() -> Environment:
    """The templates. Every value is escaped, and what acts unseen is made visible."""
    return Environment(
        loader=PackageLoader("tl_geometry.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        # jinja2 marks HTML as a subclass of str: only plain str is changed
        finalize=lambda value: html.visible(value) if type(value) is str else value,
    )


def chosen(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """The findings at the head, and the others. The first stays first, because it says what the
    model does; then come those that exclude their null."""
    ranked = [*findings[:1], *sorted(findings[1:], key=lambda finding: not finding.clear)]
    return ranked[:SHOWN], ranked[SHOWN:]


def document(
    a: Analysis,
    parts: Sequence[tuple[Section, Sequence[Block | Card]]],
    coming: Sequence[Section] = (),
) -> str:
    """The whole page; ``coming`` are sections that are not made yet."""
    blocks = [block for _, made in parts for block in made if isinstance(block, Block)]
    found = [finding for block in blocks for finding in block.findings]
    # the head that does most comes first, where the report has it
    found.sort(key=lambda finding: finding.item != "removal")
    head, rest = chosen(found)
    view, rows = a.view, a.windows
    lede = f"{view.n_layers} blocks of {view.n_heads} heads, on {len(rows)} windows of "
    lede += f"{rows.tokens.shape[1]} tokens of {rows.corpus}. Each finding stands beside its "
    lede += "interval and what chance gives."
    style = (files("tl_geometry.report") / "assets" / "report.css").read_text(encoding="utf-8")
    return (
        environment()
        .get_template("page.html")
        .render(
            title=view.name,
            lede=lede,
            embedded=view.name == "tl-geometry-embedded",
            head=head,
            rest=rest,
            parts=parts,
            coming=[section.title for section in coming],
            allowed=" ".join(dict.fromkeys(text for block in blocks for text in block.scripts)),
            style=Markup(style),
            sources=[SOURCES[key] for key in WORKS],
            is_card=lambda block: isinstance(block, Card),
        )
    )
