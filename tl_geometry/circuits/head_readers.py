"""How much of what each writer wrote do heads read? Sums of products of writes and cotangents, for
the sweep over writers and for composition.

With scales frozen a side of a head (query, key or value) is linear in the stream: ``x = M^T h``
with ``M [d_model d_head]``, then the frozen scale and the rotation. With G the cotangent of
``M^T h`` (:func:`tl_geometry.circuits.writer_sweep.score_cotangents`, taken back through both) the
numerator of writer a's share is

    sum_i w_a[i] . (M G[i]).

Every write is formed as a vector of the stream, once for all readers of a layer, and compared with
all ``M G[i]`` in one product. (The composite ``W_O^writer M^reader`` of each pair of heads would
take ``d_head^2`` multiplications for each pair and token in place of ``d_model``: no fewer.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.linalg import transposed
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.writers import Written

Rows = slice | list[int]
"""Rows of a tensor."""
WORKING_SET = 2**25
"""Bytes that vectors of the stream may take in one step: few enough for a processor's cache, and
for the allocator to use the same memory again (larger blocks come from the system, which clears
them)."""


@dataclass(frozen=True, eq=False)
class Reader:
    """One side of some heads of a layer as a linear function of the stream.

    ``matrix`` is centring, gain and projection. ``cotangents`` are those of the projections, before
    QK-norm, rotation and frozen scale. ``constant`` holds the numerators of the layer's own
    constants in each context. ``positions`` are those that the side reads (``None``: all).
    """

    matrix: Float[Tensor, "d_model head d_head"]
    cotangents: Float[Tensor, "weight batch position head d_head"]
    constant: Float[Tensor, "weight batch head"]
    positions: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        layer: LayerView,
        which: str,
        cotangents: Float[Tensor, "weight batch position head d_head"],
        heads: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> Reader:
        """The ``"q"``, ``"k"`` or ``"v"`` side; ``cotangents`` are those of the side as it enters
        scores or output, at the chosen heads and positions."""
        length, n_heads = layer.q.shape[1:3]
        # on the layer's device: every list that indexes a tensor there is copied, and waited for
        pick = _indices(heads, n_heads, layer.q.device)
        at = _indices(positions, length, layer.q.device)
        scale, constant = (getattr(layer, f"{which}_{name}") for name in ("scale", "constant"))
        constants = einsum(cotangents, constant[:, at][:, :, pick], "n b i h e, b i h e -> n b h")
        # the layer rotates all its heads and positions: zeros stand where none are chosen
        padded = cotangents.new_zeros(*cotangents.shape[:2], length, n_heads, cotangents.shape[-1])
        chosen = at.unsqueeze(1), pick
        padded[:, :, *chosen] = cotangents
        back = transposed(lambda x: layer.turned(x, which), padded)
        back = back[:, :, *chosen] * scale[:, *chosen].unsqueeze(-1)
        eye = torch.eye(layer.h.shape[-1], dtype=layer.h.dtype, device=layer.h.device)
        matrix = layer.projected(eye, which)[:, pick]
        read = None if positions is None else tuple(positions)
        return cls(matrix, back, constants.double(), read)

    def among(self, start: int, stop: int, length: int) -> tuple[Rows, Rows]:
        """Which of the tokens ``start`` to ``stop`` of all contexts in a row are read: their rows
        in ``cotangents``, and their places counted from ``start``."""
        if self.positions is None:
            return slice(start, stop), slice(None)
        n_read = len(self.positions)
        read = [
            (token // length * n_read + self.positions.index(token % length), token - start)
            for token in range(start, stop)
            if token % length in self.positions
        ]
        return [row for row, _ in read], [place for _, place in read]


def _indices(chosen: Sequence[int] | None, n: int, device: torch.device) -> Int[Tensor, " row"]:
    """The chosen ones of n (``None``: all) as a tensor."""
    return torch.arange(n, device=device) if chosen is None else torch.tensor(chosen, device=device)


def numerators(
    readers: Sequence[Reader],
    written: Written,
    grain: str = "writers",
    *,
    others: bool = False,
    keep: int = 0,
    contexts: Sequence[slice] | None = None,
) -> list[Float[Tensor, "group sample weight head part"]]:
    """``sum_i w_a[i] . (matrix cotangents[i])`` of each reader and writer, over each group of
    ``contexts`` (all are one group by default). Sample 0 is what was written; with ``others``
    sample 1 is what was written in the context before it in the batch. Writes stay in memory for
    the next layer where those of all layers take at most ``keep`` bytes."""
    batch, length, d_model = written.constants.shape
    samples, parts = 1 + others, len(written.names(grain))
    groups = [slice(0, batch)] if contexts is None else list(contexts)
    sizes = [(parts, samples, len(r.cotangents), r.matrix.shape[1]) for r in readers]
    totals = [
        torch.zeros(len(groups), *size, dtype=torch.float64, device=written.constants.device)
        for size in sizes
    ]
    # with others, the next context's cotangents meet what was written in this one
    cotangents = [
        torch.stack([r.cotangents.roll(-shift, 1).flatten(1, 2) for shift in range(samples)])
        for r in readers
    ]
    kept = written.kept(grain, keep)
    vectors = parts + sum(samples * n * heads for _, _, n, heads in sizes)
    step = max(1, WORKING_SET // (vectors * d_model * written.constants.element_size()))
    # one buffer for the writes of every step, empty where they are kept
    buffer = written.constants.new_empty(
        parts, 1, min(step, batch * length) * (kept is None), d_model
    )
    tokens = [
        (group, start, min(start + step, rows.stop * length))
        for group, rows in enumerate(groups)
        for start in range(rows.start * length, rows.stop * length, step)
    ]
    for group, start, stop in tokens:
        if kept is None:
            some = written.tokens(slice(start, stop))
            writes = some.stacked(grain, out=buffer[:, :, : stop - start]).flatten(1, 2)
        else:
            writes = kept[:, start:stop]
        for reader, of_reader, total in zip(readers, cotangents, totals, strict=True):
            rows, places = reader.among(start, stop, length)
            back = einsum(of_reader[:, :, rows], reader.matrix, "s n t h e, d h e -> s n h t d")
            products = writes[:, places].flatten(1) @ back.flatten(3).flatten(0, 2).mT
            total[group] += products.view(total.shape[1:]).double()
    return [rearrange(total, "group part s n h -> group s n h part") for total in totals]


def random_numerators(
    readers: Sequence[Reader],
    written: Written,
    grain: str,
    directions: tuple[Float[Tensor, "sample d_model"], Float[Tensor, "sample d_model"]],
) -> list[Float[Tensor, "sample weight head part"]]:
    """``sum_i (u . w_a[i]) (v . (matrix cotangents[i]))`` for pairs (u, v) of directions of writes
    and reads. These are two projections; a turned writer would cost as much as the writer did."""
    written_along = written.along(directions[0]).stacked(grain)
    sums = []
    for reader in readers:
        matrix = einsum(reader.matrix, directions[1].to(reader.matrix), "d h e, k d -> k h e")
        read_along = einsum(reader.cotangents, matrix, "n b i h e, k h e -> k n h b i")
        positions = slice(None) if reader.positions is None else list(reader.positions)
        writes = written_along[:, :, positions]
        sums.append(einsum(read_along, writes, "k n h b i, p b i k -> k n h p").double())
    return sums
