"""Whether geometry says beforehand what a model fails at: measures and scores over the steps of a
run."""

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
"""Measures of geometry that might say which lengths a model will fail at."""


def by_step(
    states: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]], length: int
) -> list[dict[str, Any]]:
    """One row per task, seed and step: scores, and the means over states above 0 (over heads) of
    the measures at one length."""
    found = []
    for key in dict.fromkeys((r["task"], r["seed"], r["step"]) for r in states):
        mine = [
            r
            for r in states
            if (r["task"], r["seed"], r["step"]) == key and r["length"] == length and r["state"] > 0
        ]
        tops = [
            r for r in heads if (r["task"], r["seed"], r["step"]) == key and r["length"] == length
        ]
        row: dict[str, Any] = dict(zip(("task", "seed", "step"), key, strict=True))
        row |= {n: mine[0][n] for n in mine[0] if n.startswith(("exact", "digits", "wpe"))}
        row |= {
            n: math.fsum(r[n] for r in mine) / len(mine)
            for n in ("fracture", "fracture_digits", "roughness", "low_frequency")
        }
        row["pos_pos_fracture"] = math.fsum(r["pos_pos_fracture"] for r in tops) / len(tops)
        found.append(row)
    return found


def prediction(
    rows: Sequence[dict[str, Any]], score_name: str = "digits_out"
) -> list[dict[str, Any]]:
    """Rank correlation of each measure with a score over the measured steps of each run, and of its
    change with the score's change.

    Both rise or fall with the step in most runs, which alone makes a correlation: the one of
    changes is free of a common trend. The untrained model (step 0) is left out: it knows no sums of
    any length.
    """
    found = []
    for task, seed in dict.fromkeys((r["task"], r["seed"]) for r in rows):
        mine = [r for r in rows if (r["task"], r["seed"]) == (task, seed) and r["step"] > 0]
        target = torch.tensor([r[score_name] for r in mine], dtype=torch.float64)
        for name in PREDICTORS:
            values = torch.tensor([r[name] for r in mine], dtype=torch.float64)
            pair = {
                "levels": _rank_correlation(values, target),
                "changes": _rank_correlation(values.diff(), target.diff()),
            }
            found.append(
                {
                    "task": task,
                    "seed": seed,
                    "measure": name,
                    "score": score_name,
                    "points": len(mine),
                    **pair,
                }
            )
    return found


def _rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rho; NaN where either does not vary or fewer than three points are there."""
    if len(x) < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    found: Any = spearmanr(x.numpy(), y.numpy())
    return float(found.statistic)
