"""The benchmarks run, agree first, and report ratios; their small size takes seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import tl_geometry
from benchmarks import __main__ as benchmarks
from benchmarks.harness import Row

pytestmark = [pytest.mark.once, pytest.mark.nightly]

ROOT = Path(tl_geometry.__file__).parent.parent


@pytest.mark.nightly
def test_every_benchmark_runs_in_its_small_size() -> None:
    command = [sys.executable, "-m", "benchmarks", "--size", "smoke", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"torch", "transformer-lens", "python", "cores", "device"} <= set(found["machine"])
    rows = [Row(**row) for row in found["rows"]]
    for name in (
        "decompose",
        "sweep",
        "weights",
        "measures",
        "trajectories",
        "langevin",
        "scaling",
        "processes",
        "soak",
        "peak memory",
        "calibration",
        "known",
        "costs",
        "large",
    ):
        assert any(row.benchmark.startswith(name) for row in rows), name
    assert all(row.seconds > 0 or math.isnan(row.seconds) for row in rows)
    shares = ("calibration", "known")
    assert all(row.ratio > 0 for row in rows if row.benchmark not in shares), "a share may be 0"


def test_names_are_the_modules_of_the_folder() -> None:
    assert {
        "decomposition",
        "sweep",
        "weights",
        "measures",
        "trajectories",
        "rendering",
        "scaling",
        "processes",
        "soak",
        "calibration",
        "known",
    } <= set(benchmarks.NAMES)
    assert not {"harness", "__main__"} & set(benchmarks.NAMES)
