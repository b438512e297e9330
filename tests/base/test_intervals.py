"""Intervals and sign flips by other routes: groups of unequal size, several sources, scipy, all
flips."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.intervals import LeftOut, jackknife_interval, paired_interval, sign_flip_p

pytestmark = pytest.mark.once


def test_a_jackknife_over_unequal_groups_leaves_a_mean_as_it_is() -> None:
    """A mean has no bias, whatever the sizes of the groups; its error is that of the weighted
    group means (Busing, Meijer & van der Leeden 1999)."""
    x = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    sizes = torch.tensor([1, 2, 3, 5, 9])
    groups = x.split(sizes.tolist())
    rest = torch.stack([(x.sum() - g.sum()) / (20 - len(g)) for g in groups])
    interval = jackknife_interval(x.mean(), [LeftOut(rest, sizes.double())])
    assert float(interval.value) == pytest.approx(float(x.mean()), abs=1e-12)
    means = torch.stack([g.mean() for g in groups])  # the pseudo-values of a mean
    weights = 1 / (20 / sizes.double() - 1)
    error = ((means - x.mean()).square() * weights).mean().sqrt()
    assert float(interval.error) == pytest.approx(float(error), rel=1e-10)


def test_a_jackknife_over_unequal_groups_takes_a_bias_away() -> None:
    """The plug-in variance is too small by (n - 1) / n: with single values left out the correction
    gives the unbiased one."""
    x = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rest = torch.stack([torch.cat([x[:i], x[i + 1 :]]).var(correction=0) for i in range(12)])
    interval = jackknife_interval(x.var(correction=0), [LeftOut(rest, torch.ones(12).double())])
    assert float(interval.value) == pytest.approx(float(x.var()), rel=1e-10)


def test_the_seed_draws_the_sign_flips() -> None:
    differences = torch.randn(14, generator=torch.Generator().manual_seed(2)).double() + 0.3
    values = [sign_flip_p(differences, seed=seed) for seed in range(5)]
    assert values == [sign_flip_p(differences, seed=seed) for seed in range(5)]
    assert len(set(values)) > 1


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_paired_intervals_are_those_of_scipy(level: float) -> None:
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1
    found = paired_interval(x, level=level)
    for column in range(3):
        numbers = x[:, column].numpy()
        center, error = numbers.mean(), stats.sem(numbers)
        low, high = stats.t.interval(level, 9, center, error)
        mine = [float(end[column]) for end in found]
        assert mine == pytest.approx([center, low, high, error], rel=1e-12)
    if level == 0.95:
        assert torch.equal(torch.stack(found), torch.stack(paired_interval(x)))
    fewer = paired_interval(x[:9], level=level)
    assert torch.equal(fewer.value, x[:9].mean(0))
    assert all(bool(end.isnan().all()) for end in fewer[1:])


def test_two_sources_of_error_add_up() -> None:
    """Corrections and variances add up; degrees of freedom are Satterthwaite's, and the larger
    source has nearly all of them."""
    generator = torch.Generator().manual_seed(4)
    whole = torch.tensor(2.0, dtype=torch.float64)
    sources = [
        whole + scale * torch.randn(n, generator=generator, dtype=torch.float64)
        for n, scale in ((5, 0.3), (8, 0.1))
    ]
    value, variances = 2.0, []
    for values in sources:
        n, mean = len(values), float(values.mean())
        value += (n - 1) * (2.0 - mean)
        variances.append((n - 1) / n * float((values - mean).square().sum()))
    variance = sum(variances)
    freedom = variance**2 / (variances[0] ** 2 / 4 + variances[1] ** 2 / 7)
    given = [LeftOut(values, torch.full((len(values),), 6.0).double()) for values in sources]
    for level in (0.95, 0.5):
        reach = stats.t.ppf((1 + level) / 2, freedom) * variance**0.5
        found = [float(end) for end in jackknife_interval(whole, given, level=level)]
        expected = [value, value - reach, value + reach, variance**0.5]
        assert found == pytest.approx(expected, rel=1e-10)
    assert torch.equal(
        torch.stack(jackknife_interval(whole, given)),
        torch.stack(jackknife_interval(whole, given, level=0.95)),
    )


def test_a_jackknife_needs_two_groups_and_may_have_no_spread() -> None:
    whole = torch.tensor(2.0, dtype=torch.float64)
    still = LeftOut(whole.repeat(2), torch.ones(2).double())
    assert [float(end) for end in jackknife_interval(whole, [still])] == [2, 2, 2, 0]
    for values, sizes in ((1, 1), (3, 2), (2, 3)):
        bad = LeftOut(whole.repeat(values), torch.ones(sizes).double())
        text = f"at least 2 groups, got {values} values and {sizes} sizes"
        with pytest.raises(GeometryError, match=text):
            jackknife_interval(whole, [bad])


def test_sign_flips_count_ties_and_both_sides() -> None:
    """Against all 1,024 flips of ten differences. Sums of tenths that are equal differ in their
    last bits, and many flips are as far from zero as the data: three of ten signs are negative."""
    for negative in (0, 2, 3):
        tenths = [-1] * negative + [1] * (10 - negative)
        far = [
            abs(sum(s * t for s, t in zip(signs, tenths, strict=True))) >= abs(sum(tenths))
            for signs in itertools.product((-1, 1), repeat=10)
        ]
        exact = sum(far) / len(far)
        found = sign_flip_p(torch.tensor(tenths).double() / 10)
        assert abs(found - exact) < 4 * (exact * (1 - exact) / 1e4) ** 0.5 + 2e-4
    # the data itself, and no other of 9,999 flips
    assert sign_flip_p(torch.ones(60)) == pytest.approx(1e-4, rel=1e-6)
    assert math.isnan(sign_flip_p(torch.ones(9)))
    assert math.isnan(sign_flip_p(torch.zeros(12)))
