"""Sums over the contexts of a corpus, added, moved, saved and selected in one way: :class:`Sums` is
the base of them all (moments of a decomposition, sums of scores, sums of composition).

A subclass declares its tensors as dataclass fields, ``None`` where one is not taken::

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Norms(Sums):
        squares: Float[Tensor, "*context head"]
        counts: Float[Tensor, "*context"]

Then ``a + b`` adds them, ``.to(device)`` moves them, ``.tensors()`` names them for a file, and
``cat``, ``stack``, ``pooled`` and ``select`` go along the axes that the annotations name. Fields
that are no tensors are settings; a sum has those of its left side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tl_geometry.base.axes import axes_of
from tl_geometry.base.errors import require


@dataclass(frozen=True, eq=False, kw_only=True)
class Sums:
    """Base of sums over contexts: tensors as declared fields, one implementation of what is done
    with them."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, without those that were not taken."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}

    def mapped(self: S, change: Callable[[str, Tensor], Tensor]) -> S:
        """The same sums with ``change(name, value)`` in place of every tensor."""
        changed: dict[str, Any] = {n: change(n, value) for n, value in self.tensors().items()}
        return dataclasses.replace(self, **changed)

    def __add__(self: S, other: S) -> S:
        """Tensor by tensor, on this side's device."""
        mine, theirs = self.tensors(), other.tensors()
        same = mine.keys() == theirs.keys()
        require(same, "sums", expected=f"sums of {', '.join(mine)}", got=", ".join(theirs))
        return self.mapped(lambda name, value: value + theirs[name].to(value.device))

    def to(self: S, device: torch.device | str) -> S:
        """The same sums on another device."""
        return self.mapped(lambda _, value: value.to(device))

    @classmethod
    def cat(cls: type[S], sums: Sequence[S], axis: str = "context") -> S:
        """Several sums side by side along an axis; tensors without it are taken from the first."""
        tensors = [s.tensors() for s in sums]
        joined = lambda name, _, dim: torch.cat([side[name] for side in tensors], dim)  # noqa: E731
        return sums[0]._along(axis, joined)

    @classmethod
    def stack(cls: type[S], sums: Sequence[S]) -> S:
        """Pooled sums, one for each context, as one with a context axis."""
        tensors = [s.tensors() for s in sums]
        return sums[0].mapped(lambda name, _: torch.stack([context[name] for context in tensors]))

    def pooled(self: S) -> S:
        """The sums over all contexts, of tensors that hold one sum for each context."""
        return self._along("context", lambda _, value, dim: value.sum(dim))

    def select(self: S, index: Any, axis: str = "context") -> S:
        """Some entries along an axis, by number, slice or index tensor."""
        return self._along(axis, lambda _, value, dim: value[(slice(None),) * dim + (index,)])

    def _along(self: S, axis: str, change: Callable[[str, Tensor, int], Tensor]) -> S:
        """``change(name, value, dim)`` in place of the tensors that have an axis, which is their
        ``dim``; the others as they are."""

        def changed(name: str, value: Tensor) -> Tensor:
            dim = self._axis(name, axis, value)
            return value if dim is None else change(name, value, dim)

        return self.mapped(changed)

    @classmethod
    def _axis(cls, name: str, axis: str, value: Tensor) -> int | None:
        """Number of an axis in a tensor, ``None`` where it has none."""
        names = [n.lstrip("*") for n in axes_of(cls)[name]]
        # counted from the end, because axes in front, such as *context, may be absent
        dim = names.index(axis) - len(names) + value.dim() if axis in names else -1
        return None if dim < 0 else dim


S = TypeVar("S", bound=Sums)
