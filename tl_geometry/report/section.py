"""A section of a report: text, figures, tables, and cards that say what was refused, left out or
failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tl_geometry.base import html
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.report.clock import span


@runtime_checkable
class Figure(Protocol):
    """Anything that shows itself as an HTML fragment (see :mod:`tl_geometry.render`)."""

    def html(self) -> str:
        """The figure as a fragment of a page."""
        ...


@dataclass(frozen=True)
class Drawn:
    """A figure that has been drawn: its HTML alone."""

    text: str

    def html(self) -> str:
        """The fragment."""
        return self.text


@dataclass(frozen=True, kw_only=True)
class Card:
    """In the place of something that is not there: what, why, and for an unexpected error where it
    came from. ``status`` is ``"refused"``, ``"left out"`` or ``"failed"``."""

    status: str
    what: str
    why: str
    trace: str = ""

    def line(self) -> str:
        """One sentence.

        >>> Card(status="refused", what="surrogates", why="the model is rotary.").line()
        'surrogates: refused, because the model is rotary.'
        """
        words = {
            "refused": "refused, because",
            "left out": "left out, because",
            "failed": "failed with an error,",
        }
        return f"{self.what}: {words[self.status]} {self.why.rstrip('.')}."

    def html(self) -> str:
        """The sentence, and the traceback folded away."""
        body = f'<p class="note {self.status.replace(" ", "-")}">{html.escape(self.line())}</p>'
        if self.trace:
            trace = f"<pre>{html.escape(self.trace)}</pre>"
            body += f"<details><summary>Traceback</summary>{trace}</details>"
        return body


@dataclass(frozen=True, eq=False, kw_only=True)
class Section:
    """One part of the report: paragraphs (plain text, escaped), figures and cards, and tables, also
    written as CSV and safetensors."""

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: dict[str, Result] = field(default_factory=dict)

    @property
    def cards(self) -> list[Card]:
        """What was refused, left out or failed."""
        return [f for f in self.figures if isinstance(f, Card)]

    def html(self) -> str:
        """The section as an HTML fragment."""
        parts = [
            f"<section><h2>{html.escape(self.title)}</h2>",
            *(f"<p>{html.escape(t)}</p>" for t in self.text),
        ]
        parts += [
            f'<div class="card{" absent" if isinstance(f, Card) else ""}">{f.html()}</div>'
            for f in self.figures
        ]
        for name, table in self.tables.items():
            body = html.table(*upright(table), caption=name)
            long = len(table.rows()) > 12 or len(table.columns()) > 12
            parts.append(f"<details><summary>Table: {html.escape(name)}</summary>" if long else "")
            parts.append(f'<div class="scroll">{body}</div>' + ("</details>" if long else ""))
        return "".join([*parts, "</section>"])


def upright(table: Result, *, widest: int = 12) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Columns and rows of a table for the page: one with many columns and few rows stands on its
    side, a measure per line."""
    columns, rows = table.columns(), table.rows()
    if len(columns) <= widest or len(rows) > widest:
        return columns, rows
    return [columns[0], *(str(row[0]) for row in rows)], [
        [name, *(row[i] for row in rows)] for i, name in enumerate(columns) if i
    ]


class Draft:
    """A section in the making. What goes wrong in a :meth:`part` is a card in its place, and the
    rest of the section stays.

    >>> draft = Draft("Weights")
    >>> with draft.part("surrogates"):
    ...     raise GeometryError("the model is rotary")
    >>> draft.section().cards[0].status
    'refused'
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.text: list[str] = []
        self.figures: list[Figure] = []
        self.tables: dict[str, Result] = {}

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A piece of work that may be refused or fail."""
        try:
            yield
        except GeometryError as error:
            self.figures.append(refusal(what, error))
        except Exception as error:
            self.figures.append(failure(what, error))

    def draw(self, figure: Figure) -> None:
        """Add a figure, drawn now: what goes wrong in drawing belongs to the part, and its memory
        is free again."""
        self.figures.append(Drawn(figure.html()))

    def leave_out(self, what: str, why: str) -> None:
        """Say that something is not there, and why."""
        self.figures.append(Card(status="left out", what=what, why=why))

    def too_long(self, what: str, needed: float) -> None:
        """Say that something did not fit the time."""
        self.leave_out(
            what, f"it takes about {span(needed)} at its smallest, which --budget does not leave"
        )

    def section(self) -> Section:
        """The section as it is now."""
        return Section(
            title=self.title, text=tuple(self.text), figures=tuple(self.figures), tables=self.tables
        )


def refusal(what: str, error: GeometryError) -> Card:
    """The card of what a model or its input does not allow."""
    return Card(status="refused", what=what, why=" ".join(str(error).split()))


def failure(what: str, error: BaseException) -> Card:
    """The card of an unexpected error."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    trace = "".join(traceback.format_exception(error))
    return Card(status="failed", what=what, why=said[:500], trace=trace)
