"""Which functions of the package does a test call? :mod:`tests.mutate` asks before it plants a
fault in one: a trace function sees each call of a process, and of those that a test starts."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

PACKAGE = f"{os.sep}tl_geometry{os.sep}"
NOTES = "REACHED_NOTES"
"""The environment variable with the folder for what other processes call."""
ELSEWHERE = "from tests import probes\nprobes.start()\nprobes.note_at_the_end()\n"
"""``sitecustomize.py`` of a watched tree, which each process that a test starts runs first."""
_called: set[tuple[str, str]] = set()


def _see(frame: FrameType, _event: str, _argument: object) -> None:
    """Called at each call of a function; lines of it are not followed."""
    code = frame.f_code
    if PACKAGE in code.co_filename:
        _called.add((code.co_filename, code.co_qualname))


def start() -> None:
    """Note from now on what is called."""
    threading.settrace(_see)
    sys.settrace(_see)


def taken() -> set[str]:
    """``path::qualified name`` of what was called since this was asked last. The import of a module
    calls its code and that of its classes, too."""
    found = {f"tl_geometry/{file.split(PACKAGE)[-1]}::{name}" for file, name in _called}
    _called.clear()
    return found


def leave(names: Iterable[str]) -> None:
    """Leave a file with what was called, as :func:`taken` names it, for the process that watches;
    nothing where none does."""
    if folder := os.environ.get(NOTES):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / secrets.token_hex(8)).write_text("\n".join(names))


def note_at_the_end() -> None:
    """Leave what this process will have called."""
    atexit.register(lambda: leave(taken()))
