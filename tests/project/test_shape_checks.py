"""Annotations are checked at every call, whatever the kind of the argument and however often a
function is defined; planted mistakes in each place are seen."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.door import is_bearable
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import tl_geometry
from tests import shape_checks


def outer(shift: float) -> Callable[..., Tensor]:
    @jaxtyping.jaxtyped(typechecker=beartype)
    def inner(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return a + b + shift if shift < 5 else torch.zeros(len(a) + 1)

    return inner


def test_each_copy_of_a_nested_function_checks_its_own_calls() -> None:
    x = torch.ones(3)
    first = outer(0.0)
    code = inspect.unwrap(first).__code__
    kept = shape_checks._known[code]
    second, wrong = outer(2.0), outer(9.0)
    assert first(x, x).tolist() == [2, 2, 2]
    assert second(x, x).tolist() == [4, 4, 4]
    for inner in (first, second):
        with pytest.raises(TypeCheckError, match="inner"):
            inner(x, torch.ones(4))
        with pytest.raises(TypeCheckError, match="inner"):
            inner(x, "text")
    with pytest.raises(TypeCheckError, match="return value"):
        wrong(x, x)
    assert inspect.unwrap(wrong).__code__ is code
    assert shape_checks._known[code] is kept, "read once"


@jaxtyping.jaxtyped(typechecker=beartype)
def every_kind(
    first: Float[Tensor, " n"],
    /,
    second: Float[Tensor, " n"] | None = None,
    *more: Float[Tensor, " n"],
    named: Float[Tensor, " n"] | None = None,
    later: Later | None = None,
    **others: int,
) -> tuple[Float[Tensor, " n"], int]:
    return first[: others.get("cut", len(first))], len(more)


class Later:
    """Defined below the function that names it."""


RIGHT: Any = torch.ones(3)
WRONG: Any = torch.ones(4)


def test_every_kind_of_argument_is_checked() -> None:
    found = every_kind(RIGHT, RIGHT, RIGHT, RIGHT, named=RIGHT, later=Later(), other=1)
    assert found[1] == 2
    assert every_kind(RIGHT)[1] == 0, "defaults are as they are"
    planted: dict[str, Callable[[], object]] = {
        "first": lambda: every_kind("text"),  # pyright: ignore[reportArgumentType]
        "second": lambda: every_kind(RIGHT, WRONG),
        "rest": lambda: every_kind(RIGHT, RIGHT, RIGHT, WRONG),
        "named": lambda: every_kind(RIGHT, named=WRONG),
        "later": lambda: every_kind(RIGHT, later="text"),  # pyright: ignore[reportArgumentType]
        "other": lambda: every_kind(RIGHT, other="text"),  # pyright: ignore[reportArgumentType]
        "return value": lambda: every_kind(RIGHT, cut=2),
    }
    for name, call in planted.items():
        with pytest.raises(TypeCheckError, match=f"every_kind: {name}: expected"):
            call()


def test_a_name_that_is_patched_later_does_not_change_what_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @jaxtyping.jaxtyped(typechecker=beartype)
    def inner(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return a + b

    monkeypatch.setattr(sys.modules[__name__], "Tensor", lambda: None)
    assert inner(RIGHT, RIGHT).tolist() == [2, 2, 2]
    with pytest.raises(TypeCheckError, match="inner"):
        inner(RIGHT, WRONG)


def test_annotations_of_the_package_are_read() -> None:
    """What says nothing is not checked: aliases that are Any outside type checkers, and names that
    a type checker alone imports; no more."""
    asked, unread = 0, set()
    for found in pkgutil.walk_packages(tl_geometry.__path__, "tl_geometry."):
        if found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        for _, function in inspect.getmembers(module, inspect.isfunction):
            fn: Any = inspect.unwrap(function)
            if fn.__module__ == module.__name__ and isinstance(fn, FunctionType):
                for written in fn.__annotations__.values():
                    asked += 1
                    if shape_checks._hint(written, fn, True) is None and written != "Any":
                        unread.add(written)
    assert asked > 3000
    late = re.compile(r"\b(Axes|Figure|Effects|ScoreSplit|PositionContext|GPT2LMHeadModel)\b")
    # the command line loads no torch for these two
    allowed = {"TokensLike", "ModelLike", "Result", "LogitGraph", "Layers"}
    assert {name for name in unread if not late.search(name)} == allowed


class Words(Protocol):
    """What only beartype can judge."""

    def said(self) -> str: ...


QUICK: Any = (
    int,
    float,
    str,
    Tensor,
    torch.dtype,
    type(None),
    str | None,
    int | Tensor,
    bool | None,
)
SLOW = (list[int], Sequence[str], tuple[int, ...], Callable[..., int], Any | None, Words)
VALUES = (1, 1.5, True, "a", None, [1], ["a"], (1, 2), len, torch.float32, RIGHT, WRONG, Later())


def test_what_isinstance_decides_beartype_decides_alike() -> None:
    """What says more than a class is left to beartype; the twin: its answers are others."""
    assert all(shape_checks._classes(hint) for hint in QUICK)
    assert not any(shape_checks._classes(hint) for hint in SLOW)
    for hint in QUICK:
        check: Any = shape_checks._check(hint)
        assert [check(x) for x in VALUES] == [is_bearable(x, hint) for x in VALUES], hint
    assert is_bearable(["a"], list[int]) != isinstance(["a"], list)


def test_only_what_may_name_axes_opens_a_list_of_sizes() -> None:
    sizes: Any = Float[Tensor, " n"]
    for hint in (sizes, sizes | None, list[sizes], dict[str, sizes], Sequence[int]):
        assert shape_checks._may_name_axes(hint), hint
    assert not any(shape_checks._may_name_axes(hint) for hint in (None, *QUICK))
