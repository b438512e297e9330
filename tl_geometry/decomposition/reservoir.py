"""A few contexts whose states are kept whole: a seeded uniform sample, the same for any batches.

Every context has a priority, a random number drawn from the seed and what the context holds (the
hash of its tokens); those of lowest priority are the sample. It does not depend on batches,
processes or shards: the samples of two shards merge by keeping the lowest priorities of both. Drawn
from the context's number in its shard instead, shards of one seed would sample the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.results import row_hashes
from tl_geometry.base.sums import Sums


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Reservoir(Sums):
    """At most ``size`` sampled contexts: priority, index, states and (where they are known) tokens,
    a row for each.

    While contexts enter there are ``size`` rows, the free ones last and of infinite priority.

    >>> samples, keys = [Reservoir.empty(2, 0, (1, 4, 3)) for _ in range(2)], torch.arange(6)
    >>> entered = samples[0].enter(0, keys[:3]), samples[0].enter(3, keys[3:])
    >>> entered = samples[1].enter(0, keys)
    >>> sorted(samples[0].contexts.tolist()) == sorted(samples[1].contexts.tolist())
    True
    """

    size: int
    seed: int
    priorities: Float[Tensor, " sample"]
    contexts: Int[Tensor, " sample"]
    states: Float[Tensor, "sample state position d_model"]
    tokens: Int[Tensor, "sample position"] | None = None

    @classmethod
    def empty(cls, size: int, seed: int, shape: tuple[int, int, int]) -> Reservoir:
        """Room for the states ``[state position d_model]`` of so many contexts."""
        return cls(
            size=size,
            seed=seed,
            priorities=torch.full((size,), torch.inf, dtype=torch.float64),
            contexts=torch.full((size,), -1),
            # not zeros: only the rows that are written take up memory
            states=torch.empty(size, *shape),
            tokens=torch.zeros(size, shape[1], dtype=torch.int64),
        )

    def __repr__(self) -> str:
        return f"Reservoir({len(self)} of {self.size} contexts, seed {self.seed})"

    def __len__(self) -> int:
        return int((self.contexts >= 0).sum())

    def enter(
        self, first: int, keys: Int[Tensor, " batch"], tokens: Tensor | None = None
    ) -> list[tuple[int, int]]:
        """Let the contexts ``first``, ``first + 1``, ... in where their priority is low enough:
        (row here, row of the batch) of each, whose states are to be written; ``keys`` are the
        hashes of the contexts, ``tokens`` their ids.
        """
        candidates = [
            (float(np.random.default_rng((self.seed, key)).random()), i)
            for i, key in enumerate(keys.tolist())
        ]
        # a row of the sample as a negative number, a row of the batch as it is
        sampled = [(p, -1 - row) for row, p in enumerate(self.priorities.tolist())]
        lowest = sorted(sampled + candidates)[: len(sampled)]
        staying = {-1 - i for _, i in lowest if i < 0}
        free_rows = [row for row in range(len(sampled)) if row not in staying]
        entering = [(priority, i) for priority, i in lowest if i >= 0]
        for row, (priority, i) in zip(free_rows, entering, strict=True):
            self.priorities[row], self.contexts[row] = priority, first + i
            if self.tokens is not None and tokens is not None:
                self.tokens[row] = tokens[i]
        return [(row, i) for row, (_, i) in zip(free_rows, entering, strict=True)]

    def sort(self) -> None:
        """Order the rows by priority, where they are.

        Processes that add up their states must all do it, or their rows do not match.
        """
        order = self.priorities[: len(self)].argsort(stable=True)
        for name, values in self.filled().tensors().items():
            # one state at a time: a copy of all may be as large as everything else together
            parts = values.unbind(1) if name == "states" else (values,)
            for part in parts:
                part.copy_(part[order])

    def filled(self) -> Reservoir:
        """The rows that hold a context."""
        return self.select(slice(len(self)), "sample")

    @staticmethod
    def merge(parts: Sequence[Reservoir], starts: Sequence[int]) -> Reservoir:
        """The contexts of lowest priority of all parts, as many as the smallest room held: a
        context that a smaller one turned away could be among more. ``starts`` are the numbers that
        the first contexts of the parts have in the whole."""
        size = min(part.size for part in parts)
        numbered = [
            dataclasses.replace(part, contexts=part.contexts + start, size=size)
            for part, start in zip(parts, starts, strict=True)
        ]
        pooled = Reservoir.cat(numbered, "sample")
        return pooled.select(pooled.priorities.argsort(stable=True)[:size], "sample")


def activation_keys(h: Float[Tensor, "batch position d_model"]) -> Int[Tensor, " batch"]:
    """What tells contexts of activations apart, whose tokens are not known: a hash of the last
    position's vector."""
    # the bits of the numbers, which are hashed as ids are
    return row_hashes(h[:, -1].double().view(torch.int64))
