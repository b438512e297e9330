"""``python -m benchmarks [--size smoke|cpu|gpu] [--only NAME ...] [--json]``: agreement first, then
interleaved ratios."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks.harness import machine, show, steady

NAMES = sorted(
    p.stem
    for p in Path(__file__).parent.glob("*.py")
    if p.stem not in ("__init__", "__main__", "harness", "planted")
    and not p.stem.startswith(("calibration_", "known_"))
)


def main() -> int:
    """Run the chosen benchmarks and print their rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--size", choices=("smoke", "cpu", "gpu"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        sys.stdout.write(f"{machine()}\n")
    rows = []
    for name in arguments.only:
        with redirect_stdout(sys.stderr):  # what libraries say is no row
            found = importlib.import_module(f"benchmarks.{name}").run(arguments.size)
        rows += found
        if not arguments.json:
            show(found)
    if arguments.json:
        show(rows, as_json=True)
    return 0


if __name__ == "__main__":
    steady()
    sys.exit(main())
