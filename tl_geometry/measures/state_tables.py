"""What form has a report with a row per state? Beside each measure stand its jackknife error and
what chance gives. The reports of position and context put their numbers here into a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.intervals import FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.base.tables import Table
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.resampling import Subsets

Values = dict[str, Tensor]
"""Measures by name ``[sample]``: the first sample is the whole corpus."""
Nulls = dict[tuple[str, str], Tensor]
"""Measures of bases without the effect, by (measure, null): one value per draw, or a single number
that is known without drawing."""

UNBOUNDED = ("rank", "explained", "fracture_at", "relative_norm", "relative_norm_reference")
"""Measures without an error, because their jackknife intervals do not cover.

Ranks, what follows from them, and positions change in jumps: without one block a basis often has
exactly the value of the whole corpus, or a far one. Intervals of ``+- t`` errors, meant to cover
95%, covered 21 to 53% of simulated ranks. Relative norms divide by a norm of the states, which is
not stored for each block: intervals with the norm of the whole corpus, or with one that moves with
position and context alone, covered 71 to 86% in the first states of a real model."""


def table_of(
    basis: PositionContext, columns: Values, flags: Sequence[str], chance: str, **others: Any
) -> Table:
    """Columns of numbers as a table of a basis; ``others`` of its provenance."""
    frame = {name: column.tolist() for name, column in columns.items()}
    provenance = basis.provenance.flagged(*flags, *basis.flags(), **others)
    return Table.of(frame, provenance, chance=chance)


def report_table(
    basis: PositionContext,
    sets: Subsets,
    per_state: Sequence[tuple[Values, Nulls]],
    flags: Sequence[str],
    least: int,
    draws: int,
    chance: str,
    seed: int,
) -> Table:
    """A row per state: for each measure its value, ``_se``, and for each null its mean and
    ``_sd``.

    Errors are delete-one jackknife standard errors over ``blocks`` of contexts, NaN below ``least``
    contexts or 4 blocks: a 95% interval for the mean of the measure over corpora of this size is
    the measure ``+- t_(blocks - 1)`` errors (2.36 errors for eight blocks). ``_sd`` is the spread
    over draws: a basis without the effect differs from the mean by about that much. None for
    ``noise``, as random halves vary as the corpus does, which the errors show.
    """
    columns: Values = {"state": torch.tensor(basis.states)}
    few = basis.contexts < least or sets.blocks < FEWEST_GROUPS
    sizes = (~sets.member[sets.jackknife] * basis.group_counts).sum(1).double()
    for name in per_state[0][0]:
        value = torch.stack([values[name] for values, _ in per_state], dim=1)  # [sample state]
        columns[name] = value[0]
        if len(value) > 1 and name not in UNBOUNDED:
            error = jackknife_interval(value[0], [LeftOut(value[1:], sizes)]).error
            columns[f"{name}_se"] = torch.full_like(error, torch.nan) if few else error
        for null in (null for measure, null in per_state[0][1] if measure == name):
            drawn = torch.stack([nulls[name, null] for _, nulls in per_state])
            columns[f"{name}_{null}"] = drawn if drawn.dim() == 1 else drawn.mean(1)
            if drawn.dim() == 2 and drawn.shape[1] > 1 and null != "noise":
                columns[f"{name}_{null}_sd"] = drawn.std(1)
    for name, number in (("blocks", sets.blocks), ("draws", draws)):
        columns[name] = torch.full_like(columns["state"], number)
    if sets.blocks and few:
        flags = (*flags, f"fewer than {least} contexts or {FEWEST_GROUPS} blocks: no errors")
    return table_of(basis, columns, flags, chance, seed=seed)
