"""Whose folder is this? :func:`check_folder` refuses to write a report among other things. It
imports nothing heavy: the command line asks before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tl_geometry.base.errors import require
from tl_geometry.base.html import plain

PAGE, RECORD = "report.html", "report.json"
WRITER = "tl-geometry report"
"""What the record of a report says, by which it is known."""
SECTIONS = ("heads", "states", "weights", "flow", "overview")
"""Keys of the sections, in reading order."""


def record_of(out: Path) -> dict[str, Any]:
    """The record of the report in a folder; empty where there is none."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    ours = isinstance(record, dict) and record.get("written_by") == WRITER
    return record if ours else {}


def check_folder(out: Path, *, force: bool = False, report: bool = True) -> None:
    """Refuse a file, and a folder that is not empty, unless ``force``; with ``report`` a folder of
    a report is taken too."""
    taken = out.exists() and not (out.is_dir() and (force or not any(out.iterdir())))
    got = plain(f"{out}, {'which is not empty' if out.is_dir() else 'a file'}")
    expected, instead = "a new or empty folder", "another --out, or --force"
    ours = report and bool(record_of(out))
    require(not taken or ours, "--out", expected=expected, got=got, instead=instead)


def check_sections(names: Sequence[str]) -> None:
    """Refuse names of no section."""
    unknown = ", ".join(name for name in names if name not in SECTIONS)
    expected = f"some of {', '.join(SECTIONS)}"
    require(names and not unknown, "--sections", expected=expected, got=unknown or "none")
