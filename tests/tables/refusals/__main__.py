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

import numpy as np
import torch

import tl_geometry as tlg
from tests import probes
from tests.tables.refusals.row import Row, Scene
from tests.tables.refusals.tables import ROWS

SECONDS = 10.0 if probes.NOTES in os.environ else 1.0
"""Most processor time of a call: what takes longer hangs, or does something for nothing. Under the
trace of ``tests.mutate`` all takes longer."""


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
        # looked up once: to list the weights takes longer than to compare them
        self.weights = {
            f"{w.kind}: {name}": value
            for w in self.worlds
            for name, value in (*w.model.named_parameters(), *w.model.named_buffers())
        }
        self.modules = {w.kind: list(w.model.modules()) for w in self.worlds}
        self.before = {name: _copied(value) for name, value in self._now().items()}

    def left(self, folder: Path) -> list[str]:
        """Names of what has changed."""
        now = self._now()
        changed = [name for name in now if not _same(now[name], self.before[name])]
        self.before |= {name: _copied(now[name]) for name in changed}
        return changed + [path.name for path in folder.rglob("*.part")]

    def _now(self) -> dict[str, Any]:
        numpy_state: Any = np.random.get_state()  # noqa: NPY002 (the global one, which is looked at)
        found: dict[str, Any] = {
            "generator of torch": torch.get_rng_state(),
            "generator of numpy": numpy_state[1].tobytes(),
            "generator of random": random.getstate(),
            "default dtype": str(torch.get_default_dtype()),
            "gradients": torch.is_grad_enabled(),
        }
        for w in self.worlds:
            points = w.model.hook_dict.values()
            for name, value in w.inputs.tensors().items():
                found[f"{w.kind}: input {name}"] = value
            found[f"{w.kind}: hooks"] = str([len(p.fwd_hooks) + len(p.bwd_hooks) for p in points])
            found[f"{w.kind}: training"] = str([m.training for m in self.modules[w.kind]])
        return found | self.weights


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


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
    """All calls, in the order of the tables."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        traces = Traces(scene)
        ROWS[0].call(scene)  # what is imported at the first call takes no time of a row
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            found[row.name] = outcome(row, Path(folder), traces)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
