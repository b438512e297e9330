"""A module of one's own to try things on."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType
from typing import Any


def copy_of(module: ModuleType, change: ast.NodeTransformer | None = None) -> Any:
    """A copy of a module without run-time type checks, into which a test may put stand-ins, or a
    ``change`` of its code."""
    copy = ModuleType(f"{module.__name__}__copy")
    copy.__file__ = module.__file__
    copy.__package__ = module.__package__
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        tree = ast.parse(inspect.getsource(module))
        tree = tree if change is None else ast.fix_missing_locations(change.visit(tree))
        exec(compile(tree, str(module.__file__), "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return copy
