"""What is a section of a report made of? Text, figures, tables, and cards that say what was
refused, left out or failed. The modules of sections fill a :class:`Draft`, which gives a
:class:`Section`."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from tl_geometry.base import html
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.render.figure import View
from tl_geometry.render.page import PageView
from tl_geometry.report.budget import Budget
from tl_geometry.report.findings import Finding
from tl_geometry.report.origin import linked, plain
from tl_geometry.report.page import Part
from tl_geometry.report.tables import TableBlock
from tl_geometry.report.templates import anchor, fill


@dataclass(frozen=True, kw_only=True)
class FigureBlock:
    """A figure at its place in the text: its HTML, and the hashes of the scripts that it runs."""

    key: str
    text: str
    scripts: tuple[str, ...] = ()

    def html(self) -> str:
        """The HTML of the figure in an element with an id, to which findings link."""
        return f'<div id="{self.key}">{self.text}</div>'


@dataclass(frozen=True, kw_only=True)
class Card:
    """Takes the place of something that is missing: what it is, why, and the traceback of an
    unexpected error. ``status`` is ``"refused"``, ``"left out"`` or ``"failed"``."""

    status: str
    what: str
    why: str
    trace: str = ""

    def line(self) -> str:
        """One sentence.

        >>> Card(status="refused", what="surrogates", why="the model is rotary.").line()
        'surrogates: refused, because the model is rotary.'
        """
        ended = "failed with an error," if self.status == "failed" else f"{self.status}, because"
        return f"{self.what}: {ended} {self.why.rstrip('.')}."

    def html(self) -> str:
        """The sentence, and the traceback folded away."""
        return fill("card", card=self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Section:
    """One part of the report: its findings, and its ``blocks`` in reading order. A block is a
    paragraph (plain text, escaped on the page), or a figure, table or card with a method ``html``.
    Tables are also written as CSV and safetensors."""

    title: str
    blocks: Sequence[Any] = ()
    findings: Sequence[Finding] = ()

    @property
    def text(self) -> list[str]:
        """The paragraphs."""
        return [plain(b) for b in self.blocks if isinstance(b, str)]

    @property
    def cards(self) -> list[Card]:
        """What was refused, left out or failed."""
        return [b for b in self.blocks if isinstance(b, Card)]

    @property
    def tables(self) -> dict[str, Result]:
        """The tables by name."""
        return {b.name: b.table for b in self.blocks if isinstance(b, TableBlock)}

    def part(self, name: str) -> Part:
        """The section as the page and its file hold it."""
        figures = [block for block in self.blocks if isinstance(block, FigureBlock)]
        section_tables = self.tables
        return Part(
            name=name,
            title=self.title,
            html=fill("section", title=self.title, blocks=self.blocks),
            findings=self.findings,
            scripts=sorted({script for figure in figures for script in figure.scripts}),
            sources=[key for table in section_tables.values() for key in table.provenance.sources],
            tables={
                key: {"columns": list(table.columns()), "rows": [list(row) for row in table.rows()]}
                for key, table in section_tables.items()
            },
        )


class Draft:
    """A section that is being made. A :meth:`part` that goes wrong becomes a card, and the rest of
    the section stays.

    >>> draft = Draft("Weights")
    >>> with draft.part("surrogates"):
    ...     raise GeometryError("the model is rotary")
    >>> draft.section().cards[0].status
    'refused'
    """

    def __init__(self, title: str, bar: tqdm | None = None) -> None:
        self.title, self.bar = title, tqdm(disable=True) if bar is None else bar
        self.bar.set_description(title)
        self.blocks: list[Any] = []
        self.findings: list[Finding] = []

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A context manager for a piece of work that may be refused (the model or its input does
        not allow it) or fail (an unexpected error). The progress bar names it."""
        self.bar.set_postfix_str(what)
        try:
            yield
        except GeometryError as error:
            self.blocks.append(Card(status="refused", what=what, why=_one_line(error)))
        # any error: one part must not cost the reader the rest of the report
        except Exception as error:
            why = _one_line(f"{type(error).__name__}: {error}")[:500]
            trace = "".join(traceback.format_exception(error))
            self.blocks.append(Card(status="failed", what=what, why=why, trace=trace))

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.blocks.append(text)

    def draw(
        self,
        figure: View | PageView,
        key: str = "",
        *,
        title: str = "",
        how: str = "",
        null: str = "",
    ) -> None:
        """Add a figure. It is drawn now, so that an error in drawing belongs to the current part,
        and its memory becomes free.

        ``key`` names the figure for links. ``title``, ``how`` (how to read it) and ``null`` replace
        the texts of the figure if they are given; an interactive figure keeps its title. Their
        numbers can name their cells (:mod:`tl_geometry.report.origin`)."""
        name = f"figure-{key or anchor(figure.title)}"
        figure.caption, figure.null = how or figure.caption, null or figure.null
        if isinstance(figure, PageView):
            self.blocks.append(_interactive_block(figure, name))
        else:
            figure.title = title or figure.title
            self.blocks.append(FigureBlock(key=name, text=linked(figure.html())))

    def table(
        self, name: str, table: Result, about: str = "", columns: Sequence[str] | None = None
    ) -> None:
        """Add a table. All of its columns are written to ``name.csv``; ``columns`` are those on the
        page."""
        self.blocks.append(TableBlock(name=name, table=table, about=about, columns=columns))

    def find(self, finding: Finding | None) -> None:
        """Add a finding, if there is one."""
        if finding is not None:
            self.findings.append(finding)

    def leave_out(self, what: str, why: str) -> None:
        """Add a card that says what is left out, and why."""
        self.blocks.append(Card(status="left out", what=what, why=why))

    def fit(self, budget: Budget, part: str, length: int, most: int, least: int = 1) -> int:
        """How many windows of ``length`` tokens a part may take (:meth:`Budget.windows`). If not
        even ``least`` fit, it is 0, and a card takes the place of the part."""
        count = budget.windows(part, length, most, least)
        if not count:
            why = f"even {least} windows are more than --budget {budget.word} allows"
            self.leave_out(part, why)
        return count

    def section(self) -> Section:
        """The section as it is now."""
        return Section(title=self.title, blocks=tuple(self.blocks), findings=tuple(self.findings))


def _interactive_block(figure: PageView, name: str) -> FigureBlock:
    """An interactive figure, with its image, title and caption for paper and for places where no
    script runs."""
    png = figure.png()  # holds the title
    still = linked(html.escape(" ".join(filter(None, (figure.caption, figure.null)))))
    live = figure.html(png, lazy=True)
    text = f'<div class="live"><p class="still">{still}</p>{live}</div>'
    return FigureBlock(key=name, text=text, scripts=figure.scripts)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
