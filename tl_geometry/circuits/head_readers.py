"""How much of what each writer wrote does a head read? Shares in its scores and in its output, with
what chance gives beside them, for the sweep over writers, composition and features.

With parts ``h = sum_a w_a`` of a layer's input and all scales frozen, a side x of a head (query,
key or value) is linear in the stream, and a writer's share is a gradient times what it wrote:

    share_a = sum_i w_a[i] . G[i] / total,   G = d sum(W S) / dh through that side alone.

For the scores, W is held fixed: the row-centred scores S~ give the covariance share
``sum S~ X_a / sum S~^2``, attention minus uniform gives the gain share
(:mod:`tl_geometry.scores.sums`). On the value side the output ``o[i] = sum_j p_ij sum_a v_a[j]
W_O`` takes the place of both W and S: ``sum o_a . o / sum o^2``.

G stays in factors, ``G[i] = M g[i]`` with M ``[d_model d_head]`` (centring, gain and projection)
and g taken back through rotation, QK-norm and scale. Every write is formed as a vector of the
stream, once for all heads of a layer, a few positions at a time. (The composite
``W_O^writer M^reader`` of each pair of heads would take ``d_head^2`` multiplications for each pair
and token in place of ``d_model``: no fewer.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base.linalg import transposed, unit_roundoff
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.writers import Written
from tl_geometry.scores.sums import block_scores

HEAD_SIDES = ("query", "key", "value")
"""Sides of a head that read writers."""
SHARES = ("cs", "gs")
"""Covariance and gain share, the axis ``weight``: a cell counts by the row-centred score, or by
attention minus uniform."""
WORKING_SET = 2**25
"""Bytes that vectors of the stream may take in one step: few enough for a processor's cache, and
for the allocator to use the same memory again (larger blocks come from the system, which clears
them)."""


@dataclass(frozen=True, eq=False)
class Reads:
    """What one side of some heads of a layer reads of the stream: ``matrix cotangents[i]`` is the
    gradient at position i.

    ``constant`` holds the numerators of the layer's own constants in each context, ``total`` the
    denominators. The value side has one weighting, that of ``cs``.
    """

    matrix: Float[Tensor, "d_model head d_head"]
    cotangents: Float[Tensor, "weight batch position head d_head"]
    constant: Float[Tensor, "weight batch head"]
    total: Float[Tensor, "weight batch head"]


def _reads(
    layer: LayerView, which: str, cotangents: Tensor, total: Tensor, heads: Sequence[int] | None
) -> Reads:
    """The ``"q"``, ``"k"`` or ``"v"`` side of the chosen heads; ``cotangents [weight batch position
    head d_head]`` are those of all heads' queries, keys or values as they enter scores or
    output."""
    constant, scale = (getattr(layer, f"{which}_{name}") for name in ("constant", "scale"))
    constants = einsum(cotangents, constant, "n b i h e, b i h e -> n b h").double()
    back = transposed(lambda x: layer.turned(x, which), cotangents) * scale.unsqueeze(-1)
    eye = torch.eye(layer.h.shape[-1], dtype=layer.h.dtype, device=layer.h.device)
    # on the layer's device: a list that indexes a tensor there is copied each time
    pick = slice(None) if heads is None else torch.tensor(heads, device=layer.h.device)
    matrix = layer.projected(eye, which)[:, pick]
    return Reads(matrix, back[:, :, :, pick], constants[..., pick], total[..., pick])


def score_reads(
    layer: LayerView,
    drop: int,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> tuple[list[Reads], Float[Tensor, "weight head"], Float[Tensor, " head"]]:
    """What scores read on the query and the key side, ``g_q[i] = scale sum_j W_ij k[j]`` and
    ``g_k[j] = scale sum_i W_ij q[i]``, from position ``drop`` on; with ``queries`` these alone are
    summed over. Also, for all heads of the layer, the numerators of ALiBi, and what rounding alone
    could leave of the totals."""
    at = slice(drop, None) if queries is None else list(queries)
    query = rearrange(layer.q[:, at], "b i h e -> b h i e").contiguous() * layer.scale
    key = rearrange(layer.k[:, drop:], "b j h e -> b h j e")
    # rows of W sum to zero: without what all keys share sums are the same, and round less
    shift = key.mean(2, keepdim=True)
    key = (key - shift).contiguous()
    bias = None if layer.bias is None else layer.bias[:, at, drop:].to(query)
    g_q, g_k = (x.new_zeros(len(SHARES), *x.shape) for x in (query, key))
    total = query.new_zeros(len(SHARES), *query.shape[:2], dtype=torch.float64)
    alibi = torch.zeros_like(total[:, 0])
    options = {"key_shift": shift, "bias": bias, "softcap": layer.softcap}
    cells = block_scores(query, key, layer.allowed[at, drop:], **options)
    for block, centred, block_bias, above_uniform in cells:
        for n, weight in enumerate((centred, above_uniform)):
            g_q[n, :, :, block.rows] = weight @ key[:, :, : block.end] * layer.scale
            g_k[n, :, :, : block.end] += weight.mT @ query[:, :, block.rows]
            total[n] += (weight * centred).sum((2, 3), dtype=torch.float64)
            if block_bias is not None:
                alibi[n] += (block_bias * weight).sum((0, 2, 3), dtype=torch.float64)
    # as in share_sums: what rounding alone could leave
    sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)).double() for x in (query, key)]
    floor = (32 * unit_roundoff(query.dtype) * sizes[0] * sizes[1]).square().sum(0)
    sides = []
    for which, g, positions in (("q", g_q, at), ("k", g_k, slice(drop, None))):
        cotangents = g.new_zeros(len(SHARES), *layer.q.shape)  # zero where none is chosen
        cotangents[:, :, positions] = rearrange(g, "n b h i e -> n b i h e")
        sides.append(_reads(layer, which, cotangents, total, heads))
    return sides, alibi, floor


def value_reads(
    layer: LayerView, drop: int, heads: Sequence[int], queries: Sequence[int] | None = None
) -> Reads:
    """What the heads' outputs read, their constant writes left out: ``g[j] = sum_i p_ij o[i]
    W_O^T``."""
    assert layer.pattern is not None  # a pass by writers has both
    assert layer.z is not None
    rows = slice(drop, None) if queries is None else list(queries)
    pattern = layer.pattern[:, :, rows].to(layer.h)
    W_O = remove_mean(layer.weights.W_O, layer.norm.norm_type)
    # attention to all keys together: below 1 with a sink
    z = layer.z[:, rows] - layer.v_constant[:, rows] * pattern.sum(-1).mT.unsqueeze(-1)
    out = einsum(z, W_O, W_O, "b i h e, h e d, h f d -> b i h f")
    total = (z.double() * out.double()).sum((1, 3)).unsqueeze(0)
    cotangents = einsum(pattern, out, "b h i j, b i h e -> b j h e").unsqueeze(0)
    reads = _reads(layer, "v", cotangents, total, heads)
    return replace(reads, constant=torch.zeros_like(reads.constant))


def _in_steps(
    written: Written, grain: str, vectors: int
) -> Iterator[tuple[slice, Float[Tensor, "part batch position d_model"]]]:
    """What every writer wrote, some positions of all contexts at a time, beside that many more
    ``vectors`` of each token."""
    batch, length, d_model = written.constants.shape
    parts = len(written.names(grain))
    of_position = (parts + vectors) * batch * d_model * written.constants.element_size()
    step = max(1, WORKING_SET // of_position)
    places = torch.arange(batch * length, device=written.constants.device).view(batch, length)
    for start in range(0, length, step):
        at = slice(start, min(start + step, length))
        writes = written.tokens(places[:, at].flatten()).stacked(grain)
        yield at, writes.squeeze(1).unflatten(1, (batch, -1))


def numerators(
    reads: Sequence[Reads], written: Written, grain: str = "writers", *, others: bool = False
) -> Float[Tensor, "sample weight side batch head part"]:
    """``sum_i w_a[i] . (matrix cotangents[i])`` of each writer, side and head; part 0 is the
    layer's own constants. Sample 0 is what was written; with ``others`` sample 1 is what was
    written in the context before it in the batch."""
    heads, constant = reads[0].matrix.shape[1], torch.cat([r.constant for r in reads])
    shape = len(written.constants), (1 + others) * len(constant), heads
    sums = constant.new_zeros(*shape, 1 + len(written.names(grain)))
    sums[:, : len(constant), :, 0] = rearrange(constant, "n b h -> b n h")
    for at, writes in _in_steps(written, grain, shape[1] * heads):
        sides = [
            einsum(r.cotangents[:, :, at], r.matrix, "n b i h e, d h e -> b n h i d") for r in reads
        ]
        # the next context's gradients meet what was written in this one
        sides += [back.roll(-1, 0) for back in sides] if others else []
        sums[..., 1:] += einsum(writes, torch.cat(sides, 1), "p b i d, b n h i d -> b n h p")
    samples = rearrange(sums, "b (sample n) h p -> sample n b h p", n=len(constant))
    return torch.stack([by_side(sample, len(reads)) for sample in samples])


def by_side(kinds: Float[Tensor, "row ..."], sides: int) -> Float[Tensor, "weight side ..."]:
    """Numbers of both weightings of each side, one side after another, as two axes; zero for the
    gain of values, which there is not."""
    wide = kinds.new_zeros(sides * len(SHARES), *kinds.shape[1:])
    wide[: len(kinds)] = kinds
    return rearrange(wide, "(side weight) ... -> weight side ...", weight=len(SHARES))


def random_numerators(
    reads: Sequence[Reads],
    written: Written,
    grain: str,
    directions: tuple[Float[Tensor, "sample d_model"], Float[Tensor, "sample d_model"]],
) -> Float[Tensor, "weight side sample head part"]:
    """``sum_i (u . w_a[i]) (v . (matrix cotangents[i]))`` for pairs (u, v) of directions of writes
    and reads; part 0, the layer's constants, is 0. These are two projections; a turned writer would
    cost as much as the writer did."""
    wrote, sides = written.along(directions[0]).stacked(grain), []
    for r in reads:
        matrix = einsum(r.matrix, directions[1].to(r.matrix), "d h e, k d -> k h e")
        read = einsum(r.cotangents, matrix, "n b i h e, k h e -> n k h b i")
        sides.append(einsum(read, wrote, "n k h b i, p b i k -> n k h p").double())
    return by_side(pad(torch.cat(sides), (1, 0)), len(reads))


def context_products(written: Written, drop: int, grain: str) -> Float[Tensor, "row part"]:
    """``sum w . w'`` and ``sum w . w`` of each writer, w' of the context before in the batch, over
    the positions from ``drop`` on."""
    sums = written.constants.new_zeros(2, len(written.names(grain)), dtype=torch.float64)
    for at, writes in _in_steps(written, grain, len(written.names(grain))):
        own = writes[:, :, max(drop - at.start, 0) :]
        for n, other in enumerate((own.roll(1, 1), own)):
            sums[n] += (own * other).sum((1, 2, 3), dtype=torch.float64)
    return sums
