"""Laws of ``tl_geometry.base``: linear algebra and intervals by other routes, sums that merge,
files that come back or are refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.lib.data import normal
from tl_geometry.base import linalg
from tl_geometry.base.intervals import LeftOut, jackknife_interval, paired_interval, sign_flip_p

pytestmark = pytest.mark.once


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed))[0]


@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3), (3, 3)])
def test_principal_angles_are_those_that_were_planted(first: int, second: int) -> None:
    """Three planes of known angles, one of them tiny, and bases of the spans in any order."""
    Q, theta = orthogonal(9), torch.tensor([3e-9, 0.7, 1.5], dtype=torch.float64)
    a, b = Q[:, :3], Q[:, :3] * theta.cos() + Q[:, 3:6] * theta.sin()
    a, b = torch.cat([a, Q[:, 6 : 3 + first]], 1), torch.cat([b, Q[:, 6 : 3 + second]], 1)
    if first == second == 3:
        assert torch.equal(linalg.principal_angles(a, a) < 1e-12, torch.ones(3).bool())
    a, b = a @ orthogonal(first, 1), b @ orthogonal(second, 2)
    found = linalg.principal_angles(a, b)
    assert found.tolist() == pytest.approx(theta.tolist(), rel=1e-6)


@pytest.mark.parametrize("shape", [(40, 3), (3, 40), (2, 40, 3), (2, 3, 40)])
def test_the_numerical_rank_is_that_of_numpy(shape: tuple[int, ...]) -> None:
    """Also just above and just below the threshold, which goes by the longer side."""
    eps = torch.finfo(torch.float64).eps
    for factor, rank in ((0.9, 2), (1.1, 3)):
        s = torch.tensor([2.0, 1.0, factor * 40 * eps * 2.0], dtype=torch.float64)
        assert linalg.numerical_rank(s, shape).item() == rank
    X = normal(*shape, seed=1)
    values = torch.linalg.svdvals(X)
    assert linalg.numerical_rank(values, shape).tolist() == np.linalg.matrix_rank(X).tolist()


@pytest.mark.parametrize(("rows", "columns", "rank"), [(7, 5, 3), (5, 7, 3), (4, 4, 6)])
def test_the_svd_of_a_product_is_that_of_the_matrix(rows: int, columns: int, rank: int) -> None:
    """Through its factors, of a batch, wide or narrow."""
    left, right = normal(2, rows, rank), normal(2, columns, rank, seed=1)
    found, size = linalg.product_svd(left, right), min(rows, columns, rank)
    assert torch.allclose(found.U * found.S.unsqueeze(-2) @ found.V.mT, left @ right.mT)
    expected = torch.linalg.svdvals(left @ right.mT)[:, :size]
    assert torch.allclose(found.S[:, :size], expected)
    peak = found.V.gather(-2, found.V.abs().argmax(-2, keepdim=True))
    assert bool((peak > 0).all())


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
