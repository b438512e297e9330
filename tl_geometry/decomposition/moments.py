"""What is summed over a corpus? Sums, squares and products of states, from which mean, pos and the
analysis of variance follow. :class:`tl_geometry.decomposition.accumulator.Accumulation` fills them.

:meth:`Moments.add` takes in a batch, ``a + b`` joins two, and any partition of a corpus gives the
same sums to rounding. Position sums and squares are float64. Second moments are float64 sums of
float32 products of states centred on a *shift*, the first batch's mean. Without the shift, float32
products are wrong by tens of per cent where a coordinate has a mean of thousands and a variance of
one, as GPT-2's outlier coordinates do; with it by 1e-7.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.sums import Sums
from tl_geometry.decomposition.largest import OCTAVES, PER_OCTAVE, log_histogram

BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Bytes of float64 activations converted at a time, by type of device: about the cache of a core
(which takes half the time of converting whole batches), or enough for a GPU."""
TRIANGLE_BLOCKS = 8
"""Block rows into which a symmetric product is cut: only blocks on and below the diagonal are
multiplied, 36 of 64 (56%)."""
HALF_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
"""Whether this PyTorch (2.8 or newer) can multiply half-precision matrices on a GPU into a float32
product."""
SHIFT_SPREAD = 3.0
"""A half-precision coordinate is centred only if its mean is more than this many standard
deviations from zero. Then most states are within a factor of two of the shift, so that subtracting
it is exact (Sterbenz); elsewhere the shift is zero."""


class Scratch:
    """Named buffers that are reused from batch to batch: fresh memory pages cost as much as the
    arithmetic on them, and a buffer that is held already cannot run out of memory. ``busy`` is true
    while sums are being changed."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.busy = False

    def get(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised tensor, valid until the next call with the same name."""
        size, buffer = math.prod(shape), self.held.get(name)
        if (
            buffer is None
            or buffer.numel() < size
            or buffer.dtype != dtype
            or buffer.device != device
        ):
            # drop the old buffer first: both need not fit into memory at once
            self.held.pop(name, None)
            buffer = self.held[name] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(*shape)


def half_width(width: int) -> int:
    """Positions in each of the two ends of a window of ``width`` positions. A quarter of the window
    (at least one position) is left out between them, because neighbouring residuals are
    correlated."""
    return (width - max(1, width // 4)) // 2


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Moments(Sums):
    """Running sums of states ``h [context position d_model]``, kept apart for disjoint groups of
    contexts.

    Sums over contexts: ``sums`` of h, ``squares`` of |h|^2, ``context_squares`` of |m|^2 for the
    context's mean m over the window, ``halves`` of (|a|^2, |b|^2, a.b) for the means a, b of the
    window's two ends (:func:`half_width`). ``counts`` are the contexts of each group, always on the
    CPU. ``second`` is the lower block triangle of sum (h - shift)(h - shift)^T over contexts and
    window, ``tail`` the histogram of |h|^2 inside the window
    (:func:`tl_geometry.decomposition.largest.log_histogram`). The position axis holds all positions
    seen; whatever is said to be over the window uses positions ``window`` only.
    """

    window: tuple[int, int]
    sums: Float[Tensor, "group state position d_model"]
    squares: Float[Tensor, "group state position"]
    context_squares: Float[Tensor, "group state"]
    halves: Float[Tensor, "group state 3"]
    counts: Int[Tensor, " group"]
    tail: Float[Tensor, "state 2 bin"]
    second: Float[Tensor, "state d_model d_model"] | None = None
    shift: Float[Tensor, "state d_model"] | None = None
    product_dtype: torch.dtype = torch.float32
    fixed: set[int] = field(init=False, default_factory=set)
    """Rows of the states whose shift is set: products are centred on it, so it must not change."""
    scratch: Scratch = field(init=False, default_factory=Scratch)

    def __post_init__(self) -> None:
        if self.counts.any():
            self.fixed.update(range(self.sums.shape[1]))

    @classmethod
    def zeros(
        cls,
        *,
        states: int,
        length: int,
        d_model: int,
        window: tuple[int, int],
        groups: int = 8,
        second: bool = False,
        product_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Moments:
        """Sums of no contexts, for these sizes."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            window=window,
            sums=zeros(groups, states, length, d_model),
            squares=zeros(groups, states, length),
            context_squares=zeros(groups, states),
            halves=zeros(groups, states, 3),
            counts=torch.zeros(groups, dtype=torch.int64),
            tail=zeros(states, 2, PER_OCTAVE * OCTAVES),
            second=zeros(states, d_model, d_model) if second else None,
            shift=zeros(states, d_model) if second else None,
            product_dtype=product_dtype,
        )

    @property
    def contexts(self) -> int:
        """Number of contexts summed."""
        return int(self.counts.sum())

    def to(self, device: torch.device | str) -> Moments:
        """The same sums on another device; counts stay on the CPU, where they are read."""
        return self.mapped(lambda name, value: value if name == "counts" else value.to(device))

    def count(self, group_of: Int[Tensor, " batch"]) -> None:
        """Count the contexts of a batch: once per batch, while :meth:`add` is called once per
        state."""
        self.counts.add_(torch.bincount(group_of, minlength=len(self.counts)))

    def add(
        self,
        state: int,
        h: Float[Tensor, "batch position d_model"],
        group_of: Int[Tensor, " batch"],
        on_norms: Callable[[Tensor, Tensor], None] | None = None,
        groups: slice = slice(None),
    ) -> tuple[Float[Tensor, "batch d_model"], Bool[Tensor, ""]]:
        """Add one batch of one state; returns each context's mean over the window (float64) and
        whether every number is finite.

        ``state`` is the row of the state, ``group_of`` the group of each context.
        ``on_norms(h, norms)`` receives states ``[batch position d_model]`` and norms
        ``[batch position]`` of the window. ``groups`` is the range of groups in ``group_of``, where
        it is known: only their sums are read and written.

        Everything large is allocated before the first sum changes, and ``scratch.busy`` is true
        while sums change. So the caller can tell whether memory ran out before (the batch can be
        taken in again, in parts) or in between (it cannot).
        """
        self.scratch.busy = False
        device, (start, end) = self.sums.device, self.window
        h = h.to(device)  # a model spread over several devices
        batch, length, width = h.shape
        fill = {"dtype": torch.float64, "device": device}
        group_index = torch.arange(len(self.counts), device=device)[groups]
        member = (group_index.unsqueeze(1) == group_of.to(device)).double()  # [group batch]
        step = max(1, BLOCK_BYTES.get(device.type, 2**20) // (8 * batch * width))
        norms = torch.empty(batch, length, **fill)
        window_total, first, last = (torch.zeros(batch, width, **fill) for _ in range(3))
        # allocate it here, before `busy`; the loop below only reuses it
        self.scratch.get("block", (batch, min(step, length), width), torch.float64, device)
        rows = None if self.second is None else self._centred(state, h[:, start:end])
        self.scratch.busy = True
        if rows is not None:
            self._add_products(state, rows)
        end_width = half_width(end - start)
        # cut there too, so that each block is inside or outside the window and each of its ends
        cuts = sorted(
            {start, start + end_width, end - end_width, end, length, *range(0, length, step)}
        )
        flat = self.sums.view(len(self.counts), -1, length * width)[groups, state]
        for low, high in pairwise(cuts):
            block = self.scratch.get("block", (batch, high - low, width), torch.float64, device)
            block.copy_(h[:, low:high])
            sums = flat[:, low * width : high * width]
            torch.addmm(sums, member, block.view(batch, -1), out=sums)
            norms[:, low:high] = torch.linalg.vector_norm(block, dim=-1)
            if start <= low < end:
                total = block.sum(1)
                window_total += total
                if low < start + end_width:
                    first += total
                if low >= end - end_width:
                    last += total
        self.squares[groups, state] += member @ norms.square()
        means = window_total / (end - start)
        self.context_squares[groups, state] += member @ means.square().sum(-1)
        if end_width > 0:
            first, last = first / end_width, last / end_width
            products = torch.stack(
                [first.square().sum(-1), last.square().sum(-1), (first * last).sum(-1)], dim=-1
            )
            self.halves[groups, state] += member @ products
        self.tail[state] += log_histogram(norms[:, start:end].square())
        if on_norms is not None:
            on_norms(h[:, start:end], norms[:, start:end])
        self.scratch.busy = False
        return means, torch.isfinite(norms).all()

    def _centred(
        self, state: int, h: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "row d_model"]:
        """States minus the shift, in the dtype of the products; the first batch sets the shift.

        Half precision stays half precision on a GPU, which accumulates its products in float32.
        That is many times faster than float32 products and gives the same numbers, because the
        shift is zero or a half-precision number near the state, so that their difference is exact
        (:data:`SHIFT_SPREAD`).
        """
        assert self.shift is not None
        half = h.element_size() == 2 and self.product_dtype == torch.float32
        if state not in self.fixed:
            mean = h.mean((0, 1), dtype=torch.float64)
            if half:
                spread = (h.float() - mean.float()).square().mean((0, 1)).sqrt()
                mean = torch.where(mean.abs() > SHIFT_SPREAD * spread, mean.to(h.dtype), 0)
            self.shift[state] = mean.float()
            self.fixed.add(state)
        dtype = h.dtype if half and h.is_cuda and HALF_PRODUCTS else self.product_dtype
        rows = self.scratch.get("rows", h.shape, dtype, h.device)
        if h.element_size() >= dtype.itemsize:
            # subtract before narrowing: rounding the states themselves would lose the difference
            torch.sub(h, self.shift[state].to(h.dtype), out=rows)
        else:
            rows.copy_(h).sub_(self.shift[state].to(dtype))
        return rows.flatten(0, 1)

    def _add_products(self, state: int, rows: Float[Tensor, "row d_model"]) -> None:
        assert self.second is not None
        size = -(-rows.shape[1] // TRIANGLE_BLOCKS)
        for low in range(0, rows.shape[1], size):
            high = min(low + size, rows.shape[1])
            if rows.element_size() == 2:
                product = torch.mm(rows[:, low:high].T, rows[:, :high], out_dtype=torch.float32)
            else:
                product = self.scratch.get("product", (high - low, high), rows.dtype, rows.device)
                torch.mm(rows[:, low:high].T, rows[:, :high], out=product)
            self.second[state, low:high, :high] += product

    def __repr__(self) -> str:
        groups, states, length, width = self.sums.shape
        sizes = f"{states} states of {length} positions and d_model {width}"
        return f"Moments({self.contexts} contexts in {groups} groups, {sizes})"

    def window_sum(self) -> Float[Tensor, "state d_model"]:
        """Sum of h over contexts and window positions."""
        return self.sums[:, :, self.window[0] : self.window[1]].sum((0, 2))

    def centred_second(
        self, state: int, centre: Float[Tensor, " d_model"]
    ) -> Float[Tensor, "d_model d_model"]:
        """``sum (h - centre)(h - centre)^T`` over contexts and window positions, both
        triangles."""
        assert self.second is not None
        assert self.shift is not None
        lower = self.second[state].tril()
        full = lower + lower.tril(-1).T
        n_vectors = self.contexts * (self.window[1] - self.window[0])
        shift = self.shift[state]
        total = self.sums[:, state, self.window[0] : self.window[1]].sum((0, 1))
        excess = total - n_vectors * shift  # sum of (h - shift)
        delta = shift - centre
        # the products of h - centre = (h - shift) + delta, expanded
        return (
            full
            + torch.outer(excess, delta)
            + torch.outer(delta, excess)
            + n_vectors * torch.outer(delta, delta)
        )

    def __add__(self, other: Moments) -> Moments:  # type: ignore[override]
        """Moments of the contexts of both; the second moments of ``other`` are moved to this shift.

        Products of two dtypes count as products of the less accurate one.
        """
        fits = self.window == other.window and self.sums.shape == other.sums.shape
        expected = f"window {self.window} and sums of shape {tuple(self.sums.shape)}"
        got = f"window {other.window} and {tuple(other.sums.shape)}"
        require(fits, "merge", expected=expected, got=got, instead="partial results of one corpus")
        fits = (self.second is None) == (other.second is None)
        expected = "second moments in both or in neither"
        instead = "the same second_moments= for both"
        require(fits, "merge", expected=expected, got="in one", instead=instead)
        if self.contexts == 0 or other.contexts == 0:
            return other if self.contexts == 0 else self
        if self.second is not None and self.shift is not None:
            centred = [other.centred_second(s, self.shift[s]) for s in range(len(self.second))]
            # other's products are now about self's shift; the sum below adds shifts, so zero here
            other = dataclasses.replace(
                other, second=torch.stack(centred), shift=torch.zeros_like(self.shift)
            )
        coarse = max(
            self.product_dtype, other.product_dtype, key=lambda dtype: torch.finfo(dtype).eps
        )
        added = super().__add__(other)  # type: ignore[arg-type]
        return dataclasses.replace(added, product_dtype=coarse)

    def regrouped(self, group_of: Int[Tensor, " group"], groups: int) -> Moments:
        """The same sums in other groups: group g joins group ``group_of[g]`` of ``groups``."""

        def joined(name: str, values: Tensor) -> Tensor:
            if self._axis(name, "group", values) is None:
                return values
            empty = values.new_zeros(groups, *values.shape[1:])
            return empty.index_add_(0, group_of.to(values.device), values)

        moments = self.mapped(joined)
        # not left to __post_init__, which sees only counts: the shift may have come from another
        # process before this one has counted a context
        moments.fixed.update(self.fixed)
        return moments
