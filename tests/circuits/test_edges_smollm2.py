"""Edges of a real decoder on names: few carry the behaviour, as plain torch had found before."""

from __future__ import annotations

from typing import Any

import pytest

import tl_geometry as tlg

pytestmark = [pytest.mark.smollm2, pytest.mark.once]
NAMES = (("Mary", "John"), ("Anna", "Paul"), ("Sarah", "James"), ("Emma", "David"))
ORDERS = [order for pair in NAMES for order in (pair, pair[::-1])]
TEXT = "When {} and {} went to the store, {} gave a drink to"
PAIRS: dict[str, Any] = {
    "prompts": [TEXT.format(a, b, b) for a, b in ORDERS],
    "counterfactuals": [TEXT.format(a, b, a) for a, b in ORDERS],
    "targets": [(f" {a}", f" {b}") for a, b in ORDERS],
    "prepend_bos": True,
}
SPREAD = 0.05
"""Of f by numbers of other machines: edges near the cut change places. Measured at 0.1, 0.5, 1, 2,
5 and 10% of the edges: integrated 0.42, 0.74, 0.77, 0.83, 0.82, 0.90, gradient 0.26, 0.42, 0.58,
0.74, 0.92, 0.90. More edges are not always better: some of them work against the answer."""


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
    assert f == pytest.approx([0.742, 0.830, 0.900], abs=SPREAD)
    assert float(curve.random_f.abs().max()) < 0.01
    gradient = tlg.edge_scores(model, **PAIRS, method="gradient")
    curve = tlg.faithfulness(model, gradient, **PAIRS, fractions=(0.005, 0.02, 0.05), draws=1)
    of_gradient = curve.f.value.tolist()
    # the plain torch computation gave 0.62, 0.84 and 0.92
    assert of_gradient == pytest.approx([0.42, 0.74, 0.92], abs=SPREAD)
    assert f[0] > of_gradient[0] + 0.2  # of the fewest edges the integrated score knows best
