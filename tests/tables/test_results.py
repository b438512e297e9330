"""Every result that the subjects of the tables return, and every result that these offer, keeps the
same laws: it comes back from a file, its table is what it shows, hostile text stays text, all that
it offers answers, and nothing of it changes.

Nothing is asked of a result by the name of a field: each is asked for whatever it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.lib.data import Provenance
from tests.lib.subjects import SUBJECTS, called
from tests.lib.subjects.row import results_in
from tests.lib.worlds import world
from tests.tables.answers import (
    HOSTILE,
    Cells,
    arrays,
    ask,
    asked,
    different,
    frame,
    offered,
    with_text,
)
from tests.tables.test_signatures import public

pytestmark = pytest.mark.once
KINDS = ("llama", "gpt2", "embedded")
"""Where subjects are looked for: most in the first, what it lacks in the others."""
LINES = "a\nb\r\tc"
PACKAGES = (
    *("models", "base", "decomposition", "scores", "circuits", "interventions"),
    *("weights", "sphere", "flow"),
)
"""Packages that have results."""
FEWEST = 20
"""Results that must at least be found, so that no law passes on nothing."""
NOT_REACHED = {"Result"}
"""Results that no subject returns: the base of all."""


@cache
def results() -> dict[str, tlg.Result]:
    """One result of each class, by its name."""
    found: dict[str, tlg.Result] = {}
    done: set[str] = set()
    for kind in KINDS:
        for subject in SUBJECTS.values():
            variant = next(iter(subject.variants))
            if subject.name in done or subject.name.startswith("view:"):
                continue
            if subject.exists(world(kind), variant):
                done.add(subject.name)
                _add(found, called(kind, subject.name, variant)[0])
    return found


def _add(found: dict[str, tlg.Result], value: Any) -> None:
    """Note results of classes that are new, and the results that these offer."""
    for result in results_in(value):
        if type(result).__name__ not in found:
            found[type(result).__name__] = result
            for answer in asked(result).values():
                _add(found, answer)


def every(law: Callable[[Any], object]) -> dict[str, str]:
    """Results that break a law, and how."""
    assert len(results()) >= FEWEST
    broken = {}
    for name, result in results().items():
        try:
            if said := law(result):
                broken[name] = str(said)
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"[:300]
    return broken


def comes_back(result: Any, folder: Path) -> str:
    # the short file of a basis is another basis
    whole = {"full": True} if isinstance(result, tlg.PositionContext) else {}
    names = [folder / f"{type(result).__name__}{i}.safetensors" for i in range(2)]
    paths = [result.save(name, **whole) for name in names]
    if paths[0].read_bytes() != paths[1].read_bytes():
        return "two files of one result"
    again = tlg.load(paths[0])
    before, after = asked(result), asked(again)
    gone = before.keys() ^ after.keys()
    changed = {n: different(before[n], after[n]) for n in before.keys() & after.keys()}
    return " ".join([*gone, *(f"{n}: {how}" for n, how in changed.items() if how)])


def test_results_come_back_from_files(tmp_path: Path) -> None:
    assert every(lambda result: comes_back(result, tmp_path)) == {}


def test_a_changed_answer_is_found() -> None:
    x = torch.tensor([1.0, math.nan])
    for a, b in [
        (x, x.clone() + 1),
        (x, x.double()),
        ({"a": x}, {"b": x}),
        ((1, "a"), (1, "b")),
        ([1], [1, 2]),
        (1, 1.0),
        (Provenance(model="a"), Provenance(model="b")),
    ]:
        assert different(a, b)
        assert not different(a, a)


def as_number(cell: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(cell.strip().replace("\u2212", "-"))
    return None


def agrees(cell: str, value: Any) -> bool:
    """Whether a cell shows a value, rounded."""
    if isinstance(value, float | int | np.number) and not isinstance(value, bool):
        shown = as_number(cell)
        if not math.isfinite(value):
            return shown is None or not math.isfinite(shown)
        return shown is not None and math.isclose(shown, value, rel_tol=6e-4, abs_tol=1e-12)
    return bool(cell.strip()) or not str(value).strip()


def shows_its_table(result: Any) -> str:
    """Each column of the HTML is a column of the table, row by row; most columns are shown."""
    table = frame(result)
    head, *rows = Cells(result._repr_html_()).rows
    if len(head) < min(len(table.columns), 8):
        return f"{len(head)} of {len(table.columns)} columns"
    if not min(len(table), 10) <= len(rows) <= len(table) + 1:
        return f"{len(rows)} of {len(table)} rows"
    values = [table[name].tolist() for name in table.columns]
    for i, name in enumerate(head):
        cells = [row[i] for row in rows[: len(table)]]
        if not any(all(map(agrees, cells, column)) for column in values):
            return f"the column {name} is none of the table: {cells[:5]}"
    return ""


def is_short(result: Any) -> str:
    """A result says what it is and from what it was made, in a few lines, and shows its table."""
    said = repr(result)
    lines = said.splitlines()
    if not lines[0].startswith(type(result).__name__):
        return lines[0][:80]
    if result.provenance.model and result.provenance.model not in lines[0]:
        return "not from what it was made"
    for how in ("metric", "method", "unit"):
        if str(getattr(result, how, "")) not in lines[0]:
            return f"not its {how}"
    hidden, sweep = len(frame(result).columns) - 16, isinstance(result, tlg.scores.SweepTable)
    if hidden > 0 and f"{hidden} more column" not in said and not sweep:
        return f"{hidden} columns are left out without a word"
    wide = [line for line in lines if len(line) > 3000]
    return f"{len(lines)} lines, {len(wide)} of them wide" if len(lines) > 30 or wide else ""


def ranks_its_rows(result: Any) -> str:
    """``top`` gives the rows of the largest absolute values of a column, NaN last."""
    table = frame(result)
    numbers = [n for n, kind in table.dtypes.items() if kind.kind == "f"]
    for name in numbers if hasattr(result, "top") else ():
        values = table[name] if isinstance(result, tlg.scores.SweepTable) else table[name].abs()
        found = frame(result.top(name, 3)).iloc[:, [*table].index(name)].abs()
        if not np.array_equal(found, values.sort_values(ascending=False)[:3].abs(), True):
            return f"{name}: {found.tolist()}"
    return ""


def is_json(result: Any) -> str:
    """What is offered as JSON is JSON: without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    texts = [ask(result, name) for name in offered(result) if "json" in name]
    for text in texts:
        json.loads(text if isinstance(text, str) else json.dumps(text), parse_constant=refuse)
    return ""


def is_frozen(result: Any) -> str:
    for name in (dataclasses.fields(result)[0].name, "something_new"):
        for change in (lambda: setattr(result, name, None), lambda: delattr(result, name)):  # noqa: B023
            with contextlib.suppress(dataclasses.FrozenInstanceError):
                change()
                return f"{name} was changed"
    return ""


LAWS = (shows_its_table, ranks_its_rows, is_short, is_json, is_frozen)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_result_keeps_the_law(law: Callable[[Any], str]) -> None:
    assert every(law) == {}
    if law is is_json:
        assert any("json" in name for result in results().values() for name in offered(result))


def is_inert(result: Any) -> str:
    """HTML holds hostile text as text, and the shown text has no control character."""
    for changed in with_text(result, HOSTILE):
        page, said = changed._repr_html_(), repr(changed)
        seen = Cells(page)
        if "script" in seen.tags or any(name.startswith("on") for name in seen.attributes):
            return "a script"
        if HOSTILE[:20] in said and HOSTILE[:20] not in seen.text:
            return "text that is lost"
        if re.search("[\x1b\u202e\ud800]", page + said):
            return "a control character"
    return ""


def test_hostile_text_stays_text() -> None:
    assert every(is_inert) == {}
    texts = {name: sum(1 for _ in with_text(r, HOSTILE)) for name, r in results().items()}
    assert sum(count > 1 for count in texts.values()) >= 10, texts


def prints_its_rows(result: Any) -> str:
    wanted = len(repr(result).splitlines())
    found = {len(repr(changed).splitlines()) for changed in with_text(result, LINES)}
    return "" if found == {wanted} else f"{found} lines for {wanted}"


def test_line_ends_in_texts_end_no_row() -> None:
    assert every(prints_its_rows) == {}


def hands_out(result: Any) -> list[str]:
    """Answers that are others after somebody wrote over the numbers of an earlier answer."""
    found = []
    for name in offered(result):
        for array in arrays(ask(result, name)):
            kept = array.clone() if isinstance(array, torch.Tensor) else array.copy()
            try:
                array[...] = ~kept if str(kept.dtype).endswith("bool") else 3
            except (RuntimeError, ValueError, TypeError):
                continue  # it cannot be written
            try:
                again = next(arrays(ask(result, name)), None)
                if (
                    again is not None
                    and again.shape == array.shape
                    and bool((again == array).all())
                ):
                    found.append(name)
                    break
            finally:
                array[...] = kept
    return found


def package(result: Any) -> str:
    return type(result).__module__.split(".")[1]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_results_hand_out_changes_nothing(name: str) -> None:
    mine = {n: hands_out(r) for n, r in results().items() if package(r) == name}
    assert mine
    assert {n: names for n, names in mine.items() if names} == {}


def test_no_public_result_is_left_out() -> None:
    classes = [c for c in public().values() if inspect.isclass(c) and issubclass(c, tlg.Result)]
    assert {c.__name__ for c in classes} - results().keys() == NOT_REACHED
    assert {package(result) for result in results().values()} == set(PACKAGES)


def test_what_is_handed_out_is_found() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Planted:
        """Hands out its numbers by one name, and copies by another."""

        numbers: torch.Tensor

        def rows(self) -> list[torch.Tensor]:
            return [row.clone() for row in self.numbers]

    assert hands_out(Planted(torch.rand(2, 3))) == ["numbers"]
