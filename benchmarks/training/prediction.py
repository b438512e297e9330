"""Does geometry predict what a model will fail at? Rank correlations of measures with scores over
the steps of a run. :mod:`benchmarks.training.arithmetic` calls :func:`by_step` and
:func:`prediction`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PREDICTORS = (
    "fracture",
    "fracture_digits",
    "roughness",
    "pos_pos_fracture",
    "wpe_fracture",
    "wpe_roughness",
)
"""Measures of geometry that might predict failure at lengths that were not trained."""
SCORE = "digits_out"
"""The score that they are compared with: the share of right digits at untrained lengths."""
STATE_MEASURES = ("fracture", "fracture_digits", "roughness", "low_frequency")
"""Measures of the positional basis that are averaged over states."""


def by_step(
    states: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]], length: int
) -> list[dict[str, Any]]:
    """One row per task, seed and step: the scores, and the measures on lines of one length, as
    means over states above 0 or over heads."""
    import pandas as pd

    keys = ["task", "seed", "step"]
    of_states: Any = pd.DataFrame(states).query("length == @length")
    of_heads: Any = pd.DataFrame(heads).query("length == @length")
    steps = of_states[of_states["state"] > 0].groupby(keys, sort=False)
    # every row of a step repeats its scores and the measures of wpe
    first = steps.first()
    scores = [name for name in map(str, first) if name.startswith(("exact", "digits", "wpe"))]
    table = first[scores].join(steps[list(STATE_MEASURES)].mean())
    table = table.join(of_heads.groupby(keys)["pos_pos_fracture"].mean())
    return table.reset_index().to_dict("records")


def prediction(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank correlation of each measure with :data:`SCORE` over the measured steps of each run, and
    of its change with the score's change; NaN for fewer than three points, or where either does not
    vary.

    ``levels`` correlates the values. In most runs both have a trend over the steps, which alone
    makes a correlation. ``changes`` correlates the differences between measured steps, which a
    common trend does not correlate. The untrained model (step 0) is left out, because it answers no
    sums of any length.
    """
    import pandas as pd

    table: list[dict[str, Any]] = []
    runs: Any = pd.DataFrame(rows).groupby(["task", "seed"], sort=False)
    for (task, seed), run in runs:
        values = run.loc[run["step"] > 0, [*PREDICTORS, SCORE]]
        levels, changes = (
            x.corr("spearman", min_periods=3)[SCORE] for x in (values, values.diff())
        )
        for name in PREDICTORS:
            row: dict[str, Any] = {"task": task, "seed": seed, "measure": name, "score": SCORE}
            row |= {"points": len(values), "levels": float(levels[name])}
            table.append(row | {"changes": float(changes[name])})
    return table
