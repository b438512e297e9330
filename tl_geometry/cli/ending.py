"""How a command ends: its exit code and the one line that says why."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.printable import printable
from tl_geometry.base.run_files import RECORD
from tl_geometry.cli.arguments import file_trouble

USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for a command line that it cannot parse (its own copy of click's exception, or
click's)."""
STOPPED = 130
"""Exit code of a run that was interrupted from the keyboard, as shells give it: 128 and the number
of the signal."""
_partial: list[Path] = []
"""Where the running command puts what a stopped run goes on from."""
_again: list[str] = []
"""How it is gone on with."""
_signal: list[int] = []
"""The signal that stopped this run, if it was another than the keyboard's."""


def goes_on_from(*places: Path, how: str = "--resume") -> None:
    """Say where a command puts what a stopped run goes on from (files and folders), and how."""
    _partial[:], _again[:] = places, [how]


def _stopped(started: float) -> str:
    """What is said of a stopped run: what it has finished is kept, if it has finished anything."""
    kept = [p for p in _partial if any(f.stat().st_mtime >= started for f in _files(p))]
    if not kept:
        return "stopped; this run had finished nothing yet"
    where = printable(", ".join(map(str, kept)))
    return f"stopped; what was finished is kept in {where}, {_again[0]} goes on from it"


def _files(place: Path) -> list[Path]:
    """A file, the sections of a report in a folder, or the training states of an experiment."""
    found = [*place.glob("*.json"), *place.rglob("training.safetensors")]
    return [p for p in (found if place.is_dir() else [place]) if p.is_file() and p.name != RECORD]


def _terminated(number: int, frame: object) -> None:
    """SIGTERM (a scheduler, a shutdown) ends a run as the keyboard does."""
    _signal.append(number)
    raise KeyboardInterrupt


def run(app: Callable[..., Any]) -> None:
    """Run the command line. An error that the user can mend is one line on standard error and exit
    code 2; stopped is 130, terminated 143."""
    started = time.time()
    goes_on_from()
    _signal.clear()
    try:
        with _handled(signal.SIGTERM):
            code = app(prog_name="tl-geometry", standalone_mode=False)
        sys.stdout.flush()
    except GeometryError as error:
        raise SystemExit(_line(str(error), 2)) from None
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except BrokenPipeError:  # the reader of our output has gone
        raise SystemExit(_silenced()) from None
    except USAGE as error:
        raise SystemExit(_line(str(error.format_message()), 2)) from None
    except Exception as error:
        said = file_trouble(error)
        if said is None:
            raise
        raise SystemExit(_line(said, 2)) from None
    if code == STOPPED:  # some versions of typer turn the interruption into a code
        raise SystemExit(_line(_stopped(started), 128 + (_signal or [signal.SIGINT])[0]))
    raise SystemExit(code if isinstance(code, int) else 0)


class _handled:
    """A signal that raises ``KeyboardInterrupt``, where handlers may be set at all (the main
    thread)."""

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.before = number, None

    def __enter__(self) -> None:
        try:
            self.before = signal.signal(self.number, _terminated)
        except ValueError:  # not the main thread
            self.before = None

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(self.number, self.before)


def _silenced() -> int:
    """Send what is still to be written to nowhere, or the interpreter complains at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _line(text: str, code: int) -> int:
    """Say what went wrong, and with which arguments, in one line on standard error."""
    said = " ".join(text.split())
    typer.echo(printable(f"tl-geometry: {said} [{shlex.join(sys.argv[1:])}]"), err=True)
    return code
