"""The whole analysis of a model on a corpus, to a folder: ``report.html``, CSV tables, safetensors results and ``run.json``.

A section is a function ``section(analysis) -> Section | None`` in a module of this package, named in :data:`SECTIONS` in
reading order. To add one, write the function and add its name; ``None`` leaves it out (with nothing said).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tl_geometry import _html
from tl_geometry.decomposition import PositionContext
from tl_geometry.records import ModelView, TokenWindows
from tl_geometry.report import page
from tl_geometry.results import SOURCES, Result

SECTIONS = ("overview", "basis", "heads", "measures", "weights", "flow")
"""Modules of this package that hold a ``section`` function, in reading order."""


@runtime_checkable
class Figure(Protocol):
    """Anything that shows itself as an HTML fragment (see :mod:`tl_geometry.render`)."""

    def html(self) -> str: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """What sections are made from: the model, the tokens, the basis, its null and its untrained twin (where there is one)."""

    model: Any
    view: ModelView
    windows: TokenWindows
    basis: PositionContext
    null: PositionContext | None = None
    twin: PositionContext | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()
    progress: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Section:
    """One part of the report: paragraphs (plain text, escaped), figures, and tables that are also written as CSV and safetensors."""

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: dict[str, Result] = field(default_factory=dict)

    def html(self) -> str:
        """The section as an HTML fragment."""
        parts = [f"<section><h2>{_html.escape(self.title)}</h2>", *(f"<p>{_html.escape(t)}</p>" for t in self.text)]
        parts += [f'<div class="card">{figure.html()}</div>' for figure in self.figures]
        for name, table in self.tables.items():
            body = _html.table(*upright(table), caption=name)
            long = len(table.rows()) > 12 or len(table.columns()) > 12
            parts.append(f"<details><summary>Table: {_html.escape(name)}</summary>" if long else "")
            parts.append(f'<div class="scroll">{body}</div>' + ("</details>" if long else ""))
        return "".join([*parts, "</section>"])


def upright(table: Result, *, widest: int = 12) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Columns and rows of a table for the page: one with many columns and few rows stands on its side, a measure per line."""
    columns, rows = table.columns(), table.rows()
    if len(columns) <= widest or len(rows) > widest:
        return columns, rows
    return [columns[0], *(str(row[0]) for row in rows)], [[name, *(row[i] for row in rows)] for i, name in enumerate(columns) if i]


def sections(analysis: Analysis, names: Sequence[str] = SECTIONS) -> list[Section]:
    """All sections that apply to this analysis, in order."""
    made = []
    for name in names:
        build: Callable[[Analysis], Section | None] = importlib.import_module(f"tl_geometry.report.{name}").section
        part = build(analysis)
        if part is not None:
            made.append(part)
    return made


def write(analysis: Analysis, out: Path, *, command: Sequence[str] = (), names: Sequence[str] = SECTIONS) -> dict[str, Any]:
    """Write the report into ``out`` and return the summary that is also written as ``run.json``."""
    out.mkdir(parents=True, exist_ok=True)
    made = sections(analysis, names)
    for part in made:
        for name, table in part.tables.items():
            table.to_dataframe().to_csv(out / f"{name}.csv", index=False)
            table.save(out / f"{name}.safetensors")
    analysis.basis.save(out / "basis.safetensors")
    provenance = dataclasses.asdict(analysis.basis.provenance)
    summary = {
        "command": list(command),
        "provenance": provenance,
        "versions": versions(),
        "notes": list(analysis.notes),
        "sections": [part.title for part in made],
        "files": sorted(p.name for p in out.iterdir() if p.suffix in (".csv", ".safetensors") and p.stem != "checkpoint"),
        "tables": {n: {"columns": list(t.columns()), "rows": [list(r) for r in t.rows()]} for part in made for n, t in part.tables.items()},
    }
    sources = [SOURCES[key] for key in analysis.basis.provenance.sources]
    text = page.document(f"Geometry of {analysis.view.name}", [part.html() for part in made], [part.title for part in made], sources)
    (out / "report.html").write_text(text, encoding="utf-8")
    brief = {k: v for k, v in summary.items() if k != "tables"}
    (out / "run.json").write_text(json.dumps(brief, indent=2, default=str) + "\n", encoding="utf-8")
    return summary


def versions() -> dict[str, str]:
    """Versions of everything that shapes the numbers."""
    from importlib.metadata import version

    names = ("tl-geometry", "transformer-lens", "torch", "transformers", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except Exception:  # an uninstalled checkout has no metadata
            found[name] = "unknown"
    return {"python": platform.python_version(), "platform": sys.platform, **found}
