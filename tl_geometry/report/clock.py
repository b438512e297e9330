"""One line of progress while a report is computed: which stage of how many, what it does, and the
time since the start. The time that is left is not known well enough to be shown."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence

CLEAR = "\r\x1b[K"
"""Characters that clear the line of a terminal."""


class Clock:
    """Stages in their order, shown on standard error.

    >>> now = iter([0.0, 75.0]).__next__
    >>> clock = Clock(["first", "second"], show=False, now=now)
    >>> clock.elapsed()
    75.0
    """

    def __init__(
        self, stages: Sequence[str], *, show: bool, now: Callable[[], float] | None = None
    ) -> None:
        self.stages, self.show, self.now = tuple(stages), show, now or time.monotonic
        self.started = self.now()
        self.stage, self.place, self.last = "start", 0, ""

    def begin(self, stage: str, title: str) -> None:
        """Begin a stage."""
        self.stage, self.place = title, self.stages.index(stage) + 1
        self.say("")

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.now() - self.started

    def say(self, text: str) -> None:
        """Show what is being done: on a terminal one line, rewritten; elsewhere a line for each
        stage."""
        terminal = sys.stderr.isatty()
        if not terminal and self.last == self.stage:
            return
        self.last = self.stage
        what = f"{self.stage}: {text}" if text else self.stage
        line = f"[{self.place}/{len(self.stages)}] {what} ({span(self.elapsed())} so far)"
        columns = shutil.get_terminal_size().columns  # a longer line would not be rewritten
        self._write(f"{CLEAR}{line[: columns - 1]}" if terminal else f"{line}\n")

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self.finish()
        self._write(f"{text}\n")

    def finish(self) -> None:
        """End the line."""
        if sys.stderr.isatty():
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        if self.show:
            sys.stderr.write(text)
            sys.stderr.flush()


def span(seconds: float) -> str:
    """A length of time in words.

    >>> span(3.2), span(75.0), span(3700.0)
    ('3 s', '1 min 15 s', '1 h 1 min')
    """
    rounded = round(seconds)
    if rounded < 60:
        return f"{max(rounded, 1)} s"
    if rounded < 3600:
        return f"{rounded // 60} min" + (f" {rounded % 60} s" if rounded % 60 else "")
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"
