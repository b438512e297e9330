"""Do the tests notice a fault? ``python -m tests.mutate --sample 300 --seed N`` plants faults at
random, one at a time, and runs the tests that evaluate the faulty code.

A line of the package is drawn first, of all lines in which :mod:`tests.faults` can plant one, then
one of its faults. The fault is planted in a copy of the working tree, and its tests run until one
fails. Laws come first, records (:data:`RECORDS`, and the examples of docstrings) last: they notice
that a number changed and cannot tell whether it was right. What may come of a fault is said on the
page (:data:`tests.mutation_page.HEAD`).

Which tests run which line, and how long each takes, is found first: each test file runs once under
a trace (:mod:`tests.probes`), and the answer, which holds for a commit, is kept in ``--map``. A
file that fails without a fault is left out, and so are the tests that only the night runs.
``--files`` asks some test files alone. ``--results`` is read first, so that a run goes on where it
stopped; faults that were out of time are planted again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests import forks, probes
from tests.faults import Fault, faults
from tests.mutation_page import Verdict, line_of, page, reached, tables

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_faults.json"
PACKAGE = "tl_geometry"
RECORDS = ("tests/tables/test_recorded.py", "tests/tables/test_recorded_signatures.py", PACKAGE)
"""The tests that compare with what is stored; the examples of docstrings show what came, too."""
NOT_ASKED = tuple(f"tests/project/test_{name}.py" for name in ("machinery", "packaging", "types"))
"""Tests of what is around the library, which look at none of its numbers."""
SIGNATURES = ("tests/tables/test_signatures.py", RECORDS[1])
"""Tests of every signature and decorator of the package, whether it is called or not."""
STARTS = {"tests/tables/test_refusals.py": 15.0}
"""Seconds that a file takes before its first test: it starts a process of its own."""
QUICK = 20.0
"""Seconds of the tests that run first. They notice most faults."""
PATIENCE = 4
"""Tests that take over a minute more than this many times their time without the fault hang."""


class TestFile(NamedTuple):
    """How long the tests of a file take, and which of them run which line: ``reached`` has numbers
    of tests by line. None is all tests of the file, for what runs while modules are imported."""

    seconds: dict[str, float]
    reached: dict[str, list[int] | None]

    def reaching(self, lines: list[str], name: str) -> tuple[list[str], float]:
        """What pytest is to run for a fault in some lines, in a file of this ``name``, and how long
        it takes."""
        found = [self.reached.get(line, []) for line in lines]
        if name in SIGNATURES or None in found:
            return [name], sum(self.seconds.values())
        numbers = {number for numbers in found for number in numbers or ()}
        tests = [test for number, test in enumerate(self.seconds) if number in numbers]
        return tests, sum(self.seconds[test] for test in tests)


def main() -> int:
    """Make the map and plant the faults; 1 where fewer are caught than the goals say."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--sample", type=int, default=300, help="how many faults are drawn")
    parser.add_argument("--first", type=int, help="plant only the first of them")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--package", help="only in this package, such as render")
    parser.add_argument("--files", nargs="+", help="ask these test files, or those in folders")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one fault")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--map", type=Path, help="which tests run which line; added to")
    parser.add_argument("--results", type=Path, help="lines of JSON, read first and added to")
    parser.add_argument("--page", type=Path, help="the page of the site to write")
    given = parser.parse_args()
    chosen = draw(given.sample, given.seed, given.package)
    drawn = f"{given.package or 'all'}-{given.sample}-{given.seed}"
    names = files_of_tests(given.files or ["tests", PACKAGE])
    covered = map_of(names, given.map or Path(f"mutation-map-{commit()}.json"), given.workers)
    results = given.results or Path(f"mutation-{drawn}{'-some' if given.files else ''}.jsonl")
    verdicts = run(chosen[: given.first], covered, results, given.limit, given.workers)
    sys.stdout.write(tables(verdicts))
    if given.page:
        text = page(verdicts, shlex.join(sys.argv[1:]), commit())
        given.page.write_text(text, encoding="utf-8")
    return int(not reached(verdicts))


def files_of_tests(named: Sequence[str]) -> list[str]:
    """The test files of these names, all those inside of folders, and the package, whose examples
    are tests of one file."""
    paths = [ROOT / name for name in named if name != PACKAGE]
    found = {file for p in paths for file in ([p] if p.is_file() else p.glob("**/test_*.py"))}
    files = {path.relative_to(ROOT).as_posix() for path in found}.difference(NOT_ASKED)
    return sorted(files | ({PACKAGE} & {*named}))


def draw(sample: int, seed: int, package: str | None = None) -> list[Fault]:
    """Faults of random lines, no line twice: a kind of fault is drawn first, then one of its kind,
    since a line with ten numbers is as likely to have a wrong comparison."""
    by_line: dict[tuple[str, int], list[Fault]] = defaultdict(list)
    for fault in _all_faults():
        if package in (None, fault.package):
            by_line[fault.path, fault.line].append(fault)
    generator = random.Random(seed)
    lines = generator.sample(sorted(by_line), min(sample, len(by_line)))
    chosen = []
    for line in lines:
        kind = generator.choice(sorted({fault.kind for fault in by_line[line]}))
        chosen.append(generator.choice([f for f in by_line[line] if f.kind == kind]))
    return chosen


@cache
def _all_faults() -> list[Fault]:
    """Every fault that can be planted in the package."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return [f for p in paths for f in faults(p.relative_to(ROOT).as_posix(), p.read_text())]


def map_of(names: list[str], place: Path, workers: int) -> dict[str, TestFile]:
    """The test files of these names that pass, by name. Those that the map in ``place`` lacks are
    run, each alone, and added to it."""
    known = json.loads(place.read_text()) if place.is_file() else {}
    if missing := [name for name in names if name not in known]:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
            tree = copy_of_tree(Path(folder))
            (tree / "sitecustomize.py").write_text(probes.ELSEWHERE)
            known |= zip(missing, pool.map(partial(_tests_of_file, tree), missing), strict=True)
        place.write_text(json.dumps(known))
    return {name: TestFile(*known[name]) for name in names if known[name] is not None}


def _tests_of_file(tree: Path, name: str) -> TestFile | None:
    """One entry of the map; None where the tests fail, and so can notice nothing."""
    ran = forks.pytest_in(tree, [name], watched=True)
    sys.stdout.write(f"{name}: {sum(ran.seconds.values()):.0f} s {ran.failed or ''}\n")
    sys.stdout.flush()
    return None if ran.code else TestFile(ran.seconds, ran.reached)


def run(
    chosen: list[Fault], covered: dict[str, TestFile], results: Path, limit: float, workers: int
) -> list[Verdict]:
    """The verdicts of the ``chosen`` faults; those in the file ``results`` are not run again,
    unless they were out of time."""
    past = results.read_text().splitlines() if results.exists() else []
    verdicts = [Verdict(Fault(*fault), *rest) for fault, *rest in map(json.loads, past)]
    known = {verdict.fault: verdict for verdict in verdicts if verdict.outcome != "out of time"}
    judged = equivalents()
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            trees.put(compiled(copy_of_tree(Path(folder, str(number)))))

        def verdict(fault: Fault) -> Verdict:
            if identity(fault) in judged:
                return Verdict(fault, "equivalent", "")
            if fault in known:
                return known[fault]
            tree = trees.get()
            try:
                new = Verdict(fault, *judge(fault, covered, tree, limit))
            finally:
                trees.put(tree)
            with results.open("a") as file:
                file.write(json.dumps(new) + "\n")
            sys.stdout.write(line_of(new) + "\n")
            sys.stdout.flush()
            return new

        return list(pool.map(verdict, chosen))


def judge(fault: Fault, covered: dict[str, TestFile], tree: Path, limit: float) -> tuple[str, str]:
    """Plant a fault in a copy of the working tree and run tests until one fails: the outcome, and
    the test. Records are asked about what no other test has caught."""
    place = tree / fault.path
    clean = place.read_bytes()
    lines = [f"{fault.path}:{line}" for line in fault.lines(clean.decode())]
    place.write_bytes(fault.planted(clean))
    laws = {name: file for name, file in covered.items() if name not in RECORDS}
    records = {name: file for name, file in covered.items() if name in RECORDS}
    try:
        outcome, test = first_failure(tests_of(fault, lines, laws), tree, limit)
        if outcome != "caught":
            differs, record = first_failure(tests_of(fault, lines, records), tree, limit)
            if differs == "caught":
                return "only by records", record
            outcome = min(outcome, differs)  # that it survived is known where both came to an end
        return outcome, test
    finally:
        place.write_bytes(clean)


def first_failure(runs: list[tuple[list[str], float]], tree: Path, limit: float) -> tuple[str, str]:
    """Run tests, one process after the other, until one fails."""
    deadline = time.monotonic() + limit
    for tests, seconds in runs:
        left, patience = deadline - time.monotonic(), 60 + PATIENCE * seconds
        try:
            ran = forks.pytest_in(tree, tests, max(0.0, min(left, patience)))
        except TimeoutError:
            return ("caught", "hangs") if patience <= left else ("out of time", "")
        if ran.code:
            return "caught", ran.failed
    return "survived", ""


def tests_of(
    fault: Fault, lines: list[str], covered: dict[str, TestFile]
) -> list[tuple[list[str], float]]:
    """Tests that run the lines of a fault, and how long they take, for one process after the
    other. The quick ones come first, file by file; those of the fault's package look most closely,
    and the table of refusals where something is refused, so their time counts a quarter. A process
    imports all its files before it runs a test, so the quickest (:data:`QUICK`) have a process of
    their own."""
    closely, found = (f"tests/laws/test_{fault.package}",), []
    if re.search(r"\b(require|fail|checks)\b", fault.before):
        closely += ("tests/tables/test_refusals",)
    for name, file in covered.items():
        tests, seconds = file.reaching(lines, name)
        if tests:
            seconds += STARTS.get(name, 0.0)
            found.append((seconds / 4 if name.startswith(closely) else seconds, tests, seconds))
    found.sort(key=lambda entry: entry[0])
    runs: list[tuple[list[str], float]] = [([], 0.0)]
    for _, tests, seconds in found:
        if len(runs) == 1 and runs[0][1] + seconds > QUICK:
            runs.append(([], 0.0))
        runs[-1] = (runs[-1][0] + tests, runs[-1][1] + seconds)
    return [(tests, seconds) for tests, seconds in runs if tests]


def copy_of_tree(folder: Path) -> Path:
    """The files of the working tree that git does not ignore, copied."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def compiled(tree: Path) -> Path:
    """The same tree, after one process has imported all tests and left their bytecode: compiling
    took half of a short run. Later processes leave none, so no fault lies there compiled."""
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0", "tests"]
    settings = os.environ | forks.SETTINGS | {"PYTHONPATH": str(tree)}
    subprocess.run(collect, cwd=tree, env=settings, check=True, capture_output=True)
    return tree


def identity(fault: Fault) -> tuple[str, ...]:
    """A fault by its file and texts, which hold when lines move and comments change."""
    text = code_of((ROOT / fault.path).read_text().splitlines()[fault.line - 1])
    return fault.path, text, fault.before, fault.after


def code_of(line: str) -> str:
    """A line without its indentation and its comment."""
    return line.split("  #")[0].strip()


def equivalents() -> set[tuple[str, ...]]:
    """The faults that were judged by hand to make no difference."""
    entries = json.loads(EQUIVALENT.read_text())
    return {tuple(entry[key] for key in ("path", "line", "before", "after")) for entry in entries}


def commit() -> str:
    """The commit of the working tree, in short."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout[:-1]


if __name__ == "__main__":
    sys.exit(main())
