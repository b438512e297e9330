"""All calls, as a user would make them: see the package."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg
from tests.bad_inputs import CALLS
from tests.bad_inputs.cases import Call, World
from tl_geometry.base.errors import GeometryError


def outcome(given: Call, world: World) -> dict[str, Any]:
    """What came of one call: taken (and as it should be), refused with a text, or an error that no
    user should see; and traces left."""
    before = next(iter(world.model.parameters())).clone()
    try:
        found: dict[str, Any] = {"taken": bool(given.check(world, given.call(world)))}
    except GeometryError as error:
        found = {"refused": str(error)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    parts = [path.name for path in world.folder.rglob("*.part")]
    same = torch.equal(before, next(iter(world.model.parameters())))
    return found | {"parts": parts, "weights": same, "hooks": list(tlg.view(world.model).hooked())}


def main() -> None:
    """All calls, in order, as JSON on standard output."""
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 12, n=10)
    basis = tlg.decompose(model, windows, progress=False)
    split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    table = tlg.sweep_heads(model, windows, basis, progress=False)
    from tests.tiny import tiny

    made = {
        "model": model,
        "windows": windows,
        "basis": basis,
        "split": split,
        "table": table,
        "other": tiny("bridge", "llama"),
    }
    found = []
    for given in CALLS:
        with tempfile.TemporaryDirectory() as folder:
            found.append(outcome(given, World(**made, folder=Path(folder))))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
