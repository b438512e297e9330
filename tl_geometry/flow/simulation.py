"""Sample paths of the stochastic flow: exact draws, or Euler-Maruyama and Heun steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.linalg import rotation_exp
from tl_geometry.flow.geodesic import GeodesicPath


class FlowNoise(NamedTuple):
    """Noise of the flow: each coordinate gains ``alpha lambda e^{lambda t} dt`` of variance."""

    alpha: float
    rate: float

    def amplitude(self, t: float) -> float:
        """``sqrt(alpha lambda e^{lambda t})``."""
        return math.sqrt(self.alpha * self.rate * math.exp(self.rate * t))

    def variance(self, path: GeodesicPath, start: float, end: float) -> Float[Tensor, " rank"]:
        """What the co-moving coordinates gain: ``integral alpha lambda e^{lambda u} sigma_i^{-2}
        du``."""
        return self.alpha * self.rate * path.integral(start, end, self.rate)


def exact_paths(
    path: GeodesicPath,
    noise: FlowNoise,
    x: Float[Tensor, "trajectory rank"],
    begin: float,
    times: list[float],
    generator: torch.Generator,
    embed: Float[Tensor, "d_model rank"] | None,
) -> Float[Tensor, "time trajectory column"]:
    """Paths from the exact law of the co-moving increments, at increasing times; ``embed`` takes
    coordinates to the stream (``None``: they are those of the stream)."""
    y = x @ (path.rotation(begin) / path.sigma(begin)).to(x)
    width = x.shape[1] if embed is None else len(embed)
    out = torch.empty(len(times), len(x), width, dtype=x.dtype)
    now, draw = begin, torch.empty_like(y)
    for i, t in enumerate(times):
        if t > now and noise.alpha != 0:
            spread = noise.variance(path, now, t).sqrt().to(y)
            y.addcmul_(draw.normal_(generator=generator), spread)
        R = path.rotation(t) if embed is None else embed @ path.rotation(t)
        torch.mm(y, (R * path.sigma(t)).to(y).mT, out=out[i])
        now = t
    return out


def stepped_paths(
    path: GeodesicPath,
    noise: FlowNoise,
    x: Float[Tensor, "trajectory rank"],
    begin: float,
    times: list[float],
    generator: torch.Generator,
    embed: Float[Tensor, "d_model rank"] | None,
    *,
    dt: float,
    heun: bool,
    stretch_share: float,
) -> Float[Tensor, "time trajectory column"]:
    """Paths from steps of at most ``dt`` that end at every state and time asked for, with
    ``stretch_share`` of the stretch in the drift."""
    now, out = begin, []
    for t in times:
        while now < t:
            k, _ = path.locate(now)
            end = min(float(path.times[k + 1]), t)
            n = max(1, math.ceil((end - now) / dt - 1e-9))
            x = _interval(path, noise, x, k, now, end, n, generator, heun, stretch_share)
            now = end
        out.append(x if embed is None else x @ embed.to(x).mT)
    return torch.stack(out)


def _interval(
    path: GeodesicPath,
    noise: FlowNoise,
    x: Tensor,
    k: int,
    begin: float,
    end: float,
    steps: int,
    generator: torch.Generator,
    heun: bool,
    stretch_share: float,
) -> Tensor:
    """Steps inside one interval; the rotation advances by one fixed factor per step."""
    h, length = (end - begin) / steps, path.length(k)
    turning, log = path.turning(k), path.logs[k]
    R = path.U[k] @ rotation_exp((begin - float(path.times[k])) / length * log)
    advance = rotation_exp(h / length * log)

    def drift_rows(R: Tensor, t: float) -> Tensor:
        return (turning + (R * (stretch_share * path.stretch_rate(t))) @ R.mT).mT.to(x)

    drift = drift_rows(R, begin)
    for j in range(steps):
        t = begin + j * h
        R = R @ advance
        following = drift_rows(R, min(t + h, end))
        push, kick = x @ drift, torch.zeros_like(x)
        if noise.alpha != 0:
            kick = torch.randn(x.shape, generator=generator, dtype=x.dtype) * math.sqrt(h)
        guess = x + h * push + noise.amplitude(t) * kick
        if heun:
            amplitude = (noise.amplitude(t) + noise.amplitude(t + h)) / 2
            x = x + h / 2 * (push + guess @ following) + amplitude * kick
        else:
            x = guess
        drift = following
    return x
