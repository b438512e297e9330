"""What may a user write into what a result hands out? Anything: a :class:`Guarded` result answers
from its own tensors and hands out copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor


class Guarded:
    """Hands out copies of the tensors that it has as fields, alone, in named tuples or in mappings:
    nothing that is written to an answer changes it. Inner loops read ``vars(self)``, which copies
    nothing."""

    if not TYPE_CHECKING:  # or every name would be an attribute of it

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return value if name.startswith("_") or name not in vars(self) else _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if hasattr(value, "_make"):  # a named tuple
        return value._make(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value
