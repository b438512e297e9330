"""The folder of a report: sections, tables and the page on the disk at every moment, and the record
that a stopped run goes on from.

``run.json`` holds, besides command, versions and provenance, a ``manifest``: for each finished
section its title, files, cards and the hash of the settings that it was made under. A section is
taken over only where that hash is the same.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tl_geometry.base.results import SOURCES, Provenance, Result
from tl_geometry.report import page
from tl_geometry.report.findings import Finding
from tl_geometry.report.section import Drawn, Section

RECORD, PAGE, PARTS = "run.json", "report.html", "sections"


def digest(settings: Mapping[str, Any]) -> str:
    """16 hex digits of settings.

    >>> digest({"a": 1}) == digest({"a": 1}), digest({"a": 1}) == digest({"a": 2})
    (True, False)
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def put(path: Path, text: str) -> None:
    """Write a text so that ``path`` always holds the old one or the new one, whole; half
    characters are written out."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_csv(table: Result, path: Path) -> None:
    """A table as CSV: empty where there is no number, half characters written out (a DataFrame
    cannot hold them)."""
    missing = lambda v: v is None or (isinstance(v, float) and math.isnan(v))  # noqa: E731
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(table.columns())
        writer.writerows(["" if missing(v) else v for v in row] for row in table.rows())


class Folder:
    """A report on the disk; with ``resume`` what is there already, if it was made under the same
    settings."""

    def __init__(
        self,
        out: Path,
        model: str,
        *,
        command: Sequence[str] = (),
        versions: Mapping[str, str] | None = None,
        resume: bool = False,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.model = out, model
        self.known = read_record(out) if resume else {}
        if not resume:
            self._clear(read_record(out))
        self.plan: dict[str, Any] = dict(self.known.get("plan", {}))
        self.settings = ""
        self.manifest: dict[str, dict[str, Any]] = {}
        self.names: tuple[str, ...] = ()
        self.summary: dict[str, Any] = {"command": list(command), "versions": dict(versions or {})}
        self.parts: dict[str, dict[str, Any]] = {}
        self.provenance = Provenance()
        self.lede = self.caution = ""

    def _clear(self, old: Mapping[str, Any]) -> None:
        """Take away what an earlier run has written, so that its tables do not stand beside
        others."""
        for name, entry in old.get("manifest", {}).items():
            for file in map(Path, [*entry.get("files", []), f"{PARTS}/{name}.json"]):
                if file.name and not file.is_absolute() and ".." not in file.parts:
                    (self.out / file).unlink(missing_ok=True)

    def planned(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes that a stopped run of the same request had chosen, or nothing."""
        return dict(self.plan) if self.plan.get("request") == digest(settings) else {}

    def remember(self, settings: Mapping[str, Any], **sizes: Any) -> None:
        """Keep the sizes that were chosen for a request, so that a later run goes on with the same
        tokens."""
        self.plan = {"request": digest(settings), **sizes}

    def begin(self, settings: Mapping[str, Any]) -> None:
        """From here on sections are made under these settings; finished ones of the same settings
        are taken over."""
        self.settings = digest(settings)
        for name, entry in self.known.get("manifest", {}).items():
            part = self.out / PARTS / f"{name}.json"
            if (
                entry.get("settings") == self.settings
                and not entry.get("failed")
                and part.is_file()
            ):
                self.manifest[name] = entry
                self.parts[name] = json.loads(part.read_text(encoding="utf-8"))

    def has(self, name: str) -> bool:
        """Whether a section is finished."""
        return name in self.parts

    def describe(
        self,
        provenance: Provenance,
        *,
        notes: Sequence[str],
        names: Sequence[str],
        lede: str = "",
        caution: str = "",
    ) -> None:
        """Say what the sections are made from, and which there will be."""
        self.provenance, self.names = provenance, tuple(names)
        self.lede, self.caution = lede, caution
        self.summary |= {"provenance": dataclasses.asdict(provenance), "notes": list(notes)}
        self.write()

    def add(self, name: str, section: Section, *, seconds: float = 0.0) -> None:
        """Write a finished section: its tables, its part of the page, the page and the record."""
        (self.out / PARTS).mkdir(exist_ok=True)
        files, tables = [], {}
        for key, table in section.tables.items():
            write_csv(table, self.out / f"{key}.csv")
            table.save(self.out / f"{key}.safetensors")
            files += [f"{key}.csv", f"{key}.safetensors"]
            tables[key] = {
                "columns": list(table.columns()),
                "rows": [list(r) for r in table.rows()],
            }
        cards = [{"status": c.status, "what": c.what, "why": c.why} for c in section.cards]
        failed = next((c["why"] for c in cards if c["status"] == "failed"), "")
        self.manifest[name] = {
            "title": section.title,
            "settings": self.settings,
            "seconds": round(seconds, 1),
            "files": files,
            "cards": cards,
            "failed": failed,
        }
        drawn = [b for b in section.blocks if isinstance(b, Drawn)]
        self.parts[name] = {
            "html": section.html(),
            "tables": tables,
            "findings": [dataclasses.asdict(f) for f in section.findings],
            "scripts": sorted({s for d in drawn for s in d.scripts}),
            "library": any(d.library for d in drawn),
            "sources": section.sources,
        }
        put(self.out / PARTS / f"{name}.json", json.dumps(self.parts[name], default=str))
        self.write()

    def finished(self) -> list[str]:
        """Sections there are, in reading order."""
        return [name for name in self.names if name in self.parts]

    def write(self, finished: bool = False) -> None:
        """Write page and record as they are now."""
        done = self.finished()
        titles = [self.manifest[name]["title"] for name in done]
        cited = [key for name in done for key in self.parts[name].get("sources", ())]
        sources = [SOURCES[key] for key in dict.fromkeys([*self.provenance.sources, *cited])]
        missing = [name for name in self.names if name not in self.parts]
        here = f"Being written: {len(done)} of {len(self.names)} sections are here"
        note = f"{here}, {', '.join(missing)} to come." if missing else ""
        title = f"Geometry of {self.model}"
        last = sorted(done, key=lambda name: name == "overview")
        parts = [self._part(name) for name in last]
        made = page.document(title, parts, sources, lede=self.lede, caution=self.caution, note=note)
        put(self.out / PAGE, made)
        own = {name for name in ("basis.safetensors",) if (self.out / name).is_file()}
        self.summary |= {
            "sections": titles,
            "finished": finished,
            "failed": {name: e["failed"] for name, e in self.manifest.items() if e["failed"]},
            "manifest": {name: self.manifest[name] for name in done},
            "plan": self.plan,
            "files": sorted({f for name in done for f in self.manifest[name]["files"]} | own),
        }
        put(self.out / RECORD, json.dumps(self.summary, indent=2, default=str) + "\n")

    def _part(self, name: str) -> page.Part:
        """A finished section as the page takes it."""
        held = self.parts[name]
        return page.Part(
            name=name,
            title=self.manifest[name]["title"],
            html=held["html"],
            findings=tuple(Finding(**f) for f in held.get("findings", ())),
            scripts=tuple(held.get("scripts", ())),
            library=held.get("library", False),
        )

    def finish(self, seconds: float) -> dict[str, Any]:
        """The record as finished, and with the tables for who wants to print them."""
        self.summary["seconds"] = round(seconds, 1)
        self.write(finished=True)
        tables = [self.parts[name]["tables"] for name in self.finished()]
        return {**self.summary, "tables": {n: t for held in tables for n, t in held.items()}}


def read_record(out: Path) -> dict[str, Any]:
    """``run.json`` of a folder; nothing where there is none that can be read."""
    try:
        found = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
