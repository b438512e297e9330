"""The null of position: what the position terms explain when the positional vectors of each group
of contexts are shifted along the window by a random offset of their own.

Shifted, the groups no longer agree on where a position is, so that what their average knew of
position is gone, while every group keeps how its states vary along the window: on text neighbouring
positions are alike, and permuted ones, the obvious null, are far too poor an opponent. Contexts are
measured with the basis of the other groups, each shifted relative to the context's own, so that
under the null the true offsets (all equal) are one draw among the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.blockwise import blocks_of, centred_scores
from tl_geometry.scores.leave_out import GroupProjections
from tl_geometry.scores.projection import Side

DRAWS = 19
"""Draws of the null: the smallest p-value is 1 / 20."""


def shifted_positions(
    vectors: Float[Tensor, "group position *column"],
    share: Float[Tensor, " group"],
    own: int,
    offsets: Int[Tensor, "sample group"],
    window: tuple[int, int],
) -> Float[Tensor, "sample position *column"]:
    """Mean plus positional vectors (or what they are projected to) of all groups but ``own`` (all
    for -1), the positions inside ``window`` shifted cyclically in each draw by the offset of their
    group relative to that of the context's own."""
    groups, length = vectors.shape[:2]
    relative = offsets - (offsets[:, own : own + 1] if own >= 0 else 0)
    (start, end), at = window, torch.arange(length).unsqueeze(-1)
    moved = start + (at - start - relative.unsqueeze(1)) % (end - start)
    place = torch.where((at >= start) & (at < end), moved, at)  # [sample position group]
    rows = (place + torch.arange(groups) * length).flatten(0, 1).to(vectors.device)
    weight = torch.where(torch.arange(groups) == own, 0, share.cpu())
    weight = (weight / weight.sum()).to(vectors).expand(rows.shape).contiguous()
    table = rearrange(vectors, "group position ... -> (group position) (...)")
    found = embedding_bag(rows, table, mode="sum", per_sample_weights=weight)
    return found.reshape(len(offsets), *vectors.shape[1:])


class ShiftedSide(NamedTuple):
    """Queries (with the score scale) or keys of some contexts, and what their position part is made
    of in every draw, ``position = mapped * frozen + constant``."""

    whole: Float[Tensor, "batch head position d_head"]
    mapped: Float[Tensor, "head sample position d_head"]
    frozen: Float[Tensor, "batch head position"]
    constant: Float[Tensor, "batch head position d_head"]

    def scaled(self, scale: float) -> ShiftedSide:
        """The same times a number."""
        return self._replace(
            whole=self.whole * scale, frozen=self.frozen * scale, constant=self.constant * scale
        )

    @property
    def size(self) -> Float[Tensor, "batch head"]:
        """``|position|^2 + |content|^2`` with the true offsets."""
        position = self.mapped[:, 0] * self.frozen.unsqueeze(-1) + self.constant
        return (position.square() + (self.whole - position).square()).sum((2, 3)).double()


class ShiftedKeys:
    """Position parts of keys less what is the same for all positions, which rows of S~ do not see:
    ``mapped~ * frozen + middle * (frozen - its mean) + constant~``, with ``mapped~`` the mapped
    vectors less their mean over positions ``middle``."""

    def __init__(self, k: ShiftedSide) -> None:
        middle = k.mapped.mean(2, keepdim=True)
        self.mapped = torch.cat([middle, k.mapped - middle], 2)  # [head sample 1 + key d_head]
        self.frozen = k.frozen
        self.beyond = k.frozen - k.frozen.mean(-1, keepdim=True)
        self.constant = k.constant - k.constant.mean(2, keepdim=True)

    def weights(
        self, x: Float[Tensor, "batch head key column"]
    ) -> Float[Tensor, "batch head key+1 column"]:
        """The weights of ``middle`` and of the mapped keys in ``sum_j x_j position_j``, without the
        constant."""
        keys = x.shape[2]
        middle = self.beyond[..., None, :keys] @ x
        return torch.cat([middle, x * self.frozen[..., :keys, None]], 2)

    def dot(self, x: Float[Tensor, "batch head key d_head"]) -> Float[Tensor, "batch head sample"]:
        """``sum_j <position_j, x_j>`` in every draw."""
        found = einsum(self.weights(x), self.mapped, "b h j e, h s j e -> b h s")
        return found + (self.constant * x).sum((2, 3)).unsqueeze(-1)


def shifted_numerators(
    q: ShiftedSide,
    k: ShiftedSide,
    allowed: Bool[Tensor, "query key"],
    bias: Float[Tensor, "head query key"] | None,
) -> tuple[Float[Tensor, "batch head sample term"], Float[Tensor, "batch head"], Tensor]:
    """``sum X~ . S~`` of the terms of position and content (position-position, position-content,
    content-position, content-content, then the bias) in every draw, ``sum S~^2``, and what rounding
    alone could leave of it.

    No draw changes the whole queries and keys, so S~ and its products with them and with the
    constants are made once, and the terms follow from sums with positions on both sides, on the key
    side, on the query side and on none. Products of mapped queries and keys, which only the first
    needs, are the same for all contexts.
    """
    query, key, keys = q.whole, k.whole - k.whole.mean(2, keepdim=True), ShiftedKeys(k)
    wide: Any = {"dtype": torch.float64, "device": key.device}
    extra = None if bias is None else row_center(bias, allowed).to(key)
    sums = torch.zeros(*key.shape[:2], q.mapped.shape[1], 4 + (bias is not None), **wide)
    total = torch.zeros(sums.shape[:2], **wide)
    of_keys, of_constants = torch.empty_like(query), torch.empty_like(query)
    of_queries, of_query_constants = torch.zeros_like(key), torch.zeros_like(key)
    for block in blocks_of(allowed.unsqueeze(0), key.dtype):
        rows, count = slice(block.start, block.stop), block.full + block.mask.sum(-1, keepdim=True)
        centred, _ = centred_scores(query[:, :, rows], key, block, count.clamp(min=1))
        if extra is not None:
            added = extra[:, rows, : block.end]
            centred = centred + added
            sums[..., 4] += (centred * added).sum((-2, -1), dtype=torch.float64).unsqueeze(-1)
        total += torch.linalg.vector_norm(centred, dim=(-2, -1)).double().square()
        of_keys[:, :, rows] = centred @ key[:, :, : block.end]
        of_constants[:, :, rows] = centred @ keys.constant[:, :, : block.end]
        of_queries[:, :, : block.end] += centred.mT @ query[:, :, rows]
        of_query_constants[:, :, : block.end] += centred.mT @ q.constant[:, :, rows]
        pairs = keys.mapped[:, :, : 1 + block.end] @ q.mapped[:, :, rows].mT
        weights = keys.weights(centred.mT) * q.frozen[:, :, None, rows]
        sums[..., 0] += einsum(weights, pairs, "b h j i, h s j i -> b h s")

    def at_query(x: Tensor) -> Tensor:
        return einsum(x * q.frozen.unsqueeze(-1), q.mapped, "b h i e, h s i e -> b h s")

    sums[..., 0] += at_query(of_constants) + keys.dot(of_query_constants)
    sums[..., 1] += at_query(of_keys) + (q.constant * of_keys).sum((2, 3)).unsqueeze(-1)
    sums[..., 2] += keys.dot(of_queries)
    sums[..., 3] += (query * of_keys).sum((2, 3), dtype=torch.float64).unsqueeze(-1)
    sums[..., 3] -= sums[..., 1:3].sum(-1) - sums[..., 0]
    sums[..., 1:3] -= sums[..., :1].clone()
    floor = q.size * k.size
    if extra is not None:
        floor = floor + extra.double().square().sum((-2, -1))
    return sums, total, floor * (32 * unit_roundoff(key.dtype)) ** 2


class PositionNull:
    """Sums in progress of one layer: position and content terms for the true offsets (draw 0) and
    for random ones."""

    def __init__(self, basis: PositionContext, seed: int) -> None:
        self.basis = basis
        generator = torch.Generator().manual_seed(seed)
        size = (DRAWS + 1, int((basis.group_counts > 0).sum()))
        width = basis.window[1] - basis.window[0]
        self.offsets = torch.randint(width, size, generator=generator)
        self.offsets[0] = 0
        self.mapped: tuple[int, dict[str, Tensor]] | None = None
        self.sums: list[Tensor] = []
        self.contexts = 0

    def release(self) -> None:
        """Keep the sums alone."""
        self.mapped = None

    def _mapped(self, layer: LayerView, groups: GroupProjections, own: int) -> dict[str, Tensor]:
        """Queries and keys of the shifted bases, kept until another group comes."""
        if self.mapped is None or self.mapped[0] != own:
            made, length = {}, layer.h.shape[1]
            for which, vectors in groups.whole.items():
                shifted = shifted_positions(
                    vectors, groups.share, own, self.offsets, self.basis.window
                )
                turned = layer.turned(shifted[:, :length], which)
                made[which] = rearrange(turned, "sample i head e -> head sample i e").contiguous()
            self.mapped = own, made
        return self.mapped[1]

    def add(
        self,
        layer: LayerView,
        groups: GroupProjections,
        rows: slice,
        own: Int[Tensor, " batch"],
        drop: int,
    ) -> None:
        """Take in some contexts."""
        normalized = self.basis.provenance.normalized
        allowed = layer.allowed[drop:, drop:]
        bias = None if layer.bias is None else layer.bias[:, drop:, drop:]
        both = {w: Side.of(layer, w, normalized=normalized) for w in ("q", "k")}
        first = rows.start or 0
        for group in own.unique().tolist():
            at = first + (own == group).nonzero().flatten()
            mapped, sides = self._mapped(layer, groups, group), []
            for which, whole in (("q", layer.q), ("k", layer.k)):
                side = both[which].select(at, slice(drop, None), slice(None))
                made = ShiftedSide(
                    rearrange(whole[at, drop:], "b i h e -> b h i e"),
                    mapped[which][:, :, drop:],
                    rearrange(side.frozen, "b i h -> b h i"),
                    rearrange(side.constant, "b i h e -> b h i e"),
                )
                sides.append(made if which == "k" else made.scaled(layer.scale))
            found = [x.sum(0) for x in shifted_numerators(sides[0], sides[1], allowed, bias)]
            before = self.sums or [torch.zeros_like(x) for x in found]
            self.sums = [a + b for a, b in zip(before, found, strict=True)]
            self.contexts += len(at)

    def table(self) -> dict[str, Float[Tensor, "head ..."]]:
        """Shares of position and content of every draw, their means, the share with the true
        offsets, and the p-value of position (NaN where contexts or groups are too few)."""
        numerators, total, floor = self.sums
        cs = numerators / torch.where(total > floor, total, torch.nan)[:, None, None]
        position = cs[..., 0] + cs[..., 4:].sum(-1)  # ALiBi is position
        out: dict[str, Tensor] = {}
        for name, values in (("position", position), ("content", cs[..., 3])):
            draws = values[:, 1:]
            out |= {f"cs_{name}_shifted": draws.mean(1), f"draws_{name}_shifted": draws}
        out["cs_position_others"] = position[:, 0]
        above = (position[:, 1:] >= position[:, :1]).sum(1)
        p = (1 + above).double() / (1 + DRAWS)
        few = min(self.contexts, self.basis.contexts) < FEWEST
        few = few or self.offsets.shape[1] < FEWEST_GROUPS
        unknown = torch.isnan(position).any(1) | few
        out["p_position"] = torch.where(unknown, torch.nan, p)
        return out
