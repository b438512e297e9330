"""Which contexts' states are kept whole? A seeded uniform sample of a corpus. Called by the
accumulation of ``decompose`` (``keep=``) and by ``PositionContext.merge``.

Every context has a priority, a random number drawn from the seed and the hash of its tokens; the
contexts of lowest priority are the sample. So the sample does not depend on batches, processes or
shards, and the samples of two shards merge by keeping the lowest priorities of both. The priority
is not drawn from the context's number, because shards with one seed would then sample the same
numbers. Equal contexts have equal priorities.
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
    """At most ``size`` sampled contexts, one row each: priority, number in the corpus
    (``contexts``), states and (where they are known) tokens.

    While contexts enter there are ``size`` rows. Free rows have infinite priority and context -1,
    and are the last.

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
            # empty, not zeros: rows that are never written take no physical memory
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
        """Offer the contexts ``first``, ``first + 1``, ... of a batch; those of low enough priority
        replace others. ``keys`` are the hashes of the contexts, ``tokens`` their ids. Returns
        (row here, row of the batch) of each that entered: the caller writes its states.
        """
        candidates = [
            (float(np.random.default_rng((self.seed, key)).random()), i)
            for i, key in enumerate(keys.tolist())
        ]
        # rows of the sample are coded as -1 - row, rows of the batch as they are: ties go to the
        # sample, and free rows (all infinite) are filled from the first on
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
        """Order the rows by priority, in place.

        Processes that add up their states must all call it, or their rows do not match.
        """
        order = self.priorities[: len(self)].argsort(stable=True)
        for name, values in self.filled().tensors().items():
            # one state at a time: a copy of all could be as large as everything else together
            parts = values.unbind(1) if name == "states" else (values,)
            for part in parts:
                part.copy_(part[order])

    def filled(self) -> Reservoir:
        """The rows that hold a context."""
        return self.select(slice(len(self)), "sample")

    @staticmethod
    def merge(parts: Sequence[Reservoir], starts: Sequence[int]) -> Reservoir:
        """The contexts of lowest priority of all parts. The merged size is the smallest ``size`` of
        a part: among more, a context might be missing that this part has turned away. ``starts``
        are the numbers that the first contexts of the parts have in the merged corpus."""
        size = min(part.size for part in parts)
        numbered = [
            dataclasses.replace(part, contexts=part.contexts + start, size=size)
            for part, start in zip(parts, starts, strict=True)
        ]
        pooled = Reservoir.cat(numbered, "sample")
        return pooled.select(pooled.priorities.argsort(stable=True)[:size], "sample")


def activation_keys(h: Float[Tensor, "batch position d_model"]) -> Int[Tensor, " batch"]:
    """Keys of contexts whose tokens are not known: hashes of the vector at the last position."""
    # the bits of the float64 numbers, hashed as if they were token ids
    return row_hashes(h[:, -1].double().view(torch.int64))
