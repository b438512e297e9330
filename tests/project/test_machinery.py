"""What every run of the tests promises: annotations are checked at every call, a skip that nothing
explains fails in CI, ``--fast`` runs one architecture of each test; and what ``python -m
tests.mutate`` promises: planted faults are faults, and are caught by a test that looks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import tl_geometry as tlg
from tests import forks, mutate, probes
from tests.faults import Fault, faults
from tests.mutation_page import Verdict, reached, shares

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
RIGHT: Any = torch.ones(3)
WRONG: Any = torch.ones(4)
TEXT: Any = "text"


@jaxtyping.jaxtyped(typechecker=beartype)
def every_kind(
    first: Float[Tensor, " n"],
    /,
    second: Float[Tensor, " n"] | None = None,
    *more: Float[Tensor, " n"],
    named: Float[Tensor, " n"] | None = None,
    later: Later | None = None,
    **others: int,
) -> tuple[Float[Tensor, " n"], int]:
    return first[: others.get("cut", len(first))], len(more)


class Later:
    """Defined below the function that names it."""


def test_every_kind_of_argument_is_checked() -> None:
    assert every_kind(RIGHT, RIGHT, RIGHT, RIGHT, named=RIGHT, later=Later(), other=1)[1] == 2
    assert every_kind(RIGHT)[1] == 0, "defaults are as they are"
    basis = tlg.decompose_activations(torch.randn(2, 8, 6, 4).double())
    planted: dict[str, Callable[[], object]] = {
        "first": lambda: every_kind(TEXT),
        "second": lambda: every_kind(RIGHT, WRONG),
        "rest": lambda: every_kind(RIGHT, RIGHT, RIGHT, WRONG),
        "named": lambda: every_kind(RIGHT, named=WRONG),
        "later": lambda: every_kind(RIGHT, later=TEXT),
        "other": lambda: every_kind(RIGHT, other=TEXT),
        "return value": lambda: every_kind(RIGHT, cut=2),
        "": lambda: basis.transform(TEXT),  # of the package
    }
    for name, call in planted.items():
        with pytest.raises(TypeCheckError, match=f"{name}: expected"):
            call()


PLANTED = """import pytest

@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_of_each(architecture): pass

def test_that_skips(): pytest.skip("the moon is down")
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ci", "options", "code", "said"),
    [
        ("true", [], 1, "not expected in CI: the moon is down"),
        ("", ["--fast"], 0, "1 passed, 1 skipped, 1 deselected"),
    ],
)
def test_a_run_of_the_tests(
    ci: str, options: list[str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), *options, str(tmp_path)]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.nightly
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    law: str,
    record: str,
    limit: float,
    outcome: str,
) -> None:
    monkeypatch.setattr(forks, "IMPORTED_ONCE", ())  # these tests need no torch
    source = "def half(x):\n    return x / 2\n"
    (tmp_path / "half.py").write_text(source)
    covered = {}
    for name, check in (("test_law.py", law), (mutate.RECORDS, record)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"from half import half\n\ndef test():\n    assert {check}\n"
        (tmp_path / name).write_text(text)
        covered[name] = mutate.TestFile({f"{name}::test": 1.0}, {"half.py::half": None})
    (fault,) = (f for f in faults("half.py", source) if "/" in f.before)
    assert mutate.judge(fault, covered, tmp_path, limit)[0] == outcome
    assert (tmp_path / "half.py").read_text() == source


@pytest.mark.nightly
def test_the_map_knows_which_tests_call_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of one test, of a fixture (which may matter to all), of a process that a test starts,
    of no test, and a file that fails."""
    package, tests = tmp_path / mutate.PACKAGE, tmp_path / "tests"
    for folder in (package, tests):
        folder.mkdir()
        (folder / "__init__.py").touch()
    shutil.copy(str(probes.__file__), tests)
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
    monkeypatch.setattr(forks, "IMPORTED_ONCE", ())
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    copied = tmp_path.parent / f"{tmp_path.name}-copy"
    monkeypatch.setattr(mutate, "copy_of_tree", lambda folder: shutil.copytree(tmp_path, copied))
    homes = [fault.home(source) for fault in faults(f"{mutate.PACKAGE}/a.py", source)]
    place = tmp_path / "map.json"
    asked = mutate.test_files(["tests"])
    assert asked == ["tests/test_a.py", "tests/test_fails.py"]
    covered = mutate.map_of(asked, place, workers=1)
    assert set(covered) == {"tests/test_a.py"}
    found = covered["tests/test_a.py"]
    one, two, elsewhere = (f"tests/test_a.py::test_{name}" for name in ("one", "two", "elsewhere"))
    assert homes == [f"{mutate.PACKAGE}/a.py::{name}" for name in names]
    assert [found.reached.get(home, "no") for home in homes] == [[one], None, [elsewhere], "no"]
    assert set(found.seconds) == {one, two, elsewhere}
    assert mutate.tests_of(faults(f"{mutate.PACKAGE}/a.py", source)[0], homes[0], covered) == [
        ([one], found.seconds[one])
    ]
    assert mutate.map_of(asked, place, workers=1) == covered, "read, not made again"


def test_the_goals_count_what_matters() -> None:
    """Equivalent faults are no faults, and what records alone notice is no law."""
    one, two = (Fault(f"tl_geometry/{name}/x.py", 1, "k", "1", "2", 0, 1) for name in ("a", "b"))
    laws, records = Verdict(one, "caught", "t"), Verdict(one, "only by records", "t")
    missed, equivalent = Verdict(two, "survived", ""), Verdict(two, "equivalent", "")
    found = shares([laws] * 6 + [records] * 2 + [missed] * 2 + [equivalent] * 5)
    assert found["all"][1:] == (10, 0.6, 0.8)
    assert found["b"][1:] == (2, 0.0, 0.0)
    assert reached([laws] * 8 + [records] * 2 + [equivalent])
    assert not reached([laws] * 6 + [records] * 4), "60% by laws"
    assert not reached([laws] * 99 + [missed]), "none in package b"


def test_equivalent_faults_have_a_reason() -> None:
    for entry in json.loads(mutate.EQUIVALENT.read_text()):
        assert set(entry) == {"path", "line", "before", "after", "reason"}
        lines = (mutate.ROOT / entry["path"]).read_text().splitlines()
        assert entry["line"] in map(mutate.code_of, lines), entry
