"""How is a path of the stochastic flow drawn? From the exact law of its increments, or by
Euler-Maruyama steps as published; for :meth:`tl_geometry.flow.LangevinModel.simulate`.

Paths are in the coordinates of the model's subspace; times are layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.flow.geodesic import GeodesicPath


class FlowNoise(NamedTuple):
    """Noise of the flow: in time dt each coordinate gains the variance
    ``alpha lambda e^{lambda t} dt``; ``rate`` is lambda."""

    alpha: float
    rate: float

    def amplitude(self, t: float) -> float:
        """``sqrt(alpha lambda e^{lambda t})``."""
        return math.sqrt(self.alpha * self.rate * math.exp(self.rate * t))

    def variance(self, path: GeodesicPath, start: float, end: float) -> Float[Tensor, " rank"]:
        """Variance that the co-moving coordinates gain from ``start`` to ``end``:
        ``integral alpha lambda e^{lambda u} sigma_i(u)^{-2} du``."""
        return self.alpha * self.rate * path.integral(start, end, self.rate)


def exact_paths(
    path: GeodesicPath,
    noise: FlowNoise,
    x: Float[Tensor, "trajectory rank"],
    begin: float,
    times: list[float],
    generator: torch.Generator,
) -> Float[Tensor, "time trajectory rank"]:
    """Paths from the exact law of the co-moving increments, at increasing times."""
    y = x @ (path.rotation(begin) / path.sigma(begin)).to(x)
    paths = torch.empty(len(times), *x.shape, dtype=x.dtype, device=x.device)
    now, gaussian = begin, torch.empty(x.shape, dtype=x.dtype)
    for i, t in enumerate(times):
        # the first time may be the start itself: no time passes, nothing is drawn
        if t > now and noise.alpha != 0:
            spread = noise.variance(path, now, t).sqrt().to(y)
            y.addcmul_(gaussian.normal_(generator=generator).to(y), spread)
        torch.mm(y, (path.rotation(t) * path.sigma(t)).to(y).mT, out=paths[i])
        now = t
    return paths


def stepped_paths(
    path: GeodesicPath,
    noise: FlowNoise,
    x: Float[Tensor, "trajectory rank"],
    begin: float,
    times: list[float],
    generator: torch.Generator,
    *,
    dt: float,
    stretch_share: float,
) -> Float[Tensor, "time trajectory rank"]:
    """Paths from Euler-Maruyama steps of at most ``dt``, with ``stretch_share`` times the stretch
    rate in the drift. Steps end at every state and at every time asked for.

    Inside an interval the rotation advances by one fixed factor per step, so that there are two
    matrix exponentials per interval and not one per step.
    """
    now, paths = begin, []
    for t in times:
        while now < t:
            k, passed = path.locate(now)
            end = min(float(path.times[k + 1]), t)
            # 1e-9: an interval that is a multiple of dt up to rounding takes no extra step
            steps = max(1, math.ceil((end - now) / dt - 1e-9))
            h, turning = (end - now) / steps, path.turning(k)
            R = path.U[k] @ torch.linalg.matrix_exp(passed * path.logs[k])
            advance = torch.linalg.matrix_exp(h / path.length(k) * path.logs[k])
            for step in range(steps):
                u = now + step * h
                # the drift at the start of the step, as published
                drift = turning + (R * (stretch_share * path.stretch_rate(u))) @ R.mT
                x = x + h * (x @ drift.mT.to(x))
                if noise.alpha != 0:
                    gaussian = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                    x = x + noise.amplitude(u) * math.sqrt(h) * gaussian.to(x)
                R = R @ advance
            now = end
        paths.append(x)
    return torch.stack(paths)
