"""How does a command end? With an exit code, and with a line on standard error that says why.
``main`` of the command line runs every command through :func:`run`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.printable import printable
from tl_geometry.cli.arguments import file_trouble

USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for a command line that it cannot parse. By version it is click's exception or
typer's own copy of it, so it is looked up by name among the base classes."""
STOPPED = 130
"""Exit code of a run that was interrupted from the keyboard, as shells give it: 128 plus the number
of the signal (SIGINT, 2)."""
_finished: list[tuple[Path, str]] = []
"""Where the running command keeps what it has finished, and how to resume: an option, or the same
command again. A list of one item or none, so that functions can change it."""
_signal: list[int] = []
"""The signal that stopped this run, unless it was an interrupt from the keyboard."""


def goes_on_from(place: Path, how: str = "--resume") -> None:
    """Register the file or folder from which a stopped run of this command resumes, and how."""
    _finished[:] = [(place, how)]


def _stopped() -> str:
    """The message of a stopped run: where its finished parts are, if it keeps any."""
    for place, how in _finished:
        if place.exists():
            where = printable(str(place))
            return f"stopped; anything finished is kept in {where}, {how} goes on from it"
    return "stopped; nothing was kept"


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM (a scheduler, a shutdown) ends a run as the keyboard does."""

    def stop(number: int, frame: object) -> None:
        _signal.append(number)
        raise KeyboardInterrupt

    # only the main thread may set a handler
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(app: Callable[..., Any]) -> None:
    """Run the command line. An error that the user can correct gives one line on standard error and
    exit code 2; a run stopped from the keyboard exits with 130, a terminated one with 143."""
    _finished.clear()
    _signal.clear()
    try:
        with _terminable():
            code = app(prog_name="tl-geometry", standalone_mode=False)
        sys.stdout.flush()
    except GeometryError as error:
        raise SystemExit(_line(str(error), 2)) from None
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except BrokenPipeError:  # the reader of our output has gone
        # send buffered output nowhere, or the interpreter reports another broken pipe when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except USAGE as error:
        raise SystemExit(_line(str(error.format_message()), 2)) from None
    except Exception as error:
        trouble = file_trouble(error)
        if trouble is None:
            raise
        raise SystemExit(_line(trouble, 2)) from None
    if code == STOPPED:  # some versions of typer turn the interruption into a code
        raise SystemExit(_line(_stopped(), 128 + (_signal or [signal.SIGINT])[0]))
    raise SystemExit(code if isinstance(code, int) else 0)


def _line(text: str, code: int) -> int:
    """Say what went wrong, and with which arguments, in one line on standard error."""
    line = f"tl-geometry: {' '.join(text.split())} [{shlex.join(sys.argv[1:])}]"
    typer.echo(printable(line), err=True)
    return code
