"""The subjects answer what version 1 answered: every key of ``tests/records``, and no other.

A redesign edits ``call`` and ``answers`` of a row, never a record. ``python -m tests --accept``
renews records, for a reader of the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib import recording
from tests.lib.recording import Numbers, compare, entry_of, of_subject, tolerances
from tests.lib.subjects import SUBJECTS
from tests.lib.worlds import DAILY, KINDS, world


def kinds() -> list[Any]:
    """All kinds; those that are not of every day are marked, and have a process of their own."""
    marks = {k: [pytest.mark.nightly, pytest.mark.xdist_group(k)] for k in KINDS if k not in DAILY}
    marks["smollm2"].append(pytest.mark.smollm2)
    return [pytest.param(k, marks=marks.get(k, [])) for k in KINDS]


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("kind", kinds())
def test_answers_are_those_recorded(kind: str, name: str) -> None:
    subject, here = SUBJECTS[name], world(kind)
    new = {}
    for variant in subject.variants:
        if subject.exists(here, variant):
            new |= of_subject(kind, name, variant)
    old = {key: e for key, e in recording.load(kind).items() if key.startswith(f"{name}/")}
    found = compare(old, new, tolerances(kind, new))
    assert not found, "\n".join(["(python -m tests --accept, if it is meant)", *map(str, found)])


@pytest.mark.parametrize("kind", kinds())
def test_every_record_belongs_to_a_subject(kind: str) -> None:
    names = {key.partition("/")[0] for key in recording.load(kind)}
    assert names <= set(SUBJECTS), names - set(SUBJECTS)


def test_a_tolerance_has_a_reason() -> None:
    for subject in SUBJECTS.values():
        for pattern, (size, reason) in subject.tolerance.items():
            assert recording.TOLERANCE < size <= 1e-2, f"{subject.name} {pattern}"
            assert len(reason.split()) >= 4, f"{subject.name} {pattern}"


ARRAY = np.sin(np.arange(60.0)).reshape(3, 20)


def _differs(changed: np.ndarray, array: np.ndarray = ARRAY) -> bool:
    return Numbers.of(array).differs(Numbers.of(changed), 1e-5) is not None


CHANGED = (
    *(ARRAY * (1 + 1e-4), ARRAY + 1e-4, ARRAY[::-1], -ARRAY, ARRAY.reshape(20, 3)),
    np.where(ARRAY[1, 3] == ARRAY, ARRAY + 1e-2, ARRAY),
    np.where(ARRAY[2, 5] == ARRAY, np.nan, ARRAY),
    np.where(ARRAY[0, 0] == ARRAY, np.inf, ARRAY),
)
"""Scaled, shifted, in another order, of another sign or shape; one number, a NaN, an infinity."""


def test_a_change_is_a_difference_and_rounding_is_none() -> None:
    assert all(map(_differs, CHANGED))
    rounded = ARRAY + 1e-6 * np.random.default_rng(0).normal(size=ARRAY.shape)
    assert not any(map(_differs, (ARRAY, rounded, ARRAY.astype(np.float32))))
    assert not _differs(1e-9 * ARRAY * (1 + 1e-6), 1e-9 * ARRAY)


def test_numbers_that_move_between_kept_ones_are_seen() -> None:
    big = np.cos(np.arange(5000.0))
    swapped = big.copy()
    swapped[[50, 51]] = swapped[[51, 50]]
    assert _differs(swapped, big)


def test_words_and_keys_are_compared() -> None:
    old = {"a": entry_of("L0H1"), "b": entry_of(["x", "y"]), "c": entry_of(ARRAY)}
    assert [d.key for d in compare(old, old)] == []
    new = {"a": entry_of("L0H2"), "b": entry_of(["y", "x"]), "d": entry_of(ARRAY)}
    assert [d.key for d in compare(old, new)] == ["a", "b", "c", "d"]
    many = [f"edge {i}" for i in range(100)]
    assert entry_of(many) != entry_of([*many[:50], "another", *many[51:]])


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    odd = np.array([1.0, np.nan, -np.inf, 2.0])
    entries = {"w": entry_of("word"), "l": entry_of(["a"]), "n": entry_of(ARRAY)}
    entries |= {"odd": entry_of(odd), "number": entry_of(np.array(3.0))}
    recording.store("kind", entries, tmp_path)
    assert compare(entries, recording.load("kind", tmp_path)) == []
