"""A planted layer whose true shares are known: random weights on a population of states with a
known basis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from tl_geometry.base.rows import causal_mask
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.reconstruction import ReconstructionReport
from tl_geometry.scores.projection import ProjectedParts
from tl_geometry.scores.sums import share_sums

T, D, HEADS, D_HEAD = 12, 10, 4, 6
"""Positions, coordinates, heads and coordinates of a head of the planted layer."""


@dataclass(frozen=True)
class World:
    """A population of states: a positional curve, contexts, and noise correlated along the window
    (``along``) and from one window to the next (``between``)."""

    position: float = 0.6
    context: float = 0.6
    along: float = 0.8
    between: float = 0.0

    def draw(self, contexts: int, generator: torch.Generator) -> Tensor:
        """``[context position d_model]``."""
        noise = _autoregressive(torch.randn(contexts, T, D, generator=generator), self.along, 1)
        slow = _autoregressive(torch.randn(contexts, 1, D, generator=generator), self.between, 0)
        return noise + self.context * slow + self.position * curve() + mean_state()


def _autoregressive(white: Tensor, rho: float, axis: int) -> Tensor:
    rows = [white.select(axis, 0)]
    for i in range(1, white.shape[axis]):
        rows.append(rho * rows[-1] + (1 - rho**2) ** 0.5 * white.select(axis, i))
    return torch.stack(rows, axis)


@cache
def curve() -> Tensor:
    """A smooth random curve of positions, ``[position d_model]``."""
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(11)).cumsum(0)
    return (x - x.mean(0)) / x.std()


@cache
def mean_state() -> Tensor:
    """The mean of the population, ``[d_model]``."""
    return 0.5 * torch.randn(D, generator=torch.Generator().manual_seed(12))


@cache
def _weights() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(13)
    q, k = (torch.randn(D, HEADS, D_HEAD, generator=g) / D**0.5 for _ in range(2))
    return q, k


def layer_of(h: Tensor) -> LayerView:
    """One layer without norm whose weights are random."""
    q, k = _weights()
    to_q, to_k = (lambda x, w=w: einsum(x, w, "... d, d h e -> ... h e") for w in (q, k))
    ones = torch.ones(*h.shape[:2], HEADS)
    nothing = torch.zeros(*h.shape[:2], HEADS, D_HEAD)
    sides: dict[str, Any] = {f"{w}_scale": ones for w in "qkv"}
    sides |= {f"{w}_constant": nothing for w in "qkv"} | {"q_map": to_q, "k_map": to_k}
    return LayerView(
        layer=0,
        h=h,
        norm=NormWeights(norm_type=None, gain=torch.ones(D), bias=torch.zeros(D), eps=0.0),
        norm_scale=torch.ones(h.shape[:2]),
        scale=D_HEAD**-0.5,
        softcap=None,
        sinks=None,
        bias=None,
        bias_source="",
        allowed=causal_mask(T),
        v_map=to_k,
        q=to_q(h),
        k=to_k(h),
        pattern=None,
        scores=None,
        v=None,
        z=None,
        roundoff=2.0**-24,
        projected=lambda parts, side: to_q(parts) if side == "q" else to_k(parts),
        turned=lambda values, *_: values,
        sizes=lambda w: einsum(h.abs(), (q if w == "q" else k).abs(), "... d, d h e -> ... h e"),
        reconstruction=ReconstructionReport(checks={}, scale=1.0),
        **sides,
    )


def parts_of(layer: LayerView, mean: Tensor, pos: Tensor) -> ProjectedParts:
    """Bias, pos and cvec of a layer by some basis."""
    parts = [x.expand_as(layer.h).float() for x in (mean, pos)]
    parts.append(layer.h - parts[0] - parts[1])
    stacked = torch.stack(parts)
    return ProjectedParts(layer.q_map(stacked) * layer.scale, layer.k_map(stacked))


@cache
def true_shares(world: World) -> Tensor:
    """Shares with the population's basis over 20,000 contexts, ``[head term]``."""
    h = World(world.position, world.context, world.along).draw(
        20_000, torch.Generator().manual_seed(99)
    )
    layer = layer_of(h)
    parts = parts_of(layer, mean_state(), world.position * curve())
    return share_sums(parts.q, parts.k, layer.allowed, energy=False, gain=False).pooled().cs
