"""Small sizes of the calibration of measures: what is printed covers."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.calibration_measures import (
    REPORTED,
    anova_shares,
    overlap_null,
    planted,
    planted_basis,
    positional,
    report_errors,
    two_bases,
)
from tl_geometry.decomposition import PositionContext
from tl_geometry.measures.state_measures import UNBOUNDED, StateMeasures

pytestmark = pytest.mark.once

SOME = planted("topics of 8 windows", 32)


@pytest.mark.nightly
def test_shares_of_variance_in_topic_blocks_cover_or_have_no_interval() -> None:
    (found,) = anova_shares("topics of 8 windows", 32, 60)
    assert found.kept
    (few,) = anova_shares("topics of 8 windows", 16, 20)
    assert "(pos alone)" in few.name


def halved(basis: PositionContext) -> StateMeasures:
    """Errors of half their size, which must be seen."""
    report = positional(basis)
    return dataclasses.replace(report, errors={n: e / 2 for n, e in report.errors.items()})


@pytest.mark.nightly
def test_errors_of_measures_cover_and_smaller_ones_do_not() -> None:
    draw = planted_basis("topics of 8 windows")
    (found,) = report_errors("position", draw, 32, 60, positional, SOME)
    (small,) = report_errors("half of it", draw, 32, 60, halved, SOME)
    assert found.kept
    assert not small.kept
    assert not set(REPORTED[found.name]) & set(UNBOUNDED)


def test_two_bases_of_one_population_are_within_their_floors() -> None:
    far, unlike = two_bases("topics of 8 windows with their own curve", 64, 40)
    assert far.kept
    assert unlike.value < 0.25


def test_overlap_by_coordinates_is_within_its_null_and_by_turned_noise_is_not() -> None:
    (coordinates,) = overlap_null(32, 40, turned=False)
    (turned,) = overlap_null(32, 20, turned=True)
    assert coordinates.kept
    assert not turned.kept
