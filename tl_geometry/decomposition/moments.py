"""Sums over contexts that merge: one batch at a time, on one process or many, in any order.

:class:`Moments` is a monoid: :meth:`Moments.add` puts a batch in, :meth:`Moments.merge` joins two,
and any partition of a corpus gives the same sums to rounding. Position sums, squares and counts are
float64. Second moments are float64 sums of float32 products of states centred on a *shift* (the
first batch's mean): plain float32 products are wrong by tens of per cent once a coordinate has a
mean of thousands and a variance of one, as GPT-2's outlier coordinates do; centred ones by 1e-7.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.decomposition.largest import OCTAVES, PER_OCTAVE, log_histogram

BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Bytes of activations converted to float64 at a time: about the cache of a core (half the time of
whole batches), or enough for a GPU."""
TRIANGLE_BLOCKS = 8
"""Block rows of a symmetric product: only blocks on and below the diagonal are multiplied (56% of
the products)."""
HALF_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
"""Whether PyTorch (2.8 and newer) multiplies half-precision matrices on a GPU into a float32
product."""
SHIFT_SPREAD = 3.0
"""Standard deviations from zero beyond which half-precision coordinates are centred on their
shift."""
GROUPED = ("sums", "squares", "context_squares", "halves", "counts")
"""Sums that are kept apart for each group of contexts."""
SETTINGS = ("window", "product_dtype", "fixed", "scratch", "busy")
"""Fields of :class:`Moments` that are not sums."""


class Scratch:
    """Buffers that are used again and again: fresh pages cost as much as the arithmetic on them,
    and what is held cannot run out."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def get(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised tensor, valid until the next call with the same name."""
        size, found = math.prod(shape), self.held.get(name)
        if found is None or found.numel() < size or found.dtype != dtype or found.device != device:
            self.held.pop(name, None)
            found = self.held[name] = torch.empty(size, dtype=dtype, device=device)
        return found[:size].view(*shape)


def half_width(width: int) -> int:
    """Positions in each end of a window of ``width`` positions when a quarter (at least one) is
    left out between them."""
    return (width - max(1, width // 4)) // 2


@dataclass(eq=False, kw_only=True, repr=False)
class Moments:
    """Running sums of states ``h [context position d_model]``, kept apart for disjoint groups of
    contexts.

    ``sums`` is the sum of h over contexts, ``squares`` of |h|^2, ``context_squares`` of |mean over
    the window of h|^2, ``halves`` of (|a|^2, |b|^2, a.b) for the means a, b of the window's two
    ends (a quarter of the window left out between them). ``second`` is the lower block triangle of
    sum (h - shift)(h - shift)^T over the window, ``tail`` the histogram of |h|^2 inside it
    (:func:`tl_geometry.decomposition.largest.log_histogram`). Positions are all that were seen; the
    quantities named with a window use ``window`` only.
    """

    window: tuple[int, int]
    sums: Float[Tensor, "group state position d_model"]
    squares: Float[Tensor, "group state position"]
    context_squares: Float[Tensor, "group state"]
    halves: Float[Tensor, "group state 3"]
    counts: Int[Tensor, " group"]
    second: Float[Tensor, "state d_model d_model"] | None = None
    shift: Float[Tensor, "state d_model"] | None = None
    label_sums: Float[Tensor, "label state d_model"] | None = None
    label_counts: Int[Tensor, " label"] | None = None
    tail: Float[Tensor, "state 2 bin"] | None = None
    product_dtype: torch.dtype = torch.float32
    fixed: set[int] = field(default_factory=set)
    scratch: Scratch = field(default_factory=Scratch)
    busy: bool = False

    @classmethod
    def zeros(
        cls,
        *,
        states: int,
        length: int,
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
            sums=zeros(groups, states, length, d_model),
            squares=zeros(groups, states, length),
            context_squares=zeros(groups, states),
            halves=zeros(groups, states, 3),
            counts=torch.zeros(groups, dtype=torch.int64),
            product_dtype=product_dtype,
            second=zeros(states, d_model, d_model) if second else None,
            shift=zeros(states, d_model) if second else None,
            label_sums=zeros(labels, states, d_model) if labels else None,
            label_counts=torch.zeros(labels, dtype=torch.int64) if labels else None,
            tail=zeros(states, 2, PER_OCTAVE * OCTAVES),
        )

    @property
    def contexts(self) -> int:
        """Number of contexts summed."""
        return int(self.counts.sum())

    def count(
        self, group_of: Int[Tensor, " batch"], label_of: Int[Tensor, " batch"] | None
    ) -> None:
        """Count the contexts of a batch, once, beside one :meth:`add` for each state."""
        self.counts += torch.bincount(group_of, minlength=len(self.counts))
        if self.label_counts is not None and label_of is not None:
            self.label_counts += torch.bincount(label_of, minlength=len(self.label_counts))

    def add(
        self,
        state: int,
        h: Float[Tensor, "batch position d_model"],
        group_of: Int[Tensor, " batch"],
        label_of: Int[Tensor, " batch"] | None = None,
        on_norms: Callable[[Tensor, Tensor], None] | None = None,
        groups: slice = slice(None),
    ) -> tuple[Float[Tensor, "batch d_model"], Bool[Tensor, ""]]:
        """Add one batch of one state; returns each context's mean over the window (float64) and
        whether every number is finite.

        ``on_norms(h, norms)`` receives states ``[batch position d_model]`` and norms
        ``[batch position]`` of the window. ``groups`` are those that the batch is of, where they
        are known: only their sums are read and written.

        Everything large is allocated before the first sum changes; ``busy`` is true while they
        change, so that running out of memory before (then the batch can be taken in again, in
        parts) and in between (then it cannot) can be told apart.
        """
        self.busy = False
        device, (start, end) = self.sums.device, self.window
        h = h.to(device)  # a model spread over several devices
        batch, length, width = h.shape
        fill = {"dtype": torch.float64, "device": device}
        number = torch.arange(len(self.counts), device=device)[groups]
        member = (number.unsqueeze(1) == group_of.to(device)).double()  # [group batch]
        step = max(1, BLOCK_BYTES.get(device.type, 2**20) // (8 * batch * width))
        norms = torch.empty(batch, length, **fill)
        whole, first, last = (torch.zeros(batch, width, **fill) for _ in range(3))
        self.scratch.get("block", (batch, min(step, length), width), torch.float64, device)
        rows = None if self.second is None else self._centred(state, h[:, start:end])
        self.busy = True
        if rows is not None:
            self._add_products(state, rows)
        part = half_width(end - start)
        cuts = sorted({start, start + part, end - part, end, length, *range(0, length, step)})
        flat = self.sums.view(len(self.counts), -1, length * width)[groups, state]
        for low, high in pairwise(cuts):
            block = self.scratch.get("block", (batch, high - low, width), torch.float64, device)
            block.copy_(h[:, low:high])
            sums = flat[:, low * width : high * width]
            torch.addmm(sums, member, block.view(batch, -1), out=sums)
            norms[:, low:high] = torch.linalg.vector_norm(block, dim=-1)
            if start <= low < end:
                total = block.sum(1)
                whole += total
                if low < start + part:
                    first += total
                if low >= end - part:
                    last += total
        self.squares[groups, state] += member @ norms.square()
        means = whole / (end - start)
        self.context_squares[groups, state] += member @ means.square().sum(-1)
        if part > 0:
            first, last = first / part, last / part
            products = torch.stack(
                [first.square().sum(-1), last.square().sum(-1), (first * last).sum(-1)], dim=-1
            )
            self.halves[groups, state] += member @ products
        if self.label_sums is not None and label_of is not None:
            self.label_sums[:, state].index_add_(0, label_of.to(device), whole)
        if self.tail is not None:
            self.tail[state] += log_histogram(norms[:, start:end].square())
        if on_norms is not None:
            on_norms(h[:, start:end], norms[:, start:end])
        self.busy = False
        return means, torch.isfinite(norms).all()

    def _centred(
        self, state: int, h: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "row d_model"]:
        """States minus the shift, in the dtype of the products; the first batch fixes the shift.

        Half precision stays half precision on a GPU, whose products of it are accumulated in
        float32: many times faster than float32 products, and the same numbers, because the shift is
        zero or a half-precision number near the state, so that the difference of the two is exact.
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
            # subtract first: states rounded to a narrower dtype would lose what is left
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
        """``sum (h - centre)(h - centre)^T`` over contexts and window positions, whole and
        symmetric."""
        assert self.second is not None
        assert self.shift is not None
        lower = self.second[state].tril()
        whole = lower + lower.tril(-1).T
        n = self.contexts * (self.window[1] - self.window[0])
        shift = self.shift[state]
        total = self.sums[:, state, self.window[0] : self.window[1]].sum((0, 1))
        excess = total - n * shift  # sum of (h - shift)
        delta = shift - centre
        return (
            whole
            + torch.outer(excess, delta)
            + torch.outer(delta, excess)
            + n * torch.outer(delta, delta)
        )

    @staticmethod
    def merge(a: Moments, b: Moments) -> Moments:
        """Moments of the contexts of both; the second moments of ``b`` are moved to the shift of
        ``a``.

        Products of two dtypes count as products of the less accurate one. Label k is the same
        document in both, so that both need as many labels.
        """
        same = a.window == b.window and a.sums.shape == b.sums.shape
        sizes = f"window {a.window} and sums of shape {tuple(a.sums.shape)}"
        require(
            same,
            "merge",
            expected=sizes,
            got=f"window {b.window} and {tuple(b.sums.shape)}",
            instead="partial results of one corpus",
        )
        both = (a.second is None) == (b.second is None)
        require(
            both,
            "merge",
            expected="second moments in both or in neither",
            got="in one",
            instead="the same second_moments= for both",
        )
        if a.contexts == 0 or b.contexts == 0:
            return b if a.contexts == 0 else a
        first, other = (0 if m.label_counts is None else len(m.label_counts) for m in (a, b))
        same_labels = "labels= for all parts or for none, each with the largest label"
        require(
            first == other,
            "merge: labels",
            expected=f"{first} labels",
            got=f"{other} in another part",
            instead=same_labels,
        )
        added = {
            f.name: getattr(a, f.name) + getattr(b, f.name).to(a.sums.device)
            for f in dataclasses.fields(a)
            if f.name not in (*SETTINGS, "second", "shift")
            and getattr(a, f.name) is not None
            and getattr(b, f.name) is not None
        }
        second = None
        if a.second is not None and a.shift is not None:
            second = a.second + torch.stack(
                [b.centred_second(s, a.shift[s]) for s in range(len(a.second))]
            )
        coarse = max(a.product_dtype, b.product_dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return Moments(
            window=a.window,
            product_dtype=coarse,
            second=second,
            shift=a.shift,
            fixed=set(a.fixed),
            **added,
        )

    def halve_groups(self) -> None:
        """Join groups 0 and 1, 2 and 3, ... in place; the second half of the groups is empty
        afterwards."""
        half = len(self.counts) // 2
        for name in GROUPED:
            values = getattr(self, name)
            values[:half] = values[0::2] + values[1::2]
            values[half:] = 0

    def regrouped(self, group_of: Int[Tensor, " group"], groups: int) -> Moments:
        """The same sums in other groups: group g joins group ``group_of[g]`` of ``groups``."""
        made: dict[str, Tensor] = {}
        for name in GROUPED:
            values = getattr(self, name)
            made[name] = torch.zeros(
                groups, *values.shape[1:], dtype=values.dtype, device=values.device
            )
            made[name].index_add_(0, group_of.to(values.device), values)
        return dataclasses.replace(self, **made, fixed=set(self.fixed), scratch=Scratch())

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name, as they are stored in a file."""
        sums = {name: value for name, value in vars(self).items() if name not in SETTINGS}
        return {name: value for name, value in sums.items() if value is not None}

    @classmethod
    def of(
        cls,
        window: Sequence[int],
        tensors: dict[str, Tensor],
        product_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Moments:
        """Moments from :meth:`tensors`; the dtype of the products behind them says how accurate the
        second moments are."""
        names = {f.name for f in dataclasses.fields(cls)}
        host = ("counts", "label_counts")
        sums: dict[str, Any] = {
            k: v if k in host else v.to(device) for k, v in tensors.items() if k in names
        }
        made = cls(window=(window[0], window[1]), product_dtype=product_dtype, **sums)
        made.fixed = set(range(made.sums.shape[1])) if made.counts.any() else set()
        return made
