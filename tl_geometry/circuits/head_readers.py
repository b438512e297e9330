"""How much of what each writer wrote do heads read? Sums of products of writes and cotangents; the
sweep over writers and composition ask for them.

A side of a head (query, key or value) is linear in the stream, ``x = M h``. With G the cotangent of
x (:func:`tl_geometry.circuits.writer_sweep.pulled`) the numerator of writer a is

    sum_i w_a[i] . (M G[i]).

For few tokens every write is formed as a vector of the stream, once for all readers, and compared
with all ``M G[i]`` in one product. For many tokens embeddings and MLPs are compared so; a head
writes ``z W_O``, and ``sum_i z[i] G[i]^T`` is one small matrix for each pair of heads, its product
with the composite ``W_O^writer M^reader`` (Elhage et al. 2021) the numerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.writers import CONSTANTS, Written

WORKING_SET = 2**27
"""Bytes of one step over vectors of the stream."""


@dataclass(frozen=True, eq=False)
class Reader:
    """One side of some heads of a layer as a linear function of the stream: ``matrix`` is centring,
    gain and projection, ``pulled`` what their products are multiplied by (turned back through
    rotation, QK-norm and frozen scale), ``constant`` numerators of the layer's own constants;
    ``positions`` are those that it reads (``None``: all)."""

    matrix: Float[Tensor, "d_model head d_head"]
    pulled: Float[Tensor, "weight batch position head d_head"]
    constant: Float[Tensor, "weight head"]
    positions: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        layer: LayerView,
        which: str,
        weight: Float[Tensor, "weight batch position head d_head"],
        heads: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> Reader:
        """The ``"q"``, ``"k"`` or ``"v"`` side; ``weight`` is for the chosen heads and
        positions."""
        length, count = layer.q.shape[1:3]
        pick = list(range(count) if heads is None else heads)
        at = list(range(length) if positions is None else positions)
        frozen, constant = (getattr(layer, f"{which}_{name}") for name in ("scale", "constant"))
        constants = einsum(weight, constant[:, at][:, :, pick], "n b i h e, b i h e -> n h")
        everywhere = weight.new_zeros(*weight.shape[:2], length, count, weight.shape[-1])
        here = torch.tensor(at)[:, None], torch.tensor(pick)
        everywhere[:, :, *here] = weight
        back = _adjoint(layer, which, everywhere)[:, :, *here] * frozen[:, *here].unsqueeze(-1)
        eye = torch.eye(layer.h.shape[-1], dtype=layer.h.dtype, device=layer.h.device)
        matrix = layer.projected(eye, which)[:, pick]
        return cls(matrix, back, constants.double(), None if positions is None else tuple(at))

    def by_pair(
        self,
        written: Written,
        grain: str,
        shift: int,
        turns: Sequence[Float[Tensor, "d_model d_model"] | None],
    ) -> Float[Tensor, "sample weight head part"]:
        """The numerators by pairs of heads, for each of ``turns``; ``shift`` takes what was written
        in another context of the batch."""
        matrix = self.turned(turns)
        by_turn = self._vectors(written, shift, turns)
        flat = rearrange(self.pulled, "n b i h e -> (b i) (n h e)")
        size = self.pulled.shape[0], *self.matrix.shape[1:]
        for heads in written.heads:
            z = self._read((heads.z * heads.scale[..., None, None]), shift)
            small = rearrange(z, "b i h e -> (b i) (h e)").mT @ flat
            small = small.view(*heads.W.shape[:2], *size)
            for each_turn, turned_matrix in zip(by_turn, matrix, strict=True):
                pair = einsum(heads.W, turned_matrix, "w f d, d h e -> w f h e")
                each = einsum(small, pair, "w f n h e, w f h e -> n h w")
                if grain == "writers":
                    each_turn |= {f"L{heads.layer}H{h}": x for h, x in enumerate(each.unbind(-1))}
                else:
                    each_turn[f"attn{heads.layer}"] = each.sum(-1)
        names = [w.name for w in written.names(grain)]
        return torch.stack([torch.stack([of[n].double() for n in names], -1) for of in by_turn])

    def _read(self, x: Float[Tensor, "batch position ..."], shift: int) -> Tensor:
        """What was written at the positions that are read, in the context ``shift`` before."""
        at = slice(None) if self.positions is None else list(self.positions)
        return x.roll(shift, 0)[:, at]

    def turned(
        self, turns: Sequence[Float[Tensor, "d_model d_model"] | None]
    ) -> Float[Tensor, "sample d_model head d_head"]:
        """The matrix behind orthogonal maps of the stream."""
        flat = self.matrix.flatten(1)
        return torch.stack([flat if t is None else t @ flat for t in turns]).view(
            -1, *self.matrix.shape
        )

    def few_tokens(self, turns: int) -> bool:
        """Whether writes as vectors, token by token, take fewer products than all pairs of
        heads."""
        n, batch, length, heads, width = self.pulled.shape
        d_model, tokens = len(self.matrix), batch * length
        by_token = tokens * d_model * (width + turns * n * heads)
        by_pair = width * heads * width * (turns * d_model + n * tokens)
        return by_token < by_pair

    def among(self, start: int, stop: int) -> tuple[list[int], slice | list[int]]:
        """Of the positions ``start`` to ``stop`` those that are read: their rows in ``pulled``, and
        their places among all of ``start`` to ``stop``."""
        if self.positions is None:
            return list(range(start, stop)), slice(None)
        rows = [row for row, at in enumerate(self.positions) if start <= at < stop]
        return rows, [self.positions[row] - start for row in rows]

    def _vectors(
        self, written: Written, shift: int, turns: Sequence[Tensor | None]
    ) -> list[dict[str, Float[Tensor, "weight head"]]]:
        """Numerators of what is held as vectors of the stream, for each turn."""
        held = {**written.dense, CONSTANTS: written.constants}
        n, batch, length, heads, _ = self.pulled.shape
        out = self.pulled.new_zeros(len(turns), len(held), n * heads, dtype=torch.float64)
        each = length * len(self.matrix) * (n * heads + 2 * len(held)) * out.element_size() // 2
        for rows in torch.arange(batch).split(max(1, WORKING_SET // each)):
            values = torch.stack([self._read(x, shift)[rows] for x in held.values()])
            back = einsum(self.pulled[:, rows], self.matrix, "n b i h e, d h e -> n h b i d")
            back = back.flatten(2).flatten(0, 1).mT
            for turn, total in zip(turns, out, strict=True):
                turned = values if turn is None else values @ turn
                total += (turned.flatten(1) @ back).double()
        return [dict(zip(held, of.view(-1, n, heads), strict=True)) for of in out]


def numerators(
    readers: Sequence[Reader],
    written: Written,
    grain: str = "writers",
    *,
    turns: Sequence[Float[Tensor, "d_model d_model"]] = (),
    others: bool = False,
) -> list[Float[Tensor, "sample weight head part"]]:
    """``sum_i w_a[i] . (matrix pulled[i])`` of each reader and writer. Samples are what was
    written, the same turned by each of ``turns`` (orthogonal maps), and, if ``others``, what was
    written in the context before of the batch."""
    together = [reader for reader in readers if reader.few_tokens(1 + len(turns))]
    found = dict(zip(together, _by_token(together, written, grain, turns, others), strict=True))
    for reader in readers:
        if reader not in found:
            samples = [reader.by_pair(written, grain, 0, (None, *turns))]
            samples += [reader.by_pair(written, grain, 1, (None,))] if others else []
            found[reader] = torch.cat(samples)
    return [found[reader] for reader in readers]


def _by_token(
    readers: Sequence[Reader],
    written: Written,
    grain: str,
    turns: Sequence[Float[Tensor, "d_model d_model"]],
    others: bool,
) -> list[Float[Tensor, "sample weight head part"]]:
    """The numerators from every write as a vector of the stream, a few positions at a time."""
    batch, length, d_model = written.constants.shape
    matrices = [
        rearrange(reader.turned((None, *turns)), "t d h e -> t h e d") for reader in readers
    ]
    samples, parts = 1 + len(turns) + others, len(written.names(grain))
    sizes = [(parts, samples, r.matrix.shape[1], len(r.pulled)) for r in readers]
    totals = [
        torch.zeros(size, dtype=torch.float64, device=written.constants.device) for size in sizes
    ]
    vectors = parts + sum(samples * heads * n for _, _, heads, n in sizes)
    step = max(1, WORKING_SET // (vectors * batch * d_model * written.constants.element_size()))
    for start in range(0, length if readers else 0, step):
        stop = min(start + step, length)
        writes = written.at(slice(start, stop)).stacked(grain)
        for reader, matrix, total in zip(readers, matrices, totals, strict=True):
            rows, here = reader.among(start, stop)
            if not rows:
                continue
            pulled = rearrange(reader.pulled[:, :, rows], "n b i h e -> h (n b i) e")
            back = pulled.new_empty(
                samples, len(pulled), len(reader.pulled), batch, len(rows) * d_model
            )
            turned = len(matrix)
            torch.matmul(pulled, matrix, out=back[:turned].view(turned, *pulled.shape[:2], d_model))
            if others:  # the cotangents of the context behind meet what was written in this one
                back[-1] = back[0].roll(-1, 2)
            products = writes[:, :, here].flatten(1) @ back.flatten(3).flatten(0, 2).mT
            total += products.view(total.shape).double()
    return [rearrange(total, "part t h n -> t n h part") for total in totals]


def _adjoint(layer: LayerView, which: str, weight: Tensor) -> Tensor:
    """The transpose of QK-norm's linear part and the rotation, which leave heads and positions
    apart."""
    # autograd of a linear map gives its transpose, at zero as anywhere
    with torch.enable_grad():
        start = torch.zeros_like(weight, requires_grad=True)
        return torch.autograd.grad(layer.turned(start, which), start, weight)[0]
