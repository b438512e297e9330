"""Is an argument of a public function usable? A check returns the argument in a plain form, or
raises a ``GeometryError`` that says what was expected, what came, and what to call instead. Every
package that takes arguments from users calls these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.errors import check_seed, fail, require

# these live with the errors, which load without torch; other packages import them here
from tl_geometry.base.errors import choice as choice
from tl_geometry.base.errors import count as count
from tl_geometry.base.errors import whole as whole

Head = str | Sequence[int]
"""A head as ``(layer, head)`` or ``"L5H1"``."""


def describe(value: object) -> str:
    """A tensor as its dtype and shape, anything else as a short repr.

    >>> describe(torch.zeros(2, 3)), describe(torch.zeros(2).to_sparse())
    ('float32 tensor of shape (2, 3)', 'sparse or nested float32 tensor')
    """
    if isinstance(value, Tensor):
        kind = "" if is_plain(value) else "meta " if value.is_meta else "sparse or nested "
        shape = f" of shape {tuple(value.shape)}" if is_plain(value) else ""
        return f"{kind}{str(value.dtype).removeprefix('torch.')} tensor{shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}..."


def is_plain(value: Tensor) -> bool:
    """Whether a tensor is dense and holds values: not sparse, nested or on the meta device."""
    return value.layout == torch.strided and not value.is_nested and not value.is_meta


def holds_integers(value: Tensor) -> bool:
    """Whether a tensor is dense and of an integer dtype (``bool`` is none).

    >>> holds_integers(torch.tensor([1, 2])), holds_integers(torch.tensor([True]))
    (True, False)
    """
    fractions = value.is_floating_point() or value.is_complex()
    return not fractions and value.dtype != torch.bool and is_plain(value)


def finite(values: Tensor, what: str) -> Tensor:
    """``values`` if none is NaN or infinite, else an error that counts them."""
    # one sum in place of a mask of all elements; a sum that overflows only leads to the count
    if not bool(torch.isfinite(values.sum())):  # a finite sum proves that all are
        n_bad = int((~torch.isfinite(values)).sum())
        got = f"{n_bad} NaN or infinite of {values.numel()}"
        require(n_bad == 0, what, expected="finite numbers", got=got, instead="inputs without NaN")
    return values


def require_default_device() -> None:
    """Raise where new tensors are made on another device than the CPU, on which generators draw."""
    device = torch.get_default_device()
    instead = 'torch.set_default_device("cpu"), and model.to(device)'
    require(device.type == "cpu", "default device", expected="cpu", got=device, instead=instead)


def seeded(seed: Any) -> torch.Generator:
    """A generator on the CPU, started with a seed that is a whole number from 0 to 2^32 - 1."""
    require_default_device()
    return torch.Generator().manual_seed(check_seed(seed, "seed"))


def index(value: Any, size: int, what: str) -> int:
    """``value`` as an int if 0 <= value < size (negative indices are refused); any integer type
    will do."""
    number = whole(value)
    if number is None or not 0 <= number < size:
        fail(what, expected=f"an index from 0 to {size - 1}", got=repr(value))
    return number


def position(value: Any, length: int, what: str = "position") -> int:
    """A position of ``length``, counted from the end where it is negative (-1 is the last).

    >>> position(2, 5), position(-1, 5)
    (2, 4)
    """
    number = whole(value)
    if number is None or not -length <= number < length:
        fail(what, expected=f"a number from {-length} to {length - 1}", got=repr(value))
    return number % length


def several(values: Any) -> tuple[Any, ...]:
    """The values as a tuple; one value becomes a tuple of one."""
    # a tensor of one number is Iterable by its type, but counts as that number
    one = isinstance(values, str) or not getattr(values, "ndim", 1)
    one = one or not isinstance(values, Iterable)
    return (values,) if one else tuple(values)


def indices(values: Any, size: int, what: str) -> tuple[int, ...]:
    """All indices for ``None``, else the given ones, each checked, in the given order, without
    repeats.

    >>> indices(None, 3, "layers"), indices([2, 0], 3, "layers"), indices(1, 3, "layers")
    ((0, 1, 2), (2, 0), (1,))
    """
    if values is None:
        return tuple(range(size))
    given = several(values)
    require(len(given) > 0, what, expected="at least one index", got="none")
    chosen = tuple(index(v, size, what) for v in given)
    require(len(set(chosen)) == len(chosen), what, expected="each index once", got=repr(chosen))
    return chosen


def heads(
    values: Any, n_layers: int, n_heads: int, layers: Iterable[int] | int | None = None
) -> tuple[tuple[int, int], ...]:
    """Heads as (layer, head) pairs: those named in ``values`` (pairs, ``"L5H1"``, ``"5.1"``; one or
    several, repeats left out), or all heads of ``layers`` (by default of every layer).

    >>> heads(["L1H0", (0, 1), "1.1"], n_layers=2, n_heads=2)
    ((1, 0), (0, 1), (1, 1))
    """
    if values is None:
        return tuple(product(indices(layers, n_layers, "layers"), range(n_heads)))
    given = several(values)
    if len(given) == 2 and all(whole(v) is not None for v in given):
        given = (given,)  # two integers alone are one pair
    pairs = [_head(value, n_layers, n_heads) for value in given]
    require(len(pairs) > 0, "heads", expected="at least one head", got="none")
    allowed = indices(layers, n_layers, "layers")
    outside, expected = [p for p in pairs if p[0] not in allowed], f"heads of layers {allowed}"
    require(not outside, "heads", expected=expected, got=outside, instead="heads= or layers= alone")
    return tuple(dict.fromkeys(pairs))


def _head(value: Any, n_layers: int, n_heads: int) -> tuple[int, int]:
    """One head as a (layer, head) pair."""
    pair = value
    # without a dot or an H, "51" would match as layer 5, head 1
    if isinstance(value, str) and re.search("[.hH]", value):
        match = re.fullmatch(r"L?(\d+)\.?H?(\d+)", value, re.IGNORECASE)
        pair = (int(match[1]), int(match[2])) if match else value
    if len(pair := several(pair)) != 2:
        fail("heads", expected='(layer, head) pairs such as (5, 1), or "L5H1"', got=repr(value))
    layer = index(pair[0], n_layers, f"layer of head {value!r}")
    return layer, index(pair[1], n_heads, f"head {value!r}")


def head_name(head: tuple[int, int]) -> str:
    """A head as it is shown.

    >>> head_name((5, 1))
    'L5H1'
    """
    return f"L{head[0]}H{head[1]}"


def head_rows(
    values: Any, present: Sequence[tuple[int, int]], instead: str | None = None
) -> list[int]:
    """Rows of heads in a result whose rows are the heads ``present``; all rows for ``None``.

    >>> head_rows(["L1H1", (0, 1)], [(0, 1), (1, 0), (1, 1)])
    [2, 0]
    """
    if values is None:
        return list(range(len(present)))
    # the smallest model that has these heads: heads() needs sizes, and a result knows no others
    chosen = heads(values, *(1 + max(pair[i] for pair in present) for i in (0, 1)))
    missing = [pair for pair in chosen if pair not in present]
    expected = f"heads of layers {sorted({layer for layer, _ in present})} that the result has"
    require(not missing, "heads", expected=expected, got=missing, instead=instead)
    return [present.index(pair) for pair in chosen]


def window(value: Any, length: int, default_start: int) -> tuple[int, int]:
    """A half-open window inside ``length`` positions, from two integers; ``(default_start,
    length)`` for ``None``, or all positions if that is empty.

    >>> window(None, 8, 1), window((2, 5), 8, 1)
    ((1, 8), (2, 5))
    """
    if value is None:
        return (default_start if length > default_start else 0, length)
    given = [whole(v) for v in several(value)]
    start, end = given if len(given) == 2 else (None, None)
    if start is None or end is None or not 0 <= start < end <= length:
        expected = f"(start, end) in positions, 0 <= start < end <= {length}"
        fail("window", expected=expected, got=describe(value))
    return (start, end)
