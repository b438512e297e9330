"""The sums behind the shares block by block of query rows: row-centred scores, how they move
attention, and energies from the moments of the keys seen so far (see
:mod:`tl_geometry.scores.sums`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.rows import causal_mask

BLOCK = 64
"""Query rows handled at a time."""


class Block(NamedTuple):
    """Query rows ``start`` to ``stop``: all of them see keys 0 to ``full``, ``mask`` says which of
    ``full`` to ``end`` each one sees."""

    start: int
    stop: int
    full: int
    end: int
    mask: Float[Tensor, "batch head query key"]


class PlaneIndex(NamedTuple):
    """The rotary plane of each coordinate of a layer's heads, and how many planes there are."""

    plane: Int[Tensor, " d_head"]
    planes: int


def blocks_of(mask: Tensor, dtype: torch.dtype) -> Iterator[Block]:
    """Blocks of query rows; causal and unmasked attention share the keys before the block, any
    other mask is taken as it comes."""
    length = mask.shape[-1]
    causal = len(mask) == 1 and torch.equal(mask[0], causal_mask(length, device=mask.device))
    everything = len(mask) == 1 and bool(mask.all())
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        full = start if causal else length if everything else 0
        end = stop if causal else length
        yield Block(start, stop, full, end, mask[:, None, start:stop, full:end].to(dtype))


def contracted(
    weight: Float[Tensor, "batch head query key"],
    rows: Float[Tensor, "batch head query part d_head"],
    tables: Tensor,
    added: Tensor | None,
) -> Float[Tensor, "batch head term"]:
    """``sum_ij W_ij X_ij`` of all terms X, of which ``added`` is one that is there as a matrix;
    rows of W sum to zero."""
    weighted = (weight @ tables).unflatten(-1, rows.shape[-2:])
    found = (rows @ weighted.mT).sum(2, dtype=torch.float64)  # a product for each query
    return with_added(found.flatten(2), weight, added)


def with_added(
    found: Float[Tensor, "batch head pair"], weight: Tensor, added: Tensor | None
) -> Float[Tensor, "batch head term"]:
    """Sums of the terms of queries and keys, and of one more that is there as a matrix."""
    if added is None:
        return found
    last = (weight * added).sum((-2, -1), dtype=torch.float64)
    return torch.cat([found, last.unsqueeze(-1)], -1)


def contracted_by_plane(
    weight: Float[Tensor, "batch head query key"],
    rows: Float[Tensor, "batch head query part d_head"],
    tables: Tensor,
    planes: PlaneIndex,
) -> Float[Tensor, "batch head plane pair"]:
    """:func:`contracted` of the terms of queries and keys plane by plane: the same products, summed
    over the coordinates of a plane in place of all."""
    parts = rows.shape[3]
    weighted = (weight @ tables).unflatten(-1, rows.shape[-2:])
    found = [(rows * weighted[..., c : c + 1, :]).sum(2) for c in range(parts)]
    each = rearrange(torch.stack(found, -1), "b h a e c -> b h e (a c)").double()
    out = each.new_zeros(*each.shape[:2], planes.planes, parts**2)
    return out.index_add_(2, planes.plane.to(out.device), each)


def centred_scores(
    query: Tensor, key: Tensor, block: Block, count: Tensor
) -> tuple[Float[Tensor, "batch head query key"], Tensor]:
    """Row-centred total scores of one block, ``q . k - q . (mean allowed key)``, in one product;
    and the means that were taken out."""
    known = key[:, :, : block.end]
    prefix = known[:, :, : block.full].sum(2, keepdim=True)
    if block.end > block.full:
        prefix = prefix + block.mask @ known[:, :, block.full :]
    mean = (query * prefix).sum(-1, keepdim=True) / count
    rows = mean.expand(-1, -1, -1, block.end).flatten(0, 1)
    centred = torch.baddbmm(rows, query.flatten(0, 1), known.flatten(0, 1).mT, beta=-1).unflatten(
        0, query.shape[:2]
    )
    if block.end > block.full:
        centred[..., block.full :] *= block.mask
    return centred, mean


def moved_attention(
    centred: Float[Tensor, "batch head query key"],
    block: Block,
    count: Tensor,
    softcap: float | None,
    level: Tensor | None,
) -> Float[Tensor, "batch head query key"]:
    """``p - u``: softmax of the scores over the allowed keys minus the even spread over them.

    With ``w = e^(s - max) - 1``, ``p - u = (w - mean w) / sum (1 + w)``, which keeps its digits
    where attention is nearly uniform. ``level`` is what row-centring took out of the scores, which
    a soft cap sees.
    """
    near = slice(block.full, block.end)
    if softcap is None or level is None:
        # a masked zero is never above the largest allowed of a row whose mean is zero
        w = centred - centred.amax(-1, keepdim=True)
    else:
        w = softcap * torch.tanh((centred + level) / softcap)
        w[..., near].masked_fill_(block.mask == 0, torch.finfo(w.dtype).min)
        w -= w.amax(-1, keepdim=True)
    w.expm1_()
    w[..., near] *= block.mask
    # in float64: it cancels against the count where one key has everything
    summed = w.sum(-1, keepdim=True, dtype=torch.float64)
    w.sub_((summed / count).to(w)).div_((summed + count).to(w))
    w[..., near] *= block.mask
    return w


class KeyMoments:
    """Sum and second moment of the keys before a block, in float64 (float32 loses three digits on
    small terms)."""

    def __init__(self, keys: Float[Tensor, "batch head key part d_head"]) -> None:
        self.keys, self.end = keys, 0
        self.sums: Tensor | None = None
        self.squares: Tensor | None = None

    def extend(self, end: int) -> None:
        """Take in the keys up to ``end``."""
        if end <= self.end:
            return
        new = rearrange(self.keys[:, :, self.end : end], "b h j c e -> b h c j e")
        new = new.contiguous().double()
        sums, squares = new.sum(-2), (new.mT @ new).flatten(-2)
        self.sums = sums if self.sums is None else self.sums + sums
        self.squares = squares if self.squares is None else self.squares.add_(squares)
        self.end = end

    def energies(
        self, rows: Float[Tensor, "batch head query part d_head"], block: Block, count: Tensor
    ) -> Float[Tensor, "batch head part part"]:
        """``sum_ij X~^2`` of all pairs of parts for the rows of one block: the shared keys by their
        moments, the others cell by cell."""
        rows = rearrange(rows, "b h i a e -> b h a i e").contiguous()
        batch, heads, parts, queries, _ = rows.shape
        energy = torch.zeros(batch, heads, parts, parts, dtype=torch.float64, device=rows.device)
        sums = energy.new_zeros(batch, heads, parts, queries, parts)  # row sums of each term
        if self.sums is not None and self.squares is not None:
            wide = rows.double()
            energy += (wide.mT @ wide).flatten(-2) @ self.squares.mT
            sums += wide @ self.sums.mT.unsqueeze(2)
        if block.end > block.full:
            near = rearrange(self.keys[:, :, block.full : block.end], "b h j c e -> b h (c j) e")
            cells = rearrange(
                rows.flatten(2, 3) @ near.mT, "b h (a i) (c j) -> b h a i c j", a=parts, c=parts
            )
            cells *= rearrange(block.mask, "b h i j -> b h 1 i 1 j")
            energy += torch.linalg.vector_norm(cells, dim=-1).double().square().sum(3)
            sums += cells.sum(-1)
        return energy - (sums.square() / count.unsqueeze(2)).sum(3)
