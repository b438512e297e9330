"""The axes of a tensor by name, from its annotation ``Float[Tensor, "head side part"]``. Results
derive their tables from these, and sums the axes that they are joined along."""

from __future__ import annotations

import functools
import re


@functools.cache
def axes_of(cls: type) -> dict[str, tuple[str, ...]]:
    """Axis names of every tensor that a class has as a field or as a property; none for a field
    that is no tensor.

    >>> from tl_geometry.base.intervals import LeftOut
    >>> axes_of(LeftOut)["values"]
    ('group', '...')
    """
    annotations: dict[str, object] = {}
    # bases first, so that a subclass has the last word on a name
    for base in reversed(cls.__mro__):
        annotations |= vars(base).get("__annotations__", {})
        for name, value in vars(base).items():
            if isinstance(value, property) and value.fget is not None:
                annotations[name] = value.fget.__annotations__.get("return", "")
    found = {n: re.search(r"Tensor, ['\"]([^'\"]*)['\"]", str(a)) for n, a in annotations.items()}
    return {name: tuple(axes[1].split()) if axes else () for name, axes in found.items()}
