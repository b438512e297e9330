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
  ``tests/equivalent_faults.json``, and not planted.

Which tests run a line, and how long each file takes, stands in a map that ``--map`` makes once (the
whole suite under ``coverage``; a file that fails without a fault is left out). ``--results`` is
read first, so that a run goes on where it stopped.

A test file takes seconds, and so does the import of torch and TransformerLens. So one process
imports them, and each test file runs in a fork of it, which imports only the package and its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.faults import Fault, faults

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_faults.json"
PACKAGE = "tl_geometry"
IMPORTED_ONCE = (
    *("torch", "transformer_lens", "pandas", "matplotlib.pyplot", "scipy.stats"),
    *("hypothesis", "beartype"),
)
"""What most test files import and no fault changes."""
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
"""The environment of the tests: no network, and one thread for each of several processes."""
GOAL, WORST = 0.85, 0.75
"""Shares of the faults that are to be caught: of all, and in each package."""
PATIENCE = 4
"""A test file that takes this many times as long as without the fault, and a minute, hangs."""


class TestFile(NamedTuple):
    """How long a test file takes, and which of its tests run a line of the package: their numbers
    in ``tests`` by file and line. A line that runs while fixtures are made or modules imported
    matters to all of them, and has no numbers."""

    seconds: float
    tests: list[str]
    lines: dict[str, dict[str, list[int]]]

    def runs(self, fault: Fault) -> bool:
        """Whether a test of the file runs the line."""
        return str(fault.line) in self.lines.get(fault.path, {})

    def reaching(self, fault: Fault) -> list[str]:
        """The tests that run the line; none says: all of the file."""
        return [self.tests[number] for number in self.lines[fault.path][str(fault.line)]]


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


def coverage_map(workers: int) -> dict[str, TestFile]:
    """Run each test file alone under ``coverage``: its seconds and the lines that it runs."""
    names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))
    with ThreadPoolExecutor(workers) as pool:
        entries = dict(zip(names, pool.map(_lines_of, names), strict=True))
    return {name: entry for name, entry in entries.items() if entry is not None}


def _lines_of(name: str) -> TestFile | None:
    """One entry of the map; None where the tests fail, and so can notice nothing."""
    from coverage import CoverageData  # only this command needs it

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "lines")
        started = time.monotonic()
        failed = pytest_in(ROOT, [name], lines=data)
        seconds = time.monotonic() - started
        measured = CoverageData(str(data))
        measured.read()
        tests = sorted(measured.measured_contexts() - {""})
        number = {name: position for position, name in enumerate(tests)}
        lines = {}
        for path in sorted(measured.measured_files()):
            lines[Path(path).relative_to(ROOT).as_posix()] = {
                str(line): [] if "" in names else sorted(number[test] for test in names)
                for line, names in measured.contexts_by_lineno(path).items()
            }
    sys.stdout.write(f"{name}: {seconds:.0f} s{' FAILED' if failed else ''}\n")
    sys.stdout.flush()
    return None if failed else TestFile(seconds, tests, lines)


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
            sys.stdout.write(_line(new) + "\n")
            sys.stdout.flush()
            return new

        return list(pool.map(verdict, chosen))


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
                tests = covered[name].reaching(fault) or [name]
                failed = pytest_in(tree, tests, min(left, patience))
            except TimeoutError:
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
    names = [name for name, test in covered.items() if test.runs(fault)]
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


def pytest_in(
    tree: Path, tests: list[str], limit: float | None = None, lines: Path | None = None
) -> int:
    """The exit status of tests of a ``tree``, which run in a fork with the package that lies there.
    ``lines`` is the file for the lines that each test runs.

    Raises:
        TimeoutError: they take more than ``limit`` seconds; all processes that they started are
            ended.
    """
    os.environ.update(SETTINGS)  # of the process that is forked: read when torch is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    process = context.Process(target=_run_tests, args=(tree, tests, lines))
    process.start()
    process.join(limit if limit is None else max(limit, 0))
    if process.exitcode is None:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # not yet the leader of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        raise TimeoutError(f"{tests} take more than {limit} seconds")
    return process.exitcode


def _run_tests(tree: Path, tests: list[str], lines: Path | None) -> None:
    """Become a process that knows nothing but ``tree``, and run its tests."""
    os.setsid()  # the leader of a group: what the tests start ends with it
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for module in list(sys.modules):  # this file was imported to find this function
        if module.partition(".")[0] in ("tests", PACKAGE):
            del sys.modules[module]
    import pytest

    # what was imported before the fork is not rewritten for assertions, and needs not be
    quiet = "ignore::pytest.PytestAssertRewriteWarning"
    command = ["-q", "-x", "-n", "0", "-W", quiet, *tests]
    code = pytest.main(command) if lines is None else _pytest_with_lines(command, lines)
    os._exit(int(code))  # without the end of threads that a fault may have left waiting


def _pytest_with_lines(command: list[str], lines: Path) -> int:
    """Run pytest; which test ran which line is written into the file ``lines``."""
    import pytest
    from coverage import Coverage  # only the map needs it

    measured = Coverage(data_file=str(lines), source=[PACKAGE])

    class LinesOfEachTest:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
            measured.switch_context(item.nodeid)
            yield
            measured.switch_context("")

    measured.start()
    code = pytest.main(command, plugins=[LinesOfEachTest()])
    measured.stop()
    measured.save()
    return code


def identity(fault: Fault) -> tuple[str, ...]:
    """A fault by its file and texts, which hold when lines move."""
    text = (ROOT / fault.path).read_text().splitlines()[fault.line - 1].strip()
    return fault.path, text, fault.before, fault.after


def equivalents() -> set[tuple[str, ...]]:
    """The faults that were judged by hand to make no difference."""
    entries = json.loads(EQUIVALENT.read_text())
    return {tuple(entry[key] for key in ("path", "line", "before", "after")) for entry in entries}


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
    """Tables in Markdown: outcomes by package, and the faults that no test noticed."""
    columns = ("caught", "survived", "out of time", "equivalent")
    rows = [_row(["package", *columns, "caught share"]), "|---|" + "---:|" * (len(columns) + 1)]
    for name, (outcomes, share) in shares(verdicts).items():
        rows.append(_row([name, *(str(outcomes[column]) for column in columns), f"{share:.0%}"]))
    rows += ["", _row(["not noticed", "kind", "text", "fault"]), "|---|---|---|---|"]
    for verdict in verdicts:
        if verdict.outcome in columns[1:3]:
            fault = verdict.fault
            code = [f"`{_on_one_line(text)}`" for text in (fault.before, fault.after)]
            rows.append(_row([f"{fault.path}:{fault.line}", fault.kind, *code]))
    return "\n".join(rows) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _line(verdict: Verdict) -> str:
    fault = verdict.fault
    before, after = _on_one_line(fault.before), _on_one_line(fault.after)
    place = f"{fault.path}:{fault.line}"
    return f"{verdict.outcome}: {place} {fault.kind}: {before} -> {after} {verdict.by}".rstrip()


def _on_one_line(code: str) -> str:
    return " ".join(code.split())


if __name__ == "__main__":
    sys.exit(main())
