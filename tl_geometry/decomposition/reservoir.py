"""A seeded uniform sample of contexts, the same for any batches, that merges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(eq=False, kw_only=True, repr=False)
class Reservoir:
    """A uniform sample of contexts whose states are kept whole, chosen by a seeded priority of the
    context's index.

    The choice depends on the seed and the indices only, never on the batches, and two reservoirs
    merge by keeping the lowest priorities of both. ``priorities``, ``contexts`` and, where they are
    known, ``states`` and ``tokens`` have a row for each sampled context (``states`` and ``tokens``
    also for those of ``size`` that are still free, until :meth:`ordered`).

    >>> sample = Reservoir(size=2, seed=0)
    >>> entered = [sample.enter(0, 3), sample.enter(3, 3)]
    >>> at_once = Reservoir(size=2, seed=0)
    >>> entered.append(at_once.enter(0, 6))
    >>> sorted(sample.contexts.tolist()) == sorted(at_once.contexts.tolist())
    True
    """

    size: int
    seed: int
    priorities: Float[Tensor, " sample"] = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float64)
    )
    contexts: Int[Tensor, " sample"] = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )
    states: Float[Tensor, "sample state position d_model"] | None = None
    tokens: Int[Tensor, "sample position"] | None = None

    def __repr__(self) -> str:
        return f"Reservoir({len(self.contexts)} of {self.size} contexts, seed {self.seed})"

    def tensors(self) -> dict[str, Tensor]:
        """What is known of the sampled contexts, by name."""
        found = {"states": self.states, "tokens": self.tokens}
        known = {name: values for name, values in found.items() if values is not None}
        return {"priorities": self.priorities, "contexts": self.contexts} | known

    def enter(self, first: int, count: int) -> list[tuple[int, int]]:
        """Let the contexts ``first``, ``first + 1``, ... in where their priority is low enough:
        (slot, row of the batch) of each.

        A slot is a row of every array here; those whose contexts have to leave are used again.
        """
        drawn = [
            (float(np.random.default_rng((self.seed, first + i)).random()), i) for i in range(count)
        ]
        # a slot of the sample as a negative number, a row of the batch as it is
        known = [(p, -1 - slot) for slot, p in enumerate(self.priorities.tolist())]
        kept = sorted(known + drawn)[: self.size]
        stay = {-1 - i for _, i in kept if i < 0}
        free = [slot for slot in range(self.size) if slot not in stay]
        chosen = list(zip(free, [pair for pair in kept if pair[1] >= 0], strict=False))
        grown = max([len(known), *(slot + 1 for slot, _ in chosen)])
        extra = grown - len(known)
        self.priorities = torch.cat([self.priorities, torch.zeros(extra, dtype=torch.float64)])
        self.contexts = torch.cat([self.contexts, torch.zeros(extra, dtype=torch.int64)])
        for slot, (priority, i) in chosen:
            self.priorities[slot], self.contexts[slot] = priority, first + i
        return [(slot, i) for slot, (_, i) in chosen]

    def room(
        self, chosen: Sequence[tuple[int, int]], shape: tuple[int, int, int], tokens: Tensor | None
    ) -> None:
        """Make room (not filled yet) for the states ``[state position d_model]`` of the chosen
        contexts; note their tokens."""
        if not chosen:
            return
        slots, rows = [slot for slot, _ in chosen], [row for _, row in chosen]
        self.states = self._padded(self.states, torch.empty(self.size, *shape))
        if tokens is not None:
            self.tokens = self._padded(
                self.tokens, torch.empty(self.size, shape[1], dtype=torch.int64)
            )
            self.tokens[slots] = tokens[rows].cpu()

    def _padded(self, values: Tensor | None, empty: Tensor) -> Tensor:
        """Rows for the whole sample: ``values`` as they are, or moved into ``empty``."""
        if values is not None and len(values) == self.size:
            return values
        if values is not None:
            empty[: len(values)] = values
        return empty

    def ordered(self, *, copy: bool = True) -> Reservoir:
        """The sample by priority, without unused room.

        Without a copy (which is as large as everything else together) the slots are sorted where
        they are; processes that share a sample must then all do it, or have ended.
        """
        order = torch.argsort(self.priorities, stable=True)
        made: dict[str, Tensor] = {}
        for name, values in self.tensors().items():
            if copy:
                made[name] = values[order]
            else:
                _sort(values, order.tolist())
                made[name] = values[: len(order)]
        return dataclasses.replace(self, **made)

    @staticmethod
    def merge(a: Reservoir, b: Reservoir, first: int) -> Reservoir:
        """The contexts of lowest priority among both; ``first`` is the number that context 0 of
        ``b`` has in the whole."""
        contexts = b.contexts + first
        if a.states is None or b.states is None:
            return dataclasses.replace(b, contexts=contexts) if a.states is None else a
        priorities = torch.cat([a.priorities, b.priorities])
        kept = torch.argsort(priorities, stable=True)[: a.size]
        tokens = None
        if a.tokens is not None and b.tokens is not None:
            tokens = torch.cat([a.tokens, b.tokens])[kept]
        return Reservoir(
            size=a.size,
            seed=a.seed,
            priorities=priorities[kept],
            contexts=torch.cat([a.contexts, contexts])[kept],
            states=torch.cat([a.states, b.states])[kept],
            tokens=tokens,
        )


def _sort(values: Tensor, order: Sequence[int]) -> None:
    """``values[order]`` in place, a row at a time along each cycle of the permutation."""
    left = list(order)
    for first in range(len(left)):
        held, at = values[first].clone(), first
        while left[at] != first:
            values[at] = values[left[at]]
            left[at], at = at, left[at]
        values[at], left[at] = held, at
