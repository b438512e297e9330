"""Every input of ``tests/bad_inputs`` is taken, or refused by one clear line; nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bad_inputs import CALLS, COMMANDS
from tests.bad_inputs.cases import Command
from tl_geometry import cli


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    words = [sys.executable, "-W", "ignore", "-m", "tests.bad_inputs"]
    done = subprocess.run(
        words,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("at", range(len(CALLS)), ids=lambda i: CALLS[i].name)
def test_calls(at: int, outcomes: list[dict[str, Any]]) -> None:
    given, found = CALLS[at], outcomes[at]
    assert "error" not in found, found
    if given.refused is None:
        assert found.get("taken") is True, found
    else:
        text = found.get("refused")
        assert text is not None, found
        assert re.search(f"(?i){given.refused}", text), text
        assert "expected" in text, text
        assert len(text) < 600, text
    assert not found["parts"], found
    assert found["weights"], found
    assert found["hooks"] == [], found


@pytest.mark.parametrize("given", COMMANDS, ids=lambda c: c.name)
def test_commands(
    given: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in given.files:
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tl-geometry", *given.words])
    with pytest.raises(SystemExit) as found:
        cli.main()
    said = capsys.readouterr()
    assert found.value.code == 2, said
    assert re.search(f"(?i){given.refused}", said.err), said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_mistake_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    started = time.monotonic()
    words = [sys.executable, "-X", "importtime", "-m", "tl_geometry", "fit", "--corpus", "nope.txt"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert time.monotonic() - started < 60
    loaded = {
        line.rsplit("|", 1)[-1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "typer" in loaded  # the twin: what is loaded is seen
    assert not loaded & {"transformers", "transformer_lens", "matplotlib"}


def test_the_table_is_large_and_its_names_differ() -> None:
    assert len(CALLS) + len(COMMANDS) >= 120
    for table in (CALLS, COMMANDS):
        names = [(c.name, i) for i, c in enumerate(table)]
        assert all(name for name, _ in names)
    assert sum(c.refused is not None for c in CALLS) > 90 < len(CALLS) - 20
