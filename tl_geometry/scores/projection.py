"""Queries and keys of mean, position and context of a layer's input, for sweeps and edits of a live
model.

With every scale frozen a layer's queries are linear in additive parts of its input (keys alike)::

    q_a = map(p_a) * frozen          q = sum_a q_a + constant

The constant of norm and projection, and the mean, make ``bias``; cvec is the remainder of the
model's own queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.terms import BIAS

PARTS = (BIAS, "pos", "cvec")
"""Parts of the stream in a sweep and in edits, in the order of the part axis."""
ALL = slice(None)


class ProjectedParts(NamedTuple):
    """Queries (with the score scale) and keys of some contexts by part."""

    q: Float[Tensor, "part batch query head d_head"]
    k: Float[Tensor, "part batch key head d_head"]


class MappedBasis(NamedTuple):
    """Mean and pos (the ``part`` axis) of one layer's input after the maps, without the frozen
    scales, so that they serve for every batch.

    ``normalized`` says that they are parts of the normed input, whose norm scale is not frozen.
    """

    q: Float[Tensor, "head position part d_head"]
    k: Float[Tensor, "head position part d_head"]
    normalized: bool = False


def project_basis(layer: LayerView, basis: PositionContext, length: int) -> MappedBasis:
    """Map mean and positional vectors of the first ``length`` positions to queries and keys."""
    mean, pos = basis.of_state(layer.layer, length)
    mean_and_pos = torch.stack([mean.expand_as(pos), pos]).to(layer.h)
    q, k = (
        rearrange(f(mean_and_pos), "part position head e -> head position part e").contiguous()
        for f in (layer.q_map, layer.k_map)
    )
    return MappedBasis(q, k, basis.provenance.normalized)


def frozen_scale(
    layer: LayerView, which: str, normalized: bool
) -> Float[Tensor, "batch position head"]:
    """The frozen scales of queries or keys; of ``normalized`` parts without that of the norm."""
    frozen = getattr(layer, f"{which}_scale")
    return layer.without_norm(frozen) if normalized else frozen


def split_heads(
    layer: LayerView,
    mapped: MappedBasis,
    heads: list[int] | slice = ALL,
    contexts: slice = ALL,
    start: int = 0,
) -> ProjectedParts:
    """Queries (with the score scale) and keys of bias, pos and cvec, for some heads and contexts
    and positions from ``start`` on. cvec is the remainder, so these parts always add up; the sweep
    checks cvec separately. Gradients pass."""
    projected = []
    for which, scale in (("q", layer.scale), ("k", 1.0)):
        total, constant = (getattr(layer, name) for name in (which, f"{which}_constant"))
        frozen = frozen_scale(layer, which, mapped.normalized)[contexts, start:][..., heads]
        total, constant = (x[contexts, start:][..., heads, :] for x in (total, constant))
        mean_and_pos = getattr(mapped, which)[heads][:, start:]
        # memory in the order in which share_sums reads: its rearrangement then needs no copy
        batch, length, n_heads, width = total.shape
        parts = total.new_empty(batch, n_heads, length, len(PARTS), width)
        parts[..., :2, :] = mean_and_pos * rearrange(frozen * scale, "b i h -> b h i 1 1")
        parts[..., 0, :] += rearrange(constant * scale, "b i h e -> b h i e")
        rest = rearrange(total * scale, "b i h e -> b h i e") - parts[..., :2, :].sum(-2)
        parts[..., 2, :] = rest
        projected.append(rearrange(parts, "b h i part e -> part b i h e"))
    return ProjectedParts(*projected)
