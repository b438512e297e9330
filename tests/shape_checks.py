"""What the tests check of every annotation of the package: of each function the first calls, and
then one of some (:data:`ALL`, :data:`EACH`).

jaxtyping's import hook (``--jaxtyping-packages``) decorates every function. Its own decorator binds
the arguments, checks them twice, and compiles two functions for each one that is defined, also for
a nested one at each call of the one around it: more than half of the time of the tests. The
decorator below checks the same annotations with the same beartype and the same axis names:
arguments before the call, then the result, in the axes that the arguments have set; what it needs
is read from the annotations once for each code, at its first call. Fields of dataclasses are
checked in the same way, as the arguments of ``__init__``.
"""

from __future__ import annotations

import dataclasses
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

ALL, EACH = 100, 16
"""The first 100 calls of a code are checked and then every 16th: a million calls of some hundred
small functions took a sixth of the time of the tests, and show nothing new."""
Check = Callable[[Any], bool]
"""Whether a value is what an annotation says."""
_known: dict[CodeType, Annotations] = {}


class Annotations(NamedTuple):
    """The annotations of a function, those that say anything, as checks."""

    names: tuple[str, ...]
    """Of the arguments that may be given by position."""
    positional: tuple[Check | None, ...]
    """Their checks."""
    checks: dict[str, Check | None]
    rest: Check | None
    """Of ``*args``."""
    others: Check | None
    """Of ``**kwargs``."""
    result: Check | None
    calls: list[int]
    """How often the code was called."""


def install() -> None:
    """Let the import hook decorate with :func:`checked` from now on."""
    if not hasattr(jaxtyping.jaxtyped, "shape_checks"):
        whole = jaxtyping.jaxtyped

        def jaxtyped(fn: Any = None, **options: Any) -> Any:
            if fn is None:
                return lambda found: jaxtyped(found, **options)
            if isinstance(init := _init(fn), FunctionType):
                fn.__init__ = checked(init, shared=False)
                return fn
            return checked(fn) if isinstance(fn, FunctionType) else whole(fn, **options)

        jaxtyped.shape_checks = True  # pyright: ignore[reportFunctionMemberAccess]
        jaxtyping.jaxtyped = jaxtyped  # pyright: ignore[reportAttributeAccessIssue]


def _init(fn: Any) -> Any:
    return vars(fn).get("__init__") if dataclasses.is_dataclass(fn) else None


def checked(fn: FunctionType, *, shared: bool = True) -> Callable[..., Any]:
    """The function with its arguments and its result checked. Functions of one code share what is
    known of them (a nested one is defined anew at each call of the one around it); ``__init__`` of
    two dataclasses with the same names of fields has one code, and other types."""
    if not fn.__annotations__:
        return fn
    known: Annotations | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if known is None:  # looked up once: the hash of a code is computed anew at each look
            known = _known.get(fn.__code__) if shared else None
            known = known or _annotations(fn)
            if shared:
                _known[fn.__code__] = known
        known.calls[0] += 1
        if known.calls[0] > ALL and known.calls[0] % EACH:
            return fn(*args, **kwargs)
        memo = push_shape_memo({})  # sizes of axes hold for one call
        try:
            checks = known.positional
            if len(args) > len(checks):
                checks += (known.rest,) * (len(args) - len(checks))
            for position, (check, value) in enumerate(zip(checks, args)):
                if check is not None and not check(value):
                    named = position < len(known.names)
                    name = known.names[position] if named else "rest"
                    raise _wrong(fn, name, value, memo)
            for name, value in kwargs.items():
                check = known.checks.get(name, known.others)
                if check is not None and not check(value):
                    raise _wrong(fn, name, value, memo)
            result = fn(*args, **kwargs)
            if known.result is not None and not known.result(result):
                raise _wrong(fn, "return value", result, memo)
            return result
        finally:
            pop_shape_memo()

    return call


def _wrong(fn: FunctionType, name: str, value: Any, memo: Any) -> TypeCheckError:
    written = fn.__annotations__.get("return" if name == "return value" else name, "its annotation")
    shape = tuple(value.shape) if hasattr(value, "shape") else ""
    return TypeCheckError(
        f"{fn.__module__}.{fn.__qualname__}: {name}: expected {written}, "
        f"got {type(value).__name__} {shape} {value!r:.200}\n{shape_str(memo)}"
    )


def _annotations(fn: FunctionType) -> Annotations:
    """The annotations at the first call, when all that they name is defined."""
    parameters = inspect.signature(fn).parameters.values()
    hints = {p.name: _hint(p.annotation, fn) for p in parameters}
    result = _hint(fn.__annotations__.get("return", Any), fn)
    checks = {name: _check(hint) for name, hint in hints.items()}
    kinds = {
        p.kind: checks.pop(p.name)
        for p in parameters
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in parameters if p.kind in by_place)
    return Annotations(
        names,
        tuple(checks[name] for name in names),
        checks,
        kinds.get(inspect.Parameter.VAR_POSITIONAL),
        kinds.get(inspect.Parameter.VAR_KEYWORD),
        _check(result),
        [0],
    )


def _check(hint: Any) -> Check | None:
    """beartype's check of a type."""
    return None if hint is None or hint is object else lambda value: is_bearable(value, hint)


def _hint(annotation: Any, fn: FunctionType) -> Any:
    """The type that an annotation names, None where it says nothing, or names what only a type
    checker imports."""
    if annotation is inspect.Parameter.empty:
        return None
    holder = SimpleNamespace(__annotations__={"value": annotation})
    try:
        hint = typing.get_type_hints(holder, fn.__globals__, include_extras=True)["value"]
    except NameError:
        return None
    if typing.get_origin(hint) is typing.TypeGuard:
        return bool
    return None if hint is Any else hint
