"""Named families of parts, and the package that adds each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

SWEEPS = {
    "writers": "tl_geometry.circuits.writer_sweep:sweep_writers",
    "blocks": "tl_geometry.circuits.writer_sweep:sweep_writers",
}
"""What sweeps the heads by a family of parts of its own, loaded where it is asked for: packages
below this one are not imported here."""


def sweep_of(parts: str) -> Callable[..., Any]:
    """The sweep of a named family."""
    module, _, name = SWEEPS[parts].partition(":")
    return getattr(importlib.import_module(module), name)
