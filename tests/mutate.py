"""Do the tests notice a fault? ``python -m tests.mutate --sample 300 --seed N`` plants faults at
random, one at a time, and runs the tests that evaluate the faulty code.

A line of the package is drawn first, of all lines in which :mod:`tests.faults` can plant one, then
one of its faults. The fault is planted in a copy of the working tree, and its tests run until one
fails. A fault is

- caught: a test failed, or the tests took far longer than without the fault;
- survived: all of them passed;
- out of time: they did not come to an end within ``--limit`` seconds;
- equivalent: nobody could see a difference; judged by hand, with its reason, in
  ``tests/equivalent_faults.json``, and not planted.

Which tests evaluate which of the drawn faults, and how long each takes, is found first: the whole
suite runs once with probes (:mod:`tests.probes`), and the answer is kept in ``--map``. A file that
fails without a fault is left out. ``--results`` is read first, so that a run goes on where it
stopped; faults that were out of time are planted again, with the ``--limit`` of the new run.

A test file takes seconds, and so does the import of torch and TransformerLens. So one process
imports them, and tests run in forks of it, which import only the package and its tests.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import json
import math
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
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from tests import probes
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
NOT_ASKED = tuple(
    f"tests/project/test_{name}.py"
    for name in ("benchmarks", "notebooks", "packaging", "site_links", "types", "skips", "mutate")
)
"""Slow tests of what is around the library, which look at none of its numbers."""
LAWS = ("tests/project/test_dataclasses.py", "tests/project/test_defaults.py")
"""Tests of every signature and decorator of the package, whether it is called or not."""
GOAL, WORST = 0.85, 0.75
"""Shares of the faults that are to be caught: of all, and in each package."""
QUICK = 20.0
"""Seconds of the tests that run first. They notice most faults."""
PATIENCE = 4
"""Tests that take over a minute more than this many times their time without the fault hang."""

HEAD = """# Which faults the tests notice

Made by `python -m tests.mutate --sample {sample} --first {planted} --seed {seed}
--limit {limit:.0f} --page docs/mutation.md` on commit {commit} (hours on two cores). {sample} lines
of code of the package were drawn at random, and a fault was planted in the first {planted} of them,
one at a time: another operator, comparison, constant or order, a negated or missing condition, a
missing argument or statement. Then the tests that evaluate the line ran, the quick ones first,
until one failed.

- **caught**: a test failed, or hung;
- **survived**: all of them passed;
- **out of time**: none had failed after {limit:.0f} seconds (what the rest would say is not known,
  and the fault counts as not caught);
- **equivalent**: nobody could see a difference. This was judged by hand, with a reason, in
  `tests/equivalent_faults.json`, and such faults do not count.

Of {that_matter} faults that matter, {share:.0%} were caught (sampling error {error:.1%}), and
{share_in_time:.0%} of those that came to an end. The goal is {goal:.0%}, and {worst:.0%} in each
package. A package has few of these faults, so its own share says little. Whoever mends a test
leaves this page as it is until a run under a new seed: a known sample measures nothing.
"""


class TestFile(NamedTuple):
    """How long the tests of a file take, and which of them evaluate which fault: ``reached`` has
    names of tests by the number of a fault. None is all tests of the file, for what runs while
    fixtures are made or modules imported."""

    seconds: dict[str, float]
    reached: dict[str, list[str] | None]

    def reaching(self, number: int, name: str) -> tuple[list[str], float]:
        """What pytest is to run for a fault, in a file of this ``name``, and how long it takes."""
        tests = self.reached[str(number)]
        if tests is None:
            return [name], sum(self.seconds.values())
        return tests, sum(self.seconds[test] for test in tests)


class Verdict(NamedTuple):
    """What became of a fault, and the test that failed."""

    fault: Fault
    outcome: str
    by: str


def main() -> int:
    """Make the map or plant the faults; 1 where fewer are caught than the goal says."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--sample", type=int, default=300, help="how many faults are drawn")
    parser.add_argument("--first", type=int, help="plant only the first of them")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--package", help="only in this package, such as render")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one fault")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--map", type=Path, help="which tests evaluate which fault; made if absent")
    parser.add_argument("--results", type=Path, help="lines of JSON, read first and added to")
    parser.add_argument("--page", type=Path, help="the page of the site to write")
    arguments = parser.parse_args()
    chosen = draw(arguments.sample, arguments.seed, arguments.package)
    # a map numbers the faults of one draw on one commit
    drawn = f"{arguments.package or 'all'}-{arguments.sample}-{arguments.seed}"
    place = arguments.map or Path(f"mutation-map-{drawn}.json")
    if not place.is_file():
        place.write_text(json.dumps(map_of(chosen, arguments.workers)))
    covered = {name: TestFile(*entry) for name, entry in json.loads(place.read_text()).items()}
    results = arguments.results or Path(f"mutation-seed-{arguments.seed}.jsonl")
    planted = chosen[: arguments.first]
    verdicts = run(planted, covered, results, arguments.limit, arguments.workers)
    sys.stdout.write(report(verdicts))
    if arguments.page:
        head = HEAD.format(**vars(arguments), **in_words(verdicts), commit=commit())
        arguments.page.write_text(f"{head}\n{report(verdicts)}", encoding="utf-8")
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


def map_of(chosen: list[Fault], workers: int) -> dict[str, TestFile]:
    """Run each test file alone with probes at the ``chosen`` faults, which count from 0."""
    names = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")}
    names = sorted(names.difference(NOT_ASKED))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        tree = copy_of_tree(Path(folder))
        by_file: dict[str, dict[int, Fault]] = defaultdict(dict)
        for number, fault in enumerate(chosen):
            by_file[fault.path][number] = fault
        for path, places in by_file.items():
            (tree / path).write_bytes(probes.probed((tree / path).read_bytes(), places))
        (tree / "sitecustomize.py").write_text(probes.ELSEWHERE)
        entries = dict(zip(names, pool.map(partial(_tests_of_file, tree), names), strict=True))
    found = {name: entry for name, entry in entries.items() if entry is not None}
    for number, fault in enumerate(chosen):
        widen(found, str(number), probes.when((ROOT / fault.path).read_bytes(), fault))
    return found


def widen(found: dict[str, TestFile], number: str, when: str) -> None:
    """What is evaluated at import matters to all tests of a file, whichever of them came first and
    so imported the module. Laws look at signatures too."""
    for name, file in found.items():
        imports = when == "import" and number in file.reached
        if imports or (when != "call" and name in LAWS):
            file.reached[number] = None


def _tests_of_file(tree: Path, name: str) -> TestFile | None:
    """One entry of the map; None where the tests fail, and so can notice nothing."""
    ran = pytest_in(tree, [name])
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

        def verdict(number: int, fault: Fault) -> Verdict:
            if identity(fault) in judged:
                return Verdict(fault, "equivalent", "")
            if fault in known:
                return known[fault]
            tree = trees.get()
            try:
                new = Verdict(fault, *judge(fault, number, covered, tree, limit))
            finally:
                trees.put(tree)
            with results.open("a") as file:
                file.write(json.dumps(new) + "\n")
            sys.stdout.write(_line(new) + "\n")
            sys.stdout.flush()
            return new

        return list(pool.map(verdict, range(len(chosen)), chosen))


def judge(
    fault: Fault, number: int, covered: dict[str, TestFile], tree: Path, limit: float
) -> tuple[str, str]:
    """Plant a fault in a copy of the working tree and run tests until one fails: the outcome, and
    the test."""
    place, deadline = tree / fault.path, time.monotonic() + limit
    clean = place.read_bytes()
    place.write_bytes(fault.planted(clean))
    try:
        for tests, seconds in tests_of(fault, number, covered):
            left, patience = deadline - time.monotonic(), 60 + PATIENCE * seconds
            try:
                ran = pytest_in(tree, tests, max(0.0, min(left, patience)))
            except TimeoutError:
                return ("caught", "hangs") if patience <= left else ("out of time", "")
            if ran.code:
                return "caught", ran.failed
    finally:
        place.write_bytes(clean)
    return "survived", ""


def tests_of(
    fault: Fault, number: int, covered: dict[str, TestFile]
) -> list[tuple[list[str], float]]:
    """Tests that evaluate a fault, and how long they take, for one process after the other. The
    quick ones come first, file by file; those of the fault's package look most closely, so their
    time counts a quarter. A process imports all its files before it runs a test, so the quickest
    (:data:`QUICK`) have a process of their own."""
    own, found = f"tests/{fault.package}/", []
    for name, file in covered.items():
        if str(number) in file.reached:
            tests, seconds = file.reaching(number, name)
            found.append((seconds / 4 if name.startswith(own) else seconds, tests, seconds))
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
    settings = os.environ | SETTINGS | {"PYTHONPATH": str(tree)}
    subprocess.run(collect, cwd=tree, env=settings, check=True, capture_output=True)
    return tree


class Ran(NamedTuple):
    """What a process that ran tests has to say: its exit status, the first test or file that
    failed, and what the map needs."""

    code: int
    failed: str
    seconds: dict[str, float]
    reached: dict[str, list[str] | None]


def pytest_in(tree: Path, tests: list[str], limit: float | None = None) -> Ran:
    """Run tests of a ``tree`` in a fork with the package that lies there.

    Raises:
        TimeoutError: they take more than ``limit`` seconds; all processes that they started are
            ended.
    """
    os.environ.update(SETTINGS)  # of the process that is forked: read when torch is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(tree, tests, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise TimeoutError(f"{tests} take more than {limit} seconds")
        ran = Ran(*receiver.recv())
    except EOFError:  # the process has ended without a word
        ran = Ran(-1, "the process", {}, {})
    finally:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # not yet the leader of its group, or gone
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    return ran


def _run_tests(tree: Path, tests: list[str], sender: Connection) -> None:
    """Become a process that knows nothing but ``tree``, run its tests and send what they did."""
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
    # what was imported before the fork is not rewritten for assertions, and needs not be
    quiet = "ignore::pytest.PytestAssertRewriteWarning"
    watch = _Watch(tree / f"notes-{os.getpid()}")
    os.environ[probes.NOTES] = str(watch.notes)
    code = pytest.main(["-q", "-x", "-n", "0", "-W", quiet, *tests], plugins=[watch])
    # plain values, since the class belongs to a module that is gone
    sender.send((int(code), watch.failed, watch.seconds, watch.reached()))
    os._exit(int(code))  # does not wait for threads that a fault has left hanging


class _Watch:
    """Notes during a run of pytest which test fails, how long each takes, and what it reaches."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.hits = set[int]()
        setattr(builtins, probes.NAME, self.hits.add)
        self.failed = ""
        self.outside = set[int]()
        self.seconds: dict[str, float] = defaultdict(float)
        self.of_test: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the seconds of one phase (setup, call, teardown) of a test."""
        self.seconds[report.nodeid] += report.duration
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: Any) -> None:
        """Files that cannot be imported fail too."""
        self.failed = self.failed or (report.nodeid if report.failed else "")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> Iterator[None]:
        """Tests run in the order in which they were asked for, whatever the suite's own is."""
        asked = list(items)
        yield
        items[:] = asked

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """What is reached between calls belongs to no single test."""
        self._leave_outside()
        yield
        for number in self._hits():
            self.of_test[str(number)].append(item.nodeid)

    def reached(self) -> dict[str, list[str] | None]:
        """Which tests evaluate which fault; what imports and fixtures reach is for all tests."""
        self._leave_outside()
        return {**self.of_test, **{str(number): None for number in self.outside}}

    def _leave_outside(self) -> None:
        self.outside |= self._hits()

    def _hits(self) -> set[int]:
        """What was reached since this was called last, here and in other processes."""
        found, self.hits = self.hits, set()
        setattr(builtins, probes.NAME, self.hits.add)
        for place in self.notes.glob("*"):
            found |= set(map(int, place.read_text().split()))
            place.unlink()
        return found


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
    # the sum comes first; "." is a module beside the packages
    for name, (outcomes, share) in sorted(shares(verdicts).items(), key=lambda x: x[0] != "all"):
        name = PACKAGE if name == "." else name
        rows.append(_row([name, *(str(outcomes[column]) for column in columns), f"{share:.0%}"]))
    columns_of_misses = ["not noticed", "outcome", "kind", "text", "fault"]
    rows += ["", _row(columns_of_misses), "|---" * len(columns_of_misses) + "|"]
    for verdict in verdicts:
        if verdict.outcome in columns[1:3]:
            fault = verdict.fault
            code = [f"`{_on_one_line(text)}`" for text in (fault.before, fault.after)]
            place = f"`{fault.path}:{fault.line}`"
            rows.append(_row([place, verdict.outcome, fault.kind, *code]))
    return "\n".join(rows) + "\n"


def in_words(verdicts: list[Verdict]) -> dict[str, float]:
    """Numbers of the page's text. The error is that of a share of independent draws."""
    outcomes, share = shares(verdicts)["all"]
    that_matter = outcomes.total() - outcomes["equivalent"]
    return {
        "planted": len(verdicts),
        "goal": GOAL,
        "worst": WORST,
        "that_matter": that_matter,
        "share": share,
        "error": math.sqrt(share * (1 - share) / that_matter),
        "share_in_time": outcomes["caught"] / (that_matter - outcomes["out of time"]),
    }


def commit() -> str:
    """The commit of the working tree, in short."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout[:-1]


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
