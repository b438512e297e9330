"""Sums over contexts that merge: one batch at a time, on one process or many, in any order.

:class:`Moments` is a monoid: :meth:`Moments.add` puts a batch in, :meth:`Moments.merge` joins two, and any partition of a
corpus gives the same sums to rounding. Position sums, squares and counts are float64. Second moments are float64 sums of
float32 products of states centred on a *pilot* (the first batch's mean): plain float32 products are wrong by tens of per
cent once a coordinate has a mean of thousands and a variance of one, as GPT-2's outlier coordinates do; centred ones by 1e-7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry._check import require

COLUMN_BLOCK = 16
"""Columns converted to float64 at a time, so that the copy stays in cache (half the time of whole batches, measured)."""
TRIANGLE_BLOCKS = 6
"""Block rows of a symmetric product: only blocks on and below the diagonal are multiplied (58% of the products)."""
SETTINGS = ("window", "product_dtype")
"""Fields of :class:`Moments` that are not sums."""


def half_width(width: int) -> int:
    """Columns in each end of a window of ``width`` columns when a quarter (at least one column) is left out between them."""
    return (width - max(1, width // 4)) // 2


@dataclass(eq=False, kw_only=True)
class Moments:
    """Running sums of states ``h [context position d_model]``, kept apart for disjoint groups of contexts (index modulo groups).

    ``sums`` is the sum of h over contexts, ``squares`` of |h|^2, ``context_squares`` of |mean over the window of h|^2, ``halves``
    of (|a|^2, |b|^2, a.b) for the means a, b of the window's two ends (a quarter of the window left out between them).
    ``second`` is the lower block triangle of sum (h - pilot)(h - pilot)^T over the window. Columns are all that were seen; the
    quantities named with a window use ``window`` only.
    """

    window: tuple[int, int]
    sums: Float[Tensor, "group state column d_model"]
    squares: Float[Tensor, "group state column"]
    context_squares: Float[Tensor, "group state"]
    halves: Float[Tensor, "group state 3"]
    counts: Int[Tensor, " group"]
    second: Float[Tensor, "state d_model d_model"] | None = None
    pilot: Float[Tensor, "state d_model"] | None = None
    label_sums: Float[Tensor, "label state d_model"] | None = None
    label_counts: Int[Tensor, " label"] | None = None
    product_dtype: torch.dtype = torch.float32

    @classmethod
    def zeros(
        cls,
        *,
        states: int,
        columns: int,
        d_model: int,
        window: tuple[int, int],
        groups: int = 8,
        labels: int = 0,
        second: bool = False,
        product_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Moments:
        """The identity of :meth:`merge` for these sizes."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            window=window,
            sums=zeros(groups, states, columns, d_model),
            squares=zeros(groups, states, columns),
            context_squares=zeros(groups, states),
            halves=zeros(groups, states, 3),
            counts=torch.zeros(groups, dtype=torch.int64),
            product_dtype=product_dtype,
            second=zeros(states, d_model, d_model) if second else None,
            pilot=zeros(states, d_model) if second else None,
            label_sums=zeros(labels, states, d_model) if labels else None,
            label_counts=torch.zeros(labels, dtype=torch.int64) if labels else None,
        )

    @property
    def contexts(self) -> int:
        """Number of contexts summed."""
        return int(self.counts.sum())

    def count(self, group_of: Int[Tensor, " batch"], label_of: Int[Tensor, " batch"] | None) -> None:
        """Count the contexts of a batch, once, beside one :meth:`add` for each state."""
        self.counts += torch.bincount(group_of, minlength=len(self.counts))
        if self.label_counts is not None and label_of is not None:
            self.label_counts += torch.bincount(label_of, minlength=len(self.label_counts))

    def add(
        self,
        state: int,
        h: Float[Tensor, "batch column d_model"],
        group_of: Int[Tensor, " batch"],
        label_of: Int[Tensor, " batch"] | None = None,
    ) -> tuple[Float[Tensor, "batch d_model"], Bool[Tensor, ""]]:
        """Add one batch of one state; returns each context's mean over the window (float64) and whether every number is finite."""
        member = torch.nn.functional.one_hot(group_of, len(self.counts)).T.to(h.device, torch.float64)
        norms = torch.empty(h.shape[:2], dtype=torch.float64, device=h.device)
        start, end = self.window
        part = half_width(end - start)
        whole, first, last = (torch.zeros(h.shape[0], h.shape[2], dtype=torch.float64, device=h.device) for _ in range(3))
        cuts = sorted({start, start + part, end - part, end, h.shape[1], *range(0, h.shape[1], COLUMN_BLOCK)})
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            block = h[:, low:high].double()
            self.sums[:, state, low:high] += einsum(member, block, "group batch, batch column d_model -> group column d_model")
            norms[:, low:high] = torch.linalg.vector_norm(block, dim=-1).square()
            if start <= low < end:
                total = block.sum(1)
                whole += total
                if low < start + part:
                    first += total
                if low >= end - part:
                    last += total
        self.squares[:, state] += member @ norms
        means = whole / (end - start)
        self.context_squares[:, state] += member @ means.square().sum(-1)
        if part > 0:
            first, last = first / part, last / part
            products = torch.stack([first.square().sum(-1), last.square().sum(-1), (first * last).sum(-1)], dim=-1)
            self.halves[:, state] += member @ products
        if self.label_sums is not None and label_of is not None:
            self.label_sums[:, state].index_add_(0, label_of.to(h.device), whole)
        if self.second is not None:
            self._add_second(state, h[:, start:end])
        return means, torch.isfinite(norms).all()

    def _add_second(self, state: int, h: Float[Tensor, "batch position d_model"]) -> None:
        assert self.second is not None
        assert self.pilot is not None
        if not self.counts.any():  # nothing counted yet: this is the first batch
            self.pilot[state] = h.double().mean((0, 1)).float()
        rows = (h.to(self.product_dtype) - self.pilot[state].to(self.product_dtype)).flatten(0, 1)
        size = -(-rows.shape[1] // TRIANGLE_BLOCKS)
        for low in range(0, rows.shape[1], size):
            high = min(low + size, rows.shape[1])
            self.second[state, low:high, :high] += rows[:, low:high].T @ rows[:, :high]

    def window_sum(self) -> Float[Tensor, "state d_model"]:
        """Sum of h over contexts and window columns."""
        return self.sums[:, :, self.window[0] : self.window[1]].sum((0, 2))

    def centred_second(self, state: int, centre: Float[Tensor, " d_model"]) -> Float[Tensor, "d_model d_model"]:
        """``sum (h - centre)(h - centre)^T`` over contexts and window columns, whole and symmetric."""
        assert self.second is not None
        assert self.pilot is not None
        lower = self.second[state].tril()
        whole = lower + lower.tril(-1).T
        n = self.contexts * (self.window[1] - self.window[0])
        pilot = self.pilot[state]
        total = self.sums[:, state, self.window[0] : self.window[1]].sum((0, 1))
        excess = total - n * pilot  # sum of (h - pilot)
        delta = pilot - centre
        return whole + torch.outer(excess, delta) + torch.outer(delta, excess) + n * torch.outer(delta, delta)

    @staticmethod
    def merge(a: Moments, b: Moments) -> Moments:
        """Moments of the contexts of both; the second moments of ``b`` are moved to the pilot of ``a``."""
        same = a.window == b.window and a.sums.shape == b.sums.shape
        sizes = f"window {a.window} and sums of shape {tuple(a.sums.shape)}"
        require(same, "merge", expected=sizes, got=f"window {b.window} and {tuple(b.sums.shape)}", instead="partial results of one corpus")
        both = (a.second is None) == (b.second is None)
        require(both, "merge", expected="second moments in both or in neither", got="in one", instead="the same second_moments= for both")
        if a.contexts == 0 or b.contexts == 0:
            return b if a.contexts == 0 else a
        added = {
            f.name: getattr(a, f.name) + getattr(b, f.name).to(a.sums.device)
            for f in dataclasses.fields(a)
            if f.name not in (*SETTINGS, "second", "pilot") and getattr(a, f.name) is not None
        }
        second = None
        if a.second is not None and a.pilot is not None:
            second = a.second + torch.stack([b.centred_second(s, a.pilot[s]) for s in range(len(a.second))])
        return Moments(window=a.window, product_dtype=a.product_dtype, second=second, pilot=a.pilot, **added)

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name, as they are stored in a file."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in SETTINGS}
        return {k: v for k, v in found.items() if v is not None}

    @classmethod
    def of(cls, window: Sequence[int], tensors: dict[str, Tensor], device: torch.device | str = "cpu") -> Moments:
        """Moments from :meth:`tensors`."""
        names = {f.name for f in dataclasses.fields(cls)}
        host = ("counts", "label_counts")
        sums: dict[str, Any] = {k: v if k in host else v.to(device) for k, v in tensors.items() if k in names}
        return cls(window=(window[0], window[1]), **sums)


@dataclass(eq=False, kw_only=True)
class Reservoir:
    """A uniform sample of contexts whose states are kept whole, chosen by a seeded priority of the context's index.

    The choice depends on the seed and the indices only, never on the batches, and two reservoirs merge by keeping the lowest
    priorities of both.
    """

    size: int
    seed: int
    priorities: Float[Tensor, " sample"] = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    contexts: Int[Tensor, " sample"] = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    states: Float[Tensor, "sample state column d_model"] | None = None
    tokens: Int[Tensor, "sample column"] | None = None

    def choose(self, first: int, count: int) -> list[tuple[float, int]]:
        """(priority, row of the batch) of the contexts ``first``, ``first + 1``, ... that enter the reservoir."""
        drawn = [(float(np.random.default_rng((self.seed, first + i)).random()), i) for i in range(count)]
        known = [(p, -1) for p in self.priorities.tolist()]
        return [pair for pair in sorted(known + drawn)[: self.size] if pair[1] >= 0]

    def put(self, first: int, chosen: list[tuple[float, int]], states: Tensor, tokens: Tensor | None) -> None:
        """Take in the states ``[sample state column d_model]`` of the chosen rows and drop what no longer belongs."""
        if not chosen:
            return
        new = Reservoir(
            size=self.size,
            seed=self.seed,
            priorities=torch.tensor([p for p, _ in chosen], dtype=torch.float64),
            contexts=torch.tensor([first + i for _, i in chosen]),
            states=states.float().cpu(),
            tokens=None if tokens is None else tokens.cpu(),
        )
        merged = Reservoir.merge(self, new)
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(merged, field.name))

    @staticmethod
    def merge(a: Reservoir, b: Reservoir) -> Reservoir:
        """The contexts of lowest priority among both."""
        if a.states is None or b.states is None:
            return b if a.states is None else a
        priorities = torch.cat([a.priorities, b.priorities])
        kept = torch.argsort(priorities, stable=True)[: a.size]
        tokens = None if a.tokens is None or b.tokens is None else torch.cat([a.tokens, b.tokens])[kept]
        return Reservoir(
            size=a.size,
            seed=a.seed,
            priorities=priorities[kept],
            contexts=torch.cat([a.contexts, b.contexts])[kept],
            states=torch.cat([a.states, b.states])[kept],
            tokens=tokens,
        )
