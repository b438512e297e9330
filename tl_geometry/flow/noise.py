"""Is the residual of rotation and stretch noise? Fits the law of its variance over layers, tests
whether it is isotropic and Gaussian, and finds layers that deviate from the rest. For
:func:`tl_geometry.flow_report` and :meth:`tl_geometry.flow.Trajectories.langevin`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.optimize import linprog, minimize_scalar
from scipy.special import ndtr
from scipy.stats import false_discovery_control
from torch import Tensor

from tl_geometry.base.errors import choice, require
from tl_geometry.flow.ensemble_shape import MAD_TO_SD

LAWS = ("asymptotic", "increment")
"""Laws of the residual variance, see :func:`fit_noise_law`."""


class NoiseLaw(NamedTuple):
    """A fitted law of the residual variance v, see :func:`fit_noise_law`; ``log_alpha`` is
    ``ln alpha``, ``r2`` that of ln v, ``pairs`` the number of pairs of states fitted."""

    law: str
    alpha: float
    rate: float
    """lambda, per layer."""
    log_alpha: float
    r2: float
    aic: float
    """Akaike's criterion ``n ln(RSS/n) + 2 * 3`` for three parameters: the smaller, the better the
    law (differences under 2 do not decide)."""
    pairs: int

    def variance(
        self, start: Float[Tensor, "*batch"], end: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Variance of one coordinate of the residual from time ``start`` to ``end``, by this
        law."""
        return (
            self.log_alpha + _log_growth(self.law, self.rate, start.double(), end.double())
        ).exp()


def _log_growth(law: str, rate: float, start: Tensor, end: Tensor) -> Tensor:
    """``ln v - ln alpha`` of a law, for times in layers."""
    if law == "asymptotic":
        return rate * end
    tau = end - start
    # at rate 0 alpha is infinite and alpha |rate| finite, the variance per layer: 1e-15 is as good,
    # whatever the number of layers
    rate = rate or 1e-15
    # ln |e^{rate end} - e^{rate start}|
    return rate * start + (torch.expm1(rate * tau) / rate).log() + math.log(abs(rate))


def _times(values: Tensor, times: Tensor | None) -> Float[Tensor, " state"]:
    """Times of the states of a table of pairs: layers from 1 unless given."""
    if times is None:
        return torch.arange(1, len(values) + 1, dtype=torch.float64)
    return times.double()


def _finite_pairs(values: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Start time, end time and value of every pair of states whose value is finite."""
    times = _times(values, times)
    start, end = torch.triu_indices(len(values), len(values), 1)
    finite = torch.isfinite(values[start, end])
    start, end = start[finite], end[finite]
    return times[start], times[end], values[start, end].double()


def fit_noise_law(
    log_variance: Float[Tensor, "state state"],
    *,
    law: str = "asymptotic",
    times: Float[Tensor, " state"] | None = None,
) -> NoiseLaw:
    """Fit ``alpha`` and ``lambda`` to the mean log variances of the residuals of all pairs of
    states: ``log_variance [start end]``, as in :class:`tl_geometry.flow.residuals.Maps`.

    ``"asymptotic"``: ``v = alpha e^{lambda (t + tau)}``, ordinary least squares (Sarfati et al.
    2025, Eq. 2). ``"increment"``: ``v = alpha e^{lambda (t + tau)} (1 - e^{-lambda tau})``, the
    integral of the noise of their stochastic equation where nothing stretches (its absolute value
    for a negative lambda); least squares on ln v. A pair goes from time t to t + tau. Times are
    layers, 1 for the output of the first block unless ``times`` says otherwise; pairs whose value
    is NaN are left out. The published "alpha = -5.4" for Llama-2 cannot be a variance and is
    presumably ``log_alpha``; the paper does not state the base of its logarithm, which is e here.

    >>> t = torch.arange(1.0, 6)
    >>> v = (torch.log(torch.tensor(0.64)) + 0.18 * t).expand(5, 5)
    >>> [round(x, 3) for x in fit_noise_law(v)[1:3]]
    [0.64, 0.18]
    """
    choice(law, LAWS, "law")
    start, end, log_values = _finite_pairs(log_variance, times)
    n_pairs = len(log_values)
    expected = "at least 3 with a finite variance"
    require(n_pairs >= 3, "pairs of states", expected=expected, got=n_pairs, instead="more states")

    def misfit(rate: float) -> float:
        # constant over pairs, and equal to ln alpha, if the law holds exactly
        gap = log_values - _log_growth(law, rate, start, end)
        return float((gap - gap.mean()).square().sum())

    if law == "asymptotic":
        centred_end = end - end.mean()
        rate = float((centred_end * log_values).sum() / centred_end.square().sum())
    else:
        # the misfit may have several minima: start from the best node of a grid. |lambda| = 3, a
        # variance 20 times as large per layer, lies far beyond the published 0.18 and 0.27.
        grid = np.linspace(-3, 3, 241)
        best_node = grid[int(np.argmin([misfit(g) for g in grid]))]
        # one step of the grid either way
        best: Any = minimize_scalar(
            misfit,
            bounds=(best_node - 0.025, best_node + 0.025),
            method="bounded",
            options={"xatol": 1e-10},
        )
        rate = float(best.x)
    residual_square = misfit(rate)
    total_square = float((log_values - log_values.mean()).square().sum())
    log_alpha = float((log_values - _log_growth(law, rate, start, end)).mean())
    r2 = 1 - residual_square / total_square if total_square > 0 else math.nan
    # three parameters: alpha, lambda and the variance of the error
    aic = n_pairs * math.log(residual_square / n_pairs) + 6 if residual_square > 0 else -math.inf
    return NoiseLaw(law, math.exp(log_alpha), rate, log_alpha, r2, aic, n_pairs)


class Isotropy(NamedTuple):
    """Whether a residual is isotropic, uncorrelated and Gaussian; every number that chance makes
    large has its null beside it."""

    variance_cv: float
    """Coefficient of variation of the coordinates' variances."""
    variance_cv_chance: float
    """``sqrt(2 / (N - 1))``, its value for an isotropic Gaussian; N trajectories."""
    correlation: float
    """Mean absolute correlation of two coordinates."""
    correlation_chance: float
    """``sqrt(2 / (pi N))``, its value for independent coordinates."""
    participation: float
    """Participation ratio ``(tr C)^2 / (d tr C^2)`` of the covariance C of d coordinates: 1 where
    all its eigenvalues are equal."""
    participation_chance: float
    """``1 / (1 + (d + 1) / (N - 1))``, its value for an isotropic Gaussian."""
    sphericity_p: float
    """p-value of John's test of sphericity in the form that holds for d above N (Ledoit & Wolf
    2002)."""
    gaussian_rejected: float
    """Share of coordinates that fail the Anderson-Darling test of normality, with the false
    discovery rate held at ``fdr``."""
    gaussian_rejected_raw: float
    """The same at p < ``fdr`` without correction (``fdr`` of them fail by chance)."""
    degenerate: int
    """Constant coordinates (left out)."""


def varying(values: Float[Tensor, "trajectory d_model"]) -> Bool[Tensor, " d_model"]:
    """Which coordinates are not constant. A constant one keeps a few rounding errors of its mean,
    which are no variance.

    >>> varying(torch.tensor([[0.1, 1.0], [0.1, 2.0], [0.1, 4.0]])).tolist()
    [False, True]
    """
    values = values.double()
    rounding = 64 * torch.finfo(torch.float64).eps * values.abs().amax(0)
    return values.std(0, correction=0) > rounding


def isotropy_tests(residual: Float[Tensor, "trajectory d_model"], *, fdr: float = 0.05) -> Isotropy:
    """Tests of the claim that residuals are isotropic, uncorrelated Gaussian noise (Sarfati et al.
    2025, section 4). Raises ``GeometryError`` for fewer than 8 trajectories or 2 coordinates that
    vary.

    >>> tests = isotropy_tests(torch.randn(400, 6, generator=torch.Generator().manual_seed(1)))
    >>> tests.sphericity_p > 0.01, tests.gaussian_rejected
    (True, 0.0)
    """
    n, d = residual.shape
    expected = "at least 8 trajectories of 2 coordinates"
    require(n >= 8 and d >= 2, "residuals", expected=expected, got=f"{n} of {d}")
    centred = residual.double() - residual.double().mean(0)
    variance = centred.square().sum(0) / (n - 1)
    varies = varying(residual)
    constant = int((~varies).sum())
    centred, variance = centred[:, varies], variance[varies]
    d = centred.shape[1]
    require(d >= 2, "residuals", expected="at least 2 coordinates with variance", got=d)
    C = centred.mT @ centred / (n - 1)
    trace, square = C.diagonal().sum(), C.square().sum()
    sd = variance.sqrt()
    correlation = (C / (sd[:, None] * sd)).abs()
    # the diagonal holds d ones
    off_diagonal = (correlation.sum() - d) / (d * (d - 1))
    sphericity = float(d * square / trace.square())
    # Ledoit & Wolf 2002: (n - 1) (sphericity - 1) - d tends to a Gaussian of mean 1, variance 4
    z = ((n - 1) * (sphericity - 1) - d - 1) / 2
    p = normality_p(centred)
    corrected = torch.from_numpy(false_discovery_control(p.cpu().numpy()))
    return Isotropy(
        variance_cv=float(variance.std() / variance.mean()),
        variance_cv_chance=math.sqrt(2 / (n - 1)),
        correlation=float(off_diagonal),
        correlation_chance=math.sqrt(2 / (math.pi * n)),
        participation=1 / sphericity,
        participation_chance=1 / (1 + (d + 1) / (n - 1)),
        sphericity_p=float(ndtr(-z)),
        gaussian_rejected=float((corrected < fdr).double().mean()),
        gaussian_rejected_raw=float((p < fdr).double().mean()),
        degenerate=constant,
    )


def anderson_darling(residual: Float[Tensor, "trajectory d_model"]) -> Float[Tensor, " d_model"]:
    """Anderson-Darling statistic A^2 of normality with estimated mean and variance, for each
    coordinate (constant ones: NaN).

    Vectorised over coordinates, because a report tests every pair of states: 18 times as fast as a
    loop over ``scipy.stats.anderson`` at 192 x 576.
    """
    n = len(residual)
    values = residual.double()
    sd = values.std(0)
    standardized = ((values - values.mean(0)) / torch.where(sd > 0, sd, torch.nan)).mT.contiguous()
    # numpy sorts six times as fast as torch
    z = torch.from_numpy(np.sort(standardized.cpu().numpy(), axis=-1)).to(standardized)
    i = torch.arange(1, n + 1, dtype=torch.float64, device=values.device)
    below, above = _log_tails(z)
    return -n - ((2 * i - 1) * (below + above.flip(-1))).sum(-1) / n


def _log_tails(z: Float[Tensor, "*batch"]) -> tuple[Tensor, Tensor]:
    """``ln P(Z < z)`` and ``ln P(Z > z)`` from one ``erfc``: twice as fast as two calls of SciPy's
    ``log_ndtr``, three times as fast as two of torch's."""
    tail = torch.special.erfc(z.abs() / math.sqrt(2)) / 2  # the smaller of the two
    if bool((tail == 0).any()):  # the tail underflows, and log_ndtr has a series for its logarithm
        return torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
    small, large, negative = tail.log(), torch.log1p(-tail), z < 0
    return torch.where(negative, small, large), torch.where(negative, large, small)


def normality_p(residual: Float[Tensor, "trajectory d_model"]) -> Float[Tensor, " d_model"]:
    """p-values of :func:`anderson_darling` (D'Agostino & Stephens 1986, Table 4.9; 0 beyond the
    range of the table, 1 for constant coordinates).

    >>> g = torch.Generator().manual_seed(0)
    >>> p = normality_p(torch.stack([torch.randn(200, generator=g), torch.arange(200.0)], dim=1))
    >>> (p > 0.05).tolist()
    [True, False]
    """
    n = len(residual)
    # the table's correction for n samples, then its fits to four ranges of the statistic
    a = anderson_darling(residual) * (1 + 0.75 / n + 2.25 / n**2)
    high = torch.exp(1.2937 - 5.709 * a + 0.0186 * a**2)
    middle = torch.exp(0.9177 - 4.279 * a - 1.38 * a**2)
    low = 1 - torch.exp(-8.318 + 42.796 * a - 59.938 * a**2)
    lowest = 1 - torch.exp(-13.436 + 101.14 * a - 223.73 * a**2)
    p = torch.where(a >= 0.2, low, lowest)
    p = torch.where(a >= 0.34, middle, p)
    p = torch.where(a >= 0.6, high, p)
    p = torch.where(a > 13, 0.0, p)
    return torch.where(torch.isnan(p), 1.0, p).clamp(0, 1)


def _least_absolute(
    design: Float[Tensor, "row column"], y: Float[Tensor, " row"]
) -> Float[Tensor, " column"]:
    """Coefficients of the regression of ``y`` by least absolute deviations, from the dual linear
    programme: maximise ``y.u`` subject to ``design^T u = 0`` and ``|u| <= 1``. The coefficients are
    the multipliers of the equalities."""
    solution: Any = linprog(
        -y.numpy(), A_eq=design.mT.numpy(), b_eq=np.zeros(design.shape[1]), bounds=(-1, 1)
    )
    return torch.from_numpy(-solution.eqlin.marginals)


class Anomalies(NamedTuple):
    """Which target states have residuals that deviate from the fit to the other layers. NaN where
    too few layers are left for that fit."""

    excess: Float[Tensor, " state"]
    """Mean over starts of value minus the value predicted from the other targets."""
    z: Float[Tensor, " state"]
    """Robust z-score: ``excess`` minus its median over target states, divided by 1.4826 MAD."""
    flagged: Bool[Tensor, " state"]
    """``|z|`` above :func:`familywise_threshold`: with Gaussian deviations, 5% of runs flag any
    state."""


@lru_cache
def familywise_threshold(states: int, level: float = 0.05) -> float:
    """The robust z-score that the largest of ``states`` Gaussian deviations exceeds with
    probability ``level`` (from 20,000 seeded draws). The usual fixed limit of 3.5 flags some layer
    in 1 null run of 5 with 5 states, and in 1 of 13 with 23 states.

    >>> round(familywise_threshold(11), 1) > round(familywise_threshold(23), 1) > 3.5
    True
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(20_000, max(1, states), generator=generator, dtype=torch.float64)
    deviations = (draws - draws.quantile(0.5, dim=1, keepdim=True)).abs()
    # a single state is its own median: 0 / 1e-300 is 0, but 0 / 0 would be NaN
    mad = deviations.quantile(0.5, dim=1).clamp(min=1e-300)
    return float((deviations.amax(1) / (MAD_TO_SD * mad)).quantile(1 - level))


def layer_anomalies(
    values: Float[Tensor, "state state"],
    *,
    times: Float[Tensor, " state"] | None = None,
) -> Anomalies:
    """Which target states deviate? Leave-one-target-out diagnosis of one number per pair of states
    (mean log variance, |mean|/sd or relative error; row start, column end).

    For each target state b the regression ``value = c_0 + c_1 (t + tau) + c_2 ln tau`` is fitted on
    all pairs with another target (least absolute deviations, so that one odd layer does not bend
    the fits of the others). The excess of b is the mean residual of its own pairs; its robust
    z-score among all targets is compared with :func:`familywise_threshold`. Run the last state
    twice, before and after the final norm: libraries return it after the norm, which is a likely
    cause of the anomaly that Sarfati et al. 2025 report for the last layer of Mistral and Llama
    3.2.
    """
    start, end, pair_values = _finite_pairs(values, times)
    design = torch.stack([torch.ones_like(end), end, torch.log(end - start)], dim=1)
    excess = torch.full((len(values),), torch.nan, dtype=torch.float64)
    for b, time in enumerate(_times(values, times)):
        at_target = end == time
        # 6: at least twice as many pairs as the three coefficients
        if bool(at_target.any()) and int((~at_target).sum()) >= 6:
            excess[b] = (
                pair_values[at_target]
                - design[at_target] @ _least_absolute(design[~at_target], pair_values[~at_target])
            ).mean()
    measured = torch.isfinite(excess)
    z = torch.full_like(excess, torch.nan)
    if int(measured.sum()) >= 4:
        deviation = excess - excess[measured].quantile(0.5)
        mad = deviation[measured].abs().quantile(0.5)
        # MAD 0: at least half of the targets equal the median, and any other is infinitely far
        infinite = torch.where(deviation == 0, 0.0, torch.inf)
        z = torch.where(mad > 0, deviation / (MAD_TO_SD * mad), infinite)
        z = torch.where(measured, z, torch.nan)
    limit = familywise_threshold(int(measured.sum()))
    return Anomalies(excess, z, (z.abs() > limit) & measured)
