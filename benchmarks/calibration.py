"""Do printed intervals hold the truth, are printed p-values uniform, and are nulls null? Each is
simulated in its own setting, with a truth that is known: a planted model or a population of data.

``python -m benchmarks --only calibration`` prints coverage of nominal 95% intervals and size of
tests of nominal 5%, ``python -m benchmarks.calibration`` the same as the table of
``benchmarks/calibration.md`` (``--only NAME``: of one part). Rows that end in "(of before)" are
what a correction replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

from benchmarks import (
    calibration_circuits,
    calibration_effects,
    calibration_flow,
    calibration_measures,
    calibration_scores,
)
from benchmarks.calibration_outcomes import Outcome, markdown
from benchmarks.harness import Row

SCALE = {"smoke": 0.001, "cpu": 1.0, "gpu": 1.0}
"""Share of the repeats of the table."""
LEAST = 4
"""Repeats at least, of which a spread is a number."""
PARTS = {
    "scores": calibration_scores,
    "measures": calibration_measures,
    "effects": calibration_effects,
    "flow": calibration_flow,
    "circuits": calibration_circuits,
}
"""Parts of the table, in its order."""


def simulations(
    size: str, parts: Iterable[str] = tuple(PARTS)
) -> list[Callable[[], list[Outcome]]]:
    """Every printed interval, p-value and null, in its own setting."""
    n = lambda full: max(LEAST, int(full * SCALE[size]))  # noqa: E731
    return [simulate for part in parts for simulate in PARTS[part].simulations(n)]


def run(size: str) -> list[Row]:
    """Rows of the benchmark: in place of the ratio the coverage of a nominal 95% or the size of a
    nominal 5%."""
    found = [o for simulate in simulations(size) for o in simulate()]
    return [Row("calibration", o.name, o.seconds, o.value, _note(o)) for o in found]


def _note(o: Outcome) -> str:
    kept = "" if not o.promised else ", kept" if o.kept else ", NOT KEPT"
    return f"{o.goal.name} (+- {o.error:.3f}), worst {o.worst:.3f}, {o.repeats} repeats{kept}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration")
    parser.add_argument("--size", choices=tuple(SCALE), default="cpu")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    chosen = parser.parse_args()
    outcomes = (o for simulate in simulations(chosen.size, chosen.only) for o in simulate())
    sys.stdout.write(markdown(outcomes, sys.stderr.write))
