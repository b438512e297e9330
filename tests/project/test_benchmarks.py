"""The benchmarks run and say what they promise; models whose circuit is known do what they say, and
the library finds it; intervals cover and nulls are null, in small sizes; experiments run.

By day: that planted labels are found, where rivals are wrong. What the planted models
themselves do, and all that runs long, is asked at night."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import known_measures
from benchmarks.calibration_effects import paired_effects
from benchmarks.calibration_flow import flow_reports
from benchmarks.calibration_outcomes import AT_MOST, SIZE, Origin, outcome
from benchmarks.calibration_scores import share_settings, sweep_intervals
from benchmarks.harness import Row
from benchmarks.known_judging import Counts, judge_labels
from benchmarks.known_models import POSITIONS
from benchmarks.training import __main__ as command

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("positions", POSITIONS)


@pytest.mark.nightly
def test_every_benchmark_runs_in_its_small_size() -> None:
    words = [sys.executable, "-m", "benchmarks", "--size", "smoke", "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"torch", "transformer-lens", "python", "cores", "device"} <= set(found["machine"])
    rows = [Row(**row) for row in found["rows"]]
    names = "decompose sweep weights measures trajectories langevin scaling processes soak peak"
    for name in (*names.split(), "calibration", "known", "costs", "large"):
        assert any(row.benchmark.startswith(name) for row in rows), name
    assert all(row.seconds > 0 or math.isnan(row.seconds) for row in rows)
    shares = ("calibration", "known")
    assert not any(row.ratio <= 0 for row in rows if row.benchmark not in shares), "a share may be"


def test_a_planted_miss_and_a_planted_false_label_are_counted() -> None:
    truth = {1: "position", 2: "content", 3: "unclear", 4: "uniform"}
    assert judge_labels(truth, truth, "unclear") == Counts(4, 0, 0)
    missed = truth | {1: "unclear"}
    assert judge_labels(missed, truth, "unclear") == Counts(3, 1, 0)
    false = truth | {2: "position", 3: "content"}
    assert judge_labels(false, truth, "unclear") == Counts(2, 0, 2)


@BOTH
def test_labels_and_writers_of_planted_models_are_found(positions: str) -> None:
    found = {f.measure: f for f in known_measures.labels("heads", positions, 3)}
    even = 1 if positions == "rotary" else 0  # the head that is even to within 2%
    assert found["label of a head"].counts == Counts(9 - even, 0, even)
    assert found["dominant term"].counts[1:] == (0, 0)
    for finding in known_measures.composed("circuit", positions, 3):
        assert finding.counts[1:] == (0, 0)
        assert (finding.auroc or 0) == 1 > (finding.null or 1)


@pytest.mark.nightly
def test_intervals_cover_where_windows_come_in_topics() -> None:
    topics = [x for x in share_settings() if x["world"].topics]
    assert {x["contexts"] for x in topics} == {32, 64}
    score, gain = sweep_intervals(repeats=40, **topics[0])
    assert min(score.worst, gain.worst) >= 0.85


@pytest.mark.nightly
def test_effects_of_edits_are_calibrated() -> None:
    assert all(found.kept for found in paired_effects(600) if found.promised)


@pytest.mark.nightly
def test_a_flow_that_is_one_has_no_anomalies_and_gaussian_residuals() -> None:
    anomalous, normal = flow_reports(100, 6, 12)
    assert anomalous.kept
    assert normal.kept


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("experiment", "changes", "tables", "holds"),
    [
        ("addition", ["examples=50", "problems=8"], {"curves": 4, "prediction": 12}, 1),
        ("randomisation", [], {"final": 27}, 9),
        ("nanogpt", [], {"summary": 6, "curves": 12}, 1),
    ],
)
def test_each_command_runs_and_resumes(
    tmp_path: Path, experiment: str, changes: list[str], tables: dict[str, int], holds: int
) -> None:
    text, out = tmp_path / "u.txt", tmp_path / "made"
    words = random.Random(0).choices(["def", "return", "x", "for", "in", "(", ")", "="], k=6000)
    text.write_text(" ".join(words))
    given = [experiment, "--scale", "smoke", "--out", str(out), "--quiet", "--set", "steps=4"]
    given += [*changes, *([] if experiment == "addition" else ["--text", str(text)])]
    found, again = (command.run(command.arguments(given)) for _ in range(2))
    assert str(again.tables) == str(found.tables)
    assert sum(claim.holds is not None for claim in found.findings) == holds
    for name, rows in tables.items():
        assert len(found.tables[name]) == rows
        assert (out / f"{name}.csv").read_text().count("\n") == 1 + rows
    assert (out / "findings.txt").read_text().startswith(found.text())
    assert {f"{name}.png" for name in found.figures} <= {p.name for p in out.iterdir()}
    assert command.main([*given, "--set", "no=1"]) == 2
