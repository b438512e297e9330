"""A planted layer whose true shares are known: random weights on a population of states with a
known basis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tl_geometry.base.rows import causal_mask
from tl_geometry.models.attention import Attention, Reading, Rotation
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.norms import NormReading, NormWeights
from tl_geometry.models.parameters import HeadWeights
from tl_geometry.models.reconstruction import ReconstructionReport
from tl_geometry.scores.sums import ShareSums, share_sums

T, D, HEADS, D_HEAD = 12, 10, 4, 6
"""Positions, coordinates, heads and coordinates of a head of the planted layer."""


TOPIC = 8
"""Consecutive windows of one topic, where shares are simulated in topics."""


@dataclass(frozen=True)
class World:
    """A population of states: a positional curve, contexts, and noise correlated along the window
    (``along``; ``stay`` is instead how often a token is that of the position before) and from one
    window to the next (``between``; ``topics`` of equally many windows in a row).

    A ``rotary`` one is for rotary layers: without a mean state, whose keys would tell positions.
    """

    position: float = 0.6
    context: float = 0.6
    along: float = 0.8
    between: float = 0.0
    stay: float | None = None
    topics: int = 0
    length: int = T
    rotary: bool = False

    def draw(self, contexts: int, generator: torch.Generator) -> Tensor:
        """``[context position d_model]``."""
        noise = torch.randn(contexts, self.length, D, generator=generator)
        if self.stay is None:
            noise = _autoregressive(noise, self.along, 1)
        else:
            new = torch.rand(contexts, self.length, generator=generator) > self.stay
            new[:, 0] = True
            last = torch.where(new, torch.arange(self.length), 0).cummax(1).values
            noise = noise.gather(1, last.unsqueeze(-1).expand_as(noise))
        slow = _autoregressive(torch.randn(contexts, 1, D, generator=generator), self.between, 0)
        h = noise + self.context * slow + self.position * curve(self.length)
        if self.topics:
            topics = torch.randn(self.topics, 1, D, generator=generator)
            h = h + topics.repeat_interleave(contexts // self.topics, 0)
        return h if self.rotary else h + mean_state()


def _autoregressive(white: Tensor, rho: float, axis: int) -> Tensor:
    rows = [white.select(axis, 0)]
    for i in range(1, white.shape[axis]):
        rows.append(rho * rows[-1] + (1 - rho**2) ** 0.5 * white.select(axis, i))
    return torch.stack(rows, axis)


@cache
def curve(length: int = T) -> Tensor:
    """A smooth random curve of positions, ``[position d_model]``."""
    x = torch.randn(length, D, generator=torch.Generator().manual_seed(11)).cumsum(0)
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


def _rotation(length: int) -> Rotation:
    """Rotary embedding of base 100."""
    half = D_HEAD // 2
    angle = torch.arange(length)[:, None] * 100 ** (-torch.arange(half) / half)
    angle = torch.cat([angle, angle], -1)
    return Rotation(angle.cos(), angle.sin(), "half")


def layer_of(h: Tensor, *, rotary: bool = False, query: float = 0.0, key: float = 0.0) -> LayerView:
    """One layer without norm whose weights are random; a rotary one may have constants of this
    size in its queries and keys (both are a relative position)."""
    q, k = (rearrange(w, "d h e -> h d e") for w in _weights())
    nothing = torch.zeros(HEADS, D_HEAD)
    weights = HeadWeights(
        W_Q=q, W_K=k, W_V=k, W_O=k.mT, b_Q=nothing, b_K=nothing, b_V=nothing, b_O=torch.zeros(D)
    )
    norm = NormWeights(norm_type=None, gain=torch.ones(D), bias=torch.zeros(D), eps=0.0)
    reading = Reading(NormReading(None), rotation="half" if rotary else None, scale=D_HEAD**-0.5)
    turn = _rotation(h.shape[1]) if rotary else None
    attention = Attention(reading, norm, weights, None, None, turn)
    g = torch.Generator().manual_seed(14)
    sides: dict[str, Any] = dict.fromkeys(
        ("q_scale", "k_scale", "v_scale"), torch.ones(*h.shape[:2], HEADS)
    )
    for w, size in (("q", query), ("k", key)):
        constant = (size * torch.randn(HEADS, D_HEAD, generator=g)).expand(*h.shape[:2], -1, -1)
        sides[f"{w}_constant"] = attention.turned(constant, w)
        sides[w] = attention.turned(attention.projected(h, w), w) + sides[f"{w}_constant"]
    return LayerView(
        **vars(attention),
        layer=0,
        h=h,
        norm_scale=torch.ones(h.shape[:2]),
        v_constant=nothing.expand(*h.shape[:2], -1, -1),
        v=None,
        z=None,
        pattern=None,
        scores=None,
        bias=None,
        allowed=causal_mask(h.shape[1]),
        roundoff=2.0**-24,
        reconstruction=ReconstructionReport(checks={}, scale=1.0),
        **sides,
    )


def parts_of(layer: LayerView, mean: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of bias, pos and cvec of a layer by some basis."""
    parts = [x.expand_as(layer.h).float() for x in (mean, pos)]
    parts.append(layer.h - parts[0] - parts[1])
    stacked = torch.stack(parts)
    return layer.mapped(stacked, "q") * layer.scale, layer.mapped(stacked, "k")


@cache
def true_shares(world: World) -> ShareSums:
    """Shares with the population's basis over 20,000 contexts, ``.cs`` and ``.gs`` ``[head
    term]``; topics are of :data:`TOPIC` windows each."""
    count = 20_000
    many = replace(world, topics=count // TOPIC if world.topics else 0, between=0.0)
    h = many.draw(count, torch.Generator().manual_seed(99))
    layer = layer_of(h)
    parts = parts_of(layer, mean_state(), world.position * curve(world.length))
    return share_sums(*parts, layer.allowed)
