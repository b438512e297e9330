"""``python -m tests.tables.refusals``: makes every call of the tables as a user would, and prints
what came of each as JSON. :mod:`tests.tables.test_refusals` judges."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tl_geometry as tlg
from tests import probes
from tests.lib.subjects.guard import same, state_of
from tests.tables.refusals.row import Row, Scene
from tests.tables.refusals.tables import ROWS

SECONDS = 10.0 if probes.NOTES in os.environ else 3.0
"""Most processor time of a call: what takes longer hangs, or does something for nothing. Under the
trace of ``tests.mutate`` all takes longer."""
FREE = "warning filters"
"""What libraries change when they are imported at a first call."""


class HangsError(BaseException):
    """A call that took too long. No handler of ``Exception`` on the way may take it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise HangsError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Traces:
    """What belongs to the user, and must be after a call as before."""

    def __init__(self, scene: Scene) -> None:
        self.worlds = (scene.w, scene.rotary)
        self.before = self._now()

    def left(self, folder: Path) -> list[str]:
        """Names of what has changed."""
        before, self.before = self.before, self._now()
        changed = [
            n for n in before.keys() | self.before if not same(before.get(n), self.before.get(n))
        ]
        return sorted(changed) + [path.name for path in folder.rglob("*.part")]

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"generator of random": random.getstate()}
        for w in self.worlds:
            found |= {f"{w.kind}: {name}": value for name, value in state_of(w).items()}
        return {name: found[name] for name in found if not name.endswith(FREE)}


def outcome(row: Row, folder: Path, traces: Traces) -> dict[str, Any]:
    """What came of one call: taken (and as it should be), refused, or an error that no user should
    see; and what it left behind."""
    scene = Scene(folder)
    try:
        with limited(SECONDS):
            found: dict[str, Any] = {"taken": bool(row.holds(scene, row.call(scene)))}
    except tlg.GeometryError as error:
        found = {"refused": type(error).__name__, "what": str(error.what), "text": str(error)}
        found["expected"] = str(error.expected or "")
    except HangsError:
        found = {"error": f"took more than {SECONDS} s"}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found | {"left": traces.left(folder)}


def main() -> None:
    """The calls whose names stand in the input, in the order of the tables. Under the trace of
    ``tests.mutate`` each says what it called."""
    wanted, found = set(json.load(sys.stdin)), {}
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        traces = Traces(scene)
        ROWS[0].call(scene)  # what is imported at the first call takes no time of a row
    probes.leave()
    for row in (row for row in ROWS if row.name in wanted):
        with tempfile.TemporaryDirectory() as folder:
            found[row.name] = outcome(row, Path(folder), traces)
        found[row.name]["called"] = sorted(probes.taken())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
