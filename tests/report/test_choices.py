"""The sizes that a budget allows, the windows of a report, and what a stopped run leaves to the
next."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tl_geometry as tlg
from tests.modules import copy_of
from tests.reports import model_directory, request
from tests.tiny import tiny, tokens
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.report import budget as budget_module
from tl_geometry.report import build as building
from tl_geometry.report.budget import PARTS, Budget
from tl_geometry.report.folder import Folder

SMOLLM2 = {
    "position and context": (128, 441),
    "the null of spliced windows": (128, 180),
    "the sweep over all heads": (128, 67),
    "rotary planes": (128, 33),
    "the model with dominant terms only": (48, 4),
    "surrogates of W_QK in the live model": (48, 15),
    "surrogates of W_QK at every offset": (16, 7),
    "trajectories": (50, 47),
    "truncated states": (50, 9),
    "skipped layers": (50, 21),
}
"""Part -> tokens of a window, and windows of them in a default report of SmolLM2-135M."""


def test_a_default_report_of_smollm2_takes_nine_minutes() -> None:
    """Its sizes, and what they cost: 1.9 ms for a pass over a token."""
    budget = Budget(n_layers=30, d_model=576)
    assert budget.word == "default"
    assert budget.token_seconds == pytest.approx(1.9e-3, rel=0.01)
    sizes = {part: (n, budget.windows(part, n, 10**6)) for part, (n, _) in SMOLLM2.items()}
    assert sizes == SMOLLM2
    assert set(PARTS) == set(SMOLLM2)
    spent = {p: PARTS[p][1] * n * count * 1.911e-3 for p, (n, count) in SMOLLM2.items()}
    del spent["surrogates of W_QK at every offset"]
    assert 0.7 * 540 < sum(spent.values()) < 540
    quick, full = (Budget(word, n_layers=30, d_model=576) for word in ("quick", "full"))
    assert quick.windows("position and context", 128, 10**6) == 98
    assert full.windows("position and context", 128, 10**6) == 10**6
    assert Budget().windows("position and context", 128, 10**6) == 10**6


def test_the_least_size_may_cost_twice_the_share_of_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(budget_module.PARTS, "a part", (0.25, 2.0))
    budget = Budget("quick", n_layers=1, d_model=1)
    budget.token_seconds = 0.75
    given = ((20, 1), (21, 1), (10**6, 20), (10**6, 21), (10**6, 40), (30, 50), (10**6, 41))
    counts = [budget.windows("a part", 1, most, least) for most, least in given]
    assert counts == [20, 20, 20, 21, 40, 0, 0]
    assert budget.windows("a part", 2, 10**6) == 10
    assert [budget.windows("a part", 40, 5), budget.windows("a part", 41, 5)] == [1, 0]
    assert budget.windows("a part", 20, 30, 1) == 1
