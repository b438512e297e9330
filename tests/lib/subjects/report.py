"""The row of the report: every column of its tables, and the words of its page."""

from __future__ import annotations

import re
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd

import tl_geometry as tlg
from tests.lib.subjects.row import Answers, Subject
from tests.lib.subjects.views import NUMBER
from tests.lib.worlds import World, tokens
from tl_geometry.report import build


def _report(w: World) -> Any:
    """The tables, the page, and what was said on the way."""
    said, rows = list[str](), tokens(96, 20, seed=21)  # a third, 32, are as many as intervals need
    windows = tlg.TokenWindows(tokens=rows, has_bos=False, corpus="rows")
    with tempfile.TemporaryDirectory() as folder:
        record = build(w.model, windows, folder, say=said.append)
        tables = {path.stem: pd.read_csv(path) for path in sorted(Path(folder).glob("*.csv"))}
        page = (Path(folder) / "report.html").read_text(encoding="utf-8")
    assert record["failed"] == {}
    return tables, page, said


def _told(made: Any) -> Answers:
    """Columns by table, and words less their numbers (pictures are records of views)."""
    tables, page, said = made
    found: Answers = {}
    for name, table in tables.items():
        for column, values in table.items():
            numbers = values.dtype.kind in "fiub"
            texts = [NUMBER.sub("#", str(value)) for value in values]
            found[f"{name}.{column}"] = values.to_numpy(float) if numbers else texts
    page = re.sub(r"<(script|style).*?</\1>|<[^>]+>", "\n", page, flags=re.DOTALL)
    words = {line.strip() for line in unescape(page).splitlines()} | set(said)
    return found | {"words": sorted({NUMBER.sub("#", each) for each in words if each})}


LAWS = ("again", "order", "loaded", "classes", "half", "batches", "seeds", "empty")
SUBJECTS = (
    Subject(
        name="report",
        covers=("report.build",),
        call=_report,
        answers=_told,
        tolerance={"terms.control_change": (1e-4, "a small difference of two losses")},
        only={"*": lambda w: w.kind in ("gpt2", "llama")},
        without=dict.fromkeys(LAWS, "it calls functions that have rows of their own")
        | {"disturbs:warning filters": "plots add filters"},
    ),
)
