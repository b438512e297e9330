"""Does geometry predict what a model will fail at? Rank correlations of measures with scores over
the steps of a run. :mod:`tl_geometry.papers.arithmetic` calls :func:`by_step` and
:func:`prediction`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

PREDICTORS = (
    "fracture",
    "fracture_digits",
    "roughness",
    "pos_pos_fracture",
    "wpe_fracture",
    "wpe_roughness",
)
"""Measures of geometry that might predict the failure out of the trained lengths."""
SCORE = "digits_out"
"""The score that they are compared with: the share of right digits out of the trained lengths."""
STATE_MEASURES = ("fracture", "fracture_digits", "roughness", "low_frequency")
"""Measures of the positional basis that are averaged over states."""


def by_step(
    states: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]], length: int
) -> list[dict[str, Any]]:
    """One row per task, seed and step: the scores, and the measures on lines of one length, as
    means over states above 0 or over heads."""
    keys = ("task", "seed", "step")
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(tuple(r[k] for k in keys) for r in states):
        place = dict(zip(keys, key, strict=True)) | {"length": length}
        state_rows = [r for r in states if place.items() <= r.items() and r["state"] > 0]
        head_rows = [r for r in heads if place.items() <= r.items()]
        # every row of a step repeats its scores and the measures of wpe
        scores = {
            name: value
            for name, value in state_rows[0].items()
            if name.startswith(("exact", "digits", "wpe"))
        }
        means = {name: _mean(state_rows, name) for name in STATE_MEASURES}
        means["pos_pos_fracture"] = _mean(head_rows, "pos_pos_fracture")
        rows.append(dict(zip(keys, key, strict=True)) | scores | means)
    return rows


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return math.fsum(row[name] for row in rows) / len(rows)


def prediction(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank correlation of each measure with :data:`SCORE` over the measured steps of each run, and
    of its change with the score's change.

    ``levels`` correlates the values. In most runs both have a trend over the steps, which alone
    makes a correlation. ``changes`` correlates the differences between measured steps, which a
    common trend does not correlate. The untrained model (step 0) is left out, because it answers no
    sums of any length.
    """
    table: list[dict[str, Any]] = []
    for run in dict.fromkeys((r["task"], r["seed"]) for r in rows):
        # step 0 is the untrained model
        run_rows = [r for r in rows if (r["task"], r["seed"]) == run and r["step"] > 0]
        score = torch.tensor([r[SCORE] for r in run_rows], dtype=torch.float64)
        for name in PREDICTORS:
            values = torch.tensor([r[name] for r in run_rows], dtype=torch.float64)
            row: dict[str, Any] = {"task": run[0], "seed": run[1], "measure": name, "score": SCORE}
            row |= {"points": len(run_rows), "levels": _rank_correlation(values, score)}
            table.append(row | {"changes": _rank_correlation(values.diff(), score.diff())})
    return table


def _rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rho; NaN for fewer than three points, or where either does not vary."""
    if len(x) < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    correlation: Any = spearmanr(x.numpy(), y.numpy())
    return float(correlation.statistic)
