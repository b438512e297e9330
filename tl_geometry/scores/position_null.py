"""The null of position: what the position terms explain when the positional vectors of each group
of contexts are shifted along the window by a random offset of their own.

Shifted, the groups no longer agree on where a position is, so that what their average knew of
position is gone, while every group keeps how its states vary along the window: on text neighbouring
positions are alike, and permuted ones, the obvious null, are far too poor an opponent. Contexts are
measured with the basis of the other groups, each shifted relative to the context's own, so that
under the null the true offsets (all equal) are one draw among the others.
"""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.leave_out import GroupBasis
from tl_geometry.scores.projection import Side
from tl_geometry.scores.sums import ShareSums, share_sums

DRAWS = 19
"""Draws of the null: the smallest p-value is 1 / 20."""


def shifted_positions(
    groups: GroupBasis, own: int, offsets: Int[Tensor, "sample group"], window: tuple[int, int]
) -> Float[Tensor, "sample position d_model"]:
    """Mean plus positional vectors of all groups but ``own`` (all for -1), the positions inside
    ``window`` shifted cyclically in each draw by the offset of their group relative to that of the
    context's own."""
    start, end = window
    width = end - start
    kept = torch.tensor([float(g != own) for g in range(len(groups.share))]).to(groups.share)
    weight = groups.share * kept / (groups.share * kept).sum()
    relative = offsets - (offsets[:, own : own + 1] if own >= 0 else 0)
    at = (torch.arange(width) - relative.unsqueeze(-1)) % width  # [draw group position]
    inside = groups.pos[:, start:end]
    place = torch.arange(len(inside)).reshape(1, -1, 1)
    moved = einsum(weight, inside[place, at], "group, draw group position d -> draw position d")
    plain = einsum(weight, groups.pos, "group, group position d -> position d")
    found = plain.repeat(len(offsets), 1, 1)
    found[:, start:end] = moved
    return found + weight @ groups.mean


class PositionNull:
    """Sums in progress of one layer: position and content terms for the true offsets (draw 0) and
    for random ones."""

    def __init__(self, basis: PositionContext, layer: int, length: int, seed: int) -> None:
        self.basis, self.length = basis, length
        self.groups = GroupBasis.of(basis, layer, basis.length)
        generator = torch.Generator().manual_seed(seed)
        size = (DRAWS + 1, len(self.groups.share))
        width = basis.window[1] - basis.window[0]
        self.offsets = torch.randint(width, size, generator=generator)
        self.offsets[0] = 0
        self.mapped: tuple[int, dict[str, Tensor]] | None = None
        self.sums: ShareSums | None = None
        self.contexts = 0

    def _mapped(self, layer: LayerView, own: int) -> dict[str, Tensor]:
        """Queries and keys of the shifted bases, kept until another group comes."""
        if self.mapped is None or self.mapped[0] != own:
            pos = shifted_positions(self.groups, own, self.offsets, self.basis.window)
            pos = pos[:, : self.length].to(layer.h)
            self.mapped = own, {"q": layer.q_map(pos), "k": layer.k_map(pos)}
        return self.mapped[1]

    def add(self, layer: LayerView, rows: slice, own: Int[Tensor, " batch"], drop: int) -> None:
        """Take in some contexts."""
        normalized = self.basis.provenance.normalized
        sides = {w: Side.of(layer, w, normalized=normalized) for w in ("q", "k")}
        options = {"bias": layer.bias, "drop": drop, "energy": False, "gain": False}
        first = rows.start or 0
        for group in own.unique().tolist():
            at = first + (own == group).nonzero().flatten()
            mapped, made = self._mapped(layer, group), []
            for which, whole in (("q", layer.q), ("k", layer.k)):
                scale = layer.scale if which == "q" else 1.0
                frozen, constant = sides[which].frozen[at], sides[which].constant[at]
                position = mapped[which].unsqueeze(1) * frozen.unsqueeze(-1) + constant
                both = torch.stack([position, whole[at] - position]) * scale
                made.append(both.flatten(1, 2))  # [part draw*context position head d_head]
            sums = share_sums(made[0], made[1], layer.allowed, **options)
            for i in range(len(at)):
                one = sums.context(slice(i, None, len(at)))  # this context in every draw
                self.sums = one if self.sums is None else self.sums.plus(one)
            self.contexts += len(at)

    def table(self) -> dict[str, Float[Tensor, "head ..."]]:
        """Shares of position and content of every draw, their means, the share with the true
        offsets, and the p-value of position (NaN where contexts or groups are too few)."""
        assert self.sums is not None
        cs = self.sums.cs.transpose(0, 1)  # [head draw term]
        position = cs[..., 0] + cs[..., 4:].sum(-1)  # ALiBi is position
        out: dict[str, Tensor] = {}
        for name, values in (("position", position), ("content", cs[..., 3])):
            draws = values[:, 1:]
            out |= {f"cs_{name}_shifted": draws.mean(1), f"draws_{name}_shifted": draws}
        out["cs_position_others"] = position[:, 0]
        above = (position[:, 1:] >= position[:, :1]).sum(1)
        p = (1 + above).double() / (1 + DRAWS)
        few = min(self.contexts, self.basis.contexts) < FEWEST
        few = few or len(self.groups.share) < FEWEST_GROUPS
        unknown = torch.isnan(position).any(1) | few
        out["p_position"] = torch.where(unknown, torch.nan, p)
        return out
