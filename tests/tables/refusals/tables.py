"""All rows of the refusal tables, and the commands."""

from __future__ import annotations

from tests.tables.refusals import (
    calls,
    circuits,
    corpus,
    decomposition,
    fresh,
    fresh_more,
    fresh_numbers,
    interventions,
    models,
    render,
    scores,
    works,
)
from tests.tables.refusals.row import Group, Row

MODULES = (corpus, decomposition, scores, circuits, interventions, works, calls, models, render)
GROUPS: list[Group] = [group for module in MODULES for group in module.GROUPS]
ROWS: list[Row] = [row for group in GROUPS for row in group.rows()]
ROWS += [*fresh.ROWS, *fresh_more.ROWS, *fresh_numbers.ROWS]
