"""A module of one's own to try things on."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


def copy_of(module: ModuleType) -> Any:
    """A copy of a module without run-time type checks, into which a test may put stand-ins."""
    copy = ModuleType(f"{module.__name__}__copy")
    copy.__file__ = module.__file__
    copy.__package__ = module.__package__
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(inspect.getsource(module), str(module.__file__), "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return copy
