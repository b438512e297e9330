"""A real pretrained rotary decoder through the command line: thirty layers, grouped keys, massive
tokens."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from tl_geometry import cli

pytestmark = [pytest.mark.smollm2, pytest.mark.once]


def test_a_quick_report_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "--budget",
        "quick",
        "--contexts",
        "16",
        "--length",
        "48",
        "--sections",
        "overview,basis,heads,weights",
        "--quiet",
    ]
    monkeypatch.setattr(
        sys, "argv", ["tl-geometry", "report", "smollm2", *options, "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["finished"]
    assert not run["failed"]
    assert run["provenance"]["model"] == "SmolLM2-135M-Instruct"
    assert (tmp_path / "anova.csv").read_text().count("\n") == 32  # 31 states
    page = (tmp_path / "report.html").read_text()
    assert re.search(
        r"the largest 0\.1% of 752 tokens hold [^>]*>\d+\.\d+%<.span> "
        r"of the sum of squares of state \d+",
        page,
    )  # in this corpus
    rows = list(csv.DictReader((tmp_path / "massive_tokens.csv").read_text().splitlines()))
    assert len({row["state"] for row in rows}) == 31
    assert (
        next(row for row in rows if row["state"] == "12")["coordinate"] == "507"
    )  # where its second sinks live
    assert "5 of 31 states; axes scaled per panel" in page
