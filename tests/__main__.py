"""``python -m tests``: format, lint, types, the site, tests and doctests. ``--fast`` leaves out
the slow tests, ``--only tests`` the rest; ``--second`` is for the second environment, with another
generation of TransformerLens: the tests without those of :data:`ONCE`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ONCE = (
    "tests/cli/test_arguments.py",
    "tests/decomposition/test_distributed.py",
    "tests/experiments",
    "tests/project/test_benchmarks.py",
    "tests/project/test_calibration.py",
    "tests/project/test_packaging.py",
    "tests/project/test_skips.py",
    "tests/render",
    "tests/report/test_article.py",
    "tests/report/test_report.py",
    "tl_geometry/render",
    *(f"tests/project/test_notebooks.py::test_runs_offline[{at:02}" for at in (2, 3, 4, 5, 7, 8)),
)
"""What tests pages, files, processes and models of its own, none of which knows the generation of
TransformerLens: run in the first environment alone. The report of every shape, each command, two
notebooks and the first script run, and draw, in both."""


def main() -> int:
    """Run each check, all of them even when one fails, and return the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    parser.add_argument(
        "--only", choices=("format", "lint", "types", "docs", "tests"), help="one of the checks"
    )
    parser.add_argument("--second", action="store_true", help="the tests, less those of one run")
    parser.add_argument("--workers", default=str(os.cpu_count() or 1), help="test processes")
    arguments = parser.parse_args()
    python = [sys.executable, "-m"]
    selection = ["-m", "not slow"] if arguments.fast else []
    if arguments.second:
        arguments.only = "tests"
        selection += [f"--deselect={name}" for name in ONCE]
    checks = {
        "format": [*python, "ruff", "format", "--check", "."],
        "lint": [*python, "ruff", "check", "."],
        "types": [*python, "pyright"],
        "docs": [*python, "sphinx", "-q", "-W", "--keep-going", "docs", "docs/_build/html"],
        "tests": [
            *python,
            "pytest",
            "-q",
            "-n",
            arguments.workers,
            "--dist",
            "loadfile",
            "--durations",
            "15",
            *selection,
        ],
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    failed = []
    for name, command in checks.items():
        if arguments.only in (None, name):
            started = time.monotonic()
            code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            sys.stdout.write(
                f"{name}: {'ok' if code == 0 else f'FAILED ({code})'} in "
                f"{time.monotonic() - started:.0f} s\n"
            )
            sys.stdout.flush()
            failed += [name] if code else []
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
