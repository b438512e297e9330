"""How sure is an estimate? Jackknife intervals corrected for bias, paired t intervals and sign-flip
tests answer. Everything that prints an interval or a p-value calls them. Paired intervals and tests
are given from :data:`FEWEST` samples on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from tl_geometry.base.checks import seeded
from tl_geometry.base.errors import require

FEWEST = 10
"""Contexts, prompts or trajectories below which no error, interval or p-value is given."""
FEWEST_GROUPS = 4
"""Groups below which callers give no jackknife. Its t has one degree of freedom less than groups:
the 95% quantile is 3.2 for four groups, 4.3 for three and 12.7 for two."""
FLIPS = 9_999
"""Random sign flips of :func:`sign_flip_p`: with the data itself 10,000, so that p is at least
1e-4."""


class Interval(NamedTuple):
    """An estimate (of a jackknife: corrected for bias), its interval (95% by default), and its
    standard error."""

    value: Float[Tensor, "*batch"]
    low: Float[Tensor, "*batch"]
    high: Float[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]

    def columns(self, name: str) -> dict[str, Float[Tensor, "*batch"]]:
        """The value and the two ends under the names that tables and results give them."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class LeftOut(NamedTuple):
    """A statistic without each of G groups, and how many samples each group has (counts or shares:
    only their ratios matter)."""

    values: Float[Tensor, "group ..."]
    sizes: Float[Tensor, " group"]


def t_quantile(freedom: Tensor, level: float = 0.95) -> Tensor:
    """The two-sided quantile of Student's t, for each number of degrees of freedom; float64."""
    return torch.as_tensor(stats.t.ppf((1 + level) / 2, freedom.double().numpy()))


def jackknife_interval(
    whole: Float[Tensor, "*batch"], left_out: Sequence[LeftOut], *, level: float = 0.95
) -> Interval:
    """Delete-group jackknife, corrected for bias, with t quantiles.

    For G equal groups ``s* = G s - (G - 1) mean_g s_(-g)``, ``se^2 = (G - 1) / G sum_g (s_(-g) -
    mean)^2`` and the interval ``s* +- t_(G-1) se``; for unequal ones the pseudo-values of Busing,
    Meijer & van der Leeden 1999, which are these for equal ones. Several independent sources of
    error (the contexts of a basis, the prompts of a sweep) are several jackknives: corrections and
    variances add up, and the degrees of freedom are Satterthwaite's.

    >>> x = torch.tensor([1.0, 2.0, 4.0, 5.0]).double()
    >>> rest = (x.sum() - x) / 3
    >>> mean = jackknife_interval(x.mean(), [LeftOut(rest, torch.full((4,), 0.25).double())])
    >>> round(float(mean.value), 6), round(float(mean.error), 4), round(float(mean.high), 3)
    (3.0, 0.9129, 5.905)
    """
    value = whole.clone()
    variance, squares = torch.zeros_like(whole), torch.zeros_like(whole)
    for values, sizes in left_out:
        fits, got = len(values) == len(sizes) >= 2, f"{len(values)} values and {len(sizes)} sizes"
        expected = "a value and a size for each of at least 2 groups"
        require(fits, "left_out", expected=expected, got=got)
        # Busing's h is 1 / share: pseudo-values h s - (h - 1) s_(-g), with variances over h - 1
        share = (sizes / sizes.sum()).to(whole).reshape(-1, *[1] * whole.dim())
        groups = len(values)
        corrected = groups * whole - ((1 - share) * values).sum(0)
        pseudo = whole / share - (1 / share - 1) * values
        source_variance = ((pseudo - corrected).square() / (1 / share - 1)).mean(0)
        value = value + corrected - whole
        variance = variance + source_variance
        # Satterthwaite: (sum of variances)^2 / sum of (variance^2 / its degrees of freedom)
        squares = squares + source_variance.square() / (groups - 1)
    # without any variance the degrees of freedom would be 0 / 0; the interval is a point. 1e-300
    # only keeps the unused quotient finite
    freedom = torch.where(squares > 0, variance.square() / squares.clamp(min=1e-300), torch.inf)
    error = variance.sqrt()
    reach = t_quantile(freedom.cpu(), level).to(error) * error
    return Interval(value, value - reach, value + reach, error)


def paired_interval(differences: Float[Tensor, "sample ..."], *, level: float = 0.95) -> Interval:
    """Mean of paired differences with Student's interval, ``mean +- t_(n-1) sd / sqrt(n)``; NaN
    bounds below :data:`FEWEST` differences.

    >>> interval = paired_interval(torch.arange(10.0))
    >>> [round(float(x), 2) for x in interval[:3]]
    [4.5, 2.33, 6.67]
    """
    n = len(differences)
    mean = differences.mean(0)
    if n < FEWEST:
        unknown = torch.full_like(mean, torch.nan)
        return Interval(mean, unknown, unknown, unknown)
    error = differences.std(0) / n**0.5
    reach = float(t_quantile(torch.tensor(n - 1.0), level)) * error
    return Interval(mean, mean - reach, mean + reach, error)


def sign_flip_p(differences: Float[Tensor, " sample"], *, seed: int = 0) -> float:
    """Two-sided p-value of paired differences under sign flips: the share of flips (and of the data
    itself) whose mean is as far from zero.

    The null is that the two conditions of a pair could change places; then a difference is
    symmetric about zero, and the test is exact however heavy its tails. It is no test of the mean:
    of centred log-normal differences, which this null does not make, tests of level 5% reject 15%.
    Flips keep the sum of squares, so that the studentised mean ``mean / (sd / sqrt(n))`` is a
    monotone function of the mean: studentised flips of one sample are this very test.

    NaN below :data:`FEWEST` differences, and where all are zero.

    >>> sign_flip_p(torch.ones(12).double()) < 0.01, sign_flip_p(torch.ones(5).double())
    (True, nan)
    """
    values = differences.double()
    n, size = len(values), values.abs().sum()
    if n < FEWEST or not bool(size > 0):
        return float("nan")
    flips = torch.randint(2, (FLIPS, n), generator=seeded(seed)).double() * 2 - 1
    # ties count, up to rounding
    as_far = (flips @ values).abs() >= values.sum().abs() - 1e-12 * size
    return float((1 + as_far.sum()) / (1 + FLIPS))
