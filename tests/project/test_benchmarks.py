"""The benchmarks run, agree first, and report ratios; their small size takes seconds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tl_geometry
from benchmarks import __main__ as benchmarks
from benchmarks.harness import Row, grown, interleave, resident, show

ROOT = Path(tl_geometry.__file__).parent.parent


@pytest.mark.slow
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


def test_ratios_are_medians_over_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: clock[0])
    spent = iter(
        [9.0, 9.0, 1.0, 2.0, 1.0, 3.0, 10.0, 40.0]
    )  # warm-up, then rounds with ratios 2, 3 and 4

    def work() -> None:
        clock[0] += next(spent)

    rows = interleave("b", {"base": work, "route": work}, rounds=3, notes={"route": "remark"})
    assert [(row.ratio, row.seconds) for row in rows] == [(1.0, 1.0), (3.0, 3.0)]
    show(rows)
    assert "x   3.000  remark" in capsys.readouterr().out


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="needs Linux with a writable /proc/self/clear_refs",
)
def test_growth_is_the_peak_not_what_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with grown() as nothing:
        pass
    with grown() as found:
        held = bytearray(64 * 2**20)
        held[::4096] = b"\1" * len(held[::4096])
        del held
    assert found.mib > 48
    assert nothing.mib < 16
    assert resident() > 0
    assert "MiB above the start" in found.on(Row("b", "r", 1.0, 1.0)).note
