"""Can a stack of blocks be simulated as a stochastic flow? Fits the equation of Sarfati et al. 2025
(Eq. 3) to an ensemble, draws paths from it, and gives their mean and covariance in closed form.
:meth:`tl_geometry.flow.Trajectories.langevin` calls it.

    dx = [R' R^T + R S' R^T] x dt + sqrt(alpha lambda e^{lambda t}) dW

Time t is the layer; a prime is the derivative by t. ``R(t)`` rotates and
``S' = diag(sigma_i' / sigma_i)`` stretches; between states R and sigma follow
:mod:`tl_geometry.flow.geodesic`. With ``Sigma(t) = diag(sigma_i(t))`` and the co-moving coordinates
``y = Sigma^{-1} R^T x`` the drift vanishes:
``dy_i = sigma_i^{-1} sqrt(alpha lambda e^{lambda t}) dW_i``, and

    mean x(t) | x(s) = Phi x(s),  Phi = R(t) Sigma(t) Sigma(s)^{-1} R(s)^T
    cov  x(t) | x(s) = R(t) Sigma(t) diag(I_i) Sigma(t) R(t)^T,
    I_i = integral_s^t alpha lambda e^{lambda u} sigma_i(u)^{-2} du

Between two states Phi is the rotation and stretch of Eq. 1.

Exact sampling therefore needs no step size and no matrix logarithm at the states. The published
integrator uses ``sigma'/(2 sigma)``. That is right only if its splines hold variances, but they are
named singular values. ``dataclasses.replace(model, preset="reference")`` reproduces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe, finite
from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Provenance, Result
from tl_geometry.flow.alignment import (
    check_ensemble,
    common_basis,
    fit_aligned_bases,
    proper_rotations,
)
from tl_geometry.flow.geodesic import GeodesicPath
from tl_geometry.flow.simulation import FlowNoise, exact_paths, stepped_paths

METHODS = ("exact", "euler")
"""Integrators of :meth:`LangevinModel.simulate`."""
DT = 0.1
"""Step of the published Euler-Maruyama integration, in layers."""
TINY = torch.finfo(torch.float64).tiny
"""Smallest normal float64: a lower bound for values whose logarithm is taken."""
FLOOR = 1e-10
"""Smaller singular values are raised to this share of the state's largest, so that their logarithm
exists. The same share as in :func:`tl_geometry.flow.alignment.inverse_values`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LangevinModel(Result):
    """A fitted flow. Square rotations ``U [state rank rank]`` (determinant +1 between states) act
    on coordinates in ``subspace``.

    ``subspace [d_model rank]`` is the identity unless there were fewer trajectories than
    coordinates; ``outside`` is the share of each state's energy outside it, which simulations leave
    out. ``S`` are the singular values sigma at the states, ``times`` the layers of the states (1:
    output of the first block). The noise has variance ``alpha * rate * e^{rate t}`` per layer and
    coordinate (``rate`` is lambda). ``flips`` counts the directions that were reversed to make
    determinants positive, ``clamped`` the singular values that were raised to be positive.
    """

    subspace: Float[Tensor, "d_model rank"]
    U: Float[Tensor, "state rank rank"]
    S: Float[Tensor, "state rank"]
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
        expected, got = "positive numbers", "zeros"
        instead = "LangevinModel.fit"
        require(
            bool((self.S > 0).all()), "singular values", expected=expected, got=got, instead=instead
        )
        got = self.times.tolist()
        require(bool((self.times.diff() > 0).all()), "times", expected="increasing layers", got=got)
        got = f"alpha {self.alpha:.4g}, lambda {self.rate:.4g}"
        require(self.alpha * self.rate >= 0, "noise", expected="alpha * lambda >= 0", got=got)
        choice(self.preset, ("exact", "reference"), "preset")

    @staticmethod
    def fit(
        X: Float[Tensor, "trajectory state d_model"],
        *,
        noise: tuple[float, float],
        times: Float[Tensor, " state"] | None = None,
        provenance: Provenance | None = None,
    ) -> LangevinModel:
        """Fit rotations and stretches to an ensemble: stretches are ratios of singular values (as
        published), so that second moments match without any noise.

        Args:
            X: the ensemble.
            noise: ``(alpha, lambda)``, for instance of a fitted noise law.
            times: layers of the states, by default 1, 2, ...
            provenance: where the ensemble comes from.

        Raises ``GeometryError`` for a single state and for states that are not finite.

        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(50, 1, 3, generator=g, dtype=torch.float64)
        >>> model = LangevinModel.fit(torch.cat([x, 2 * x], dim=1), noise=(0.0, 0.0))
        >>> torch.allclose(model.simulate(x[:, 0], [1.5])[0, :, 0], 2**0.5 * x[:, 0])
        True
        """
        check_ensemble(X)
        n, states, d = X.shape
        subspace = torch.eye(d, dtype=torch.float64, device=X.device)
        outside = torch.zeros(states, dtype=torch.float64, device=X.device)
        # n < d trajectories span at most n directions per state: square rotations need a subspace
        if n < d:
            subspace, outside = common_basis(X)
            X = torch.stack([X[:, s].double() @ subspace for s in range(states)], dim=1)
        aligned, flips = proper_rotations(fit_aligned_bases(X))
        S = aligned.S.clamp(min=0)
        # TINY for a state of zeros, whose largest singular value is 0
        S = torch.maximum(S, FLOOR * S.amax(-1, keepdim=True)).clamp(min=TINY)
        clamped = int((aligned.S < S).sum())
        layers = torch.arange(1, states + 1) if times is None else times.cpu()
        source = provenance or Provenance(sources=("sarfati2025",), dtype="float64", contexts=n)
        return LangevinModel(
            subspace=subspace,
            U=aligned.U,
            S=S,
            times=layers.double(),
            outside=outside,
            alpha=float(noise[0]),
            rate=float(noise[1]),
            trajectories=n,
            flips=flips,
            clamped=clamped,
            provenance=source.flagged(*([f"{clamped} stretches clamped"] if clamped else [])),
        )

    @cached_property
    def path(self) -> GeodesicPath:
        """Rotations and stretches in the coordinates of ``subspace``."""
        return GeodesicPath(self.U, self.S, self.times)

    @property
    def noise(self) -> FlowNoise:
        """``(alpha, rate)``."""
        return FlowNoise(self.alpha, self.rate)

    @property
    def stretch_share(self) -> float:
        """Factor of the stretch rate in the drift: 1, or 1/2 under ``preset="reference"``."""
        return 0.5 if self.preset == "reference" else 1.0

    @cached_property
    def embed(self) -> Float[Tensor, "d_model rank"] | None:
        """``subspace``, or ``None`` where it is the identity and products can be left out."""
        d, rank = self.subspace.shape
        is_identity = d == rank and torch.equal(self.subspace, torch.eye(d).to(self.subspace))
        return None if is_identity else self.subspace

    def sigma(self, t: float) -> Float[Tensor, " rank"]:
        """``sigma_i`` at time ``t`` (layers), from the spline of their logarithms."""
        return self.path.sigma(t)

    def stretch_rate(self, t: float) -> Float[Tensor, " rank"]:
        """``sigma_i' / sigma_i`` at ``t`` (half of it under ``preset="reference"``)."""
        return self.stretch_share * self.path.stretch_rate(t)

    def rotation(self, t: float) -> Float[Tensor, "d_model rank"]:
        """``R(t)``: the directions at time ``t``, orthonormal columns; at the states the aligned
        singular vectors."""
        R = self.path.rotation(t)
        return R if self.embed is None else self.embed @ R

    def drift(self, t: float) -> Float[Tensor, "d_model d_model"]:
        """``A(t) = R' R^T + R S' R^T`` of ``dx = A x dt + ...`` (at a state, the limit from later
        times)."""
        R = self.path.rotation(t)
        A = self.path.turning(self.path.locate(t)[0]) + (R * self.stretch_rate(t)) @ R.mT
        return self.subspace @ A @ self.subspace.mT

    def noise_integral(self, s: float, t: float) -> Float[Tensor, " rank"]:
        """``I_i``: variance that the co-moving coordinate ``y_i`` gains from ``s`` to ``t``."""
        self.path.require_ordered(s, t)
        return self.noise.variance(self.path, s, t)

    def transition(self, s: float, t: float) -> Float[Tensor, "d_model d_model"]:
        """``Phi = R(t) Sigma(t) Sigma(s)^{-1} R(s)^T``: takes x(s) to x(t) without noise."""
        self.path.require_ordered(s, t)
        return (self.rotation(t) * (self.sigma(t) / self.sigma(s))) @ self.rotation(s).mT

    def noise_covariance(self, s: float, t: float) -> Float[Tensor, "d_model d_model"]:
        """Covariance of ``x(t)`` given ``x(s)``."""
        R = self.rotation(t)
        return (R * (self.sigma(t).square() * self.noise_integral(s, t))) @ R.mT

    def simulate(
        self,
        x: Float[Tensor, "trajectory d_model"],
        times: Sequence[float],
        *,
        start: float | None = None,
        method: str = "exact",
        samples: int = 1,
        dt: float | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Float[Tensor, "sample trajectory time d_model"]:
        """``samples`` paths from each row of ``x``, which start at time ``start`` (default the
        first state), at the given increasing times. All times are in layers. The paths are on the
        device of ``x``; random numbers are drawn on the CPU, the same for every device.

        ``"exact"`` draws the increments of the co-moving coordinates from their exact law: no step
        size, one product per time asked for. ``"euler"`` is Euler-Maruyama as published (steps
        ``dt`` of 0.1 layers by default, drift at the start of the step). The part of ``x`` outside
        ``subspace`` is left out.
        """
        begin = float(self.times[0]) if start is None else float(start)
        sample_times = [float(t) for t in times]
        d = len(self.subspace)
        shaped = finite(x, "start states").dim() == 2 and x.shape[1] == d
        require(shaped, "start states", expected=f"[trajectory {d}]", got=describe(x))
        # the first time may be the start itself, or a rounding error before it
        rising = bool(sample_times) and all(
            a < b for a, b in zip([begin - 1e-12, *sample_times], sample_times)
        )
        require(rising, "times", expected=f"increasing times from {begin:g}", got=sample_times)
        positive = samples >= 1 and (dt is None or dt > 0)
        require(positive, "samples and dt", expected="positive numbers", got=f"{samples} and {dt}")
        if choice(method, METHODS, "method") == "exact":
            exact = self.preset == "exact"
            require(exact, "method", expected='"euler" with preset="reference"', got=repr(method))
            no_step = 'none with method="exact", which has no step'
            require(dt is None, "dt", expected=no_step, got=dt)
        # refuses times off the path; as they increase, the first and the last suffice
        self.path.locate(begin)
        self.path.locate(sample_times[-1])
        coordinates = x if self.embed is None else x.double() @ self.embed.to(x.device)
        start_coordinates = repeat(
            coordinates.to(dtype), "n rank -> (sample n) rank", sample=samples
        )
        generator = torch.Generator().manual_seed(seed)
        arguments = (self.path, self.noise, start_coordinates, begin, sample_times, generator)
        if method == "exact":
            paths = exact_paths(*arguments)
        else:
            paths = stepped_paths(*arguments, dt=dt or DT, stretch_share=self.stretch_share)
        paths = paths if self.embed is None else paths @ self.embed.to(paths).mT
        return rearrange(paths, "time (sample n) d -> sample n time d", sample=samples)
