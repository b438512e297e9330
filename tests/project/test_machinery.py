"""What every run of the tests promises: annotations are checked at every call, a skip that nothing
explains fails in CI, and ``--fast`` runs one architecture of each test."""

from __future__ import annotations

import os
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

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
RIGHT: Any = torch.ones(3)
WRONG: Any = torch.ones(4)


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


def test_a_process_runs_the_whole_of_a_file(request: pytest.FixtureRequest) -> None:
    """What a file makes once is made in one process: xdist goes by the group behind the name."""
    if "PYTEST_XDIST_WORKER" in os.environ and request.config.getoption("loadgroup"):
        assert request.node.nodeid.endswith("@tests/project/test_machinery.py")


def test_every_kind_of_argument_is_checked() -> None:
    found = every_kind(RIGHT, RIGHT, RIGHT, RIGHT, named=RIGHT, later=Later(), other=1)
    assert found[1] == 2
    assert every_kind(RIGHT)[1] == 0, "defaults are as they are"
    planted: dict[str, Callable[[], object]] = {
        "first": lambda: every_kind("text"),  # pyright: ignore[reportArgumentType]
        "second": lambda: every_kind(RIGHT, WRONG),
        "rest": lambda: every_kind(RIGHT, RIGHT, RIGHT, WRONG),
        "named": lambda: every_kind(RIGHT, named=WRONG),
        "later": lambda: every_kind(RIGHT, later="text"),  # pyright: ignore[reportArgumentType]
        "other": lambda: every_kind(RIGHT, other="text"),  # pyright: ignore[reportArgumentType]
        "return value": lambda: every_kind(RIGHT, cut=2),
    }
    for name, call in planted.items():
        with pytest.raises(TypeCheckError, match=f"every_kind: {name}: expected"):
            call()


def test_the_package_is_checked() -> None:
    """Annotations of a public function, and the axes that two arguments share."""
    import tl_geometry as tlg

    states: Any = torch.randn(2, 8, 6, 4).double()
    basis = tlg.decompose_activations(states)
    wrong: Any = "a text"
    with pytest.raises(TypeCheckError):
        basis.transform(wrong)


PLANTED = """import pytest

@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_of_each(architecture): pass

def test_that_skips(): pytest.skip("the moon is down")
"""


@pytest.mark.slow
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
