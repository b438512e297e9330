"""Reports where something is missing: second moments, contexts, directions, ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_geometry import decompose_activations
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures.context_report import contextual_report
from tl_geometry.measures.position_report import positional_report

pytestmark = pytest.mark.once


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def basis_of(h: Tensor, **options: Any) -> PositionContext:
    return decompose_activations(h, **{"keep": 32, **options})


# ---- formulas


# ---- reports


def test_a_report_without_second_moments_has_no_relative_norm() -> None:
    """By default k is 20; ten cosines are shown; what is not kept is said."""
    h = gaussian(4, 16, 46, 45) + 3 * gaussian(5, 46, 45)
    basis = basis_of(h, second_moments=False, keep_ctx=False, keep=0)
    report = positional_report(basis, jackknife=False, nulls=False)
    assert report.k == 20
    assert report.fourier.shape == (1, 10, 10)
    assert bool(report["relative_norm"].isnan() & report["relative_norm_reference"].isnan())
    assert "no second moments: no relative norm" in report.provenance.flags
    assert report.errors == {}
    assert report.nulls == {}
    assert report.curve_contexts == ()
    assert report.blocks == 0
    assert report.draws == 8


def test_the_error_of_the_raw_norm_by_hand() -> None:
    """Without each of eight groups, the numerator and the denominator along the leading direction,
    which keeps its variance within positions."""
    h = gaussian(11, 16, 5, 4) + 2 * gaussian(12, 5, 4) + 3 * gaussian(13, 4)
    report = positional_report(basis_of(h, groups=8), nulls=False)
    flat, mean = h.reshape(-1, 4), h.mean((0, 1))
    raw = flat.T @ flat / 16
    v = torch.linalg.eigh(raw)[1][:, -1]
    within = ((h - h.mean(0)) @ v).square().sum() / 16
    whole = float(torch.linalg.svdvals(h.mean(0) - mean)[0] / torch.linalg.eigvalsh(raw)[-1].sqrt())
    assert float(report["relative_norm_reference"]) == pytest.approx(whole)
    without = []
    for group in range(8):
        rest = torch.cat([h[: 2 * group], h[2 * group + 2 :]])
        centre = rest.mean((0, 1))
        pos = rest.mean(0) - centre
        size = within + (pos @ v).square().sum() + 5 * (centre @ v).square()
        without.append(float(torch.linalg.svdvals(pos)[0] / size.sqrt()))
    spread = sum((x - sum(without) / 8) ** 2 for x in without)
    error = float(report.errors["relative_norm_reference"])
    assert error == pytest.approx(math.sqrt(7 / 8 * spread))


def test_a_window_too_short_for_a_rank_has_none() -> None:
    """Four positions allow k = 1, three none: rank, threshold and shares are unknown."""
    for positions, known in ((4, True), (3, False)):
        basis = basis_of(gaussian(6, 8, positions, 9) + 3 * gaussian(7, positions, 9))
        report = positional_report(basis, jackknife=False, nulls=False)
        assert report.k == (positions - 2) // 2
        for name in ("rank", "threshold", "explained", "explained_energy"):
            assert bool(report[name].isfinite()) is known, (positions, name)
        flag = f"rank bound k={report.k} of 20 (short window)"
        assert flag in report.provenance.flags


def test_a_contextual_report_compares_by_default_ten_directions() -> None:
    """Of twelve positions and dimensions, with documents in the full space and norm N."""
    h = gaussian(9, 40, 13, 12) + gaussian(10, 13, 12)
    basis, labels = basis_of(h), torch.arange(40) % 2
    options: dict[str, Any] = {"jackknife": False, "nulls": False}
    plain = contextual_report(basis, labels, **options)
    ten = contextual_report(basis, labels, rank=10, norm="N", space="full", ridge=None, **options)
    eleven = contextual_report(basis, labels, rank=11, **options)
    for name in plain.values:
        assert torch.equal(plain[name], ten[name]), name
    assert float(plain["overlap"]) != float(eleven["overlap"])
    assert plain.names == ()
    assert plain.similarity is not None
    assert plain.similarity.shape == (1, 2, 2)
    assert plain.blocks == 0
    assert plain.errors == {}


@pytest.mark.parametrize(("contexts", "given"), [(31, False), (32, True)])
def test_errors_of_contexts_are_given_from_32_on(contexts: int, given: bool) -> None:
    """Below, they are unknown, which a flag says."""
    h = gaussian(14, contexts, 5, 6) + gaussian(15, 5, 6)
    report = contextual_report(basis_of(h), nulls=False, rank=2)
    assert all(bool(error.isfinite()) is given for error in report.errors.values())
    assert ("fewer than 32 contexts: no errors" in report.provenance.flags) is not given
    assert report.curve_contexts == (round(contexts / 8), round(contexts / 4), 16, contexts)


@pytest.mark.parametrize(("contexts", "given"), [(9, False), (10, True)])
def test_errors_of_positions_are_given_from_ten_contexts_on(contexts: int, given: bool) -> None:
    """Below, they are unknown, which a flag says."""
    h = gaussian(16, contexts, 5, 6) + 3 * gaussian(17, 5, 6)
    report = positional_report(basis_of(h, groups=4), nulls=False)
    assert bool(report.errors["stable_rank"].isfinite()) is given
    assert ("fewer than 10 contexts: no errors" in report.provenance.flags) is not given
