"""The time that a report may take: shared out over its stages, one line of progress, sizes that fit
what is left.

A budget is kept by making things smaller (fewer windows, chunks, pairs), and what was made smaller
is said; it is no deadline.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping

from tl_geometry.base.errors import require

PATIENCE = 2.0
"""The smallest useful size is still run where it takes at most so many times what is left of its
stage."""


class Clock:
    """Stages by name with their weights; each may take its share of the time that those before it
    have left.

    >>> time = iter([0.0, 0.0, 30.0, 30.0, 30.0]).__next__
    >>> clock = Clock(100.0, {"first": 1.0, "second": 1.0}, show=False, now=time)
    >>> clock.begin("first"), clock.left()
    (50.0, 20.0)
    >>> clock.begin("second")
    70.0
    """

    def __init__(
        self,
        budget: float,
        weights: Mapping[str, float],
        *,
        show: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        require(budget > 0, "budget", expected="a positive number of seconds", got=budget)
        self.budget, self.weights, self.show, self.now = budget, dict(weights), show, now
        self.started = now()
        self.waiting = list(self.weights)
        self.stage, self.place, self.end = "start", 0, self.started + budget
        self.wide, self.said = False, ""
        self.expected: dict[str, float] = {}

    def expect(self, seconds: Mapping[str, float]) -> None:
        """What stages will take as far as is known, for the time left that is shown."""
        self.expected |= seconds

    def begin(self, stage: str, about: float | None = None, said: str = "") -> float:
        """Begin a stage, say how long it will take, and return the seconds that it may."""
        now = self.now()
        total = sum(self.weights[s] for s in self.waiting)
        rest = max(0.0, self.started + self.budget - now)
        allowed = rest * self.weights[stage] / total
        self.waiting.remove(stage)
        self.place += 1
        self.stage, self.end = said or stage, now + allowed
        self.say(f"about {span(min(about, allowed) if about is not None else allowed)}")
        return allowed

    def skip(self, stage: str) -> None:
        """A stage that is finished already: its time goes to the others."""
        if stage in self.waiting:
            self.waiting.remove(stage)
            self.place += 1

    def left(self) -> float:
        """Seconds that the present stage may still take."""
        return max(0.0, self.end - self.now())

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.now() - self.started

    def ahead(self) -> float:
        """Seconds to the end: what is expected, or the rest of the budget where that is less."""
        rest = max(0.0, self.started + self.budget - self.now())
        later = [self.expected.get(stage) for stage in self.waiting]
        if any(seconds is None for seconds in later):
            return rest
        return min(rest, self.left() + sum(s for s in later if s is not None))

    def fits(self, each: float, most: int, least: int = 1, *, share: float = 1.0) -> int:
        """How many items of ``each`` seconds fit into a share of what is left, ``least`` to
        ``most``; 0 where not even ``least`` do."""
        time_left = share * self.left()
        most = max(0, most)
        count = min(most, int(time_left / max(each, 1e-9)))
        if count >= least:
            return count
        return min(least, most) if least * each <= PATIENCE * time_left else 0

    def say(self, text: str) -> None:
        """Show what is being done: one line, rewritten on a terminal; elsewhere a line for each
        stage."""
        terminal = sys.stderr.isatty()
        if not self.show or (not terminal and self.said == self.stage):
            return
        self.said = self.stage
        line = (
            f"[{self.place}/{len(self.weights)}] {self.stage}: {text} ({span(self.ahead())} left)"
        )
        columns = shutil.get_terminal_size().columns  # a longer line would not be rewritten
        sys.stderr.write(f"\r\x1b[K{line[: columns - 1]}" if terminal else f"{line}\n")
        sys.stderr.flush()
        self.wide = terminal

    def finish(self) -> None:
        """End the line."""
        if self.wide:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.wide = False


def span(seconds: float) -> str:
    """A length of time for people.

    >>> span(3.2), span(75.0), span(3700.0)
    ('3 s', '1 min 15 s', '1 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{max(whole, 1)} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"
