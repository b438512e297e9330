"""Planted faults are faults, are drawn by the seed, and are caught by a test that looks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests import mutate
from tests.faults import Fault, faults

SOURCE = '''
def mean(values, start=1, *, biased=False):
    """The mean of what stands behind ``start``."""
    chosen = [v for v in values[start:] if v > 0 and v != 7]
    total = sum(chosen, start - start) @ scale
    fail("values", expected=f"at least {1 + 1}", got="none")
    return total / len(chosen), (not biased)
'''


@pytest.fixture(autouse=True)
def _small_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of these tests need no torch."""
    monkeypatch.setattr(mutate, "IMPORTED_ONCE", ())


def test_faults_of_a_function() -> None:
    planted = {(fault.line, fault.kind, fault.after) for fault in faults("p/a/b.py", SOURCE)}
    assert (2, "constant", "(2)") in planted
    assert (2, "constant", "(True)") in planted
    assert (4, "comparison", "(v >= 0)") in planted
    assert (4, "and, or", "(v > 0 or v != 7)") in planted
    assert (4, "condition left out", "([v for v in values[start:]])") in planted
    assert (5, "operator", "(start + start)") in planted
    assert (5, "order of a product", "(scale @ sum(chosen, start - start))") in planted
    assert (6, "statement left out", "pass") in planted
    assert (7, "order of what is returned", "return (not biased, total / len(chosen))") in planted
    assert (7, "sign or negation", "(biased)") in planted


def test_text_is_left_alone() -> None:
    """The docstring, and the sum inside the message of the error."""
    assert {fault.kind for fault in faults("a.py", SOURCE) if fault.line in (3, 6)} == {
        "statement left out"
    }


@pytest.mark.parametrize("package", ["base", "scores", "render"])
def test_every_fault_changes_code_that_still_parses(package: str) -> None:
    for fault in mutate.draw(60, seed=1, package=package):
        source = (mutate.ROOT / fault.path).read_bytes()
        changed = fault.planted(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), fault


def test_the_seed_chooses() -> None:
    first, again, other = (mutate.draw(40, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len({(fault.path, fault.line) for fault in first}) == 40


def _judged(tmp_path: Path, check: str) -> tuple[str, str]:
    """What becomes of a fault in ``half`` when ``check`` is its test."""
    (tmp_path / "half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "test_half.py").write_text(f"from half import half\n\ndef test():\n    {check}\n")
    (fault,) = (f for f in faults("half.py", "def half(x):\n    return x / 2\n") if "/" in f.before)
    covered = {"test_half.py": mutate.TestFile(1.0, [], {"half.py": {"1": [], "2": []}})}
    outcome = mutate.judge(fault, covered, tmp_path, limit=100)
    assert (tmp_path / "half.py").read_text() == "def half(x):\n    return x / 2\n"
    return outcome


def test_a_test_that_looks_catches(tmp_path: Path) -> None:
    assert _judged(tmp_path, "assert half(6) == 3") == ("caught", "test_half.py")


def test_a_test_that_does_not_look_lets_it_pass(tmp_path: Path) -> None:
    assert _judged(tmp_path, "assert half(0) == 0") == ("survived", "")


def test_a_fault_that_hangs_runs_out_of_time(tmp_path: Path) -> None:
    assert _judged_in(tmp_path, 0.0) == "out of time"
    assert _judged_in(tmp_path, 100.0) == "survived"


def _judged_in(tmp_path: Path, limit: float) -> str:
    (tmp_path / "one.py").write_text("ONE = 1\n")
    (tmp_path / "test_one.py").write_text("def test():\n    pass\n")
    (fault,) = faults("one.py", "ONE = 1\n")
    covered = {"test_one.py": mutate.TestFile(1.0, [], {"one.py": {"1": []}})}
    return mutate.judge(fault, covered, tmp_path, limit)[0]


def test_tests_of_the_package_come_first() -> None:
    fault = Fault("tl_geometry/scores/sums.py", 9, "constant", "1", "2", 0, 1)
    lines = {fault.path: {"9": [1]}}
    covered = {
        "tests/base/test_a.py": mutate.TestFile(1.0, [], lines),
        "tests/scores/test_slow.py": mutate.TestFile(30.0, [], lines),
        "tests/scores/test_quick.py": mutate.TestFile(2.0, [], lines),
        "tests/scores/test_elsewhere.py": mutate.TestFile(1.0, [], {fault.path: {"8": []}}),
    }
    quick_first = [
        "tests/scores/test_quick.py",
        "tests/scores/test_slow.py",
        "tests/base/test_a.py",
    ]
    assert mutate.tests_of(fault, covered) == quick_first


def test_the_map_knows_which_tests_run_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of one test, a line of a fixture (which may matter to all), and a file that fails."""
    package, tests = tmp_path / mutate.PACKAGE, tmp_path / "tests"
    for folder in (package, tests):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (package / "a.py").write_text("def one():\n    return 1\n\ndef two():\n    return 2\n")
    (tests / "test_a.py").write_text(
        "import pytest\n"
        f"from {mutate.PACKAGE} import a\n\n"
        "@pytest.fixture\ndef made():\n    return a.two()\n\n"
        "def test_one():\n    assert a.one() == 1\n\n"
        "def test_two(made):\n    assert made == 2\n"
    )
    (tests / "test_fails.py").write_text("def test():\n    raise ValueError\n")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    covered = mutate.coverage_map(workers=1)
    assert set(covered) == {"tests/test_a.py"}
    found = covered["tests/test_a.py"]
    path = f"{mutate.PACKAGE}/a.py"
    first, second = (Fault(path, line, "constant", "1", "2", 0, 1) for line in (2, 5))
    assert found.runs(first)
    assert found.reaching(first) == ["tests/test_a.py::test_one"]
    assert found.runs(second)
    assert found.reaching(second) == []
    assert not found.runs(first._replace(line=3))


def test_the_goal_counts_what_matters() -> None:
    """Equivalent faults are no faults; a package below the worst share is a failure."""
    one, two = (Fault(f"tl_geometry/{name}/x.py", 1, "k", "1", "2", 0, 1) for name in ("a", "b"))
    caught, missed = mutate.Verdict(one, "caught", "t"), mutate.Verdict(two, "survived", "")
    assert mutate.reached([caught] * 9 + [missed._replace(outcome="equivalent")])
    assert not mutate.reached([caught] * 9 + [missed])  # 90% in all, nothing in package b
    table, not_noticed = mutate.report([caught, missed._replace(outcome="survived")]).split("\n\n")
    assert "| b | 0 | 1 | 0 | 0 | 0% |" in table
    assert "| all | 1 | 1 | 0 | 0 | 50% |" in table
    assert "tl_geometry/b/x.py:1" in not_noticed
    assert "tl_geometry/a/x.py:1" not in not_noticed


def test_equivalent_faults_have_a_reason() -> None:
    for entry in json.loads(mutate.EQUIVALENT.read_text()):
        assert set(entry) == {"path", "line", "before", "after", "reason"}
        lines = (mutate.ROOT / entry["path"]).read_text().splitlines()
        assert entry["line"] in [line.strip() for line in lines], entry
