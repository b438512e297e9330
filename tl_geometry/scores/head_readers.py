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
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base.checks import count
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import transposed, unit_roundoff
from tl_geometry.base.rows import row_center
from tl_geometry.base.sums import Sums
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.attention import scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.softmax import masked_softmax, soft_cap
from tl_geometry.models.writers import Written
from tl_geometry.scores.sums import SHARES

HEAD_SIDES = ("query", "key", "value")
"""Sides of a head that read writers."""
GROUPS = 8
"""Groups of prompts that are left out in turn, as many as a basis has by default."""
WORKING_SET = 2**25
"""Bytes that vectors of the stream may take in one step: few enough for a processor's cache, and
for the allocator to use the same memory again (larger blocks come from the system, which clears
them)."""


def first_kept(source: TokenWindows, drop: int | None) -> int:
    """The first position that counts: ``drop``, by default that after a BOS token."""
    drop = int(source.has_bos) if drop is None else count(drop, "drop", 0)
    expected = f"at least {drop + 2} positions, of which {drop} are left out"
    require(source.length > drop + 1, "tokens", expected=expected, got=source.length)
    return drop


@dataclass(frozen=True, eq=False)
class Cells:
    """How much each cell of the scores of a layer counts, from position ``drop`` on, for some
    ``queries`` or all. ``query`` and ``key`` are what the scores are made of, the keys without
    their mean: rows of the weights sum to zero, and so sums are the same and round less."""

    weights: Float[Tensor, "weight batch head query key"]
    query: Float[Tensor, "batch query head d_head"]
    key: Float[Tensor, "batch key head d_head"]
    bias: Float[Tensor, "head query key"] | None

    @classmethod
    def of(cls, layer: LayerView, drop: int, queries: slice | list[int]) -> Cells:
        """Row-centred scores, and attention minus uniform."""
        query, key = layer.q[:, queries] * layer.scale, layer.k[:, drop:]
        allowed, shift = layer.allowed[queries, drop:], key.mean(1, keepdim=True)
        bias = None if layer.bias is None else layer.bias[:, queries, drop:]
        scores = scores_of(query, key - shift, 1.0) + (0.0 if bias is None else bias)
        # a soft cap acts on the scores themselves
        level = 0.0 if layer.softcap is None else (query * shift).sum(-1).mT.unsqueeze(-1)
        p = masked_softmax(soft_cap(scores + level, layer.softcap), allowed)
        bias = None if bias is None else row_center(bias, allowed)
        uniform = allowed.to(p) / allowed.sum(-1, keepdim=True).clamp(min=1)
        weights = torch.stack([row_center(scores, allowed), p - uniform])
        return cls(weights, query, key - shift, bias)


@dataclass(frozen=True, eq=False)
class Reads:
    """What some heads of a layer read of the stream on each side: ``matrix cotangents[i]`` is the
    gradient at position i.

    ``constant`` holds the numerators of the layer's own constants in each context, ``total`` the
    denominators, ``alibi`` the numerators of ALiBi, ``floor`` what rounding alone could leave of
    the denominators of covariance. The value side has one weighting, that of ``cs``; the other is
    0.
    """

    matrix: Float[Tensor, "side d_model head d_head"]
    cotangents: Float[Tensor, "weight side batch position head d_head"]
    constant: Float[Tensor, "weight side batch head"]
    total: Float[Tensor, "weight side batch head"]
    alibi: Float[Tensor, "weight head"]
    floor: Float[Tensor, "side head"]

    @classmethod
    def of(
        cls,
        layer: LayerView,
        drop: int,
        heads: Sequence[int],
        queries: Sequence[int] | None = None,
        *,
        values: bool = False,
    ) -> Reads:
        """What scores read, ``g_q[i] = scale sum_j W_ij k[j]`` and ``g_k[j] = scale sum_i W_ij
        q[i]``; and with ``values`` outputs, ``g_v[j] = sum_i p_ij o[i] W_O^T``, their constant
        writes left out."""
        at = slice(drop, None) if queries is None else list(queries)
        cells, sides = Cells.of(layer, drop, at), "qkv"[: 2 + values]
        weights, key = cells.weights, cells.key * layer.scale
        g = layer.q.new_zeros(len(SHARES), len(sides), *layer.q.shape)
        g[:, 0][:, :, at] = einsum(weights, key, "w b h i j, b j h e -> w b i h e")
        g[:, 1][:, :, drop:] = einsum(weights, cells.query, "w b h i j, b i h e -> w b j h e")
        total = g.new_zeros(*g.shape[:3], g.shape[4], dtype=torch.float64)
        total[:, :2] = (weights * weights[0]).sum((3, 4), dtype=torch.float64).unsqueeze(1)
        alibi, floor = torch.zeros_like(total[:, 0, 0]), torch.zeros_like(total[0, :, 0])
        if cells.bias is not None:
            alibi = (weights * cells.bias).sum((1, 3, 4), dtype=torch.float64)
        # what rounding alone could leave, as in share_sums but for ALiBi
        sizes = [torch.linalg.vector_norm(x, dim=(1, 3)).double() for x in (cells.query, cells.key)]
        floor[:2] = (32 * unit_roundoff(g.dtype) * sizes[0] * sizes[1]).square().sum(0)
        if values:
            g[0, 2], total[0, 2] = _of_outputs(layer, at)
        eye = torch.eye(layer.h.shape[-1], dtype=g.dtype, device=g.device)
        constant, matrices = torch.zeros_like(total), []
        for side, which in enumerate(sides):
            scale, of_layer = (getattr(layer, f"{which}_{name}") for name in ("scale", "constant"))
            if which != "v":  # that of outputs is left out
                constant[:, side] = einsum(g[:, side], of_layer, "w b i h e, b i h e -> w b h")
            back = transposed(lambda x, which=which: layer.turned(x, which), g[:, side])
            g[:, side] = back * scale.unsqueeze(-1)
            matrices.append(layer.projected(eye, which))
        pick = torch.tensor(list(heads), device=g.device)
        numbers = (x[..., pick] for x in (constant, total, alibi, floor))
        return cls(torch.stack(matrices)[:, :, pick], g[..., pick, :], *numbers)


def _of_outputs(
    layer: LayerView, queries: slice | list[int]
) -> tuple[Float[Tensor, "batch position head d_head"], Float[Tensor, "batch head"]]:
    """Gradients of half the squared outputs of heads by their values, and the squares."""
    assert layer.pattern is not None  # a pass by writers has both
    assert layer.z is not None
    pattern = layer.pattern[:, :, queries].to(layer.h)
    W_O = remove_mean(layer.weights.W_O, layer.norm.norm_type)
    # attention to all keys together: below 1 with a sink
    z = layer.z[:, queries] - layer.v_constant[:, queries] * pattern.sum(-1).mT.unsqueeze(-1)
    out = einsum(z, W_O, W_O, "b i h e, h e d, h f d -> b i h f")
    cotangents = einsum(pattern, out, "b h i j, b i h e -> b j h e")
    return cotangents, (z.double() * out.double()).sum((1, 3))


# ---- sums over a corpus


@dataclass(frozen=True, eq=False, kw_only=True)
class WriterSums(Sums):
    """Sums of the readers of one layer: numerators of the shares (part 0: the reader's constants)
    and what divides them, by group of contexts; for nulls the numerators of what was written in
    another context, and along random directions."""

    counts: Int[Tensor, " group"]
    own: Float[Tensor, "weight side group head part"]
    total: Float[Tensor, "weight side group head"]
    alibi: Float[Tensor, "weight head"]
    floor: Float[Tensor, "side head"]
    other: Float[Tensor, "weight side head part"] | None = None
    other_total: Float[Tensor, "weight side head"] | None = None
    random: Float[Tensor, "weight side sample head part"] | None = None

    @classmethod
    def of(
        cls,
        reads: Reads,
        written: Written,
        grain: str,
        group: Int[Tensor, " batch"],
        directions: tuple[Tensor, Tensor] | None = None,
    ) -> WriterSums:
        """The sums of one batch, whose contexts belong to the groups ``group``; with ``directions``
        of writes and reads those of the nulls."""
        several = directions is not None and len(group) > 1
        samples = _numerators(reads, written, grain, others=several)
        groups = 1 if directions is None else GROUPS
        counts, own, totals = (
            x.new_zeros(*x.shape[:axis], groups, *x.shape[axis + 1 :]).index_add_(axis, group, x)
            for axis, x in ((0, torch.ones_like(group)), (2, samples[0]), (2, reads.total))
        )
        nulls = {}
        if directions is not None:
            # where a context is alone in its batch, there is no other
            nulls["other"] = several * samples[-1].sum(2)
            nulls["other_total"] = several * reads.total.sum(2)
            nulls["random"] = _random_numerators(reads, written, grain, directions)
        rest = {"alibi": reads.alibi, "floor": reads.floor, **nulls}
        return cls(counts=counts, own=own, total=totals, **rest)

    def divided(
        self, numerators: Float[Tensor, "*sample weight side head part"], total: Tensor
    ) -> Float[Tensor, "*sample weight side head part"]:
        """Shares: NaN where scores are uniform within rounding, so that there is nothing to
        explain."""
        uniform = self.total[0].sum(1) <= self.floor
        return numerators / total.masked_fill(uniform, torch.nan).unsqueeze(-1)

    @property
    def shares(self) -> Float[Tensor, "weight side head part"]:
        """Shares over all contexts."""
        return self.divided(self.own.sum(2), self.total.sum(2))


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


def _numerators(
    reads: Reads, written: Written, grain: str, *, others: bool
) -> Float[Tensor, "sample weight side batch head part"]:
    """``sum_i w_a[i] . (matrix cotangents[i])`` of each writer, side and head; part 0 is the
    layer's own constants. Sample 0 is what was written; with ``others`` sample 1 is what was
    written in the context before it in the batch."""
    shape, parts = reads.constant.shape, len(written.names(grain))
    sums = reads.constant.new_zeros(1 + others, *shape, 1 + parts)
    sums[..., 0] = reads.constant
    for at, writes in _in_steps(written, grain, (1 + others) * shape[0] * shape[1] * shape[3]):
        gradients = reads.cotangents[:, :, :, at]
        back = einsum(gradients, reads.matrix, "w s b i h e, s d h e -> b w s h i d")
        for sample in sums:
            flat = einsum(writes, back.flatten(1, 3), "p b i d, b n i d -> b n p")
            flat = flat.view(shape[2], *shape[:2], shape[3], parts)
            sample[..., 1:] += rearrange(flat, "b w s h p -> w s b h p")
            # the next context's gradients meet what was written in this one
            back = back.roll(-1, 0)
    return sums


def _random_numerators(
    reads: Reads, written: Written, grain: str, directions: tuple[Tensor, Tensor]
) -> Float[Tensor, "weight side sample head part"]:
    """``sum_i (u . w_a[i]) (v . (matrix cotangents[i]))`` for pairs (u, v) of directions ``[sample
    d_model]`` of writes and reads; part 0, the layer's constants, is 0. These are two projections;
    a turned writer would cost as much as the writer did."""
    wrote = written.along(directions[0]).stacked(grain)
    matrix = einsum(reads.matrix, directions[1].to(reads.matrix), "s d h e, k d -> s k h e")
    read = einsum(reads.cotangents, matrix, "w s b i h e, s k h e -> w s k h b i")
    found = einsum(read, wrote, "w s k h b i, p b i k -> w s k h p")
    return pad(found.double(), (1, 0))


def context_products(written: Written, drop: int, grain: str) -> Float[Tensor, "row part"]:
    """``sum w . w'`` and ``sum w . w`` of each writer, w' of the context before in the batch, over
    the positions from ``drop`` on."""
    sums = written.constants.new_zeros(2, len(written.names(grain)), dtype=torch.float64)
    for at, writes in _in_steps(written, grain, len(written.names(grain))):
        own = writes[:, :, max(drop - at.start, 0) :]
        for n, other in enumerate((own.roll(1, 1), own)):
            sums[n] += (own * other).sum((1, 2, 3), dtype=torch.float64)
    return sums
