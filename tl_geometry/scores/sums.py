"""Covariance and gain shares of the terms of attention scores, without a term as a matrix: the one
contraction behind splits, sweeps, rotary planes and intervals.

A score is a sum of terms, ``S = sum_ab X_ab`` with ``X_ab[i, j] = q_a[i] . k_b[j]`` over the parts
a of the query stream and b of the key stream (plus a bias such as ALiBi). Softmax ignores a
constant added to a row, so terms are compared row-centred over the allowed keys,
``X~ = X - (mean of the row)``. Then

    covariance share  cs_X = sum X~ . S~ / sum S~^2       (sums to one over the terms; may be < 0)

with both sums over all contexts and rows, which counts all cells of a row alike. The gain share
weights each cell by the attention that it gets beyond its even share:

    gain share        gs_X = sum_i G_X(i) / sum_i G_S(i),   G_X(i) = sum_j (p_ij - u_ij) X_ij

where p is the softmax of S over the allowed keys and u is uniform over them. G is additive over
terms and does not change with a constant per row, and ``G_S(i) = KL(p_i || u) + KL(u || p_i)`` is
how far the row is from uniform. With a soft cap p is that of the capped scores while X and S are
those before it; sinks are left out of p.

No term is needed as a matrix. With ``W`` the row-centred scores (or ``p - u``), whose rows sum to
zero, ``sum W . X_ab = sum_i q_a[i] . (W k_b)[i]``. Query rows are taken in blocks, so that memory
grows with the length of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.sums import Sums
from tl_geometry.scores.shared_parts import Shared, TermSums

SHARES = ("cs", "gs")
"""Covariance and gain share."""
BLOCK = 64
"""Query rows per block: its scores of one head and context stay in the cache of a CPU core, and
products with them are still large enough to be fast."""
WORKING_SET = {"cpu": 2**23, "cuda": 2**29}
"""Bytes that one step works on, by type of device: about the cache of a CPU core, or enough to fill
a GPU."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareSums(Sums):
    """Sums behind the shares; they add up over contexts, prompts and processes.

    ``numerators`` are ``sum X~ . S~`` and ``gains`` ``sum (p - u) . X``; ``total`` is ``sum S~^2``,
    ``gain_total`` ``sum (p - u) . S``, all in float64; ``floor`` is the total that rounding alone
    could leave. ``by_plane`` are numerators and gains (axis ``weight``) of the coordinates of each
    rotary plane, where asked for. The ``pair`` axis is (query part, key part), flattened; the
    ``term`` axis is the same and then the bias, where there is one
    (:func:`tl_geometry.scores.terms.term_pairs`).
    """

    numerators: Float[Tensor, "*context head term"]
    gains: Float[Tensor, "*context head term"]
    total: Float[Tensor, "*context head"]
    gain_total: Float[Tensor, "*context head"]
    floor: Float[Tensor, "*context head"]
    by_plane: Float[Tensor, "weight head plane pair"] | None = None

    @staticmethod
    def beside(layers: Sequence[ShareSums]) -> ShareSums:
        """Sums of several layers as one, on the CPU, with their heads in order on the head axis.
        Rotary planes that a layer lacks are zeros."""
        most = max((0 if s.by_plane is None else s.by_plane.shape[2]) for s in layers)

        def wide(name: str, value: Tensor) -> Tensor:
            return value if name != "by_plane" else pad(value, (0, 0, 0, most - value.shape[2]))

        return ShareSums.cat([layer.to("cpu").mapped(wide) for layer in layers], "head")

    def of_parts(self, change: Float[Tensor, "new part"]) -> ShareSums:
        """The sums of the terms of other parts, each a weighted sum (a row of ``change``) of the
        parts: a term is linear in both of its parts."""
        change, parts = change.to(self.total), change.shape[1]

        def changed(values: Tensor) -> Tensor:
            pairs, rest = values[..., : parts**2], values[..., parts**2 :]
            table = pairs.unflatten(-1, (parts, parts))
            return torch.cat([(change @ table @ change.mT).flatten(-2), rest], -1)

        pairs = ("numerators", "gains", "by_plane")
        return self.mapped(lambda name, value: changed(value) if name in pairs else value)

    @property
    def uniform(self) -> Bool[Tensor, "*context head"]:
        """Heads whose row-centred scores are zero within rounding: they attend uniformly."""
        return self.total <= self.floor

    @property
    def cs(self) -> Float[Tensor, "*context head term"]:
        """Covariance shares; NaN where a head is uniform."""
        return self.numerators / self.total.masked_fill(self.uniform, torch.nan).unsqueeze(-1)

    @property
    def gs(self) -> Float[Tensor, "*context head term"]:
        """Gain shares; NaN where a head is uniform."""
        return self.gains / self.gain_total.masked_fill(self.uniform, torch.nan).unsqueeze(-1)


def share_sums(
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    mask: Bool[Tensor, "query key"],
    *,
    bias: Float[Tensor, "head query key"] | None = None,
    softcap: float | None = None,
    plane: Int[Tensor, " d_head"] | None = None,
) -> ShareSums:
    """Numerators and gains of all terms, summed over contexts, without a term as a matrix.

    ``q`` and ``k`` are the projected parts after any rotation, ``q`` times the attention scale.
    ``mask`` says which keys each query may attend to; ``bias`` is added to the scores and becomes
    the last term. ``softcap`` c makes the pattern behind the gains that of ``c tanh(S / c)``.
    ``plane`` numbers the rotary plane of each coordinate, for sums by plane as well. Sums are
    float64.

    The cost, in products of all queries with all keys of a head: ``2 parts + 1``.

    >>> q, k = torch.randn(2, 3, 2, 9, 4, 8)
    >>> sums = share_sums(q, k, torch.ones(9, 9).tril().bool())
    >>> sums.cs.shape, bool(torch.allclose(sums.cs.sum(-1), torch.ones(4).double(), atol=1e-4))
    (torch.Size([4, 9]), True)
    """
    step, blocks = contexts_at_once(q[0], len(q)), list(blocks_of(mask, q))
    chunks = zip(q.split(step, 1), k.split(step, 1), strict=True)
    options: dict[str, Any] = {"bias": bias, "softcap": softcap, "plane": plane}
    return reduce(ShareSums.__add__, (sums_of_some(*qk, blocks, **options) for qk in chunks))


def contexts_at_once(q: Float[Tensor, "batch query head d_head"], parts: int) -> int:
    """Contexts of which the working set holds queries and keys by part, their copies, and five
    blocks of scores."""
    _, length, heads, width = q.shape
    numbers = heads * length * (5 * min(BLOCK, length) + 6 * parts * width)
    limit = WORKING_SET.get(q.device.type, WORKING_SET["cpu"])
    return max(1, limit // (q.element_size() * numbers))


def sums_of_some(
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    blocks: Sequence[Block],
    *,
    bias: Float[Tensor, "head query key"] | None,
    softcap: float | None,
    plane: Int[Tensor, " d_head"] | None,
    shared: Sequence[Shared] = (),
) -> ShareSums:
    """:func:`share_sums` of as many contexts as the working set holds, with the mask in blocks.
    ``shared`` are parts before those of ``q`` and ``k``.

    The mean over positions is first subtracted from the keys. That changes each row of a term by a
    constant, which row-centring removes, and leaves smaller numbers to round.
    """
    queries = rearrange(q, "a b i h e -> h b i a e").contiguous()
    keys = rearrange(k, "c b j h e -> h b j c e").contiguous()
    planes = 1 if plane is None else int(plane.max()) + 1
    plane = None if plane is None else plane.to(q.device)
    sides, sizes = list[Tensor](), list[Tensor]()
    for which, x in zip("qk", (queries, keys), strict=True):
        sides.append(reduce(torch.add, [*x.unbind(3), *(one.total(which) for one in shared)]))
        own = torch.linalg.vector_norm(x.flatten(2), dim=-1).double()
        sizes.append(reduce(torch.hypot, [own, *(one.size(which) for one in shared)]))
    query, shift = sides[0], sides[1].mean(2, keepdim=True)
    key, own = sides[1] - shift, keys - keys.mean(2, keepdim=True)
    terms = [TermSums(shared, own, partial(_pairs, plane, planes)) for _ in range(2)]
    totals = torch.zeros(2, q.shape[3], dtype=torch.float64, device=q.device)
    of_bias = totals.new_zeros(*totals.shape, int(bias is not None))
    bias_squares = torch.zeros_like(totals[0])
    for block, centred, block_bias, moved in block_scores(
        query, key, blocks, key_shift=shift, bias=bias, softcap=softcap
    ):
        rows = queries[:, :, block.rows]
        for n, weight in enumerate((centred, moved)):
            terms[n].add(weight, rows, block.rows)
            if block_bias is not None:
                of_bias[n, :, 0] += (weight * block_bias).sum((1, 2, 3), dtype=torch.float64)
        totals[0] += torch.linalg.vector_norm(centred, dim=(2, 3)).double().square().sum(1)
        totals[1] += moved.mul_(centred).sum(-1).sum((1, 2), dtype=torch.float64)
        if block_bias is not None:
            bias_squares += len(q[0]) * block_bias.square().sum((1, 2, 3), dtype=torch.float64)
    # rounding of a score is at most 32 u |q| |k|, as in models.reconstruction; the squares of all
    # cells sum to at most (32 u)^2 sum |q|^2 sum |k|^2
    unit = 32 * unit_roundoff(q.dtype)
    floor = (unit * sizes[0] * sizes[1]).square().sum(1) + unit**2 * bias_squares
    pairs = torch.stack([sums.total() for sums in terms])
    numerators, gains = torch.cat([pairs.sum(2), of_bias], -1)
    return ShareSums(
        numerators=numerators,
        gains=gains,
        total=totals[0],
        gain_total=totals[1],
        floor=floor,
        by_plane=None if plane is None else pairs,
    )


def _pairs(
    plane: Int[Tensor, " d_head"] | None,
    planes: int,
    rows: Float[Tensor, "head batch query part d_head"],
    weighted: Float[Tensor, "head batch query column d_head"],
) -> Float[Tensor, "head plane part column"]:
    """Products of queries and weighted keys of all parts over contexts and queries, by rotary plane
    (without ``plane`` all coordinates are one)."""
    if plane is None or planes == 1:
        # one small product [query part, key part] per query, then a float64 sum over queries
        return (rows @ weighted.mT).sum((1, 2), dtype=torch.float64).unsqueeze(1)
    # one key part at a time, so that no product holds all pairs of parts
    by_key_part = [(rows * x.unsqueeze(3)).sum(2) for x in weighted.unbind(3)]
    by_coordinate = torch.stack(by_key_part, -1).sum(1, dtype=torch.float64)
    by_coordinate = rearrange(by_coordinate, "h a e c -> h e a c")
    by_plane = by_coordinate.new_zeros(len(by_coordinate), planes, *by_coordinate.shape[2:])
    return by_plane.index_add_(1, plane, by_coordinate)


# ---- blocks of query rows


class Block(NamedTuple):
    """Some query rows of a mask. All of them see the keys before ``full``, none sees a key from
    ``end`` on, and ``mask`` (its ``key`` axis is ``full`` to ``end``) says which of those between
    each row sees. ``n_keys`` is the number of keys that each row sees, but at least one, because it
    divides."""

    rows: slice
    full: int
    end: int
    mask: Float[Tensor, "query key"]
    n_keys: Float[Tensor, "query 1"]


def blocks_of(mask: Bool[Tensor, "query key"], like: Tensor) -> Iterator[Block]:
    """Blocks of query rows of a mask, with numbers of the dtype and on the device of ``like``."""
    length = mask.shape[1]
    positions = torch.arange(1, length + 1, device=mask.device)
    # of each row: keys up to the last one that it sees, and keys before the first that it does not
    ends = (mask * positions).amax(1).tolist()
    leads = torch.where(mask.all(1), length, (~mask).int().argmax(1)).tolist()
    mask = mask.to(like.device)
    for start in range(0, len(mask), BLOCK):
        rows = slice(start, min(start + BLOCK, len(mask)))
        full, end = min(leads[rows]), max(ends[rows])
        partial_mask = mask[rows, full:end].to(like)
        n_keys = (full + partial_mask.sum(-1, keepdim=True)).clamp(min=1)
        yield Block(rows, full, end, partial_mask, n_keys)


def block_scores(
    query: Float[Tensor, "head batch query d_head"],
    key: Float[Tensor, "head batch key d_head"],
    blocks: Sequence[Block],
    *,
    key_shift: Float[Tensor, "head batch 1 d_head"],
    bias: Float[Tensor, "head query key"] | None = None,
    softcap: float | None = None,
) -> Iterator[tuple[Block, Tensor, Tensor | None, Tensor]]:
    """Scores ``query . key + bias``, one block of query rows after another: the block, its scores
    ``[head batch query key]`` row-centred over the keys before ``block.end``, the bias among them
    ``[head 1 query key]`` (row-centred as well), and attention minus uniform attention, ``p - u``.

    ``key_shift`` is what was subtracted from all keys beforehand. Row-centring removes it, but a
    soft cap acts on the scores themselves and needs it back.
    """
    for block in blocks:
        rows = query[:, :, block.rows]
        centred, mean = _centred(rows, key, block)
        # what was taken out of each row and a soft cap needs back, [head batch query 1]
        level = None if softcap is None else mean + (rows * key_shift).sum(-1, keepdim=True)
        block_bias = None
        if bias is not None:
            allowed = pad(block.mask, (block.full, 0), value=1.0)
            inside = bias[:, block.rows, : block.end].unsqueeze(1).to(query) * allowed
            bias_mean = inside.sum(-1, keepdim=True) / block.n_keys
            block_bias = (inside - bias_mean) * allowed
            centred = centred + block_bias
            level = None if level is None else level + bias_mean
        yield block, centred, block_bias, _moved(centred, block, softcap, level)


def _centred(query: Tensor, key: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Row-centred total scores of one block, ``q . k - q . (mean allowed key)``, in one product,
    and the means that were taken out, ``[head batch query 1]``. ``query`` holds the rows of the
    block, ``key`` all keys."""
    seen = key[:, :, : block.end]
    key_sum = seen[:, :, : block.full].sum(2, keepdim=True)
    if block.end > block.full:
        key_sum = key_sum + block.mask @ seen[:, :, block.full :]
    mean = (query * key_sum).sum(-1, keepdim=True) / block.n_keys
    row_means = mean.expand(-1, -1, -1, block.end).flatten(0, 1)
    # beta=-1 subtracts the row means inside the product
    centred = torch.baddbmm(row_means, query.flatten(0, 1), seen.flatten(0, 1).mT, beta=-1)
    centred = centred.unflatten(0, query.shape[:2])
    # cells outside the mask count as zero in every later sum
    centred[..., block.full :] *= block.mask
    return centred, mean


def _moved(
    centred: Float[Tensor, "head batch query key"],
    block: Block,
    softcap: float | None,
    level: Tensor | None,
) -> Float[Tensor, "head batch query key"]:
    """``p - u``: softmax of the scores over the allowed keys minus the even spread over them.

    With ``w = e^(s - max) - 1``, ``p - u = (w - mean w) / sum (1 + w)``, which keeps its digits
    where attention is nearly uniform. ``level [head batch query 1]`` is what was taken out of the
    scores of each row; it is put back before a soft cap and not needed without one.
    """
    if softcap is None or level is None:
        # masked cells hold zero, and the largest allowed score of a centred row is at least zero
        w = centred - centred.amax(-1, keepdim=True)
    else:
        w = softcap * torch.tanh((centred + level) / softcap)
        # finite, so that a row without an allowed key does not become NaN
        w[..., block.full :].masked_fill_(block.mask == 0, torch.finfo(w.dtype).min)
        w -= w.amax(-1, keepdim=True)
    w.expm1_()
    w[..., block.full :] *= block.mask
    # in float64: where one key gets all attention the sum is about 1 - n_keys, and n_keys is added
    summed = w.sum(-1, keepdim=True, dtype=torch.float64)
    w.sub_((summed / block.n_keys).to(w)).div_((summed + block.n_keys).to(w))
    # the mean has been subtracted from masked cells as well
    w[..., block.full :] *= block.mask
    return w
