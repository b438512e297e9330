"""Faults planted in the source of one module, in this process: a check has to pass on the module
as it is and to fail on every copy with a fault, so that it is known to see them.

The quick sibling of :mod:`tests.mutations`, which plants faults in a copy of the project.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def planted(module: ModuleType, old: str = "", new: str = "") -> Any:
    """A copy of a module, of its own and without run-time type checks, in which ``old``, which must
    occur once, is ``new``."""
    source = inspect.getsource(module)
    if old:
        times = source.count(old)
        assert times == 1, f"{old!r} occurs {times} times in {module.__name__}"
        assert old != new
        source = source.replace(old, new)
    copy = ModuleType(f"{module.__name__}__planted")
    copy.__file__ = module.__file__
    copy.__package__ = module.__package__
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source, str(module.__file__), "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return copy


def require_caught(
    check: Callable[[Any], None], module: ModuleType, faults: Mapping[str, tuple[str, str]]
) -> None:
    """Raise unless the check passes on a copy of the module as it is and fails, by its own
    assertions, on every copy with a fault. The check may put stand-ins into the module."""
    check(planted(module))
    missed = []
    for name, (old, new) in faults.items():
        copy = planted(module, old, new)
        try:
            check(copy)
        except AssertionError:
            continue
        missed.append(name)
    assert not missed, f"survived in {module.__name__}: {', '.join(missed)}"
