"""Queries and keys of mean, position and context of a layer's input, for sweeps and edits of a live
model.

With every scale frozen a layer's queries are linear in additive parts of its input (keys alike)::

    q_a = map(p_a) * frozen          q = sum_a q_a + constant

The constant of norm and projection, and the mean, make ``bias``; cvec is the remainder of the
model's own queries and keys. Mean and positional vectors may be taken apart by groups of contexts:
of G groups with shares ``w_g`` of the contexts there are 2 G + 1 parts, ``w_g`` times the bias of
each group, ``w_g`` times its positional vectors, and the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.attention import Heads
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.shared_parts import Shared
from tl_geometry.scores.terms import BIAS

PARTS = (BIAS, "pos", "cvec")
"""Parts of the stream in a sweep and in edits, in the order of the part axis."""
ALL = slice(None)


class MappedBasis(NamedTuple):
    """Means, then positional vectors, of each group of contexts (the ``part`` axis) of one layer's
    input, times the group's ``share`` of the contexts, after the maps and without the frozen
    scales, so that they serve for every batch. One group of share 1 is the basis itself.

    ``normalized`` says that they are parts of the normed input, whose norm scale is not frozen.
    """

    q: Float[Tensor, "head position part d_head"]
    k: Float[Tensor, "head position part d_head"]
    share: Float[Tensor, " group"]
    normalized: bool = False


def project_basis(
    layer: LayerView, basis: PositionContext, length: int, *, by_group: bool = False
) -> MappedBasis:
    """Map mean and positional vectors of the first ``length`` positions to queries and keys, of the
    whole basis or of each of its groups."""
    if by_group:
        means, pos, share = group_basis(basis, layer.layer, length)
    else:
        mean, pos = basis.of_state(layer.layer, length)
        means, pos, share = mean.unsqueeze(0), pos.unsqueeze(0), torch.ones(1).double()
    means, pos = means * share.unsqueeze(1), pos * share[:, None, None]
    mapped: list[Tensor] = []
    for which in "qk":
        of_pos = layer.projected(pos.to(layer.h), which)
        of_mean = layer.projected(means.unsqueeze(1).to(layer.h), which)
        # expanded before the rotation, which makes the mean differ by position
        turned = layer.turned(torch.cat([of_mean.expand_as(of_pos), of_pos]), which)
        mapped.append(rearrange(turned, "part i h e -> h i part e").contiguous())
    q, k = mapped
    return MappedBasis(q, k, share, basis.provenance.normalized)


def group_basis(
    basis: PositionContext, layer: int, length: int
) -> tuple[
    Float[Tensor, "group d_model"],
    Float[Tensor, "group position d_model"],
    Float[Tensor, " group"],
]:
    """Mean and positional vectors of one state in each group of contexts that holds any, over the
    first ``length`` positions (each mean over the window of the basis), and the groups' shares of
    the contexts."""
    used = basis.group_counts.nonzero().flatten()
    counts = basis.group_counts[used].double()
    means = basis.moments.sums[used, basis.index(layer)] / counts[:, None, None]
    mean = means[:, slice(*basis.window)].mean(1)
    return mean, means[:, :length] - mean.unsqueeze(1), counts / counts.sum()


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
) -> tuple[
    Float[Tensor, "part batch query head d_head"], Float[Tensor, "part batch key head d_head"]
]:
    """Queries (with the score scale) and keys of bias, pos and cvec (of one group), for some heads.
    cvec is the remainder, so these parts always add up; the sweep checks cvec separately. Gradients
    pass."""
    projected = []
    for which, scale in (("q", layer.scale), ("k", 1.0)):
        total, constant = (
            rearrange(getattr(layer, name)[..., heads, :], "b i h e -> b h i e")
            for name in (which, f"{which}_constant")
        )
        frozen = frozen_scale(layer, which, mapped.normalized)[..., heads]
        of_basis = getattr(mapped, which)[heads] * rearrange(frozen, "b i h -> b h i 1 1")
        bias, pos = of_basis.unbind(3)
        parts = torch.stack([bias + constant, pos, total - bias - constant - pos]) * scale
        projected.append(rearrange(parts, "part b h i e -> part b i h e"))
    q, k = projected
    return q, k


def shared_heads(
    layer: LayerView, mapped: MappedBasis, contexts: slice, start: int
) -> tuple[Heads, Heads, list[Shared], bool]:
    """The parts of :func:`split_heads` for all heads, some contexts and positions from ``start``
    on, as :mod:`tl_geometry.scores.shared_parts` takes them: own queries, own keys, shared parts,
    and whether constants, which belong to the bias, are a part of their own. In the sums the 2 G
    parts of the basis come first, then constants, if there are any, then cvec."""
    rest, constants, scales = list[Tensor](), list[Tensor](), list[Tensor]()
    for which, scale in (("q", layer.scale), ("k", 1.0)):
        names = (which, f"{which}_constant")
        total, constant = (getattr(layer, name)[contexts, start:] for name in names)
        constant = constant[:1] if constant.stride(0) == 0 else constant  # one for all contexts
        total, constant = (rearrange(x * scale, "b i h e -> h b i e") for x in (total, constant))
        frozen = frozen_scale(layer, which, mapped.normalized)[contexts, start:] * scale
        scales.append(rearrange(frozen, "b i h -> h b i"))
        of_basis = getattr(mapped, which)[:, start:].sum(2).unsqueeze(1)
        rest.append(torch.addcmul(total - constant, scales[-1].unsqueeze(-1), of_basis, value=-1))
        constants.append(constant)
    shared, own = [Shared(mapped.q[:, start:], mapped.k[:, start:], *scales)], [rest]
    has_constant = any(bool(x.any()) for x in constants)
    if has_constant and all(bool((x == x[:, :1]).all()) for x in constants):
        q, k = (x[:, 0].unsqueeze(2) for x in constants)
        shared.append(Shared(q, k, None, None))
    elif has_constant:  # a QK-norm scales them
        own = [[x.expand_as(rest[0]) for x in constants], rest]
    q, k = (rearrange(list(x), "part h b i e -> part b i h e") for x in zip(*own, strict=True))
    return q, k, shared, has_constant


def of_groups(share: Float[Tensor, " group"]) -> Float[Tensor, "part column"]:
    """The 2 G + 1 parts as sums of those of :func:`shared_heads` where constants are one: each
    group's bias has its share of them."""
    groups = len(share)
    parts = torch.eye(2 * groups + 2, dtype=share.dtype)
    parts[:groups, 2 * groups] = share
    return torch.cat([parts[: 2 * groups], parts[-1:]])
