"""Do the tests notice a fault? ``python -m tests.mutate --sample 300 --seed N`` plants faults at
random, one at a time, and runs the tests that reach the faulty line.

A line of the package is drawn first, of all lines in which :mod:`tests.faults` can plant one, then
one of its faults. The fault is planted in a copy of the working tree. Test files that run the line
follow one another, those of the same package first and the quick ones before the slow ones, until
one fails. A fault is

- caught: a test failed, or a test file took far longer than without the fault;
- survived: all of them passed;
- out of time: they did not come to an end within ``--limit`` seconds;
- equivalent: nobody could see a difference; judged by hand, with its reason, in
  ``tests/equivalent_faults.json``.

Which test files run a line, and how long each takes, stands in a map that ``--map`` makes once (the
whole suite under ``coverage``). ``--results`` is read first, so that a run goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.faults import Fault, faults

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_faults.json"
PACKAGE = "tl_geometry"
GOAL, WORST = 0.85, 0.75
"""Shares of the faults that are to be caught: of all, and in each package."""
PATIENCE = 4
"""A test file that takes this many times as long as without the fault, and a minute, hangs."""


class TestFile(NamedTuple):
    """How long a test file takes, and which lines of the package it runs."""

    seconds: float
    lines: dict[str, list[int]]


class Verdict(NamedTuple):
    """What became of a fault, and the test file that failed."""

    fault: Fault
    outcome: str
    by: str


def main() -> int:
    """Make the map or plant the faults; 1 where fewer are caught than the goal says."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--map", action="store_true", help="run the suite under coverage first")
    parser.add_argument("--sample", type=int, default=300, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--package", help="only in this package, such as render")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one fault")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--coverage", type=Path, default=Path("mutation-coverage.json"))
    parser.add_argument("--results", type=Path, help="lines of JSON, read first and added to")
    arguments = parser.parse_args()
    if arguments.map or not arguments.coverage.is_file():
        arguments.coverage.write_text(json.dumps(coverage_map(arguments.workers)))
    covered = {
        name: TestFile(*entry) for name, entry in json.loads(arguments.coverage.read_text()).items()
    }
    chosen = draw(arguments.sample, arguments.seed, arguments.package)
    results = arguments.results or Path(f"mutation-seed-{arguments.seed}.jsonl")
    verdicts = run(chosen, covered, results, arguments.limit, arguments.workers)
    sys.stdout.write(report(verdicts))
    return int(not reached(verdicts))


def draw(sample: int, seed: int, package: str | None = None) -> list[Fault]:
    """Faults of random lines, no line twice: a kind of fault is drawn first, then one of its kind,
    since a line with ten numbers is as likely to have a wrong comparison."""
    by_line: dict[tuple[str, int], list[Fault]] = defaultdict(list)
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for fault in faults(name, path.read_text()):
            if package in (None, fault.package):
                by_line[name, fault.line].append(fault)
    generator = random.Random(seed)
    lines = generator.sample(sorted(by_line), min(sample, len(by_line)))
    chosen = []
    for line in lines:
        kind = generator.choice(sorted({fault.kind for fault in by_line[line]}))
        chosen.append(generator.choice([f for f in by_line[line] if f.kind == kind]))
    return chosen


def coverage_map(workers: int) -> dict[str, TestFile]:
    """Run each test file alone under ``coverage``: its seconds and the lines that it runs."""
    names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(_lines_of, names), strict=True))


def _lines_of(name: str) -> TestFile:
    from coverage import CoverageData  # only this command needs it

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "lines")
        command = ["coverage", "run", f"--source={PACKAGE}", f"--data-file={data}", "-m"]
        started = time.monotonic()
        _python([*command, "pytest", "-q", "-n", "0", name], ROOT, None)
        seconds = time.monotonic() - started
        measured = CoverageData(str(data))
        measured.read()
        paths = {
            Path(path).relative_to(ROOT).as_posix(): path for path in measured.measured_files()
        }
        lines = {path: sorted(measured.lines(paths[path]) or []) for path in sorted(paths)}
    sys.stdout.write(f"{name}: {seconds:.0f} s\n")
    return TestFile(seconds, lines)


def run(
    chosen: list[Fault], covered: dict[str, TestFile], results: Path, limit: float, workers: int
) -> list[Verdict]:
    """The verdicts of the ``chosen`` faults; those in the file ``results`` are not run again."""
    past = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    known = {Fault(*entry[0]): Verdict(Fault(*entry[0]), *entry[1:]) for entry in past}
    judged = equivalents()
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            trees.put(copy_of_tree(Path(folder, str(number))))

        def verdict(fault: Fault) -> Verdict:
            if fault in known:
                return known[fault]
            tree = trees.get()
            try:
                new = Verdict(fault, *judge(fault, covered, tree, limit))
            finally:
                trees.put(tree)
            with results.open("a") as file:
                file.write(json.dumps(new) + "\n")
            sys.stdout.write(_line(new) + "\n")
            sys.stdout.flush()
            return new

        verdicts = list(pool.map(verdict, chosen))
    return [
        v._replace(outcome="equivalent") if identity(v.fault) in judged else v for v in verdicts
    ]


def judge(fault: Fault, covered: dict[str, TestFile], tree: Path, limit: float) -> tuple[str, str]:
    """Plant a fault in a copy of the working tree and run tests until one fails."""
    place = tree / fault.path
    clean = place.read_bytes()
    place.write_bytes(fault.planted(clean))
    deadline = time.monotonic() + limit
    try:
        for name in tests_of(fault, covered):
            left, patience = deadline - time.monotonic(), 60 + PATIENCE * covered[name].seconds
            try:
                failed = _python(["pytest", "-q", "-x", "-n", "0", name], tree, min(left, patience))
            except subprocess.TimeoutExpired:
                if left < patience:
                    return "out of time", name
                return "caught", f"{name} (hangs)"
            if failed:
                return "caught", name
    finally:
        place.write_bytes(clean)
    return "survived", ""


def tests_of(fault: Fault, covered: dict[str, TestFile]) -> list[str]:
    """Test files that run the line: those of the fault's package first, then the quick ones."""
    names = [name for name, test in covered.items() if fault.line in test.lines.get(fault.path, ())]
    own = f"tests/{fault.package}/"
    return sorted(names, key=lambda name: (not name.startswith(own), covered[name].seconds))


def copy_of_tree(folder: Path) -> Path:
    """The files of the working tree that git does not ignore, copied."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _python(command: list[str], folder: Path, limit: float | None) -> int:
    """Run a module in ``folder`` with the package that lies there; its exit status."""
    settings = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=limit,
        check=False,
    ).returncode


def identity(fault: Fault) -> tuple[str, str, str]:
    """A fault by its file and text, which hold when lines move."""
    return fault.path, fault.before, fault.after


def equivalents() -> set[tuple[str, str, str]]:
    """The faults that were judged by hand to make no difference."""
    entries = json.loads(EQUIVALENT.read_text())
    return {(entry["path"], entry["before"], entry["after"]) for entry in entries}


def shares(verdicts: list[Verdict]) -> dict[str, tuple[Counter[str], float]]:
    """Outcomes by package and in all (``"all"``), and the caught share of those that matter."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        for name in (verdict.fault.package, "all"):
            counts[name][verdict.outcome] += 1
    result = {}
    for name, outcomes in sorted(counts.items()):
        that_matter = outcomes.total() - outcomes["equivalent"]
        result[name] = outcomes, outcomes["caught"] / that_matter if that_matter else 1.0
    return result


def reached(verdicts: list[Verdict]) -> bool:
    """Whether enough faults are caught, in all and in every package."""
    return all(
        share >= (GOAL if name == "all" else WORST) for name, (_, share) in shares(verdicts).items()
    )


def report(verdicts: list[Verdict]) -> str:
    """The table by package, and the faults that no test noticed."""
    columns = ("caught", "survived", "out of time", "equivalent")
    rows = [f"{'package':16}" + "".join(f"{name:>14}" for name in columns) + f"{'share':>8}"]
    for name, (outcomes, share) in shares(verdicts).items():
        numbers = "".join(f"{outcomes[column]:14}" for column in columns)
        rows.append(f"{name:16}{numbers}{share:8.0%}")
    missed = [_line(verdict) for verdict in verdicts if verdict.outcome in columns[1:3]]
    return "\n".join([*rows, "", *missed]) + "\n"


def _line(verdict: Verdict) -> str:
    fault = verdict.fault
    before, after = (" ".join(text.split()) for text in (fault.before, fault.after))
    place = f"{fault.path}:{fault.line}"
    return f"{verdict.outcome}: {place} {fault.kind}: {before} -> {after} {verdict.by}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
