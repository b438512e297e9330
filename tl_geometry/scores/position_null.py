"""The null of position: what the position terms explain when the positional vectors of each group
of contexts are shifted along the window by a random offset of their own.

Shifted, the groups no longer agree on where a position is, so that what their average knew of
position is gone, while every group keeps how its states vary along the window: on text neighbouring
positions are alike, and permuted ones, the obvious null, are far too poor an opponent. Contexts are
measured with the basis of the other groups, each shifted relative to the context's own, so that
under the null the true offsets (all equal) are one draw among the others.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

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


class ShiftedGroups:
    """Mean plus positional vectors of groups of contexts, or what they are projected to, the
    positions inside ``window`` shifted cyclically by an offset of each group.

    All groups are shifted and added up once: relative to one of them they are that sum, shifted
    back, less its own.
    """

    def __init__(
        self,
        share: Float[Tensor, " group"],
        mean: Float[Tensor, "group 1 *vector"],
        pos: Float[Tensor, "group position *vector"],
        offsets: Int[Tensor, "sample group"],
        window: tuple[int, int],
    ) -> None:
        self.share, self.mean, self.pos = share.to(pos), mean, pos
        self.offsets, self.inside = offsets.to(pos.device), slice(*window)
        self.places = torch.arange(window[1] - window[0], device=pos.device)
        plain = einsum(self.share, pos, "group, group position ... -> position ...")
        self.summed = plain.expand(len(offsets), *plain.shape).clone()
        at = self._around(-self.offsets.unsqueeze(-1))  # [sample group position]
        each = zip(self.share, pos[:, self.inside], at.unbind(1), strict=True)
        # one group at a time: all of them beside each other would be large
        self.summed[:, self.inside] = sum((w * x[i] for w, x, i in each), torch.zeros(()).to(pos))

    def _around(self, shift: Int[Tensor, "..."]) -> Int[Tensor, "... position"]:
        return (self.places + shift) % len(self.places)

    def without(self, own: int) -> Float[Tensor, "sample position *vector"]:
        """All groups but ``own`` (all for -1), each shifted relative to it."""
        if own < 0:
            return self.summed + einsum(self.share, self.mean, "group, group i ... -> i ...")
        weight, found = self.share[own], self.summed.clone()
        at = self._around(self.offsets[:, own : own + 1])  # [sample position]
        inside = self.summed[:, self.inside]
        found[:, self.inside] = torch.stack([x[i] for x, i in zip(inside, at, strict=True)])
        mean = einsum(self.share, self.mean, "group, group i ... -> i ...")
        found += mean - weight * (self.pos[own] + self.mean[own])
        return found / (1 - weight)


def shifted_numerators(
    q: tuple[Float[Tensor, "batch head query d_head"], Tensor],
    k: tuple[Float[Tensor, "batch head key d_head"], Tensor],
    allowed: Bool[Tensor, "query key"],
    bias: Float[Tensor, "head query key"] | None,
) -> tuple[Float[Tensor, "batch head sample term"], Float[Tensor, "batch head"], Tensor]:
    """``sum X~ . S~`` of the terms of position and content (position-position, position-content,
    content-position, content-content, then the bias) in every draw, ``sum S~^2``, and what rounding
    alone could leave of it.

    ``q``, ``k`` are the whole queries and keys, which no draw changes, and their position part in
    each draw ``[batch head position sample d_head]``; content is the rest. So ``S~`` and its
    products with whole keys are made once, and the terms follow from sums with positions on both
    sides, on the key side, on the query side and on none. Keys are shifted by their mean over
    positions, which rows of S~ do not see.
    """
    key, at_key = k[0] - k[0].mean(2, keepdim=True), k[1] - k[1].mean(2, keepdim=True)
    wide: Any = {"dtype": torch.float64, "device": key.device}
    extra = None if bias is None else row_center(bias, allowed).to(key)
    sums = torch.zeros(*k[1].shape[:2], k[1].shape[3], 4 + (bias is not None), **wide)
    total = torch.zeros(sums.shape[:2], **wide)
    for block in blocks_of(allowed.unsqueeze(0), key.dtype):
        rows, count = slice(block.start, block.stop), block.full + block.mask.sum(-1, keepdim=True)
        query, at_query = q[0][:, :, rows], q[1][:, :, rows]
        centred, _ = centred_scores(query, key, block, count.clamp(min=1))
        if extra is not None:
            added = extra[:, rows, : block.end]
            centred = centred + added
            sums[..., 4] += (centred * added).sum((-2, -1), dtype=torch.float64).unsqueeze(-1)
        total += torch.linalg.vector_norm(centred, dim=(-2, -1)).double().square()
        known = centred @ key[:, :, : block.end]
        moved = (centred @ at_key[:, :, : block.end].flatten(3)).unflatten(-1, at_key.shape[3:])
        sums[..., 0] += (at_query * moved).sum(-1).sum(2, dtype=torch.float64)
        sums[..., 1] += (at_query @ known.unsqueeze(-1)).squeeze(-1).sum(2, dtype=torch.float64)
        sums[..., 2] += (moved @ query.unsqueeze(-1)).squeeze(-1).sum(2, dtype=torch.float64)
        sums[..., 3] += (query * known).sum((-2, -1), dtype=torch.float64).unsqueeze(-1)
    sums[..., 3] -= sums[..., 1:3].sum(-1) - sums[..., 0]
    sums[..., 1:3] -= sums[..., :1].clone()
    sizes = [
        x[..., 0, :].square().sum((2, 3)) + (whole - x[..., 0, :]).square().sum((2, 3))
        for whole, x in (q, k)
    ]
    unit = (32 * unit_roundoff(key.dtype)) ** 2
    floor = unit * sizes[0].double() * sizes[1].double()
    if extra is not None:
        floor = floor + unit * extra.double().square().sum((-2, -1))
    return sums, total, floor


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
        self.shifted: dict[str, ShiftedGroups] = {}
        self.mapped: tuple[int, dict[str, Tensor]] | None = None
        self.sums: list[Tensor] = []
        self.contexts = 0

    def begin(self, groups: GroupProjections) -> None:
        """A batch: shift what the groups are projected to, before it turns with the position."""
        beside = (self.offsets, self.basis.window)
        self.shifted = {
            w: ShiftedGroups(groups.share, groups.mean[w], groups.pos[w], *beside) for w in "qk"
        }

    def release(self) -> None:
        """Keep the sums alone."""
        self.shifted, self.mapped = {}, None

    def _mapped(self, layer: LayerView, own: int) -> dict[str, Tensor]:
        """Queries and keys of the shifted bases, kept until another group comes."""
        if self.mapped is None or self.mapped[0] != own:
            made, length = {}, layer.h.shape[1]
            for w, shifted in self.shifted.items():
                turned = layer.turned(shifted.without(own)[:, :length], w)
                made[w] = rearrange(turned, "sample i head e -> head i sample e").contiguous()
            self.mapped = own, made
        return self.mapped[1]

    def add(self, layer: LayerView, rows: slice, own: Int[Tensor, " batch"], drop: int) -> None:
        """Take in some contexts."""
        normalized = self.basis.provenance.normalized
        allowed = layer.allowed[drop:, drop:]
        bias = None if layer.bias is None else layer.bias[:, drop:, drop:]
        both = {w: Side.of(layer, w, normalized=normalized) for w in ("q", "k")}
        first = rows.start or 0
        for group in own.unique().tolist():
            at = first + (own == group).nonzero().flatten()
            mapped, sides = self._mapped(layer, group), []
            for which, whole in (("q", layer.q), ("k", layer.k)):
                side = both[which]
                scale = layer.scale if which == "q" else 1.0
                frozen = rearrange(side.frozen[at, drop:], "b i head -> b head i 1 1")
                constant = rearrange(side.constant[at, drop:], "b i head e -> b head i 1 e")
                position = (mapped[which][:, drop:] * frozen + constant) * scale
                sides.append((rearrange(whole[at, drop:], "b i h e -> b h i e") * scale, position))
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
