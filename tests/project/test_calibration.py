"""Small sizes of the calibration: intervals cover and nulls are null within what the repeats allow;
what they replaced is caught by the same bounds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.calibration import (
    anova_shares,
    outcome,
    paired_effects,
    position_null,
    simulations,
    sweep_intervals,
)
from benchmarks.planted import World


def test_intervals_of_a_sweep_cover_and_the_bootstrap_does_not() -> None:
    new, before = sweep_intervals("C = 16", World(), 16, 24)
    assert 0.9 <= new.value <= 1.0
    assert new.kept
    assert before.value < 0.8
    assert not before.kept


def test_the_null_of_position_is_null_and_permuted_positions_are_not() -> None:
    new, before = position_null(World(position=0.0, along=0.9), 32, 16, "AR 0.9")
    assert new.value <= 0.05 + 3 * max(new.error, 0.03)
    assert before.value > 0.2
    planted, _ = position_null(World(position=1.0), 32, 3, "planted")
    assert planted.value == 1, "and it finds what is there"


def test_intervals_of_variance_cover_and_uncorrected_ones_cover_less() -> None:
    new, before = anova_shares(World(position=0.0), 16, 60, "no position")
    assert new.kept
    assert before.value < new.value - 0.05


@pytest.mark.slow
def test_effects_of_edits_are_calibrated() -> None:
    assert all(found.kept for found in paired_effects(600) if found.promised)


def test_a_promise_that_is_not_kept_is_said() -> None:
    hits = torch.ones(200, 4).double()
    hits[:60, 0] = 0
    assert not outcome("one term below 85%", hits, 0.0).kept
    assert not outcome("too wide", torch.ones(400, 4).double(), 0.0).kept
    assert not outcome(
        "size 0.2", (torch.arange(500) % 5 == 0).double()[:, None], 0, size=True
    ).kept
    assert outcome("size 0.05", (torch.arange(500) % 20 == 0).double()[:, None], 0, size=True).kept
    assert len(simulations("smoke")) >= 16
