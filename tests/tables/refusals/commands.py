"""Command lines that are refused: of ``fit``, ``report``, ``trace`` and ``check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.tables.refusals.row import Command
from tl_geometry import cli

TEXT = {"a.txt": b"def f(x):\n    return x\n" * 300}
MINE = b"mine, and nothing to do with this library"


def exit_code(words: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> int:
    """That of a whole command line."""
    monkeypatch.setattr(sys, "argv", ["tl-geometry", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def fit(*words: str) -> tuple[str, ...]:
    return ("fit", "--corpus", "a.txt", "--length", "16", "--contexts", "4", *words)


def _with(name: str, words: tuple[str, ...], what: str, files: Any = TEXT) -> Command:
    return Command(name=name, words=words, what=what, files=files)


COMMANDS = (
    _with("contexts beyond the corpus", fit("--contexts", "9999"), "contexts|windows"),
    _with("more shards than windows", fit("--shard", "5/5"), "shard"),
    _with("no prompt", ("trace", "embedded", " a", "--prompt", ""), "prompt"),
    _with("a basis into a folder", fit("--out", "."), "out"),
    _with("a basis below a file", fit("--out", "a.txt/b.safetensors"), "out|a.txt"),
    _with("a basis over a file of the user", fit(), "--force", {**TEXT, "basis.safetensors": MINE}),
    _with("a report into a file", ("report", "--out", "a.txt"), "out|a.txt"),
    _with("a report over one's file", ("report", "--out", "."), "--force", {"report.html": MINE}),
    _with("a device that no machine has", ("check", "--device", "cuda:99"), "device"),
    _with("a folder without a model", ("check", "."), "config.json"),
)
"""The same commands with right words are in ``tests/laws/test_cli.py``."""
