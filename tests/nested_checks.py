"""Type checks of nested functions, compiled once.

The tests check every annotation of the package while they run. jaxtyping compiles the checks of a
function when it is defined, and a nested function is defined anew at each call of the one around
it: about a quarter of the time of our tests. The checks follow from the function's code and its
annotations alone (strings, with names of the module), so that those compiled first serve all that
share the code. A function with defaults is left as it is: its signature holds their values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from jaxtyping import _decorator

_known: dict[CodeType, dict[Any, Any]] = {}
_current: list[dict[Any, Any] | None] = [None]


def install() -> None:
    """Keep compiled checks from now on, with a jaxtyping whose insides are those known here."""
    inside = ("_destring_annotation", "_make_fn_with_signature", "_apply_typechecker", "_sentinel")
    known = all(hasattr(_decorator, name) for name in inside)
    if not known or hasattr(_decorator.jaxtyped, "nested_checks"):
        return
    import jaxtyping

    jaxtyping.jaxtyped = _decorator.jaxtyped = _outer(_decorator.jaxtyped)
    for name, key in (
        ("_destring_annotation", lambda annotation, namespace: ("hint", annotation)),
        ("_make_fn_with_signature", lambda *given, output: ("made", output)),
        ("_apply_typechecker", lambda checker, made: ("checked", made)),
    ):
        setattr(_decorator, name, _kept(getattr(_decorator, name), key))


def _outer(decorate: Callable[..., Any]) -> Callable[..., Any]:
    def jaxtyped(fn: Any = _decorator._sentinel, **options: Any) -> Any:
        if fn is _decorator._sentinel:
            return lambda found: jaxtyped(found, **options)
        plain = isinstance(fn, FunctionType) and "<locals>" in fn.__qualname__
        plain = plain and not fn.__defaults__ and not fn.__kwdefaults__
        plain = plain and all(isinstance(a, str) for a in fn.__annotations__.values())
        _current.append(_known.setdefault(fn.__code__, {}) if plain else None)
        try:
            return decorate(fn, **options)
        finally:
            _current.pop()

    jaxtyped.nested_checks = True  # pyright: ignore[reportFunctionMemberAccess]
    return jaxtyped


def _kept(make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    def found(*given: Any, **named: Any) -> Any:
        known = _current[-1]
        if known is None:
            return make(*given, **named)
        place = key(*given, **named)
        if place not in known:
            known[place] = make(*given, **named)
        return known[place]

    return found
