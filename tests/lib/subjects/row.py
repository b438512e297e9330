"""A row of the subject table: a public function, how it is called, what it answers, and which laws
do not apply to it and why.

The answers are *named quantities* in the words of the mathematics, not the fields of today's
results: where a package is rewritten, ``call`` and ``answers`` of its rows are edited, and the
recorded numbers stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.worlds import World

Answers = dict[str, Any]
"""Quantity -> array, number, string, or list of strings."""
Options = Mapping[str, Any]
"""Options of a call; a function of the world stands for its value."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One public function, or one use of it.

    ``covers`` are the public names that it is about, by default its own. ``call(world,
    **options)`` gives the library's result, ``answers`` turns it into named quantities.
    ``variants`` are sets of options by name; ``only`` says for which worlds a variant (or ``"*"``,
    all of them) exists, ``real`` which variants run on the real decoder too.

    What laws need to know (:mod:`tests.tables.test_subjects`): ``order`` gives the axis of prompts
    of those quantities that have one; all others stay the same where prompts change places.
    ``later`` gives the axis of query positions, ``batches`` values of ``batch_size=``, ``seeds``
    the quantities that another ``seed=`` changes, ``adds`` the parts that sum to a quantity, each
    in its place or, for a number, in all, ``faults`` the hooks of a block at which a planted fault
    is refused, ``half`` what bfloat16 nearly gives, ``reference`` a second computation of some
    quantities, in float64, for the tiny kinds.

    ``without`` gives, by ``law`` or ``law:quantity``, the reason why a law does not apply;
    ``gauge`` the same for ``loaded``, what depends on how weights are loaded. ``tolerance`` gives
    by quantity a tolerance of the record other than the usual, and the reason. A quantity is named
    by a pattern, with or without ``variant/`` before it.
    """

    name: str
    call: Callable[..., Any]
    covers: tuple[str, ...] = ()
    answers: Callable[[Any], Answers] = lambda found: found
    variants: Mapping[str, Options] = field(default_factory=lambda: {"plain": {}})
    only: Mapping[str, Callable[[World], bool]] = field(default_factory=dict)
    real: tuple[str, ...] = ()
    order: Mapping[str, int] = field(default_factory=dict)
    later: Mapping[str, int] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    seeds: tuple[str, ...] = ()
    adds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    half: tuple[str, ...] = ()
    gauge: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    tolerance: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    reference: Callable[[World, str, Answers], Mapping[str, Any]] | None = None

    def exists(self, world: World, variant: str) -> bool:
        """Whether this world has this variant."""
        tests = [self.only[key] for key in ("*", variant) if key in self.only]
        here = world.kind != "smollm2" or variant in self.real
        return here and all(test(world) for test in tests)

    def result(self, world: World, variant: str, **more: Any) -> Any:
        """The library's result."""
        options = {k: v(world) if callable(v) else v for k, v in self.variants[variant].items()}
        return self.call(world, **options | more)

    def answer(self, world: World, variant: str, **more: Any) -> Answers:
        """The named quantities of a call."""
        return self.told(self.result(world, variant, **more))

    def told(self, result: Any) -> Answers:
        """The named quantities of a result, in the order of their names."""
        found = self.answers(result)
        return {name: plain(found[name]) for name in sorted(found)}

    def excused(self, law: str, key: str = "") -> str | None:
        """Why a law does not apply, to all or to a quantity (``variant/quantity``)."""
        if law in self.without:
            return self.without[law]
        own = {k.partition(":")[2]: v for k, v in self.without.items() if k.startswith(law + ":")}
        more = self.gauge if law == "loaded" else {}
        return match(own, key) or match(more, key)

    @property
    def covered(self) -> tuple[str, ...]:
        """Public names that it is about."""
        return self.covers or (self.name,)

    @property
    def takes(self) -> frozenset[str]:
        """Options that its call names itself."""
        return frozenset(inspect.signature(self.call).parameters)


def match(patterns: Mapping[str, Any], key: str) -> Any:
    """The value of the first pattern that ``variant/quantity`` matches, or the quantity alone where
    the pattern has no ``/``."""
    quantity = key.partition("/")[2]
    of = lambda pattern: key if "/" in pattern else quantity
    return next((v for p, v in patterns.items() if fnmatchcase(of(p), p)), None)


def plain(value: Any) -> Any:
    """An answer as it is recorded: a float64 array, a string, or a list of strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
        return list(value)
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"expected numbers or strings, got {value!r}")
    return array.astype(np.float64)


def results_in(value: Any, depth: int = 0) -> Iterator[tlg.Result]:
    """The results that a call gives."""
    if isinstance(value, tlg.Result):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < 2:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from results_in(each, depth + 1)


def label(head: Any) -> str:
    """A head as ``"L1H2"``."""
    return head if isinstance(head, str) else f"L{head[0]}H{head[1]}"


def labels(heads: Iterable[Any]) -> list[str]:
    """Heads as ``"L1H2"``, in their order."""
    return [label(head) for head in heads]


def prefixed(prefix: str, values: Mapping[Any, Any]) -> Answers:
    """``prefix.key`` -> value."""
    return {f"{prefix}.{key}": value for key, value in values.items()}


def columns(prefix: str, names: Sequence[Any], values: Tensor, axis: int = -1) -> Answers:
    """One quantity for each name along an axis."""
    parts = values.movedim(axis, 0)
    if len(names) != len(parts):
        raise ValueError(f"{len(names)} names for {len(parts)} columns of {prefix}")
    return {f"{prefix}.{name}": part for name, part in zip(names, parts)}


def interval(name: str, value: Any) -> Answers:
    """An estimate with its 95% bounds and standard error: ``[4 ...]``."""
    return {f"{name}, with low, high, error": torch.stack([torch.as_tensor(x) for x in value[:4]])}


def sizes(values: Tensor, keep: Sequence[int]) -> Tensor:
    """Norms over all axes but those kept."""
    drop = [axis for axis in range(values.dim()) if axis not in keep]
    return values.double().square().sum(drop).sqrt()


def given(options: Options, **defaults: Any) -> dict[str, Any]:
    """Options of a call, and defaults where there are none."""
    return defaults | dict(options)


def rotary(world: World) -> bool:
    """Worlds whose queries and keys are rotated."""
    return world.rotary


def torch_seeded(seed: int) -> torch.Generator:
    """A generator of its own, so that the global one stays as it is."""
    return torch.Generator().manual_seed(seed)
