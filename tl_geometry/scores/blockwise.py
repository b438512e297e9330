"""What do the shares need of a head's scores when no full score matrix may be held? A block of
query rows at a time: row-centred scores, attention minus uniform attention, and the energies of the
terms. Called by :func:`tl_geometry.scores.sums.share_sums` and by the sweep over writers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.rows import KeyRanges, mask_facts, mask_form, row_center
from tl_geometry.base.transfer import floats

BLOCK = 64
"""Query rows per block: its scores stay in the cache of a CPU core, and products with them are
still large enough to be fast."""


class Block(NamedTuple):
    """Query rows ``start <= i < stop`` of a mask. All of them see the keys before ``full``, none
    sees a key from ``end`` on, and ``mask`` (its ``key`` axis is ``full`` to ``end``) says which
    of those between each row sees. ``n_keys`` is the number of keys that each row sees, but at
    least one, because it divides."""

    start: int
    stop: int
    full: int
    end: int
    mask: Float[Tensor, "batch head query key"]
    n_keys: Float[Tensor, "batch head query 1"]


class PlaneIndex(NamedTuple):
    """The rotary plane of each coordinate of a layer's heads, and how many planes there are."""

    plane: Int[Tensor, " d_head"]
    planes: int


def form_of(mask: Bool[Tensor, "batch query key"] | KeyRanges) -> str:
    """The form of a mask that all contexts share (:func:`~tl_geometry.base.rows.mask_form`), else
    ``"other"``. Reading it from a GPU waits for that GPU."""
    if isinstance(mask, Tensor) and len(mask) > 1:
        return "other"
    return mask_form(floats(mask_facts(mask if isinstance(mask, KeyRanges) else mask[0])))


def blocks_of(mask: Tensor | KeyRanges, query: Tensor, form: str | None = None) -> Iterator[Block]:
    """Blocks of query rows of a mask ``[batch query key]``, in the dtype of ``query``. ``form``
    (:func:`form_of`, where ``None``) says which keys need no mask: under a causal mask those before
    the block, under a full one all, under any other none."""
    if isinstance(mask, KeyRanges):
        yield from _blocks_of_ranges(mask, query)
        return
    n_queries, length = mask.shape[-2:]  # callers may ask for some queries and all keys
    form = form or form_of(mask)
    causal, everything = form == "causal", form == "full"
    for start in range(0, n_queries, BLOCK):
        stop = min(start + BLOCK, n_queries)
        full = start if causal else length if everything else 0
        end = stop if causal else length
        partial_mask = mask[:, None, start:stop, full:end].to(query.dtype)
        # a row that sees no key divides zeros by one
        n_keys = (full + partial_mask.sum(-1, keepdim=True)).clamp(min=1)
        yield Block(start, stop, full, end, partial_mask, n_keys)


def _blocks_of_ranges(ranges: KeyRanges, query: Tensor) -> Iterator[Block]:
    """:func:`blocks_of` where each query sees a range of keys: only the mask of one block is formed
    at a time."""
    for start in range(0, len(ranges.stop), BLOCK):
        rows = slice(start, min(start + BLOCK, len(ranges.stop)))
        first, stop = ranges.first[rows], ranges.stop[rows]
        # `full` counts from key 0: nothing is common to all rows once a window has left key 0
        full, end = 0 if int(first.max()) else int(stop.min()), int(stop.max())
        mask = ranges[rows][None, None, :, full:end].to(query)
        n_keys = ranges.counts[rows].clamp(min=1)[None, None, :, None].to(query)
        yield Block(start, rows.stop, full, end, mask, n_keys)


def block_scores(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    mask: Tensor | KeyRanges,
    *,
    key_shift: Float[Tensor, "batch head 1 d_head"],
    bias: Tensor | None = None,
    softcap: float | None = None,
    gain: bool = True,
    form: str | None = None,
) -> Iterator[tuple[Block, Tensor, Tensor | None, Tensor | None]]:
    """Scores ``query . key + bias``, one block of query rows after another: the block, its scores
    row-centred over the keys before ``block.end``, the bias among them (row-centred as well), and
    if ``gain`` attention minus uniform attention, ``p - u``. All are ``[batch head query key]``.

    ``key_shift`` is what was subtracted from all keys beforehand. Row-centring removes it, but a
    soft cap acts on the scores themselves and needs it back. ``form`` is that of the mask
    (:func:`form_of`), where it is known.
    """
    bias_centred = None
    # what was taken out of each row and a soft cap needs back, [batch head query 1]: the key shift,
    # the mean of the bias, and in each block the mean that centred_scores returns
    level = None if softcap is None else (query * key_shift).sum(-1, keepdim=True)
    # a bias holds a number for each cell already, so the mask may be held as cells too
    if bias is not None:
        cells = mask.cells.unsqueeze(0).to(bias.device) if isinstance(mask, KeyRanges) else mask
        allowed = cells.unsqueeze(1)
        bias_centred = row_center(bias, allowed)
        if level is not None:
            # bias - bias_centred is the mean of the bias at every allowed key: amax picks one
            mean = torch.where(allowed, bias - bias_centred, -torch.inf).amax(-1, keepdim=True)
            level = level + mean
    for block in blocks_of(mask, query, form):
        rows = slice(block.start, block.stop)
        centred, mean = centred_scores(query[:, :, rows], key, block)
        block_bias = None if bias_centred is None else bias_centred[:, :, rows, : block.end]
        centred = centred if block_bias is None else centred + block_bias
        moved = None
        if gain:
            row_level = None if level is None else mean + level[:, :, rows]
            moved = moved_attention(centred, block, softcap, row_level)
        yield block, centred, block_bias, moved


def contracted(
    weight: Float[Tensor, "batch head query key"],
    rows: Float[Tensor, "batch head query part d_head"],
    tables: Tensor,
    planes: PlaneIndex | None = None,
) -> Float[Tensor, "batch head plane pair"]:
    """``sum_ij W_ij X_ij`` of all terms X of queries and keys, by rotary plane (without ``planes``
    all coordinates are one plane). Rows of W sum to zero.

    ``tables`` are the keys of all parts side by side, ``[batch head key (part d_head)]``. By plane,
    the products ``q_a[i, e] (W k_b)[i, e]`` are summed over the coordinates e of a plane in place
    of all of them.
    """
    weighted = (weight @ tables).unflatten(-1, rows.shape[-2:])
    if planes is None:
        # one small product [query part, key part] per query, then a float64 sum over queries
        pairs = (rows @ weighted.mT).sum(2, dtype=torch.float64)
        return pairs.flatten(2).unsqueeze(2)
    # one key part at a time, so that no product holds all pairs of parts
    by_key_part = [(rows * weighted[..., c : c + 1, :]).sum(2) for c in range(rows.shape[3])]
    by_coordinate = rearrange(torch.stack(by_key_part, -1), "b h a e c -> b h e (a c)").double()
    by_plane = by_coordinate.new_zeros(
        *by_coordinate.shape[:2], planes.planes, by_coordinate.shape[-1]
    )
    return by_plane.index_add_(2, planes.plane, by_coordinate)


def centred_scores(
    query: Tensor, key: Tensor, block: Block
) -> tuple[Float[Tensor, "batch head query key"], Tensor]:
    """Row-centred total scores of one block, ``q . k - q . (mean allowed key)``, in one product,
    and the means that were taken out, ``[batch head query 1]``. ``query`` is
    ``[batch head query d_head]``, the rows of the block; ``key`` holds all keys."""
    seen = key[:, :, : block.end]
    key_sum = seen[:, :, : block.full].sum(2, keepdim=True)
    if block.end > block.full:
        key_sum = key_sum + block.mask @ seen[:, :, block.full :]
    mean = (query * key_sum).sum(-1, keepdim=True) / block.n_keys
    row_means = mean.expand(-1, -1, -1, block.end).flatten(0, 1)
    # beta=-1 subtracts the row means inside the product
    centred = torch.baddbmm(
        row_means, query.flatten(0, 1), seen.flatten(0, 1).mT, beta=-1
    ).unflatten(0, query.shape[:2])
    if block.end > block.full:
        # cells outside the mask count as zero in every later sum
        centred[..., block.full :] *= block.mask
    return centred, mean


def moved_attention(
    centred: Float[Tensor, "batch head query key"],
    block: Block,
    softcap: float | None,
    level: Tensor | None,
) -> Float[Tensor, "batch head query key"]:
    """``p - u``: softmax of the scores over the allowed keys minus the even spread over them.

    With ``w = e^(s - max) - 1``, ``p - u = (w - mean w) / sum (1 + w)``, which keeps its digits
    where attention is nearly uniform. ``level [batch head query 1]`` is what was taken out of the
    scores of each row; it is put back before a soft cap and not needed without one.
    """
    masked_keys = slice(block.full, block.end)
    if softcap is None or level is None:
        # masked cells hold zero, and the largest allowed score of a centred row is at least zero
        w = centred - centred.amax(-1, keepdim=True)
    else:
        w = softcap * torch.tanh((centred + level) / softcap)
        # finite, so that a row without an allowed key does not become NaN
        w[..., masked_keys].masked_fill_(block.mask == 0, torch.finfo(w.dtype).min)
        w -= w.amax(-1, keepdim=True)
    w.expm1_()
    w[..., masked_keys] *= block.mask
    # in float64: where one key gets all attention the sum is about 1 - n_keys, and n_keys is added
    summed = w.sum(-1, keepdim=True, dtype=torch.float64)
    w.sub_((summed / block.n_keys).to(w)).div_((summed + block.n_keys).to(w))
    # the mean has been subtracted from masked cells as well
    w[..., masked_keys] *= block.mask
    return w


class KeyMoments:
    """Sums of the keys before a block and of their products, for the energies of the terms:
    ``sum_ij (q_i . k_j)^2 = <sum_i q_i q_i^T, sum_j k_j k_j^T>`` needs no cell. In float64, because
    float32 loses three digits on small terms."""

    def __init__(self, keys: Float[Tensor, "batch head key part d_head"]) -> None:
        batch, heads, _, parts, width = keys.shape
        self.keys, self.end = keys, 0
        self.sums = keys.new_zeros(batch, heads, parts, width, dtype=torch.float64)
        self.squares = keys.new_zeros(batch, heads, parts, width**2, dtype=torch.float64)

    def _extend(self, end: int) -> None:
        """Take in the keys up to ``end``."""
        new = rearrange(self.keys[:, :, self.end : end], "b h j c e -> b h c j e")
        new = new.contiguous().double()
        self.sums += new.sum(-2)
        self.squares += (new.mT @ new).flatten(-2)
        self.end = end

    def energies(
        self, rows: Float[Tensor, "batch head query part d_head"], block: Block
    ) -> Float[Tensor, "batch head part part"]:
        """``sum_ij X~^2`` of all pairs (query part, key part) for the rows of one block. Keys
        before ``block.full``, which all rows see, enter by their moments, the others cell by cell.
        Call it for the blocks in order: the moments grow from block to block."""
        # fewer common keys than before (a sliding window has left the first ones): begin again
        if block.full < self.end:
            self.end = 0
            self.sums.zero_()
            self.squares.zero_()
        if block.full > self.end:
            self._extend(block.full)
        rows = rearrange(rows, "b h i a e -> b h a i e").contiguous()
        batch, heads, parts, queries, _ = rows.shape
        energy = torch.zeros(batch, heads, parts, parts, dtype=torch.float64, device=rows.device)
        sums = energy.new_zeros(batch, heads, parts, queries, parts)  # row sums of each term
        if self.end > 0:
            rows64 = rows.double()
            energy += (rows64.mT @ rows64).flatten(-2) @ self.squares.mT
            sums += rows64 @ self.sums.mT.unsqueeze(2)
        if block.end > block.full:
            masked_keys = rearrange(
                self.keys[:, :, block.full : block.end], "b h j c e -> b h (c j) e"
            )
            cells = rearrange(
                rows.flatten(2, 3) @ masked_keys.mT,
                "b h (a i) (c j) -> b h a i c j",
                a=parts,
                c=parts,
            )
            cells *= rearrange(block.mask, "b h i j -> b h 1 i 1 j")
            energy += torch.linalg.vector_norm(cells, dim=-1).double().square().sum(3)
            sums += cells.sum(-1)
        # sum (x - mean)^2 = sum x^2 - (sum x)^2 / n for each row
        return energy - (sums.square() / block.n_keys.unsqueeze(2)).sum(3)
