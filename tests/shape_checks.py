"""What the tests check of every annotation of the package, each time that a function is called.

jaxtyping's import hook (``--jaxtyping-packages``) decorates every function. Its own decorator binds
the arguments, checks them twice, and compiles two functions for each one that is defined, also for
a nested one at each call of the one around it: more than half of the time of the tests. The
decorator below checks the same annotations with the same beartype and the same axis names:
arguments before the call, then the result, in the axes that the arguments have set; what it needs
is read from the annotations once for each code, when it is defined.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import jaxtyping
from beartype.door import is_bearable
from jaxtyping import TypeCheckError
from jaxtyping._storage import pop_shape_memo, push_shape_memo, shape_str

_known: dict[CodeType, Annotations] = {}


class Annotations(NamedTuple):
    """The annotations of a function, those that say anything."""

    names: tuple[str, ...]
    """Of the arguments that may be given by position."""
    hints: dict[str, Any]
    rest: Any
    """Of ``*args``."""
    others: Any
    """Of ``**kwargs``."""
    result: Any


def install() -> None:
    """Let the import hook decorate with :func:`checked` from now on."""
    if not hasattr(jaxtyping.jaxtyped, "shape_checks"):
        whole = jaxtyping.jaxtyped

        def jaxtyped(fn: Any = None, **options: Any) -> Any:
            if fn is None:
                return lambda found: jaxtyped(found, **options)
            return checked(fn) if isinstance(fn, FunctionType) else whole(fn, **options)

        jaxtyped.shape_checks = True  # pyright: ignore[reportFunctionMemberAccess]
        jaxtyping.jaxtyped = jaxtyped  # pyright: ignore[reportAttributeAccessIssue]


def checked(fn: FunctionType) -> Callable[..., Any]:
    """The function with its arguments and its result checked at every call."""
    if not fn.__annotations__:
        return fn
    if fn.__code__ not in _known:
        with contextlib.suppress(NameError):  # of what is defined further down
            _known[fn.__code__] = _annotations(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = _known.get(fn.__code__)
        if known is None:
            known = _known[fn.__code__] = _annotations(fn, late=True)
        memo = push_shape_memo({})
        try:
            for position, value in enumerate(args):
                named = position < len(known.names)
                name = known.names[position] if named else "rest"
                _check(fn, name, value, known.hints.get(name) if named else known.rest, memo)
            for name, value in kwargs.items():
                _check(fn, name, value, known.hints.get(name, known.others), memo)
            result = fn(*args, **kwargs)
            _check(fn, "return value", result, known.result, memo)
            return result
        finally:
            pop_shape_memo()

    return call


def _check(fn: FunctionType, name: str, value: Any, hint: Any, memo: Any) -> None:
    if hint is not None and not is_bearable(value, hint):
        shape = tuple(value.shape) if hasattr(value, "shape") else ""
        raise TypeCheckError(
            f"{fn.__module__}.{fn.__qualname__}: {name}: expected {hint}, "
            f"got {type(value).__name__} {shape} {value!r:.200}\n{shape_str(memo)}"
        )


def _annotations(fn: FunctionType, *, late: bool = False) -> Annotations:
    """The annotations as they are when the function is defined (tests patch names later), or at its
    first call where one names what is defined further down."""
    parameters = inspect.signature(fn).parameters.values()
    hints = {p.name: _hint(p.annotation, fn, late) for p in parameters}
    kinds = {
        p.kind: hints.pop(p.name) for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    names = (p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return Annotations(
        tuple(names),
        hints,
        kinds.get(inspect.Parameter.VAR_POSITIONAL),
        kinds.get(inspect.Parameter.VAR_KEYWORD),
        _hint(fn.__annotations__.get("return", Any), fn, late),
    )


def _hint(annotation: Any, fn: FunctionType, late: bool) -> Any:
    """The type that an annotation names, None where it says nothing, or late names what only a type
    checker imports."""
    if annotation is inspect.Parameter.empty:
        return None
    try:
        holder = SimpleNamespace(__annotations__={"value": annotation})
        hint = typing.get_type_hints(holder, fn.__globals__, include_extras=True)["value"]
    except NameError:
        if late:
            return None
        raise
    if typing.get_origin(hint) is typing.TypeGuard:
        return bool
    return None if hint is Any else hint
