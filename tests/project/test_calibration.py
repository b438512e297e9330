"""Small sizes of the calibration: intervals cover and nulls are null within what the repeats allow;
what they replaced is caught by the same bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.calibration import PARTS, simulations
from benchmarks.calibration_effects import paired_effects
from benchmarks.calibration_flow import flow_of, flow_reports
from benchmarks.calibration_outcomes import AT_MOST, SIZE, Origin, lag_one, markdown, outcome
from benchmarks.calibration_scores import (
    permuted_positions,
    position_null,
    position_settings,
    share_settings,
    sweep_intervals,
)
from benchmarks.planted import World

pytestmark = pytest.mark.once


@pytest.mark.nightly
def test_intervals_of_a_sweep_cover() -> None:
    for new in sweep_intervals("C = 32", World(), 32, 24):
        assert 0.9 <= new.value <= 1.0
        assert new.kept


@pytest.mark.nightly
def test_intervals_cover_where_windows_come_in_topics() -> None:
    topics = [x for x in share_settings() if x["world"].topics]
    assert {x["contexts"] for x in topics} == {32, 64}
    score, gain = sweep_intervals(repeats=40, **topics[0])
    assert min(score.worst, gain.worst) >= 0.85


@pytest.mark.nightly
@pytest.mark.parametrize(("rotary", "stay"), [(False, 0.95), (True, 0.5)])
def test_the_null_of_position_is_null_and_permuted_positions_are_not(
    rotary: bool, stay: float
) -> None:
    nothing = World(position=0.0, stay=stay, rotary=rotary)
    found = position_null(nothing, 32, 24, "tokens that stay")
    assert found.value <= 0.05 + 3 * max(found.error, 0.03)
    if rotary:
        planted = position_null(nothing, 32, 4, "planted", query=3.0, key=3.0)
    else:
        planted = position_null(World(position=1.5), 32, 4, "planted")
        before = permuted_positions(World(position=0.0, along=0.9), 32, 16, "AR 0.9")
        assert before.value > 0.2
    assert planted.value >= 0.9, "and it finds what is there"


def test_settings_of_the_null_are_those_that_broke_the_one_before() -> None:
    names = [x["name"] for x in position_settings()]
    assert len(set(names)) == len(names) >= 10
    stays = [x for x in position_settings() if x["world"].stay == 0.95]
    sizes = {(x["world"].length, x["contexts"]) for x in stays}
    assert sizes >= {(16, 32), (16, 64), (32, 32)}
    assert {x["contexts"] for x in position_settings() if x["world"].topics} == {32}


@pytest.mark.nightly
def test_effects_of_edits_are_calibrated() -> None:
    assert all(found.kept for found in paired_effects(600) if found.promised)


SOME = Origin("made up", "none", "200 contexts")


def test_a_promise_that_is_not_kept_is_said() -> None:
    hits = torch.ones(200, 4).double()
    hits[:60, 0] = 0
    assert not outcome("one term below 85%", hits, 0.0, SOME).kept
    assert not outcome("too wide", torch.ones(400, 4).double(), 0.0, SOME).kept
    every = {n: (torch.arange(500) % n == 0).double()[:, None] for n in (5, 20, 500)}
    assert not outcome("size 0.2", every[5], 0, SOME, goal=SIZE).kept
    assert outcome("size 0.05", every[20], 0, SOME, goal=SIZE).kept
    assert not outcome("size 0.002", every[500], 0, SOME, goal=SIZE).kept
    assert outcome("at most 0.05", every[500], 0, SOME, goal=AT_MOST).kept
    assert not outcome("at most 0.05", every[5], 0, SOME, goal=AT_MOST).kept


def test_every_row_names_its_generator_autocorrelation_and_fewest_contexts() -> None:
    made = outcome("a row", (torch.arange(500) % 20 == 0).double()[:, None], 0, SOME, goal=SIZE)
    told: list[str] = []
    table = markdown([made], told.append).splitlines()
    assert len(told) == 1
    assert "| a row | made up | none | 200 contexts | size 5% | 0.050 |" in table[-1]
    cells = table[-1].count("|")
    page = (Path(__file__).parents[2] / "benchmarks" / "calibration.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| ")]
    assert len(rows) > 100
    assert {line.count("|") for line in rows} == {cells}
    assert all(all(cell.strip() for cell in line.split("|")[2:-2]) for line in rows)
    assert len(simulations("smoke")) >= 60
    assert sum(len(simulations("smoke", [part])) for part in PARTS) == len(simulations("smoke"))


def test_the_autocorrelation_of_states_is_that_of_neighbouring_positions() -> None:
    for along in (0.0, 0.8):
        h = World(along=along, context=0.0).draw(400, torch.Generator().manual_seed(0))
        assert lag_one(h) == pytest.approx(along, abs=0.03)


@pytest.mark.nightly
def test_a_flow_that_is_one_has_no_anomalies_and_gaussian_residuals() -> None:
    anomalous, normal, round_ = flow_reports(100, 6, 12)
    assert anomalous.kept
    assert normal.kept
    assert not round_.kept
    assert flow_of(8, 3, torch.Generator()).X.shape == (8, 3, 12)
