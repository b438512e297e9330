"""What is summed over a corpus? :class:`Moments`: sums, squares and products of states, from which
mean, pos and the analysis of variance follow; and :class:`Parts`, what states are then parted into.

:meth:`Moments.add` takes in a batch, ``a + b`` joins two, and any partition of a corpus gives the
same sums to rounding. Sums are float64. Products of a batch are those of its states about their
mean in the batch, in float32 (float64 states: in float64), and are moved to the origin in float64.
About the origin float32 products would be wrong by tens of per cent where a coordinate has a mean
of thousands and a variance of one, as GPT-2's outlier coordinates do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.sums import Sums

BLOCK = {"cpu": 2**20, "cuda": 2**26}
"""Bytes of float64 states converted at a time, by type of device: about the cache of a core (which
takes half the time of converting whole batches), or enough for a GPU."""

TRIANGLE = 4
"""Row blocks of a symmetric product, of which those on and below the diagonal are multiplied: 10 of
16. The whole product made a pass with second moments 8% slower."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Moments(Sums):
    """Running sums of states ``h [context position d_model]`` for disjoint groups of contexts.

    Sums over contexts: ``sums`` of h, ``squares`` of |h|^2, ``context_squares`` of |m|^2 for the
    context's mean m over the window; ``counts`` are the contexts of each group. ``second`` is
    ``sum h h^T`` over contexts and window, valid on and below the diagonal (:meth:`products`).
    Whatever is over the window uses positions ``window`` only.
    """

    window: tuple[int, int]
    sums: Float[Tensor, "group state position d_model"]
    squares: Float[Tensor, "group state position"]
    context_squares: Float[Tensor, "group state"]
    counts: Int[Tensor, " group"]
    second: Float[Tensor, "state d_model d_model"] | None = None

    @classmethod
    def zeros(
        cls,
        sizes: tuple[int, int, int, int],
        *,
        window: tuple[int, int],
        second: bool = False,
        device: torch.device | str = "cpu",
    ) -> Moments:
        """Sums of no contexts; ``sizes`` are groups, states, positions and d_model."""
        sums = torch.zeros(sizes, dtype=torch.float64, device=device)
        return cls(
            window=window,
            sums=sums,
            squares=torch.zeros_like(sums[..., 0]),
            context_squares=torch.zeros_like(sums[:, :, 0, 0]),
            counts=torch.zeros(sizes[0], dtype=torch.int64),
            second=sums.new_zeros(sizes[1], sizes[3], sizes[3]) if second else None,
        )

    @property
    def contexts(self) -> int:
        """Number of contexts summed."""
        return int(self.counts.sum())

    def to(self, device: torch.device | str) -> Moments:
        """The same sums on another device; counts stay on the CPU, where they are read."""
        return self.mapped(lambda name, value: value if name == "counts" else value.to(device))

    def add(
        self, row: int, group: int, h: Float[Tensor, "batch position d_model"]
    ) -> tuple[Float[Tensor, "batch d_model"], Float[Tensor, "batch position"]]:
        """Add a batch of one state (``row``) to one group, in place, but for its ``counts``.
        Returns each context's mean over the window, and the norms of its states (float64)."""
        (start, end), h = self.window, h.to(self.sums.device)
        batch, length, width = h.shape
        norms = torch.empty(batch, length, dtype=torch.float64, device=h.device)
        total = norms.new_zeros(batch, width)
        step = max(1, BLOCK.get(h.device.type, BLOCK["cpu"]) // (8 * batch * width))
        # cut at the window too, so that each block is inside or outside of it
        for low, high in pairwise(sorted({start, end, length, *range(0, length, step)})):
            block = h[:, low:high].double()
            self.sums[group, row, low:high] += block.sum(0)
            norms[:, low:high] = torch.linalg.vector_norm(block, dim=-1)
            if start <= low < end:
                total += block.sum(1)
        means = total / (end - start)
        self.squares[group, row] += norms.square().sum(0)
        self.context_squares[group, row] += means.square().sum()
        if self.second is not None:
            dtype = torch.promote_types(h.dtype, torch.float32)
            shift = means.mean(0).to(dtype)
            vectors = (h[:, start:end].to(dtype) - shift).flatten(0, 1)
            for low in range(0, width, -(-width // TRIANGLE)):
                high = min(width, low - (-width // TRIANGLE))
                self.second[row, low:high, :high] += vectors[:, low:high].mT @ vectors[:, :high]
            # h h^T = r r^T + r s^T + s r^T + s s^T for r = h - s
            shift = shift.double()
            cross = total.sum(0) - len(vectors) * shift / 2
            self.second[row].addr_(cross, shift).addr_(shift, cross)
        return means, norms

    def products(self, row: int) -> Float[Tensor, "d_model d_model"]:
        """``sum h h^T`` of one state over contexts and window; second moments must be there."""
        assert self.second is not None
        lower = self.second[row].tril()
        return lower + lower.tril(-1).mT

    def window_mean(self) -> Float[Tensor, "state d_model"]:
        """Mean of h over contexts and window positions."""
        start, end = self.window
        return self.sums[:, :, start:end].sum((0, 2)) / (self.contexts * (end - start))

    def regrouped(self, group_of: Int[Tensor, " group"], groups: int) -> Moments:
        """The same sums in other groups: group g joins group ``group_of[g]`` of ``groups``."""

        def joined(name: str, values: Tensor) -> Tensor:
            if self._axis(name, "group", values) is None:
                return values
            return values.new_zeros(groups, *values.shape[1:]).index_add_(0, group_of, values)

        return self.mapped(joined)

    def pooled(self) -> Moments:
        """The sums of all groups together, as one group."""
        return self.regrouped(torch.zeros(len(self.counts), dtype=torch.int64), 1)


class Parts(NamedTuple):
    """Additive parts of states (Song & Zhong 2023, Eq. 2 and 3): ``h = mean + pos + ctx + resid``.

    This is a two-way analysis of variance in d_model dimensions. With contexts c and positions t::

        mean = average of h over c and t          pos_t = average over c of h - mean
        ctx_c = average over t of h - mean        resid = h - mean - pos_t - ctx_c
                                                  cvec  = ctx + resid

    Every context contributes every position once, so the four parts are orthogonal and their
    squared norms add up. Each has the axes of the activations along which it varies, and ``state``
    where they have one.
    """

    mean: Float[Tensor, "*state d_model"]
    pos: Float[Tensor, "*state position d_model"]
    ctx: Float[Tensor, "*state batch d_model"]
    resid: Float[Tensor, "*state batch position d_model"]

    @property
    def cvec(self) -> Float[Tensor, "*state batch position d_model"]:
        """``ctx + resid``: everything that depends on the context."""
        return self.ctx.unsqueeze(-2) + self.resid

    def total(self) -> Float[Tensor, "*state batch position d_model"]:
        """The sum of the parts: the activations again."""
        return self.mean[..., None, None, :] + self.pos.unsqueeze(-3) + self.cvec
