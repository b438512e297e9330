"""Every row of ``tests/tables/refusals`` is taken, or refused with the class that it names and
about what it names (``error.what``), and leaves the user's things as they were.

All calls are made once, in a process without the checks of annotations that tests switch on, as a
user would make them. Command lines run here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import probes
from tests.tables.refusals.commands import COMMANDS, exit_code
from tests.tables.refusals.row import Command, Row
from tests.tables.refusals.tables import GROUPS, ROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What came of the rows whose tests run."""
    rows: Any = [getattr(item, "callspec", None) for item in request.session.items]
    names = [spec.params["row"].name for spec in rows if spec and "row" in spec.params]
    words = [sys.executable, "-W", "ignore", "-m", "tests.tables.refusals"]
    options: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run(words, input=json.dumps(names), check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def faults(row: Row, found: dict[str, Any]) -> list[str]:
    """What is wrong with what came of a row."""
    wrong = [f"changed {name}" for name in found["left"]]
    if "error" in found:
        return [*wrong, found["error"]]
    if "taken" in found:
        if row.what is not None:
            return [*wrong, "taken"]
        return wrong if found["taken"] else [*wrong, "taken, and not as it should be"]
    if row.what is None:
        return [*wrong, f"refused: {found['text']}"]
    if found["refused"] != row.error.__name__:
        wrong.append(f"a {found['refused']}")
    if not re.search(row.what, found["what"], re.IGNORECASE):
        wrong.append(f"refused for {found['what']}")
    if not found["expected"] or len(found["text"]) > 600:
        wrong.append(f"refused without saying what was expected, or at length: {found['text']}")
    return wrong


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_calls(row: Row, outcomes: dict[str, dict[str, Any]]) -> None:
    probes.leave(outcomes[row.name].pop("called"))
    assert faults(row, outcomes[row.name]) == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_commands(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in command.files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert exit_code(command.words, monkeypatch) == 2
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert re.search(command.what, lines[-1], re.IGNORECASE), said.err
    # above it, at most, how the command is used
    assert all(line.startswith(("Usage:", "Try ")) for line in lines[:-1] if line), said.err
    assert said.out == ""
    for name, content in command.files.items():
        assert (tmp_path / name).read_bytes() == content
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == set(command.files)


def test_every_group_has_a_twin() -> None:
    assert [group.name for group in GROUPS if not group.right and not group.twin] == []
    assert [group.name for group in GROUPS if not group.wrong] == []
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) > 350


def test_what_is_wrong_with_an_outcome_is_found() -> None:
    refused = {"refused": "GeometryError", "what": "tokens", "text": "t", "expected": "e"}
    taken, refusal = (
        Row(name="a", call=lambda s: 1),
        Row(name="b", call=lambda s: 1, what="^tokens$"),
    )
    nothing: dict[str, Any] = {"left": []}
    assert faults(taken, {"taken": True} | nothing) == []
    assert faults(refusal, refused | nothing) == []
    for row, found in [
        (taken, {"taken": False}),
        (taken, refused),
        (taken, {"error": "KeyError: 1"}),
        (taken, {"taken": True, "left": ["hooks"]}),
        (refusal, {"taken": True}),
        (refusal, refused | {"what": "heads"}),
        (refusal, refused | {"refused": "BudgetError"}),
        (refusal, refused | {"expected": ""}),
        (refusal, refused | {"text": 99 * "sentence "}),
    ]:
        assert faults(row, nothing | found)
