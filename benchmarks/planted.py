"""A planted layer whose true shares are known: random weights on a population of states with a
known basis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from tl_geometry.base.rows import causal_mask
from tl_geometry.models.layer_view import LayerView, Rotation
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.reconstruction import ReconstructionReport
from tl_geometry.scores.projection import ProjectedParts
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


def _turn(x: Tensor) -> Tensor:
    """Rotary embedding of ``[... position head d_head]``, base 100."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-3])[:, None, None] * 100 ** (-torch.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def layer_of(h: Tensor, *, rotary: bool = False, query: float = 0.0, key: float = 0.0) -> LayerView:
    """One layer without norm whose weights are random; a rotary one may have constants of this
    size in its queries and keys (both are a relative position)."""
    q, k = _weights()
    turn = _turn if rotary else lambda x: x
    project_q, project_k = (lambda x, w=w: einsum(x, w, "... d, d h e -> ... h e") for w in (q, k))
    to_q, to_k = (lambda x, f=f: turn(f(x)) for f in (project_q, project_k))
    ones = torch.ones(*h.shape[:2], HEADS)
    nothing = torch.zeros(*h.shape[:2], HEADS, D_HEAD)
    g = torch.Generator().manual_seed(14)
    added = [turn(nothing + x * torch.randn(HEADS, D_HEAD, generator=g)) for x in (query, key)]
    sides: dict[str, Any] = {f"{w}_scale": ones for w in "qkv"}
    sides |= {"q_constant": added[0], "k_constant": added[1], "v_constant": nothing}
    sides |= {"q_map": to_q, "k_map": to_k}
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
        mask=causal_mask(h.shape[1]),
        v_map=to_k,
        q=to_q(h) + added[0],
        k=to_k(h) + added[1],
        pattern=None,
        scores=None,
        v=None,
        z=None,
        roundoff=2.0**-24,
        projected=lambda parts, side: project_q(parts) if side == "q" else project_k(parts),
        turned=lambda values, *_: turn(values),
        turn=Rotation(torch.ones(1), torch.zeros(1), "half") if rotary else None,
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
def true_shares(world: World) -> ShareSums:
    """Shares with the population's basis over 20,000 contexts, ``.cs`` and ``.gs`` ``[head
    term]``; topics are of :data:`TOPIC` windows each."""
    count = 20_000
    many = replace(world, topics=count // TOPIC if world.topics else 0, between=0.0)
    h = many.draw(count, torch.Generator().manual_seed(99))
    layer = layer_of(h)
    parts = parts_of(layer, mean_state(), world.position * curve(world.length))
    return share_sums(parts.q, parts.k, layer.allowed, energy=False).pooled()
