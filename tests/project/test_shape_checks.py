"""Checks of nested functions that are kept still check, every time."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests import shape_checks


def outer(shift: float) -> Callable[..., Tensor]:
    @jaxtyping.jaxtyped(typechecker=beartype)
    def inner(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return a + b + shift if shift < 5 else torch.zeros(len(a) + 1)

    return inner


def test_each_copy_of_a_nested_function_checks_its_own_calls() -> None:
    x = torch.ones(3)
    first, second, wrong = outer(0.0), outer(2.0), outer(9.0)
    assert first(x, x).tolist() == [2, 2, 2]
    assert second(x, x).tolist() == [4, 4, 4]
    for inner in (first, second):
        with pytest.raises(TypeCheckError, match="inner"):
            inner(x, torch.ones(4))
        with pytest.raises(TypeCheckError, match="inner"):
            inner(x, "text")
    with pytest.raises(TypeCheckError, match="return value"):
        wrong(x, x)
    code = inspect.unwrap(inner).__code__
    assert code in shape_checks._known, "kept"


def test_the_package_is_checked_through_it() -> None:
    """Twin: what is installed is what the import hook calls."""
    assert hasattr(jaxtyping.jaxtyped, "shape_checks")
    from tl_geometry.base import linalg

    with pytest.raises(TypeCheckError):
        linalg.svd("text")  # pyright: ignore[reportArgumentType]
