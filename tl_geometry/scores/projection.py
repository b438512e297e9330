"""Which query, key or value does a part of a layer's input give? The projection of parts, called by
splits, sweeps and edits of a live model.

With every scale frozen a layer's queries are linear in additive parts of its input (keys and values
alike)::

    q_a = map(p_a) * frozen          q = sum_a q_a + constant

The constant of norm and projection belongs to ``bias``, and so does the mean unless it is a part of
its own. A positional embedding that is added to queries and keys and not to the stream (``added``)
is in the constant, but it is position: it is moved to ``pos``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView, LinearMap

PARTS = ("bias", "pos", "cvec")
"""Parts of the stream in a sweep and in edits, in the order of the part axis."""


class ProjectedParts(NamedTuple):
    """Queries (with the score scale) and keys of some contexts by part."""

    q: Float[Tensor, "part batch query head d_head"]
    k: Float[Tensor, "part batch key head d_head"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Side:
    """How parts of one layer's input become its queries, keys or values.

    ``map`` is linear, the same for all tokens; ``frozen`` the scales of this forward pass (one over
    the norm's, and over a QK-norm's); ``constant`` the bias of norm and projection, scaled and
    rotated alike; ``added`` what queries or keys get from a positional embedding that is not in
    the stream, ``None`` without one.
    """

    map: LinearMap
    frozen: Float[Tensor, "batch position head"]
    constant: Float[Tensor, "batch position head d_head"]
    added: Float[Tensor, "position head d_head"] | None

    @classmethod
    def of(cls, layer: LayerView, which: str, *, normalized: bool = False) -> Side:
        """The ``"q"``, ``"k"`` or ``"v"`` side of a layer; ``normalized`` for parts of its normed
        input, from which the norm scale has been divided out already."""
        frozen = getattr(layer, f"{which}_scale")
        added = None if layer.added is None or which == "v" else layer.added
        return cls(
            map=getattr(layer, f"{which}_map"),
            frozen=layer.without_norm(frozen) if normalized else frozen,
            constant=getattr(layer, f"{which}_constant"),
            added=None if added is None else added.q if which == "q" else added.k,
        )

    def select(self, rows: slice | Tensor, positions: slice, heads: list[int] | slice) -> Side:
        """The same for some contexts, positions and heads."""
        return replace(
            self,
            frozen=self.frozen[rows, positions][..., heads],
            constant=self.constant[rows, positions][..., heads, :],
            added=None if self.added is None else self.added[positions][..., heads, :],
        )

    def bias_and_pos(
        self,
        mapped: Float[Tensor, "part ... position head d_head"],
        *,
        scale: float = 1.0,
        out: Tensor | None = None,
    ) -> Float[Tensor, "part ... batch position head d_head"]:
        """``bias`` and ``pos`` (the ``part`` axis) from the mapped mean and positional vectors:
        times the frozen scale, plus the constants, and all of it times ``scale``. The result is
        written to ``out`` where that is given."""
        parts = torch.mul(mapped, self.frozen.unsqueeze(-1) * scale, out=out)
        parts[0].add_(self.constant, alpha=scale)
        # the constant contains the added positional embedding, which belongs to pos
        if self.added is not None:
            parts[0].sub_(self.added, alpha=scale)
            parts[1].add_(self.added, alpha=scale)
        return parts


class MappedBasis(NamedTuple):
    """Mean and pos (the ``part`` axis) of one layer's input after the maps, without the frozen
    scales, so that they serve for every batch.

    ``normalized`` says that they are parts of the normed input, whose norm scale is not frozen.
    """

    q: Float[Tensor, "part head position d_head"]
    k: Float[Tensor, "part head position d_head"]
    normalized: bool = False


def project_basis(layer: LayerView, basis: PositionContext, length: int) -> MappedBasis:
    """Map mean and positional vectors of the first ``length`` positions to queries and keys."""
    row = basis.index(layer.layer)
    pos = basis.pos_seen[row, :length]
    mean_and_pos = torch.stack([basis.mean[row].expand_as(pos), pos]).to(layer.h)
    q, k = (
        rearrange(f(mean_and_pos), "part position head e -> part head position e").contiguous()
        for f in (layer.q_map, layer.k_map)
    )
    return MappedBasis(q, k, basis.provenance.normalized)


def split_layer(
    layer: LayerView, mapped: MappedBasis, rows: slice, *, start: int = 0
) -> ProjectedParts:
    """Queries (with the score scale) and keys of bias, pos and cvec, for the contexts ``rows`` and
    positions from ``start`` on. cvec is the remainder of the model's own queries and keys, so these
    parts always add up; the sweep checks cvec separately.
    """
    batch, length, heads, width = layer.q[rows, start:].shape
    # memory in the order in which share_sums reads, [batch head position part d_head]: its
    # rearrangement then needs no copy
    size = (batch, heads, length, len(PARTS), width)
    q, k = (
        rearrange(x.new_empty(size), "b h i part e -> part b i h e") for x in (layer.q, layer.k)
    )
    for which, parts, mean_and_pos, total, scale in (
        ("q", q, mapped.q, layer.q, layer.scale),
        ("k", k, mapped.k, layer.k, 1.0),
    ):
        side = Side.of(layer, which, normalized=mapped.normalized)
        side = side.select(rows, slice(start, None), slice(None))
        mean_and_pos = rearrange(
            mean_and_pos[:, :, start:], "part head position e -> part 1 position head e"
        )
        side.bias_and_pos(mean_and_pos, scale=scale, out=parts[:2])
        torch.mul(total[rows, start:], scale, out=parts[2]).sub_(parts[0]).sub_(parts[1])
    return ProjectedParts(q, k)


def split_heads(layer: LayerView, mapped: MappedBasis, heads: list[int]) -> ProjectedParts:
    """:func:`split_layer` for some heads of a whole batch, in new tensors: autograd refuses the
    ``out=`` that :func:`split_layer` uses, and edits of a live model need gradients."""
    projected: list[Tensor] = []
    for which, mean_and_pos, total in (("q", mapped.q, layer.q), ("k", mapped.k, layer.k)):
        side = Side.of(layer, which, normalized=mapped.normalized)
        side = side.select(slice(None), slice(None), heads)
        mean_and_pos = rearrange(
            mean_and_pos[:, heads], "part head position e -> part 1 position head e"
        )
        bias, pos = side.bias_and_pos(mean_and_pos)
        projected.append(torch.stack([bias, pos, total[:, :, heads] - bias - pos]))
    return ProjectedParts(projected[0] * layer.scale, projected[1])
