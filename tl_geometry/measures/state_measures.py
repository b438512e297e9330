"""What form has a report with a row per state? The base class of the reports on position and on
context: a value per measure and state, with its jackknife error, its nulls and its learning
curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.intervals import FEWEST, LeftOut, jackknife_interval
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.resampling import Subsets

Values = dict[str, Tensor]
"""Measures by name."""
Nulls = dict[tuple[str, str], Tensor]
"""Measures of bases without the effect, by (measure, null): one value per draw, or a single number
that is known without drawing."""


UNBOUNDED = ("rank", "explained", "explained_energy", "relative_norm", "fracture_at", "winding")
"""Measures without an error, because their jackknife intervals do not cover.

Ranks, what follows from them, positions and turns change in jumps: without one block a basis often
has exactly the value of the whole corpus, or a far one. Intervals of ``+- t`` errors, meant to
cover 95%, covered 21 to 53% of simulated ranks and 1 to 5% of windings. ``relative_norm`` divides
by the centred norm of the states, which is not stored for each block: intervals with the norm of
the whole corpus, or with one that moves with position and context alone, covered 71 to 86% in the
first states of a real model."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StateMeasures(Result):
    """Measures of each state: ``report["rank"]`` is one of them ``[state]``; the table has a row
    per state.

    ``errors`` are delete-one jackknife standard errors over ``blocks`` of contexts: a 95% interval
    for the mean of the measure over corpora of this size is the measure ``+- t_(blocks - 1)``
    errors (2.36 errors for eight blocks). Measures of :data:`UNBOUNDED` have none.

    ``curve["rank"] [level state]`` is the learning curve: the measure at ``curve_contexts``
    contexts (mean over disjoint blocks; the last level is all contexts). A measure that still
    changes at its end depends on the size of the corpus. ``nulls["rank", "noise"] [state]`` is the
    mean over bases in which the effect is absent, and ``spreads["rank", "shuffled"] [state]`` the
    standard deviation over such bases: a basis without the effect differs from the mean by about
    that much. Sampled nulls have ``draws`` draws.
    """

    table_axes = ("state",)
    states: tuple[int, ...]
    values: Mapping[str, Float[Tensor, " state"]]
    errors: Mapping[str, Float[Tensor, " state"]]
    nulls: Mapping[tuple[str, str], Float[Tensor, " state"]]
    spreads: Mapping[tuple[str, str], Float[Tensor, " state"]]
    curve: Mapping[str, Float[Tensor, "row state"]]
    curve_contexts: tuple[int, ...]
    blocks: int = 0
    draws: int = 0

    def __getitem__(self, measure: str) -> Float[Tensor, " state"]:
        expected = f"one of {', '.join(self.values)}"
        require(measure in self.values, "measure", expected=expected, got=repr(measure))
        return self.values[measure]

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        """Each measure, its error and its nulls, side by side."""
        columns: Values = {}
        for name, value in self.values.items():
            columns[name] = value
            if name in self.errors:
                columns[f"{name}_se"] = self.errors[name]
            for end, nulls in (("", self.nulls), ("_sd", self.spreads)):
                columns |= {f"{name}_{n}{end}": v for (m, n), v in nulls.items() if m == name}
        return {name: (value, ("state",)) for name, value in columns.items()}


def state_fields(
    basis: PositionContext,
    sets: Subsets,
    per_state: list[tuple[Values, Nulls]],
    *,
    flags: Sequence[str] = (),
    least: int = FEWEST,
    draws: int = 0,
) -> dict[str, Any]:
    """Fields of a :class:`StateMeasures`. ``per_state`` holds for every state its values [sample],
    one for each of ``sets`` (the first is all contexts), and its nulls; errors are given from
    ``least`` contexts on."""
    names = list(per_state[0][0])
    table = {n: torch.stack([v[n] for v, _ in per_state], dim=1) for n in names}  # [sample state]
    # fracture_at is a position, whose mean over subsets says nothing
    varied = [n for n in names if len(table[n]) > 1 and n != "fracture_at"]
    curve: Values = {}
    if sets.levels:
        for n in varied:
            levels = [table[n][rows].mean(0) for _, rows in sets.levels]
            curve[n] = torch.stack([*levels, table[n][0]])
    errors: Values = {}
    if sets.jackknife.stop > 1:
        sizes = (~sets.member[sets.jackknife] * basis.group_counts).sum(1).double()
        errors = {
            n: jackknife_interval(table[n][0], [LeftOut(table[n][sets.jackknife], sizes)]).error
            for n in varied
            if n not in UNBOUNDED
        }
    if errors and basis.contexts < least:
        errors = {n: torch.full_like(v, torch.nan) for n, v in errors.items()}
        flags = (*flags, f"fewer than {least} contexts: no errors")
    null_values = {n: torch.stack([nulls[n] for _, nulls in per_state]) for n in per_state[0][1]}
    return {
        "provenance": basis.provenance.flagged(*flags, *basis.flags()),
        "states": basis.states,
        "values": {n: table[n][0] for n in names},
        "errors": errors,
        "nulls": {n: x if x.dim() == 1 else x.mean(1) for n, x in null_values.items()},
        # none for "noise": random halves vary as the corpus itself does, which the errors show
        "spreads": {
            n: x.std(1)
            for n, x in null_values.items()
            if x.dim() == 2 and x.shape[1] > 1 and n[1] != "noise"
        },
        "curve": curve,
        "blocks": sets.blocks,
        "draws": draws,
        # the last level of every curve is the whole corpus
        "curve_contexts": (*(c for c, _ in sets.levels), basis.contexts) if curve else (),
    }
