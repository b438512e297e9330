"""The stack of blocks as a stochastic flow: ``dx = [R' R^T + R S' R^T] x dt + sqrt(alpha lambda
e^{lambda t}) dW``.

``R(t)`` rotates and ``S' = diag(sigma_i' / sigma_i)`` stretches (Sarfati et al. 2025, Eq. 3).
Between states R follows the geodesic ``U_k exp(a log(U_k^T U_{k+1}))`` and ``ln sigma_i`` a cubic
spline, which keeps sigma positive. The equation has a closed form: in the co-moving coordinates
``y = diag(1/sigma) R^T x`` the drift vanishes, ``dy_i = sigma_i^{-1} sqrt(alpha lambda e^{lambda
t}) dW_i``, and

    mean x(t) | x(s) = Phi x(s),  Phi = R(t) Sigma(t) Sigma(s)^{-1} R(s)^T   (rotation and stretch
    of Eq. 1 at the states) cov  x(t) | x(s) = R(t) Sigma(t) diag(I_i) Sigma(t) R(t)^T,  I_i =
    integral_s^t alpha lambda e^{lambda u} sigma_i(u)^{-2} du.

Exact sampling therefore needs no step size and no matrix logarithm. The published integrator uses
``sigma'/(2 sigma)``, right only if its splines hold variances, which their names deny:
``preset="reference"`` reproduces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize_scalar
from torch import Tensor

from tl_geometry.base.checks import describe, finite
from tl_geometry.base.errors import choice, require
from tl_geometry.base.linalg import rotation_exp, rotation_log
from tl_geometry.base.results import Provenance, Result
from tl_geometry.flow.alignment import AlignedBases, check_ensemble, common_basis, fit_aligned_bases

METHODS = ("exact", "euler", "heun")
"""Integrators of :meth:`LangevinModel.simulate`."""
STRETCHES = ("spectral", "regression")
"""How the stretch is estimated, see :meth:`LangevinModel.fit`."""
NODES, WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(16))
FLOOR = 1e-10
"""Singular values are kept above this share of the state's largest, so that their logarithm
exists."""


class Consistency(NamedTuple):
    """Where the stochastic equation disagrees with the laws published beside it, for every pair of
    states (NaN unless start < end).

    ``sde_log_variance`` is the mean over coordinates of ln of the equation's own variance;
    ``asymptotic`` and ``increment`` are ``ln(alpha e^{lambda (t + tau)})`` and
    ``ln(alpha e^{lambda (t + tau)} (1 - e^{-lambda tau}))``: equal to it only where nothing
    stretches. ``anisotropy`` is the largest over the smallest eigenvalue of the equation's
    covariance (1 for the isotropic noise that the law claims). ``energy_ratio`` is the ensemble's
    second moment as the equation predicts it over the observed one: a spectral stretch already
    contains what noise adds, so the equation adds it twice and the ratio exceeds 1.
    """

    sde_log_variance: Float[Tensor, "state state"]
    asymptotic: Float[Tensor, "state state"]
    increment: Float[Tensor, "state state"]
    anisotropy: Float[Tensor, "state state"]
    energy_ratio: Float[Tensor, "state state"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LangevinModel(Result):
    """A fitted flow. Square rotations ``U [state rank rank]`` (determinant +1 between states) act
    on coordinates in ``basis``.

    ``basis`` ``[d_model rank]`` is the identity unless there were fewer trajectories than
    coordinates; ``outside`` is the share of each state's energy that it misses (simulations leave
    it out). ``S`` are the stretches' values, ``observed`` the singular values, ``times`` the layers
    (1: output of the first block), ``flips`` the directions reversed for the determinant's sake.
    """

    basis: Float[Tensor, "d_model rank"]
    U: Float[Tensor, "state rank rank"]
    S: Float[Tensor, "state rank"]
    observed: Float[Tensor, "state rank"]
    times: Float[Tensor, " state"]
    outside: Float[Tensor, " state"]
    alpha: float
    rate: float
    trajectories: int
    flips: int = 0
    clamped: int = 0
    preset: str = "exact"
    provenance: Provenance = field(
        default_factory=lambda: Provenance(sources=("sarfati2025",), dtype="float64")
    )

    def __post_init__(self) -> None:
        n = len(self.S)
        require(n >= 2, "LangevinModel", expected="at least two states", got=n)
        require(
            bool((self.S > 0).all()),
            "singular values",
            expected="positive numbers",
            got="zeros",
            instead="LangevinModel.fit",
        )
        require(
            bool((self.times.diff() > 0).all()),
            "times",
            expected="increasing layers",
            got=self.times.tolist(),
        )
        require(
            self.alpha * self.rate >= 0,
            "noise",
            expected="alpha * lambda >= 0",
            got=f"alpha {self.alpha:.4g}, lambda {self.rate:.4g}",
        )
        choice(self.preset, ("exact", "reference"), "preset")

    @staticmethod
    def fit(
        X: Float[Tensor, "trajectory state d_model"],
        *,
        noise: tuple[float, float] | str = "sde",
        align: str = "greedy",
        stretch: str = "spectral",
        times: Float[Tensor, " state"] | None = None,
        rank: int | None = None,
        provenance: Provenance | None = None,
    ) -> LangevinModel:
        """Fit rotations, stretches and noise to an ensemble.

        Args:
            noise: ``(alpha, lambda)``, for instance of a fitted noise law; ``"sde"`` estimates them
                by the equation's own covariance, least squares on the log variances of the
                co-moving increments ``y(k+1) - y(k)``.
            align: order and signs of the directions from state to state, see
                :func:`tl_geometry.flow.alignment.align_directions`.
            stretch: ``"spectral"``: ratios of singular values (published; second moments then match
                without any noise); ``"regression"``: those ratios times ``v_i(k).v_i(k+1)``, the
                regression of each direction on itself, which leaves room for the noise and is what
                recovers a planted equation.
            rank: directions of the common basis where there are fewer trajectories than
                coordinates.

        >>> x = torch.randn(50, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> model = LangevinModel.fit(torch.cat([x, 2 * x], dim=1), noise=(0.0, 0.0))
        >>> torch.allclose(model.simulate(x[:, 0], [1.5])[0, :, 0], 2**0.5 * x[:, 0])
        True
        """
        check_ensemble(X)
        choice(stretch, STRETCHES, "stretch")
        n, states, d = X.shape
        basis, outside = torch.eye(d, dtype=torch.float64), torch.zeros(states, dtype=torch.float64)
        if n < d or rank is not None:
            basis, outside = common_basis(X, min(n, d) if rank is None else rank)
            require(basis.shape[1] <= n, "rank", expected=f"at most {n} (trajectories)", got=rank)
            X = torch.stack([X[:, s].double() @ basis for s in range(states)], dim=1)
        aligned, flips = proper_rotations(fit_aligned_bases(X, align=align))
        S = aligned.S.clamp(min=0)
        S = torch.maximum(S, FLOOR * S.amax(-1, keepdim=True)).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        clamped, observed = int((aligned.S < S).sum()), S
        if stretch == "regression":
            link = torch.stack([aligned.overlap[k, k + 1] for k in range(states - 1)])
            clamped += int((link < 1e-3).sum())
            growth = (S[1:] / S[:-1]).log() + link.clamp(min=1e-3).log()
            S = torch.cat([S[:1], S[:1] * growth.cumsum(0).exp()])
        where = (
            torch.arange(1, states + 1, dtype=torch.float64)
            if times is None
            else times.double().cpu()
        )
        flags = [f"{clamped} stretches clamped"] if clamped else []
        model = LangevinModel(
            basis=basis,
            U=aligned.U,
            S=S,
            observed=observed,
            times=where,
            outside=outside,
            alpha=0.0,
            rate=0.0,
            trajectories=n,
            flips=flips,
            clamped=clamped,
            provenance=(
                provenance or Provenance(sources=("sarfati2025",), dtype="float64", contexts=n)
            ).flagged(*flags),
        )
        if isinstance(noise, str):
            choice(noise, ("sde",), "noise")
            noise = model.estimate_noise(X)
        return model.with_noise(*noise)

    def with_noise(self, alpha: float, rate: float) -> LangevinModel:
        """The same flow with other noise parameters (``alpha=0`` for none)."""
        return self._with(alpha=float(alpha), rate=float(rate))

    def with_preset(self, preset: str) -> LangevinModel:
        """The same model with ``preset="reference"`` (half the stretch rate in the drift, as
        published) or ``"exact"``."""
        return self._with(preset=preset)

    def _with(self, **changes: Any) -> LangevinModel:
        other = replace(self, **changes)
        if "logs" in self.__dict__:
            other.__dict__["logs"] = self.logs
        return other

    def estimate_noise(self, X: Float[Tensor, "trajectory state rank"]) -> tuple[float, float]:
        """``(alpha, lambda)`` from co-moving increments: ``Var(y_i(k+1) - y_i(k)) = integral alpha
        lambda e^{lambda u} sigma_i^{-2} du``.

        ``X`` in the coordinates of ``basis``. Least squares on the log variances over all intervals
        and directions.
        """
        y = einsum(X.double(), self.U, "n state a, state a rank -> n state rank") / self.S
        measured = y.diff(dim=1).var(0).clamp(min=torch.finfo(torch.float64).tiny).log()

        def misfit(rate: float) -> tuple[float, float]:
            shape = torch.stack(
                [
                    self._integral(float(a), float(b), rate)
                    for a, b in zip(self.times[:-1], self.times[1:])
                ]
            ).log()
            left = measured - shape
            return float((left - left.mean()).square().sum()), float(left.mean())

        grid = np.linspace(-2, 2, 41)
        near = grid[int(np.argmin([misfit(g)[0] for g in grid]))]
        found = minimize_scalar(
            lambda r: misfit(r)[0],
            bounds=(near - 0.1, near + 0.1),
            method="bounded",
            options={"xatol": 1e-8},
        )
        rate = float(getattr(found, "x"))  # noqa: B009 (an attribute that scipy's stubs do not declare)
        rate = math.copysign(max(abs(rate), 1e-6), rate)
        return math.exp(misfit(rate)[1]) / rate, rate

    @cached_property
    def _spline(self) -> CubicSpline:
        return CubicSpline(self.times.numpy(), self.S.log().cpu().numpy(), axis=0)

    @cached_property
    def logs(self) -> Float[Tensor, "row rank rank"]:
        """``log(U_k^T U_{k+1})`` of each interval, skew-symmetric; computed once, from real Schur
        forms."""
        return torch.stack(
            [rotation_log(self.U[k].mT @ self.U[k + 1]) for k in range(len(self.U) - 1)]
        )

    def _locate(self, t: float, left: bool = False) -> tuple[int, float]:
        first, last = float(self.times[0]), float(self.times[-1])
        slack = 1e-9 * max(1.0, last)
        require(
            first - slack <= t <= last + slack,
            "time",
            expected=f"{first:g} to {last:g} (layers)",
            got=t,
        )
        k = (
            int(
                torch.searchsorted(self.times, torch.tensor(t, dtype=torch.float64), right=not left)
            )
            - 1
        )
        k = min(max(k, 0), len(self.times) - 2)
        return k, (t - float(self.times[k])) / float(self.times[k + 1] - self.times[k])

    def sigma(self, t: float) -> Float[Tensor, " rank"]:
        """Stretch values at time ``t`` (layers), from the spline of their logarithms."""
        self._locate(t)
        return torch.from_numpy(np.exp(self._spline(t)))

    def stretch_rate(self, t: float) -> Float[Tensor, " rank"]:
        """``sigma_i' / sigma_i`` at ``t`` (half of it under ``preset="reference"``)."""
        self._locate(t)
        return torch.from_numpy(self._spline(t, 1)) * (0.5 if self.preset == "reference" else 1.0)

    def _rotation(self, t: float) -> Float[Tensor, "rank rank"]:
        k, a = self._locate(t)
        if abs(a) < 1e-12 or abs(a - 1) < 1e-12:
            return self.U[k + round(a)]
        return self.U[k] @ rotation_exp(a * self.logs[k])

    @cached_property
    def _whole(self) -> bool:
        """Whether ``basis`` is the identity, so that products with it can be left out."""
        d, rank = self.basis.shape
        return d == rank and torch.equal(self.basis, torch.eye(d, dtype=self.basis.dtype))

    def rotation(self, t: float) -> Float[Tensor, "d_model rank"]:
        """``R(t)``: the directions at time ``t``, orthonormal columns; at the states the aligned
        singular vectors."""
        R = self._rotation(t)
        return R if self._whole else self.basis @ R

    def _drift(self, t: float, left: bool = False) -> Float[Tensor, "rank rank"]:
        k, a = self._locate(t, left)
        R = self.U[k] @ rotation_exp(a * self.logs[k]) if a > 0 else self.U[k]
        return self._turning(k) + (R * self.stretch_rate(t)) @ R.mT

    def _turning(self, k: int) -> Float[Tensor, "rank rank"]:
        """``R' R^T``, constant within an interval: ``U_k L U_k^T / length``."""
        return self.U[k] @ self.logs[k] @ self.U[k].mT / (self.times[k + 1] - self.times[k])

    def drift(self, t: float) -> Float[Tensor, "d_model d_model"]:
        """``A(t) = R' R^T + R S' R^T`` of ``dx = A x dt + ...`` (right limit at the states)."""
        return self.basis @ self._drift(t) @ self.basis.mT

    def diffusion(self, t: float) -> float:
        """``sqrt(alpha lambda e^{lambda t})``, the noise amplitude of each coordinate."""
        return math.sqrt(self.alpha * self.rate * math.exp(self.rate * t))

    def _integral(self, s: float, t: float, rate: float) -> Float[Tensor, " rank"]:
        """``integral_s^t e^{rate u} sigma_i(u)^{-2} du`` by 16-point Gauss-Legendre on each
        interval (the spline is smooth inside)."""
        inner = [float(v) for v in self.times if s < float(v) < t]
        total = torch.zeros(self.S.shape[1], dtype=torch.float64)
        for a, b in zip([s, *inner], [*inner, t]):
            u = (a + b) / 2 + (b - a) / 2 * NODES
            values = torch.exp(rate * u[:, None] - 2 * torch.from_numpy(self._spline(u.numpy())))
            total = total + (b - a) / 2 * einsum(WEIGHTS, values, "sample, sample rank -> rank")
        return total

    def noise_integral(self, s: float, t: float) -> Float[Tensor, " rank"]:
        """``I_i``: variance that the co-moving coordinate ``y_i`` gains from ``s`` to ``t``."""
        self._ordered(s, t)
        return self.alpha * self.rate * self._integral(s, t, self.rate)

    def _ordered(self, s: float, t: float) -> None:
        self._locate(s)
        self._locate(t)
        require(s <= t, "times", expected="start <= end", got=f"{s:g} and {t:g}")

    def transition(self, s: float, t: float) -> Float[Tensor, "d_model d_model"]:
        """``Phi = R(t) Sigma(t) Sigma(s)^{-1} R(s)^T``: the flow without noise."""
        self._ordered(s, t)
        return (self.rotation(t) * (self.sigma(t) / self.sigma(s))) @ self.rotation(s).mT

    def noise_covariance(self, s: float, t: float) -> Float[Tensor, "d_model d_model"]:
        """Covariance of ``x(t)`` given ``x(s)``."""
        R = self.rotation(t)
        return (R * (self.sigma(t).square() * self.noise_integral(s, t))) @ R.mT

    def moments(
        self,
        mean: Float[Tensor, " d_model"],
        covariance: Float[Tensor, "d_model d_model"],
        s: float,
        t: float,
    ) -> tuple[Float[Tensor, " d_model"], Float[Tensor, "d_model d_model"]]:
        """Mean and covariance at ``t`` of the Fokker-Planck solution that starts with these at
        ``s``: ``(Phi m, Phi C Phi^T + noise)``.

        The closed form of ``m' = A m`` and ``C' = A C + C A^T + alpha lambda e^{lambda t} I``; a
        Gaussian stays Gaussian, an ensemble of points becomes a mixture of Gaussians of covariance
        :meth:`noise_covariance`.
        """
        phi = self.transition(s, t)
        return phi @ mean.double(), phi @ covariance.double() @ phi.mT + self.noise_covariance(s, t)

    def simulate(
        self,
        x: Float[Tensor, "trajectory d_model"],
        times: Sequence[float],
        *,
        start: float | None = None,
        method: str = "exact",
        samples: int = 1,
        dt: float = 0.1,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Float[Tensor, "sample trajectory time d_model"]:
        """Sample paths that start at ``x`` at time ``start`` (default the first state), at the
        given increasing times.

        ``"exact"`` draws the increments of the co-moving coordinates from their exact law: no step
        size, one product per time asked for. ``"euler"`` is Euler-Maruyama as published
        (``dt=0.1``, drift at the start of the step), ``"heun"`` the second-order predictor and
        corrector. What lies outside ``basis`` is left out.
        """
        x = finite(x, "start states")
        d = len(self.basis)
        require(
            x.dim() == 2 and x.shape[1] == d,
            "start states",
            expected=f"[trajectory {d}]",
            got=describe(x),
        )
        begin = float(self.times[0]) if start is None else float(start)
        wanted = [float(t) for t in times]
        require(
            bool(wanted) and all(a < b for a, b in zip([begin - 1e-12, *wanted], wanted)),
            "times",
            expected=f"increasing times from {begin:g}",
            got=wanted,
        )
        require(
            samples >= 1 and dt > 0,
            "samples and dt",
            expected="positive numbers",
            got=f"{samples} and {dt}",
        )
        choice(method, METHODS, "method")
        if method == "exact":
            require(
                self.preset == "exact",
                "method",
                expected='"euler" with preset="reference"',
                got=repr(method),
            )
        for t in (begin, wanted[-1]):
            self._locate(t)
        rows = (x.to(dtype) if self._whole else (x.double() @ self.basis).to(dtype)).repeat(
            samples, 1
        )
        out = torch.empty(len(wanted), len(rows), d, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        walk = self._exact if method == "exact" else self._stepped
        walk(rows, begin, wanted, out, generator, dt, method == "heun")
        return rearrange(out, "time (sample n) d -> sample n time d", sample=samples)

    def _exact(
        self,
        x: Tensor,
        begin: float,
        wanted: list[float],
        out: Tensor,
        generator: torch.Generator,
        dt: float,
        heun: bool,
    ) -> None:
        y = x @ (self._rotation(begin) / self.sigma(begin)).to(x)
        now, draw = begin, torch.empty_like(y)
        for i, t in enumerate(wanted):
            if t > now and self.alpha != 0:
                y.addcmul_(
                    draw.normal_(generator=generator), self.noise_integral(now, t).sqrt().to(y)
                )
            torch.mm(y, (self.rotation(t) * self.sigma(t)).to(y).mT, out=out[i])
            now = t

    def _stepped(
        self,
        x: Tensor,
        begin: float,
        wanted: list[float],
        out: Tensor,
        generator: torch.Generator,
        dt: float,
        heun: bool,
    ) -> None:
        now, i = begin, 0
        if wanted[0] <= begin:
            out[0], i = x @ self.basis.to(x).mT, 1
        while i < len(wanted):
            k, _ = self._locate(now)
            end = min(float(self.times[k + 1]), wanted[i])
            x = self._piece(
                x, k, now, end, max(1, math.ceil((end - now) / dt - 1e-9)), generator, heun
            )
            now = end
            if now >= wanted[i]:
                out[i] = x @ self.basis.to(x).mT
                i += 1

    def _piece(
        self,
        x: Tensor,
        k: int,
        begin: float,
        end: float,
        steps: int,
        generator: torch.Generator,
        heun: bool,
    ) -> Tensor:
        """Steps inside one interval; the rotation advances by one fixed factor per step."""
        h = (end - begin) / steps
        length = float(self.times[k + 1] - self.times[k])
        turning, R = (
            self._turning(k),
            self.U[k] @ rotation_exp((begin - float(self.times[k])) / length * self.logs[k]),
        )
        advance = rotation_exp(h / length * self.logs[k])

        def drift_rows(R: Tensor, t: float) -> Tensor:
            return (turning + (R * self.stretch_rate(t)) @ R.mT).mT.to(x)

        drift = drift_rows(R, begin)
        for j in range(steps):
            t = begin + j * h
            push = x @ drift
            noise = (
                torch.randn(x.shape, generator=generator, dtype=x.dtype) * math.sqrt(h)
                if self.alpha != 0
                else torch.zeros_like(x)
            )
            R = R @ advance
            following = drift_rows(R, min(t + h, end))
            if heun:
                guess = x + h * push + self.diffusion(t) * noise
                x = (
                    x
                    + h / 2 * (push + guess @ following)
                    + (self.diffusion(t) + self.diffusion(t + h)) / 2 * noise
                )
            else:
                x = x + h * push + self.diffusion(t) * noise
            drift = following
        return x

    def interpolate(
        self, X: Float[Tensor, "trajectory state d_model"], t: float
    ) -> Float[Tensor, "trajectory d_model"]:
        """States between two layers: ``R(t) Sigma(t) [(1 - a) y_k + a y_{k+1}]`` with co-moving
        ``y``; passes through all true states.

        A smooth path for drawing; no interpretation is claimed.
        """
        require(
            X.shape[1] == len(self.S),
            "trajectories",
            expected=f"{len(self.S)} states",
            got=describe(X),
        )
        k, a = self._locate(t)
        ends = [X[:, s].double() @ self.basis @ (self.U[s] / self.S[s]) for s in (k, k + 1)]
        return ((1 - a) * ends[0] + a * ends[1]) @ (self.rotation(t) * self.sigma(t)).mT

    def consistency(self) -> Consistency:
        """Set the equation beside the noise laws published with it: they agree only without
        stretching. Reported, not hidden."""
        n = len(self.times)
        table = torch.full((5, n, n), torch.nan, dtype=torch.float64)
        directions = [self.rotation(float(t)).square() for t in self.times]
        for s in range(n - 1):
            for t in range(s + 1, n):
                a, b = float(self.times[s]), float(self.times[t])
                noise = self.S[t].square() * self.noise_integral(a, b)
                flow = (self.observed[s] * self.S[t] / self.S[s]).square().sum()
                growth = -math.expm1(-self.rate * (b - a)) if self.rate else math.nan
                log_alpha = math.log(self.alpha) if self.alpha > 0 else math.nan
                table[:, s, t] = torch.stack(
                    [
                        (directions[t] @ noise).log().mean(),
                        torch.tensor(log_alpha + self.rate * b, dtype=torch.float64),
                        torch.tensor(
                            log_alpha
                            + self.rate * b
                            + (math.log(growth) if growth > 0 else math.nan),
                            dtype=torch.float64,
                        ),
                        noise.max() / noise.min(),
                        (flow + self.trajectories * noise.sum()) / self.observed[t].square().sum(),
                    ]
                )
        return Consistency(*table.unbind(0))


def proper_rotations(aligned: AlignedBases) -> tuple[AlignedBases, int]:
    """AlignedBases between which all rotations have determinant +1, and how many directions were
    reversed for it.

    Where ``det(U_k^T U_{k+1}) = -1`` the real logarithm does not exist: the direction with the
    smallest singular value at k + 1 is reversed there and at all later states (which keeps the
    later signs aligned). Needs square ``U``.
    """
    d, rank = aligned.U.shape[1:]
    require(
        d == rank,
        "rotations",
        expected="as many directions as coordinates",
        got=f"{rank} of {d}",
        instead="common_basis(X)",
    )
    sign = torch.ones_like(aligned.S)
    flips = 0
    for k in range(len(aligned.S) - 1):
        relative = (aligned.U[k] * sign[k]).mT @ (aligned.U[k + 1] * sign[k + 1])
        if float(torch.linalg.slogdet(relative).sign) < 0:
            sign[k + 1 :, int(aligned.S[k + 1].argmin())] *= -1
            flips += 1
    return aligned.flipped(sign), flips
