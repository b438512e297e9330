"""``python -m tests``: format, lint, types, tests and doctests, as before a commit.

``--fast`` runs less of it: laws, and the subjects of one model. ``--nightly`` runs
everything, with many more random examples, and builds the site. ``--second`` follows a run with the
other generation of TransformerLens, and leaves out what neither can change. ``--accept`` stores
today's numbers as the records that tests compare with, for a reader of the difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # each of some hundred processes would compile again
}
LEFT_OUT = {"fast": "nightly or slow", "nightly": "", "second": "nightly or once", "": "nightly"}
"""Markers of the tests that a tier does not run."""
QUICK = ("format", "lint", "tests")
OPTIONS = {
    "fast": ["--fast", "tests/laws", "tests/tables/test_subjects.py"],
    "nightly": ["--nightly"],
}
CHECKS = {
    "fast": QUICK,
    "second": QUICK,
    "": (*QUICK, "types"),
    "nightly": (*QUICK, "types", "docs"),
}
"""What a tier checks."""


def main() -> int:
    """Run each check, all of them even when one fails, and return the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--fast", dest="tier", action="store_const", const="fast", default="")
    tier.add_argument("--nightly", dest="tier", action="store_const", const="nightly")
    tier.add_argument("--second", dest="tier", action="store_const", const="second")
    tier.add_argument("--accept", action="store_true", help="renew the stored numbers, then stop")
    names = ("format", "lint", "types", "docs", "tests")
    parser.add_argument("--only", nargs="+", choices=names, help="some checks")
    parser.add_argument("--workers", default=str(os.cpu_count() or 1), help="test processes")
    given = parser.parse_args()
    if given.accept:
        os.environ.update(QUIET)
        from tests.lib import recording

        return recording.main(["--accept"])
    checks = commands(given.tier, given.workers)
    chosen = set(given.only or CHECKS[given.tier])
    failed = 0
    if "docs" in chosen:  # whose links tests follow
        failed += not passes("docs", checks["docs"])
    rest = [name for name in ("tests", "format", "lint", "types") if name in chosen]
    # types take a minute of one core: a process beside those of the tests
    with ThreadPoolExecutor(max_workers=2) as pool:
        return failed + [*pool.map(lambda name: passes(name, checks[name]), rest)].count(False)


def commands(tier: str, workers: str) -> dict[str, list[str]]:
    """The command of each check."""
    python = [sys.executable, "-m"]
    pytest = [*python, "pytest", "-q", "-n", workers, "--dist", "loadgroup", "--durations", "15"]
    if left_out := LEFT_OUT[tier]:
        pytest += ["-m", f"not ({left_out})"]
    pytest += OPTIONS.get(tier, [])
    return {
        "format": [*python, "ruff", "format", "--check", "."],
        "lint": [*python, "ruff", "check", "."],
        "types": [*python, "pyright"],
        "docs": [*python, "sphinx", "-q", "-W", "--keep-going", "docs", "docs/_build/html"],
        "tests": pytest,
    }


def passes(name: str, command: list[str]) -> bool:
    """Whether a check passes; says so, with the time that it took."""
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, check=False).returncode
    said = "ok" if code == 0 else f"FAILED ({code})"
    sys.stdout.write(f"{name}: {said} in {time.monotonic() - started:.0f} s\n")
    sys.stdout.flush()
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
