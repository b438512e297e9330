"""How does a report on the disk stay complete at every moment, and how does a stopped run resume?
:class:`Folder` writes sections, tables, the page and the record ``run.json``.
:mod:`tl_geometry.report.build` uses it.

Besides command, versions and provenance, ``run.json`` holds two entries:

- ``files``: the files of the folder with their hashes (:mod:`tl_geometry.base.run_files`).
- ``manifest``: for each finished section its title, tables, cards, and the hash of the settings
  that it was made under. A later run takes a section over only if its own settings have the same
  hash.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tl_geometry.base.results import SOURCES, Provenance, Result
from tl_geometry.base.run_files import (
    PAGE,
    WRITER,
    OwnFiles,
    check_folder,
    write_record,
)
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.report import page
from tl_geometry.report.contents import BASIS, PARTS, SECTIONS, report_files
from tl_geometry.report.section import Card, Section


def digest(settings: Mapping[str, Any]) -> str:
    """A hash of settings, 16 hex digits.

    >>> digest({"a": 1}) == digest({"a": 1}), digest({"a": 1}) == digest({"a": 2})
    (True, False)
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_csv(table: Result, path: Path) -> None:
    """Write a table as CSV. A cell without a number is empty. Lone surrogates are written as
    escapes, because a DataFrame cannot hold them."""
    missing = lambda v: v is None or (isinstance(v, float) and math.isnan(v))  # noqa: E731
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(table.columns())
        writer.writerows(["" if missing(v) else v for v in row] for row in table.rows())


class Folder:
    """A report on the disk. With ``resume`` it begins with the sections that are there, if they
    were made under the same settings. Files that no run of tl_geometry has written are never
    deleted, and overwritten only with ``force``. ``kept`` names the files of an earlier run that
    were changed since."""

    def __init__(
        self,
        out: Path,
        model: str,
        *,
        command: Sequence[str] = (),
        versions: Mapping[str, str] | None = None,
        resume: bool = False,
        force: bool = False,
        names: Sequence[str] = SECTIONS,
    ) -> None:
        self.started = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.model, self.names = out, model, tuple(names)
        record = check_folder(out, "report", report_files(names), force=force)
        self.files = OwnFiles(out, record.get("files", {}), force=force)
        self.known = record.get("manifest", {}) if resume else {}
        self.kept = [name for name in self.files.changed() if not force]
        if not resume:
            self.files.clear()
        self.settings = ""
        self.manifest: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {
            "written_by": WRITER,
            "command": list(command),
            "versions": dict(versions or {}),
            # kept until this run knows whether its settings are the same
            "manifest": self.known,
        }
        self.parts: dict[str, page.Part] = {}
        self.provenance = Provenance()
        self.lede = self.caution = ""
        # from here on a stopped run leaves a record, by which the next run knows its files
        self._record(finished=False)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Set the settings under which sections are made, and take over the finished sections of an
        earlier run with the same settings."""
        self.settings = digest(settings)
        for name, entry in self.known.items():
            reusable = entry.get("settings") == self.settings and not entry.get("failed")
            if reusable and self.files.unchanged(f"{PARTS}/{name}.json"):
                self.manifest[name] = entry
                self.parts[name] = page.Part.read(self.out / PARTS / f"{name}.json")

    def describe(
        self, provenance: Provenance, *, notes: Sequence[str], lede: str = "", caution: str = ""
    ) -> None:
        """Record what the sections are made from, and write page and record."""
        self.provenance = provenance
        self.lede, self.caution = lede, caution
        self.summary |= {"provenance": dataclasses.asdict(provenance), "notes": list(notes)}
        self.write()

    def add(self, name: str, section: Section, *, seconds: float = 0.0) -> None:
        """Write a finished section: its tables, its part of the page, the page and the record."""
        blocks, written = list(section.blocks), []
        for key, table in section.tables.items():
            names = [f"{key}.csv", f"{key}.safetensors"]
            foreign_files = [file for file in names if not self.files.free(file)]
            # another program wrote them while this ran; the page still holds the table
            if foreign_files:
                why = "files of these names are not of this run"
                blocks.append(Card(status="left out", what=", ".join(foreign_files), why=why))
                continue
            # table is bound as a default: a closure would see the last table of the loop
            self._write(names[0], lambda part, table=table: write_csv(table, part))
            self._write(names[1], table.save)
            written += names
        section = dataclasses.replace(section, blocks=tuple(blocks))
        cards = [
            {"status": card.status, "what": card.what, "why": card.why} for card in section.cards
        ]
        self.parts[name] = section.part(name)
        text = json.dumps(dataclasses.asdict(self.parts[name]), default=str)
        self._write(f"{PARTS}/{name}.json", lambda part: _write_text(part, text))
        self.manifest[name] = {
            "title": section.title,
            "settings": self.settings,
            "seconds": round(seconds, 1),
            "tables": written,
            "cards": cards,
            "failed": next((card["why"] for card in cards if card["status"] == "failed"), ""),
        }
        self.write()

    def save_basis(self, basis: PositionContext) -> None:
        """Write the basis, with all that a later run with ``resume`` needs."""
        self._write(BASIS, partial(basis.save, full=True))

    def finished(self) -> list[str]:
        """Names of the finished sections, in reading order."""
        return [name for name in self.names if name in self.parts]

    def write(self, finished: bool = False) -> None:
        """Write the page and the record with the sections that are finished now."""
        finished_names = self.finished()
        missing = [name for name in self.names if name not in finished_names]
        cited = [key for name in finished_names for key in self.parts[name].sources]
        text = page.document(
            f"Geometry of {self.model}",
            # the overview (what was analysed, what the numbers do not say) stands at the end
            [
                self.parts[name]
                for name in sorted(finished_names, key=lambda name: name == "overview")
            ],
            [SOURCES[key] for key in dict.fromkeys([*self.provenance.sources, *cited])],
            lede=self.lede,
            caution=self.caution,
            note=f"Being written: {len(finished_names)} of {len(self.names)} sections are here, "
            f"{', '.join(missing)} to come."
            if missing
            else "",
        )
        self.summary |= {
            "sections": [self.parts[name].title for name in finished_names],
            "failed": {
                name: entry["failed"] for name, entry in self.manifest.items() if entry["failed"]
            },
            "manifest": {name: self.manifest[name] for name in finished_names},
            "kept": self.kept,
        }
        self._write(PAGE, lambda part: _write_text(part, text))
        self._record(finished)

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        self.files.write(name, save, lambda: self._record(finished=False))

    def _record(self, finished: bool) -> None:
        """Write ``run.json``."""
        self.summary |= {"finished": finished, "files": dict(sorted(self.files.hashes.items()))}
        write_record(self.out, self.summary)

    def finish(self) -> dict[str, Any]:
        """Write the record as finished. Return it together with the tables, for a caller that
        prints them."""
        self.summary["seconds"] = round(time.monotonic() - self.started, 1)
        self.write(finished=True)
        tables: dict[str, Any] = {}
        for name in self.finished():
            tables |= self.parts[name].tables
        return {**self.summary, "tables": tables}
