"""Intervals by other routes: groups of unequal size, and the seed of sign flips."""

from __future__ import annotations

import pytest
import torch

from tl_geometry.base.intervals import LeftOut, jackknife_interval, sign_flip_p


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
