"""Which lines of the package does a test run? :mod:`tests.mutate` asks before it plants a fault in
one: a trace function sees the lines of a process, and of those that a test starts. What is made
once and kept (a fixture, a cached function, a cached property) counts for every test that uses it,
not for the first alone."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import secrets
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = f"{os.sep}tl_geometry{os.sep}"
OURS = ("tests", "tl_geometry")
"""Packages whose cached functions and properties are followed."""
NOTES = "REACHED_NOTES"
"""The environment variable with the folder for what other processes run."""
ELSEWHERE = "from tests import probes\nprobes.start()\n"
"""``sitecustomize.py`` of a watched tree, which each process that a test starts runs first."""
Lines = set[tuple[str, int]]
_seen: Lines = set()
_imported: Lines = set()
"""Lines of modules and classes, which the first test that asks for one of their names imports."""
_unseen: dict[CodeType, set[int]] = {}
"""Lines of each code that are not seen yet; a code without any is not followed."""
_of_kept: dict[Hashable, Lines] = {}
"""The lines that have made what is kept."""
_cache, _Property = functools.cache, functools.cached_property


def _call(frame: FrameType, _event: str, _argument: object) -> Any:
    """Called at each call of a function: whether its lines are to be followed."""
    code = frame.f_code
    if PACKAGE not in code.co_filename:
        return None
    if code not in _unseen:
        _unseen[code] = {line for *_, line in code.co_lines() if line is not None}
    return _line if _unseen[code] else None


def _line(frame: FrameType, _event: str, _argument: object) -> Any:
    """Called at each line that is followed."""
    unseen = _unseen.setdefault(frame.f_code, set())
    if frame.f_lineno in unseen:
        unseen.remove(frame.f_lineno)
        lines = _seen if frame.f_code.co_flags & inspect.CO_OPTIMIZED else _imported
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        frame.f_trace_lines = bool(unseen)
    return _line


def start() -> None:
    """Note from now on what is run, and leave it at the end of the process."""
    atexit.register(leave)
    functools.cache, functools.cached_property = _followed, _Followed  # type: ignore[misc,assignment]
    # a fork ends without the exit functions of the interpreter
    util.register_after_fork(leave, lambda f: util.Finalize(None, f, exitpriority=0))
    threading.settrace(_call)
    sys.settrace(_call)


@contextmanager
def aside() -> Iterator[Lines]:
    """What runs inside is noted apart."""
    global _seen, _unseen
    before, _seen, _unseen = (_seen, _unseen), set(), {}
    found = _seen
    try:
        yield found
    finally:
        _seen, _unseen = before


def _kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """What is made once under a ``key``; its lines are noted wherever it is used."""
    found: Lines = set()
    try:
        with aside() as found:
            return make()
    finally:
        _of_kept.setdefault(key, set()).update(found)
        _seen.update(_of_kept[key])


def _followed(function: Callable[..., Any]) -> Any:
    """``functools.cache``, which says what it has kept."""
    cached = _cache(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return _kept((function, args, *options.items()), lambda: cached(*args, **options))

    return call if function.__module__.startswith(OURS) else cached


class _Followed(_Property):  # type: ignore[type-arg]
    """``functools.cached_property``, which is asked at each access and not at the first alone."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None or not type(instance).__module__.startswith(OURS):
            return super().__get__(instance, owner)
        return _kept((id(instance), self.attrname), lambda: _Property.__get__(self, instance))

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.attrname] = value


def taken(*others: Lines) -> set[str]:
    """``path:line`` of what functions ran since this was asked last, and of ``others``."""
    found = _named(_seen.union(*others))
    _seen.clear()
    _unseen.clear()
    return found


def imported() -> set[str]:
    """``path:line`` of what imports ran."""
    return _named(_imported)


def _named(lines: Lines) -> set[str]:
    return {f"tl_geometry/{file.split(PACKAGE)[-1]}:{line}" for file, line in lines}


def leave(names: Iterable[str] | None = None) -> None:
    """Leave a file with what was run, as :func:`taken` names it, for the process that watches;
    nothing where none does. By default all that was run or imported."""
    names = taken() | imported() if names is None else names
    if folder := os.environ.get(NOTES):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / secrets.token_hex(8)).write_text("\n".join(names))
