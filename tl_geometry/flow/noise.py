"""Is the residual of rotation and stretch noise? Fits the law of its variance over layers, tests
whether it is isotropic and Gaussian, and finds layers that deviate from the rest. For
:func:`tl_geometry.flow_report` and :class:`tl_geometry.flow.LangevinModel`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linprog, minimize_scalar
from scipy.stats import false_discovery_control
from torch import Tensor

from tl_geometry.base.checks import several
from tl_geometry.base.errors import choice, require
from tl_geometry.base.tables import Table
from tl_geometry.flow.ensemble import MAD_TO_SD
from tl_geometry.flow.maps import varying_coordinates

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
        growth = _log_growth(self.law, self.rate, start.double(), end.double())
        return (self.log_alpha + growth).exp()

    @property
    def flow(self) -> tuple[float, float]:
        """``(alpha, lambda)`` of a flow with this noise, whose variance ``alpha lambda e^{lambda
        t}`` per layer is not negative; none where the asymptotic law does not rise."""
        if self.rate > 0:
            return self.alpha, self.rate
        # the increment law has |lambda|
        return (-self.alpha, self.rate) if self.law == "increment" and self.rate < 0 else (0.0, 0.0)


def _log_growth(law: str, rate: float, start: Tensor, end: Tensor) -> Tensor:
    """``ln v - ln alpha`` of a law, for times in layers."""
    if law == "asymptotic":
        return rate * end
    # at rate 0 alpha is infinite and alpha |rate| finite, the variance per layer: 1e-15 is as good,
    # whatever the number of layers
    rate = rate or 1e-15
    # ln |e^{rate end} - e^{rate start}|
    return rate * start + (torch.expm1(rate * (end - start)) / rate).log() + math.log(abs(rate))


def _pairs(report: Table, of: str) -> tuple[Tensor, Tensor, Tensor]:
    """Start time, end time and value of every pair of states whose value is finite; the in-sample
    value where a report has one."""
    column = f"{of}_in" if f"{of}_in" in report.names else of
    columns = [report.column(name) for name in ("start", "end", column)]
    start, end, values = (torch.tensor(c, dtype=torch.float64) for c in columns)
    known = torch.isfinite(values)
    return start[known], end[known], values[known]


def fit_noise_law(report: Table, *, law: str = "asymptotic", of: str = "log_variance") -> NoiseLaw:
    """Fit ``alpha`` and ``lambda`` to the mean log variances of the residuals of all pairs of
    states: of a :func:`tl_geometry.flow_report` (in-sample, as published), of
    ``ensemble.residuals()``, or the column ``of`` of any table with ``start`` and ``end``.

    ``"asymptotic"``: ``v = alpha e^{lambda (t + tau)}``, ordinary least squares (Sarfati et al.
    2025, Eq. 2). ``"increment"``: ``v = alpha e^{lambda (t + tau)} (1 - e^{-lambda tau})``, the
    integral of the noise of their stochastic equation where nothing stretches (its absolute value
    for a negative lambda); least squares on ln v. A pair goes from time t to t + tau. Times are
    layers, 1 for the output of the first block; pairs whose value is NaN are left out. The
    published "alpha = -5.4" for Llama-2 cannot be a variance and is presumably ``log_alpha``; the
    paper does not state the base of its logarithm, which is e here.

    Raises ``GeometryError`` for fewer than 3 pairs of states.

    >>> from tl_geometry.base.results import Provenance
    >>> pairs = [(s, t) for s in range(1, 6) for t in range(s + 1, 6)]
    >>> cells = tuple((s, t, math.log(0.64) + 0.18 * t) for s, t in pairs)
    >>> names = ("start", "end", "log_variance")
    >>> found = fit_noise_law(Table(names=names, cells=cells, provenance=Provenance()))
    >>> round(found.alpha, 3), round(found.rate, 3)
    (0.64, 0.18)
    """
    choice(law, LAWS, "law")
    start, end, log_values = _pairs(report, of)
    n_pairs = len(log_values)
    expected, ends = "at least 3 with a finite variance, of two end states", len(end.unique())
    require(n_pairs >= 3 and ends > 1, "pairs of states", expected=expected, got=n_pairs)

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
        node = grid[int(np.argmin([misfit(g) for g in grid]))]
        bounds = (node - 0.025, node + 0.025)  # one step of the grid either way
        options = {"xatol": 1e-10}
        best: Any = minimize_scalar(misfit, bounds=bounds, method="bounded", options=options)
        rate = float(best.x)
    residual_square = misfit(rate)
    total_square = float((log_values - log_values.mean()).square().sum())
    log_alpha = float((log_values - _log_growth(law, rate, start, end)).mean())
    r2 = 1 - residual_square / total_square if total_square > 0 else math.nan
    # three parameters: alpha, lambda and the variance of the error
    aic = n_pairs * math.log(residual_square / n_pairs) + 6 if residual_square > 0 else -math.inf
    return NoiseLaw(law, math.exp(log_alpha), rate, log_alpha, r2, aic, n_pairs)


def isotropy_tests(
    residual: Float[Tensor, "trajectory d_model"],
) -> dict[str, float]:
    """Tests of the claim that residuals are isotropic, uncorrelated Gaussian noise (Sarfati et al.
    2025, section 4), for N trajectories of d coordinates with covariance C; every number that
    chance makes large has its null beside it.

    - ``variance_cv``: coefficient of variation of the coordinates' variances
      (``variance_cv_chance`` = ``sqrt(2 / (N - 1))`` for an isotropic Gaussian);
    - ``correlation``: mean absolute correlation of two coordinates (``correlation_chance`` =
      ``sqrt(2 / (pi N))`` for independent ones);
    - ``participation``: ratio ``(tr C)^2 / (d tr C^2)``, 1 where all eigenvalues are equal
      (``participation_chance`` = ``1 / (1 + (d + 1) / (N - 1))`` for an isotropic Gaussian);
    - ``gaussian_rejected``: share of coordinates that fail the Anderson-Darling test of normality,
      with the false discovery rate held at 5%; ``gaussian_rejected_raw``: the same at p < 0.05
      without correction (5% of them fail by chance);
    - ``degenerate``: constant coordinates (left out).

    Raises ``GeometryError`` for fewer than 8 trajectories or 2 coordinates that vary.

    >>> tests = isotropy_tests(torch.randn(400, 6, generator=torch.Generator().manual_seed(1)))
    >>> round(tests["participation"] / tests["participation_chance"], 1), tests["gaussian_rejected"]
    (1.0, 0.0)
    """
    _, centered = varying_coordinates(residual)
    n, d = centered.shape
    expected, got = "at least 8 trajectories of 2 coordinates that vary", f"{n} of {d}"
    require(n >= 8 and d >= 2, "residuals", expected=expected, got=got)
    variance = centered.square().sum(0) / (n - 1)
    C = centered.mT @ centered / (n - 1)
    sphericity = float(d * C.square().sum() / variance.sum().square())
    # C becomes the correlations; their diagonal holds d ones
    correlations = float(C.div_(variance.sqrt()).div_(variance.sqrt()[:, None]).abs_().sum() - d)
    p = normality_p(centered)
    corrected = torch.from_numpy(false_discovery_control(p.cpu().numpy()))
    return {
        "variance_cv": float(variance.std() / variance.mean()),
        "variance_cv_chance": math.sqrt(2 / (n - 1)),
        "correlation": correlations / (d * (d - 1)),
        "correlation_chance": math.sqrt(2 / (math.pi * n)),
        "participation": 1 / sphericity,
        "participation_chance": 1 / (1 + (d + 1) / (n - 1)),
        "gaussian_rejected": float((corrected < 0.05).double().mean()),
        "gaussian_rejected_raw": float((p < 0.05).double().mean()),
        "degenerate": residual.shape[1] - d,
    }


def normality_p(residual: Float[Tensor, "trajectory d_model"]) -> Float[Tensor, " d_model"]:
    """p-values of the Anderson-Darling test of normality, for each coordinate (D'Agostino &
    Stephens 1986, Table 4.9; 0 beyond the range of the table, 1 for constant coordinates).

    Vectorised over coordinates, because a report tests every pair of states: 18 times as fast as a
    loop over ``scipy.stats.anderson`` at 192 x 576.

    >>> g = torch.Generator().manual_seed(0)
    >>> p = normality_p(torch.stack([torch.randn(200, generator=g), torch.arange(200.0)], dim=1))
    >>> (p > 0.05).tolist()
    [True, False]
    """
    n, values = len(residual), residual.double()
    sd = values.std(0)
    standardized = ((values - values.mean(0)) / torch.where(sd > 0, sd, torch.nan)).mT.contiguous()
    # numpy sorts six times as fast as torch
    z = torch.from_numpy(np.sort(standardized.cpu().numpy(), axis=-1)).to(standardized)
    i = torch.arange(1, n + 1, dtype=torch.float64, device=values.device)
    below, above = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
    a = -n - ((2 * i - 1) * (below + above.flip(-1))).sum(-1) / n
    # the table's correction for n samples, then its fits to four ranges of the statistic
    a = a * (1 + 0.75 / n + 2.25 / n**2)
    p = 1 - torch.exp(-13.436 + 101.14 * a - 223.73 * a**2)
    p = torch.where(a >= 0.2, 1 - torch.exp(-8.318 + 42.796 * a - 59.938 * a**2), p)
    p = torch.where(a >= 0.34, torch.exp(0.9177 - 4.279 * a - 1.38 * a**2), p)
    p = torch.where(a >= 0.6, torch.exp(1.2937 - 5.709 * a + 0.0186 * a**2), p)
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


@lru_cache
def familywise_threshold(states: int) -> float:
    """The robust z-score that the largest of ``states`` Gaussian deviations exceeds with
    probability 5% (from 20,000 seeded draws). The usual fixed limit of 3.5 flags some layer
    in 1 null run of 5 with 5 states, and in 1 of 13 with 23 states.

    >>> round(familywise_threshold(11), 1) > round(familywise_threshold(23), 1) > 3.5
    True
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(20_000, max(1, states), generator=generator, dtype=torch.float64)
    deviations = (draws - draws.quantile(0.5, dim=1, keepdim=True)).abs()
    # a single state is its own median: 0 / 1e-300 is 0, but 0 / 0 would be NaN
    mad = deviations.quantile(0.5, dim=1).clamp(min=1e-300)
    return float((deviations.amax(1) / (MAD_TO_SD * mad)).quantile(0.95))


def layer_anomalies(
    report: Table, of: Sequence[str] = ("log_variance", "mean_over_sd", "relative_error")
) -> Table:
    """Which target states deviate? Leave-one-target-out diagnosis of measures of pairs of states,
    by default of the in-sample residuals of a :func:`tl_geometry.flow_report`.

    For each target state b the regression ``value = c_0 + c_1 (t + tau) + c_2 ln tau`` is fitted on
    all pairs with another target (least absolute deviations, so that one odd layer does not bend
    the fits of the others). The ``excess`` of b is the mean residual of its own pairs; ``z`` is its
    robust z-score among all targets, ``flagged`` where it exceeds ``limit``, so that with Gaussian
    deviations of one size 5% of runs flag any state (:func:`familywise_threshold`). An excess is a
    mean over as many pairs as there are states before it: where each pair deviates on its own,
    early states deviate more than late ones and are flagged too often (in about 1 of 6 runs). NaN
    where too few pairs are left for a fit. Run it for the last state before and after the final
    norm (``flow_report(ensemble.after_norm(model))``): libraries return it after the norm, which is
    a likely cause of the anomaly that Sarfati et al. 2025 report for the last layer of Mistral and
    Llama 3.2.

    Returns a row per measure and target state: ``measure, state, excess, z, limit, flagged``.
    """
    rows: list[dict[str, Any]] = []
    for measure in several(of):
        start, end, values = _pairs(report, measure)
        design = torch.stack([torch.ones_like(end), end, torch.log(end - start)], dim=1)
        states: list[Any] = sorted({*report.column("start"), *report.column("end")}, key=float)
        excess = torch.full((len(states),), torch.nan, dtype=torch.float64)
        for b, state in enumerate(states):
            own = end == state
            # 6: at least twice as many pairs as the three coefficients
            if bool(own.any()) and int((~own).sum()) >= 6:
                fitted = design[own] @ _least_absolute(design[~own], values[~own])
                excess[b] = (values[own] - fitted).mean()
        known = torch.isfinite(excess)
        deviation = excess - excess.nanquantile(0.5)
        mad = deviation.abs().nanquantile(0.5)
        # MAD 0: at least half of the targets equal the median, and any other is infinitely far
        far = torch.where(deviation == 0, 0.0, torch.inf)
        z = torch.where(mad > 0, deviation / (MAD_TO_SD * mad), far)
        z[~known | (known.sum() < 4)] = torch.nan
        limit = familywise_threshold(int(known.sum()))
        for state, e, score in zip(states, excess.tolist(), z.tolist(), strict=True):
            row = {"measure": measure, "state": state, "excess": e, "z": score, "limit": limit}
            rows.append({**row, "flagged": abs(score) > limit})
    chance = "By chance 5% of measures flag any state."
    return Table.of(rows, report.provenance, chance=chance)
