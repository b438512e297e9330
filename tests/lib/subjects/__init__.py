"""The subject table: a row for each public function of version 2 (:class:`~.row.Subject`), one
module for each group of packages. A public function without a row fails a test.

:func:`called` calls a subject once in a process, and notes what the call disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.lib.subjects import (
    circuits,
    decomposition,
    flow,
    geometry,
    interventions,
    models,
    papers,
    report,
    scores,
    views,
)
from tests.lib.subjects.guard import Guard
from tests.lib.subjects.row import Answers, Subject
from tests.lib.worlds import World, world

__all__ = ["SUBJECTS", "Answers", "Subject", "answered", "called", "cases"]

_MODULES = (
    models,
    decomposition,
    scores,
    circuits,
    interventions,
    geometry,
    flow,
    papers,
    report,
    views,
)
SUBJECTS: dict[str, Subject] = {s.name: s for module in _MODULES for s in module.SUBJECTS}
"""All rows by name."""
assert len(SUBJECTS) == sum(len(module.SUBJECTS) for module in _MODULES), "two rows of one name"


def cases(kind: str) -> Iterator[tuple[Subject, str]]:
    """(subject, variant): all that exist for a kind of model."""
    here = world(kind)
    for subject in SUBJECTS.values():
        for variant in subject.variants:
            if subject.exists(here, variant):
                yield subject, variant


@cache
def called(kind: str, name: str, variant: str) -> tuple[Any, Answers, tuple[str, ...]]:
    """What a subject gives in a world, what it answers, and what its call left changed, which
    should be nothing. It is called once in a process, for all tables."""
    here: World = world(kind)
    with Guard(here) as guard:
        result = SUBJECTS[name].result(here, variant)
        answers = SUBJECTS[name].told(result)
    return result, answers, guard.disturbed


def answered(kind: str, name: str, variant: str) -> Answers:
    """What a subject answers in a world."""
    return called(kind, name, variant)[1]
