"""``python -m tests``: format, lint, types, the site, tests and doctests. ``--fast`` leaves out
the slow tests, ``--only tests`` the rest. ``--second`` is for the second generation of
TransformerLens: tests that no generation changes are left out."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ONCE = (
    "base",
    "corpus",
    "measures",
    "papers",
    "render",
    "project/test_benchmarks.py",
    "project/test_docs.py",
    "project/test_site_links.py",
    "project/test_types.py",
    "report/test_smollm2.py",
)
"""Tests of what does not meet TransformerLens (arithmetic, files, pages in a browser), and the
slowest real-model test: its sections run on the embedded model in both generations."""


def main() -> int:
    """Run each check, all of them even when one fails, and return the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    parser.add_argument(
        "--only", choices=("format", "lint", "types", "docs", "tests"), help="one of the checks"
    )
    parser.add_argument("--second", action="store_true", help="leave out what runs once")
    parser.add_argument("--workers", default=str(os.cpu_count() or 1), help="test processes")
    arguments = parser.parse_args()
    python = [sys.executable, "-m"]
    selection = ["-m", "not slow"] if arguments.fast else []
    selection += [f"--ignore=tests/{path}" for path in ONCE if arguments.second]
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
