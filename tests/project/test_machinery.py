"""What every run of the tests promises, that annotations are checked at calls; and ``python -m
tests.mutate``, that planted faults are caught by a test that looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests import forks, mutate
from tests.faults import Fault, faults
from tests.mutation_page import Verdict, reached, shares
from tl_geometry.flow import separation

pytestmark = pytest.mark.once

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
    planted: dict[str, Callable[[], object]] = {
        "first": lambda: every_kind(TEXT),
        "second": lambda: every_kind(RIGHT, WRONG),
        "rest": lambda: every_kind(RIGHT, RIGHT, RIGHT, WRONG),
        "named": lambda: every_kind(RIGHT, named=WRONG),
        "later": lambda: every_kind(RIGHT, later=TEXT),
        "other": lambda: every_kind(RIGHT, other=TEXT),
        "return value": lambda: every_kind(RIGHT, cut=2),
        "values": lambda: separation.resampled_t_reach(TEXT, 0.3),  # of the package
    }
    for name, call in planted.items():
        with pytest.raises(TypeCheckError, match=f"{name}: expected"):
            call()


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
    for name, check in (("test_law.py", law), (mutate.RECORDS[0], record)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"from half import half\n\ndef test():\n    assert {check}\n"
        (tmp_path / name).write_text(text)
        covered[name] = mutate.TestFile({f"{name}::test": 1.0}, {"half.py:2": [0]})
    (fault,) = (f for f in faults("half.py", source) if "/" in f.before)
    assert mutate.judge(fault, covered, tmp_path, limit)[0] == outcome
    assert (tmp_path / "half.py").read_text() == source


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
