"""Planted faults are faults, and are caught by a test that looks; by records, where no law does."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from tests import forks, mutate
from tests.faults import Fault, faults
from tests.mutation_page import Verdict, page, reached, shares

pytestmark = pytest.mark.once

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
    monkeypatch.setattr(forks, "IMPORTED_ONCE", ())


def test_faults_of_a_function() -> None:
    """Of every kind, but none in text."""
    planted = {(fault.line, fault.kind, fault.after) for fault in faults("p/a/b.py", SOURCE)}
    assert (2, "constant", "(2)") in planted
    assert (4, "comparison", "(v >= 0)") in planted
    assert (4, "and, or", "(v > 0 or v != 7)") in planted
    assert (4, "condition left out", "([v for v in values[start:]])") in planted
    assert (5, "operator", "(start + start)") in planted
    assert (5, "order of a product", "(scale @ sum(chosen, start - start))") in planted
    assert (7, "order of what is returned", "return (not biased, total / len(chosen))") in planted
    assert (7, "sign or negation", "(biased)") in planted
    in_text = {kind for line, kind, _ in planted if line in (3, 6)}
    assert in_text == {"statement left out"}


@pytest.mark.slow
def test_every_fault_changes_code_that_still_parses() -> None:
    drawn = mutate.draw(100, seed=1)
    assert len({(fault.path, fault.line) for fault in drawn}) == 100
    assert drawn != mutate.draw(100, seed=2)
    for fault in drawn:
        source = (mutate.ROOT / fault.path).read_bytes()
        assert ast.dump(ast.parse(fault.planted(source))) != ast.dump(ast.parse(source)), fault


@pytest.mark.parametrize(
    ("law", "record", "limit", "outcome"),
    [
        ("half(6) == 3", "half(0) == 0", 100, "caught"),
        ("half(0) == 0", "half(6) == 3", 100, "only by records"),
        ("half(0) == 0", "half(0) == 0", 100, "survived"),
        ("half(6) == 3", "half(6) == 3", 0, "out of time"),
    ],
)
def test_a_fault_is_caught_by_a_test_that_looks(
    tmp_path: Path, law: str, record: str, limit: float, outcome: str
) -> None:
    source = "def half(x):\n    return x / 2\n"
    (tmp_path / "half.py").write_text(source)
    covered = {}
    for name, check in (("test_law.py", law), (mutate.RECORDS, record)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"from half import half\n\ndef test():\n    assert {check}\n"
        (tmp_path / name).write_text(text)
        covered[name] = mutate.TestFile({f"{name}::test": 1.0}, {"0": None})
    (fault,) = (f for f in faults("half.py", source) if "/" in f.before)
    assert mutate.judge(fault, 0, covered, tmp_path, limit)[0] == outcome
    assert (tmp_path / "half.py").read_text() == source


def test_the_map_knows_which_tests_evaluate_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of one test, of a fixture (which may matter to all), of a process that a test starts,
    of no test, and a file that fails."""
    package, tests = tmp_path / mutate.PACKAGE, tmp_path / "tests"
    for folder in (package, tests):
        folder.mkdir()
        (folder / "__init__.py").touch()
    names = ("one", "two", "three", "never")
    source = "\n".join(f"def {name}():\n    return {n}\n" for n, name in enumerate(names))
    (package / "a.py").write_text(source)
    (tests / "test_a.py").write_text(
        "import pytest\n"
        f"from {mutate.PACKAGE} import a\n\n"
        "@pytest.fixture\ndef made():\n    return a.two()\n\n"
        "def test_one():\n    assert a.one() == 0\n\n"
        "def test_two(made):\n    assert made == 1\n\n"
        "def test_elsewhere():\n"
        "    import subprocess, sys\n"
        f"    code = 'from {mutate.PACKAGE} import a; a.three()'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    (tests / "test_fails.py").write_text("def test():\n    raise ValueError\n")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    copied = tmp_path.parent / f"{tmp_path.name}-copy"
    monkeypatch.setattr(mutate, "copy_of_tree", lambda folder: shutil.copytree(tmp_path, copied))
    chosen, place = faults(f"{mutate.PACKAGE}/a.py", source), tmp_path / "map.json"
    asked = mutate.test_files(["tests"])
    assert asked == ["tests/test_a.py", "tests/test_fails.py"]
    covered = mutate.map_of(chosen, asked, place, workers=1)
    assert set(covered) == {"tests/test_a.py"}
    found = covered["tests/test_a.py"]
    one, two, elsewhere = (f"tests/test_a.py::test_{name}" for name in ("one", "two", "elsewhere"))
    assert found.reached == {"0": [one], "1": None, "2": [elsewhere]}
    assert set(found.seconds) == {one, two, elsewhere}
    assert mutate.tests_of(chosen[0], 0, covered) == [([one], found.seconds[one])]
    assert mutate.map_of(chosen, asked, place, workers=1) == covered, "read, not made again"


def test_the_goals_count_what_matters() -> None:
    """Equivalent faults are no faults, and what records alone notice is no law."""
    one, two = (Fault(f"tl_geometry/{name}/x.py", 1, "k", "1", "2", 0, 1) for name in ("a", "b"))
    laws, records = Verdict(one, "caught", "t"), Verdict(one, "only by records", "t")
    missed, equivalent = Verdict(two, "survived", ""), Verdict(two, "equivalent", "")
    found = shares([laws] * 6 + [records] * 2 + [missed] * 2 + [equivalent] * 5)
    assert list(found) == ["all", "a", "b"]
    assert found["all"][1:] == (10, 0.6, 0.8)
    assert found["b"][1:] == (2, 0.0, 0.0)
    assert reached([laws] * 8 + [records] * 2 + [equivalent])
    assert not reached([laws] * 6 + [records] * 4), "60% by laws"
    assert not reached([laws] * 99 + [missed]), "none in package b"
    text = page([laws] * 6 + [records] * 2 + [missed] * 2, "--seed 3", "abc")
    assert "| a | 6 | 2 | 0 | 0 | 0 | 75% | 100% |" in text
    assert text.count("tl_geometry/b/x.py:1") == 2
    assert text.count("tl_geometry/a/x.py:1") == 2, "records alone"


def test_equivalent_faults_have_a_reason() -> None:
    for entry in json.loads(mutate.EQUIVALENT.read_text()):
        assert set(entry) == {"path", "line", "before", "after", "reason"}
        lines = (mutate.ROOT / entry["path"]).read_text().splitlines()
        assert entry["line"] in map(mutate.code_of, lines), entry
