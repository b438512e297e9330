"""Planted faults are faults, are drawn by the seed, and are caught by a test that looks."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import mutate, probes
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
    covered = {"test_half.py": mutate.TestFile({"test_half.py::test": 1.0}, {"0": None})}
    outcome = mutate.judge(fault, 0, covered, tmp_path, limit=100)
    assert (tmp_path / "half.py").read_text() == "def half(x):\n    return x / 2\n"
    return outcome


def test_a_test_that_looks_catches(tmp_path: Path) -> None:
    assert _judged(tmp_path, "assert half(6) == 3") == ("caught", "test_half.py::test")


def test_a_test_that_does_not_look_lets_it_pass(tmp_path: Path) -> None:
    assert _judged(tmp_path, "assert half(0) == 0") == ("survived", "")


def test_a_fault_that_hangs_runs_out_of_time(tmp_path: Path) -> None:
    assert _judged_in(tmp_path, 0.0) == "out of time"
    assert _judged_in(tmp_path, 100.0) == "survived"


def _judged_in(tmp_path: Path, limit: float) -> str:
    (tmp_path / "one.py").write_text("ONE = 1\n")
    (tmp_path / "test_one.py").write_text("def test():\n    pass\n")
    (fault,) = faults("one.py", "ONE = 1\n")
    covered = {"test_one.py": mutate.TestFile({"test_one.py::test": 1.0}, {"0": None})}
    return mutate.judge(fault, 0, covered, tmp_path, limit)[0]


@pytest.mark.parametrize(("before", "after"), [("survived", "survived"), ("out of time", "caught")])
def test_only_what_was_undecided_is_planted_again(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = mutate.draw(1, seed=5)[0]
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(mutate.Verdict(fault, before, "")) + "\n")
    for name in ("copy_of_tree", "compiled"):
        monkeypatch.setattr(mutate, name, lambda folder: folder)
    monkeypatch.setattr(mutate, "judge", lambda *_: ("caught", "a test"))
    for _ in range(2):  # what is added to the file counts the second time
        (verdict,) = mutate.run([fault], {}, results, limit=1, workers=1)
        assert verdict.outcome == after


def test_tests_run_in_the_order_asked_for(tmp_path: Path) -> None:
    """Whatever order a suite gives itself."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n    items.reverse()\n"
    )
    text = "".join(f"def test_{name}():\n    raise ValueError\n\n" for name in ("one", "two"))
    (tmp_path / "test_order.py").write_text(text)
    for names in (("one", "two"), ("two", "one")):
        tests = [f"test_order.py::test_{name}" for name in names]
        assert mutate.pytest_in(tmp_path, tests).failed == tests[0]


def test_quick_tests_of_the_package_come_first() -> None:
    fault = Fault("tl_geometry/scores/sums.py", 9, "constant", "1", "2", 0, 1)
    covered = {
        "tests/base/test_a.py": mutate.TestFile({"a": 4.0}, {"0": ["a"]}),
        "tests/scores/test_slow.py": mutate.TestFile({"b": 30.0, "c": 60.0}, {"0": None}),
        "tests/scores/test_quick.py": mutate.TestFile({"d": 12.0, "e": 900.0}, {"0": ["d"]}),
        "tests/scores/test_elsewhere.py": mutate.TestFile({"f": 1.0}, {"1": ["f"]}),
    }
    assert mutate.tests_of(fault, 0, covered) == [
        (["d", "a"], 12.0 + 4.0),
        (["tests/scores/test_slow.py"], 30.0 + 60.0),
    ]


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
    covered = mutate.map_of(faults(f"{mutate.PACKAGE}/a.py", source), workers=1)
    assert set(covered) == {"tests/test_a.py"}
    found = covered["tests/test_a.py"]
    one, two, elsewhere = (f"tests/test_a.py::test_{name}" for name in ("one", "two", "elsewhere"))
    assert found.reached == {"0": [one], "1": None, "2": [elsewhere]}
    assert set(found.seconds) == {one, two, elsewhere}


PROBED = """
def kind(value, least=2):
    'Which?'
    match value:
        case 1:
            return one(value, (lambda x, y=5: x + y))
    total = 7
    total += value[
        3
    ]
    return sum(x for x in value if x > least), total
"""


def test_probes_change_nothing_and_tell_what_is_evaluated() -> None:
    """A default counts where the function is called, a pattern where its subject is compared."""
    planted = faults("a.py", PROBED)
    probed = probes.probed(PROBED.encode(), dict(enumerate(planted)))
    assert probed.count(b"\n") == PROBED.count("\n")
    found = set[int]()
    clean: dict[str, Any] = {}
    watched: dict[str, Any] = {probes.NAME: found.add}
    exec(PROBED, clean)
    exec(probed, watched)
    assert not found
    assert clean["kind"]([8, 1, 4, 1]) == watched["kind"]([8, 1, 4, 1]) == (12, 8)
    texts = {planted[number].before for number in found}
    assert {"2", "1", "7", "3", "x > least"} <= texts
    assert not {"5", "x + y"} & texts


@pytest.mark.parametrize(
    ("before", "expected"),
    [("1", "import"), ("2", "signature"), ("3", "call"), ("4", "import"), ("5", "call")],
)
def test_when_a_piece_of_code_is_evaluated(before: str, expected: str) -> None:
    """Decorators and attributes of classes at import, defaults with their signature."""
    source = "@f(1)\ndef g(x=2):\n    return 3\n\nclass A:\n    y = 4\n    z = lambda: 5\n"
    fault = next(f for f in faults("a.py", source) if f.before == before)
    assert probes.when(source.encode(), fault) == expected


@pytest.mark.parametrize(
    ("when", "own", "law"), [("import", None, None), ("signature", ["b"], None), ("call", ["b"], 0)]
)
def test_what_is_evaluated_at_import_is_for_all_tests_of_a_file(
    when: str, own: list[str] | None, law: list[str] | int | None
) -> None:
    """Also for those that did not import the module; laws look at whatever is in a signature."""
    reached: dict[str, dict[str, list[str] | None]] = {"tests/a.py": {"7": ["b"]}}
    reached |= {"tests/c.py": {}, mutate.LAWS[0]: {}}
    files = {name: mutate.TestFile({"b": 1.0, "d": 1.0}, of) for name, of in reached.items()}
    mutate.widen(files, "7", when)
    assert reached["tests/a.py"] == {"7": own}
    assert reached["tests/c.py"] == {}
    assert reached[mutate.LAWS[0]].get("7", 0) == law


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


def test_the_page_counts_what_came_to_an_end_apart() -> None:
    fault = Fault("tl_geometry/a/x.py", 1, "k", "1", "2", 0, 1)
    outcomes = ["caught"] * 6 + ["survived"] * 2 + ["out of time"] * 2 + ["equivalent"] * 5
    words = mutate.in_words([mutate.Verdict(fault, outcome, "") for outcome in outcomes])
    assert (words["that_matter"], words["share"], words["share_in_time"]) == (10, 0.6, 0.75)
    assert words["error"] == pytest.approx((0.6 * 0.4 / 10) ** 0.5)
    text = mutate.HEAD.format(sample=15, seed=3, limit=9.0, commit="abc", **words)
    assert "Of 10 faults that matter, 60% were caught (sampling error 15.5%), and\n75%" in text


def test_equivalent_faults_have_a_reason() -> None:
    for entry in json.loads(mutate.EQUIVALENT.read_text()):
        assert set(entry) == {"path", "line", "before", "after", "reason"}
        lines = (mutate.ROOT / entry["path"]).read_text().splitlines()
        assert entry["line"] in map(mutate.code_of, lines), entry
