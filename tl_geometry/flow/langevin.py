"""Can a stack of blocks be simulated as a stochastic flow? Fits the equation of Sarfati et al. 2025
(Eq. 3) to an ensemble, draws states from its exact law, and gives their moments, which solve its
Fokker-Planck equation, in closed form.

    dx = [R' R^T + R S' R^T] x dt + sqrt(alpha lambda e^{lambda t}) dW

Time t is the layer; a prime is the derivative by t. ``R(t)`` rotates and
``S' = diag(sigma_i' / sigma_i)`` stretches. With ``Sigma(t) = diag(sigma_i(t))`` and the co-moving
coordinates ``y = Sigma^{-1} R^T x`` the drift vanishes:
``dy_i = sigma_i^{-1} sqrt(alpha lambda e^{lambda t}) dW_i``, and

    mean x(t) | x(s) = Phi x(s),  Phi = R(t) Sigma(t) Sigma(s)^{-1} R(s)^T
    cov  x(t) | x(s) = R(t) Sigma(t) diag(I_i) Sigma(t) R(t)^T,
    I_i = integral_s^t alpha lambda e^{lambda u} sigma_i(u)^{-2} du

From state to state Phi is the rotation and stretch of Eq. 1, however R turns between them: sampling
at the states needs no step size and no matrix logarithm. Between states ``ln sigma_i`` is a cubic
spline, so that sigma stays positive. The published integrator uses ``sigma'/(2 sigma)``, which is
right only if its splines hold variances, but they are named singular values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from scipy.interpolate import CubicSpline
from torch import Tensor

from tl_geometry.base.checks import count, describe, finite, seeded
from tl_geometry.base.errors import require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Provenance, Result
from tl_geometry.flow.ensemble import SOURCE, Trajectories
from tl_geometry.flow.maps import NEGLIGIBLE
from tl_geometry.flow.noise import NoiseLaw

NODES, WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(16))
"""Nodes and weights of the 16-point Gauss-Legendre rule on [-1, 1], exact up to degree 31."""
TINY = torch.finfo(torch.float64).tiny
"""Smallest normal float64: what the values of a state of zeros are raised to."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LangevinModel(Guarded, Result):
    """A fitted flow: directions ``U [state d_model rank]`` and singular values ``S`` of the aligned
    bases at ``times`` (layers, 1: output of the first block). The noise has variance
    ``alpha * rate * e^{rate t}`` per layer and direction (``rate`` is lambda). With fewer
    trajectories than coordinates the flow lives in the span of the directions."""

    U: Float[Tensor, "state d_model rank"]
    S: Float[Tensor, "state rank"]
    times: Float[Tensor, " state"]
    alpha: float
    rate: float
    provenance: Provenance = field(default_factory=lambda: Provenance(sources=SOURCE))

    def __post_init__(self) -> None:
        got = f"alpha {self.alpha:.4g}, lambda {self.rate:.4g}"
        require(self.alpha * self.rate >= 0, "noise", expected="alpha * lambda >= 0", got=got)

    @staticmethod
    def fit(ensemble: Trajectories, *, noise: NoiseLaw | tuple[float, float]) -> LangevinModel:
        """Fit rotations and stretches to an ensemble: stretches are ratios of singular values (as
        published), so that second moments match without any noise.

        Args:
            ensemble: trajectories.
            noise: a fitted law (:func:`tl_geometry.flow.fit_noise_law`), or ``(alpha, lambda)``.

        Raises ``GeometryError`` for a single state and for states that are not finite.

        >>> import tl_geometry as tlg
        >>> windows = tlg.zoo.default_windows(tlg.zoo.embedded(), 16, n=8)
        >>> paths = tlg.trajectories(tlg.zoo.embedded(), windows, progress=False)
        >>> model = LangevinModel.fit(paths, noise=(0.0, 0.0))
        >>> model.simulate(paths.X[:, 0], [1.0, 4.0]).shape  # sample, trajectory, time, d_model
        torch.Size([1, 8, 2, 128])
        """
        alpha, rate = noise.flow if isinstance(noise, NoiseLaw) else noise
        aligned, got = ensemble.aligned_bases, len(ensemble.states)
        times = torch.tensor(ensemble.states, dtype=torch.float64)
        require(got >= 2, "states", expected="at least two", got=got, instead="more states")
        # raised, so that every stretch has a logarithm
        least = NEGLIGIBLE * aligned.S.amax(-1, keepdim=True)
        S = torch.maximum(aligned.S, least).clamp(min=TINY)
        raised = int((aligned.S < S).sum())
        made = ensemble.provenance.flagged(*[f"{raised} stretches clamped"] * bool(raised))
        return LangevinModel(U=aligned.U, S=S, times=times, alpha=alpha, rate=rate, provenance=made)

    def _rows(self, *times: float) -> list[int]:
        """Indices of the states at some times, which do not fall."""
        near = (self.times - torch.tensor(times, dtype=torch.float64)[:, None]).abs().min(1)
        rows = near.indices.tolist()
        known = bool((near.values < 1e-9).all()) and rows == sorted(rows)
        expected = f"layers that do not fall, of {self.times.tolist()}"
        require(known, "times", expected=expected, got=list(times))
        return rows

    def noise_integral(self, s: float, t: float) -> Float[Tensor, " rank"]:
        """``I_i``: variance that the co-moving coordinate ``y_i`` gains from state ``s`` to state
        ``t``, by 16-point Gauss-Legendre from state to state."""
        first, last = self._rows(s, t)
        log_sigma = CubicSpline(self.times.numpy(), self.S.log().cpu().numpy(), axis=0)
        total = torch.zeros(self.S.shape[1], dtype=torch.float64)
        # third derivatives of a cubic spline jump at the states: across one the rule loses order
        for k in range(first, last):
            left, right = float(self.times[k]), float(self.times[k + 1])
            u = (left + right) / 2 + (right - left) / 2 * NODES
            exponent = self.rate * u[:, None] - 2 * torch.from_numpy(log_sigma(u.numpy()))
            total += (right - left) / 2 * einsum(WEIGHTS, exponent.exp(), "u, u rank -> rank")
        return self.alpha * self.rate * total.to(self.S.device)

    def transition(self, s: float, t: float) -> Float[Tensor, "d_model d_model"]:
        """``Phi = R(t) Sigma(t) Sigma(s)^{-1} R(s)^T``: takes x(s) to x(t) without noise."""
        (first, last), U, S = self._rows(s, t), self.U, self.S
        return (U[last] * (S[last] / S[first])) @ U[first].mT

    def moments(
        self,
        mean: Float[Tensor, " d_model"],
        covariance: Float[Tensor, "d_model d_model"],
        s: float,
        t: float,
    ) -> tuple[Float[Tensor, " d_model"], Float[Tensor, "d_model d_model"]]:
        """Mean and covariance at state ``t`` of an ensemble with the given ones at state ``s``:
        ``Phi m`` and ``Phi C Phi^T`` plus the noise. They solve the Fokker-Planck equation's
        ``m' = A m``, ``C' = A C + C A^T + alpha lambda e^{lambda t}`` (A the drift). With C zero
        they are those of ``x(t)`` given ``x(s) = m``."""
        Phi, last = self.transition(s, t), self._rows(s, t)[1]
        R, S = self.U[last], self.S[last]
        noise = (R * (S.square() * self.noise_integral(s, t))) @ R.mT
        return Phi @ mean, Phi @ covariance @ Phi.mT + noise

    def simulate(
        self,
        x: Float[Tensor, "trajectory d_model"],
        times: Sequence[float],
        *,
        start: float | None = None,
        samples: int = 1,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Float[Tensor, "sample trajectory time d_model"]:
        """``samples`` paths from each row of ``x``, which start at the state of time ``start``
        (default the first), at the given increasing times of states, drawn from the exact law of
        the co-moving increments: one product per time asked for. The paths are on the device of
        ``x``; random numbers are drawn on the CPU, the same for every device.
        """
        U, S = self.U, self.S
        shaped = finite(x, "start states").dim() == 2 and x.shape[1] == U.shape[1]
        expected, got = f"[trajectory {U.shape[1]}]", describe(x)
        require(shaped, "start states", expected=expected, got=got)
        samples = count(samples, "samples")
        require(len(times) > 0, "times", expected="at least 1", got="none")
        now, *rows = self._rows(float(self.times[0]) if start is None else start, *times)
        y = x.to(dtype) @ (U[now] / S[now]).to(x.device, dtype)
        y = repeat(y, "n rank -> (sample n) rank", sample=samples)
        generator = seeded(seed)
        paths = []
        for row in rows:
            # the first time may be the start itself: no time passes, nothing is drawn
            if row > now and self.alpha != 0:
                variance = self.noise_integral(float(self.times[now]), float(self.times[row]))
                gaussian = torch.randn(y.shape, generator=generator, dtype=dtype)
                y = y + gaussian.to(y) * variance.sqrt().to(y)
            paths.append(y @ (U[row] * S[row]).to(y).mT)
            now = row
        return rearrange(torch.stack(paths), "time (sample n) d -> sample n time d", sample=samples)
