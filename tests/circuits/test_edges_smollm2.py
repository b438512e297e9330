"""Edges of a real decoder on names: few carry the behaviour, as plain torch had found before."""

from __future__ import annotations

from typing import Any

import pytest

import tl_geometry as tlg

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]
NAMES = (("Mary", "John"), ("Anna", "Paul"), ("Sarah", "James"), ("Emma", "David"))
ORDERS = [order for pair in NAMES for order in (pair, pair[::-1])]
TEXT = "When {} and {} went to the store, {} gave a drink to"
PAIRS: dict[str, Any] = {
    "prompts": [TEXT.format(a, b, b) for a, b in ORDERS],
    "counterfactuals": [TEXT.format(a, b, a) for a, b in ORDERS],
    "targets": [(f" {a}", f" {b}") for a, b in ORDERS],
    "prepend_bos": True,
}


def test_few_edges_carry_the_names() -> None:
    model = tlg.zoo.smollm2()
    scores = tlg.edge_scores(model, **PAIRS)
    assert len(scores.scores) == 70_651
    assert scores.clean > 4
    assert scores.counterfactual < -4
    # heads that write the names, and one that matters only by where later heads look
    largest = [row[0] for row in scores.nodes().rows()[:9]]
    assert {"L23H3", "L29H1", "L29H0", "L20H0"} <= set(largest)
    curve = tlg.faithfulness(model, scores, **PAIRS, fractions=(0.005, 0.02, 0.1), draws=1)
    f = curve.f.value.tolist()
    # a plain torch computation on other names gave 0.66, 0.82 and 0.95
    assert f[0] > 0.5
    assert f[1] > 0.7
    assert 0.85 < f[2] < 1.05
    assert float(curve.random_f.abs().max()) < 0.01
