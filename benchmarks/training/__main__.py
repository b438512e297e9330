"""``python -m benchmarks.training randomisation|addition|nanogpt [--scale smoke|cpu|paper]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.training import arithmetic, characters, random_tokens
from benchmarks.training.outcome import Outcome
from benchmarks.training.setup import SCALES
from tl_geometry.base.errors import GeometryError, require

EXPERIMENTS: dict[str, Any] = {
    "randomisation": random_tokens,
    "addition": arithmetic,
    "nanogpt": characters,
}
"""The module of each experiment, by the name of its function."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--out", type=Path, help="folder to write to; the same command resumes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--text", type=Path, nargs="+", help="files to train on (not addition)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args(argv)


def run(given: argparse.Namespace) -> Outcome:
    """Run an experiment, and write it to ``--out`` if that is given."""
    module = EXPERIMENTS[given.experiment]
    changes = dict(change.partition("=")[::2] for change in given.set)
    setup = module.SETUPS[given.scale].changed(changes)
    options: dict[str, Any] = {"seeds": tuple(given.seeds), "out": given.out}
    options |= {"device": given.device, "progress": not given.quiet}
    if given.text:
        made = given.experiment == "addition"
        require(not made, "--text", expected="none for addition, which makes its own", got="files")
        options["texts"] = [path.read_text(encoding="utf-8") for path in given.text]
        options["name"] = ", ".join(path.name for path in given.text)
    outcome: Outcome = getattr(module, given.experiment)(setup, **options)
    if given.out is not None:
        outcome.save(given.out)
    return outcome


def main(argv: list[str] | None = None) -> int:
    """Print the findings; 2 where something was refused."""
    try:
        outcome = run(arguments(argv))
    except GeometryError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{outcome.text()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
