"""Runs tests of a copy of the working tree, for :mod:`tests.mutate`.

A test file takes seconds, and so does the import of torch and TransformerLens. So one process
imports them, and tests run in forks of it, which import only the package and its tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import probes

ROOT = Path(__file__).resolve().parent.parent
IMPORTED_ONCE = (
    *("torch", "transformer_lens", "pandas", "matplotlib.pyplot", "scipy.stats"),
    *("hypothesis", "beartype"),
)
"""What most test files import and no fault changes."""
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
"""The environment of the tests: no network, and one thread for each of several processes."""


class Ran(NamedTuple):
    """What a process that ran tests has to say: its exit status, the first test or file that
    failed, and what the map needs."""

    code: int
    failed: str
    seconds: dict[str, float]
    reached: dict[str, list[int] | None]


def pytest_in(
    tree: Path, tests: list[str], limit: float | None = None, *, watched: bool = False
) -> Ran:
    """Run tests of a ``tree`` in a fork with the package that lies there; ``watched`` notes which
    lines each of them runs.

    Raises:
        TimeoutError: they take more than ``limit`` seconds; all processes that they started are
            ended.
    """
    os.environ.update(SETTINGS)  # of the process that is forked: read when torch is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(tree, tests, watched, sender))
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


def _run_tests(tree: Path, tests: list[str], watched: bool, sender: Connection) -> None:
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
        if module.partition(".")[0] in ("tests", "tl_geometry"):
            del sys.modules[module]
    # what was imported before the fork is not rewritten for assertions, and needs not be
    quiet = "ignore::pytest.PytestAssertRewriteWarning"
    watch = _Watch(tree / f"notes-{os.getpid()}")
    if watched:
        os.environ[probes.NOTES] = str(watch.notes)
        probes.start()
    chosen = ["-x", "-n", "0", "-m", "not nightly", *tests]
    code = pytest.main(["-q", "-W", quiet, *chosen], plugins=[watch])
    # a file of which only the night runs tests fails no more than an empty one
    code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
    # plain values, since the class belongs to a module that is gone
    sender.send((int(code), watch.failed, watch.seconds, watch.reached()))
    os._exit(int(code))  # does not wait for threads that a fault has left hanging


class _Watch:
    """Notes during a run of pytest which test fails, how long each takes, and what it reaches."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.failed = ""
        self.outside = set[str]()
        self.seconds: dict[str, float] = defaultdict(float)
        self.of_line: dict[str, list[str]] = defaultdict(list)
        self.of_fixture: dict[str, probes.Lines] = defaultdict(set)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the seconds of one phase (setup, call, teardown) of a test."""
        self.seconds[report.nodeid] += report.duration
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: Any) -> None:
        """Files that cannot be imported fail too."""
        self.failed = self.failed or (report.nodeid if report.failed else "")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> Iterator[None]:
        """Tests run in the order in which they were asked for, whatever the suite's own is; what
        the suite leaves out stays out."""
        asked = list(items)
        yield
        kept = set(items)
        items[:] = [item for item in asked if item in kept]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """What makes a fixture is reached by all tests that ask for it."""
        with probes.aside() as lines:
            made = yield
        self.of_fixture[fixturedef.argname] |= lines
        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """What is reached between calls belongs to no single test."""
        self._leave_outside()
        yield
        for line in self._hits(*(self.of_fixture[name] for name in item.fixturenames)):
            self.of_line[line].append(item.nodeid)

    def reached(self) -> dict[str, list[int] | None]:
        """Which tests reach which line, by their number in ``seconds``; what imports run is for all
        tests."""
        self._leave_outside()
        number = {name: i for i, name in enumerate(self.seconds)}
        found = {line: [number[name] for name in names] for line, names in self.of_line.items()}
        return {**found, **dict.fromkeys(self.outside | probes.imported())}

    def _leave_outside(self) -> None:
        self.outside |= self._hits()

    def _hits(self, *fixtures: probes.Lines) -> set[str]:
        """What was run since this was asked last, in other processes too, and made ``fixtures``."""
        found = probes.taken(*fixtures)
        for place in self.notes.glob("*"):
            found |= set(place.read_text().splitlines())
            place.unlink()
        return found
