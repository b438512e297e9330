"""How much of what each writer wrote do heads read? Sums of products of writes and cotangents; the
sweep over writers and composition ask for them.

With scales frozen a side of a head (query, key or value) is linear in the stream: ``x = M^T h``
with ``M [d_model d_head]``, then the frozen scale and the rotation. With G the cotangent of
``M^T h`` (:func:`tl_geometry.circuits.writer_sweep.score_cotangents`, taken back through both) the
numerator of writer a's share is

    sum_i w_a[i] . (M G[i]).

For few tokens every write is formed as a vector of the stream, once for all readers, and compared
with all ``M G[i]`` in one product. For many tokens only embeddings and MLPs are compared this way.
A head writes ``z W_O``: ``sum_i z[i] G[i]^T`` is one small matrix for each pair of heads, and its
product with the composite ``W_O^writer M^reader`` (Elhage et al. 2021) is the numerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.linalg import transposed
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.writers import CONSTANTS, Written

WORKING_SET = 2**25
"""Bytes that vectors of the stream may take in one step: few enough for a processor's cache, and
for memory that is handed out again without being cleared."""


@dataclass(frozen=True, eq=False)
class Reader:
    """One side of some heads of a layer as a linear function of the stream.

    ``matrix`` is centring, gain and projection. ``cotangents`` are those of the projections, taken
    back through rotation, QK-norm and frozen scale. ``constant`` holds the numerators of the
    layer's own constants. ``positions`` are those that the side reads (``None``: all).
    """

    matrix: Float[Tensor, "d_model head d_head"]
    cotangents: Float[Tensor, "weight batch position head d_head"]
    constant: Float[Tensor, "weight head"]
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
        pick = list(range(n_heads) if heads is None else heads)
        at = list(range(length) if positions is None else positions)
        scale, constant = (getattr(layer, f"{which}_{name}") for name in ("scale", "constant"))
        constants = einsum(cotangents, constant[:, at][:, :, pick], "n b i h e, b i h e -> n h")
        # the layer rotates all its heads and positions: zeros stand where none are chosen
        padded = cotangents.new_zeros(*cotangents.shape[:2], length, n_heads, cotangents.shape[-1])
        chosen = torch.tensor(at)[:, None], torch.tensor(pick)
        padded[:, :, *chosen] = cotangents
        back = transposed(lambda x: layer.turned(x, which), padded)
        back = back[:, :, *chosen] * scale[:, *chosen].unsqueeze(-1)
        eye = torch.eye(layer.h.shape[-1], dtype=layer.h.dtype, device=layer.h.device)
        matrix = layer.projected(eye, which)[:, pick]
        return cls(matrix, back, constants.double(), None if positions is None else tuple(at))

    def by_pair(
        self, written: Written, grain: str, shift: int
    ) -> Float[Tensor, "weight head part"]:
        """The numerators by pairs of heads. Each context reads what was written ``shift`` contexts
        before it in the batch."""
        by_name = self._vectors(written, shift)
        flat = rearrange(self.cotangents, "n b i h e -> (b i) (n h e)")
        size = self.cotangents.shape[0], *self.matrix.shape[1:]
        for heads in written.heads:
            z = self._read((heads.z * heads.scale[..., None, None]), shift)
            products = rearrange(z, "b i h e -> (b i) (h e)").mT @ flat
            products = products.view(*heads.W.shape[:2], *size)
            composite = einsum(heads.W, self.matrix, "w f d, d h e -> w f h e")
            by_head = einsum(products, composite, "w f n h e, w f h e -> n h w")
            if grain == "writers":
                by_name |= {f"L{heads.layer}H{h}": x for h, x in enumerate(by_head.unbind(-1))}
            else:
                by_name[f"attn{heads.layer}"] = by_head.sum(-1)
        return torch.stack([by_name[w.name].double() for w in written.names(grain)], -1)

    def _read(self, x: Float[Tensor, "batch position ..."], shift: int) -> Tensor:
        """What was written at the positions that are read, ``shift`` contexts before."""
        at = slice(None) if self.positions is None else list(self.positions)
        return x.roll(shift, 0)[:, at]

    def few_tokens(self) -> bool:
        """Whether writes as vectors, token by token, take fewer multiplications than pairs of
        heads."""
        n, batch, length, heads, width = self.cotangents.shape
        d_model, tokens = len(self.matrix), batch * length
        by_token = tokens * d_model * (width + n * heads)
        by_pair = width * heads * width * (d_model + n * tokens)
        return by_token < by_pair

    def among(self, start: int, stop: int) -> tuple[list[int], slice | list[int]]:
        """Which of the positions ``start`` to ``stop`` are read: their rows in ``cotangents``, and
        their places counted from ``start``."""
        if self.positions is None:
            return list(range(start, stop)), slice(None)
        rows = [row for row, position in enumerate(self.positions) if start <= position < stop]
        return rows, [self.positions[row] - start for row in rows]

    def _vectors(self, written: Written, shift: int) -> dict[str, Float[Tensor, "weight head"]]:
        """Numerators of embeddings, MLPs and constants, which are vectors of the stream."""
        held = {**written.dense, CONSTANTS: written.constants}
        n, batch, length, heads, _ = self.cotangents.shape
        total = self.cotangents.new_zeros(len(held), n * heads, dtype=torch.float64)
        # half of float64: vectors counted as float32
        width = len(self.matrix) * total.element_size() // 2
        per_context = length * width * (n * heads + 2 * len(held))
        for rows in torch.arange(batch).split(max(1, WORKING_SET // per_context)):
            values = torch.stack([self._read(x, shift)[rows] for x in held.values()])
            back = einsum(self.cotangents[:, rows], self.matrix, "n b i h e, d h e -> n h b i d")
            total += (values.flatten(1) @ back.flatten(2).flatten(0, 1).mT).double()
        return dict(zip(held, total.view(-1, n, heads), strict=True))


def numerators(
    readers: Sequence[Reader], written: Written, grain: str = "writers", *, others: bool = False
) -> list[Float[Tensor, "sample weight head part"]]:
    """``sum_i w_a[i] . (matrix cotangents[i])`` of each reader and writer. The samples are what was
    written and, if ``others``, what was written in the context before it in the batch."""
    by_token = [reader for reader in readers if reader.few_tokens()]
    sums = dict(zip(by_token, _by_token(by_token, written, grain, others), strict=True))
    for reader in readers:
        if reader not in sums:
            sums[reader] = torch.stack(
                [reader.by_pair(written, grain, shift) for shift in range(1 + others)]
            )
    return [sums[reader] for reader in readers]


def random_numerators(
    readers: Sequence[Reader],
    written: Written,
    grain: str,
    directions: tuple[Float[Tensor, "sample d_model"], Float[Tensor, "sample d_model"]],
) -> list[Float[Tensor, "sample weight head part"]]:
    """``sum_i (u . w_a[i]) (v . (matrix cotangents[i]))`` for pairs (u, v) of directions of writes
    and reads: two projections, where a turned writer would take as much as the writer itself."""
    written_along = written.along(directions[0]).stacked(grain)
    sums = []
    for reader in readers:
        matrix = einsum(reader.matrix, directions[1].to(reader.matrix), "d h e, k d -> k h e")
        read_along = einsum(reader.cotangents, matrix, "n b i h e, k h e -> k n h b i")
        positions = slice(None) if reader.positions is None else list(reader.positions)
        at_positions = written_along[:, :, positions]
        sums.append(einsum(read_along, at_positions, "k n h b i, p b i k -> k n h p").double())
    return sums


def _by_token(
    readers: Sequence[Reader], written: Written, grain: str, others: bool
) -> list[Float[Tensor, "sample weight head part"]]:
    """The numerators from every write as a vector of the stream, a few positions at a time."""
    batch, length, d_model = written.constants.shape
    samples, parts = 1 + others, len(written.names(grain))
    sizes = [(parts, samples, r.matrix.shape[1], len(r.cotangents)) for r in readers]
    totals = [
        torch.zeros(size, dtype=torch.float64, device=written.constants.device) for size in sizes
    ]
    vectors = parts + sum(samples * heads * n for _, _, heads, n in sizes)
    step = max(1, WORKING_SET // (vectors * batch * d_model * written.constants.element_size()))
    # of one step after the other
    memory = written.constants.new_empty(parts, batch, min(step, length), d_model)
    for start in range(0, length if readers else 0, step):
        stop = min(start + step, length)
        writes = written.at(slice(start, stop)).stacked(grain, out=memory[:, :, : stop - start])
        for reader, total in zip(readers, totals, strict=True):
            rows, places = reader.among(start, stop)
            if not rows:
                continue
            back = einsum(
                reader.cotangents[:, :, rows], reader.matrix, "n b i h e, d h e -> h n b i d"
            ).unsqueeze(0)
            if others:  # the next context's cotangents meet what was written in this one
                back = torch.cat([back, back.roll(-1, 3)])
            products = writes[:, :, places].flatten(1) @ back.flatten(3).flatten(0, 2).mT
            total += products.view(total.shape).double()
    return [rearrange(total, "part t h n -> t n h part") for total in totals]
