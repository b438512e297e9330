"""The graph of a real decoder's logit on "When Mary and John ...": the numbers of a plain torch
computation that was made before this library had a graph."""

from __future__ import annotations

import pytest
import torch

import tl_geometry as tlg
from tl_geometry.circuits.logit_graph import LogitGraph

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]
PROMPT = "When Mary and John went to the store, John gave a drink to"
LARGEST = {
    "L23H3": 2.41,
    "L29H1": 1.61,
    "L23H0": 1.26,
    "L29H0": -1.19,
    "L24H4": -1.05,
    "L23H5": 0.85,
}
"""What heads write along value paths, summed over positions."""


@pytest.fixture(scope="module")
def graph() -> LogitGraph:
    model = tlg.zoo.smollm2()
    return tlg.trace_logit(model, PROMPT, " Mary", against=" John", prepend_bos=True)


def test_the_logit_by_token(graph: LogitGraph) -> None:
    assert graph.value == pytest.approx(5.28731, abs=1e-4)
    table = graph.tokens()
    assert float(table.value.sum()) == pytest.approx(graph.value, abs=1e-4)
    found = dict(zip(table.positions, table.value.tolist(), strict=True))
    expected = {1: 1.11, 2: 3.62, 4: -1.01, 10: 1.38}  # "When", " Mary", " John", " John"
    for position, value in expected.items():
        assert found[position] == pytest.approx(value, abs=0.006)
    rest = [abs(value) for position, value in found.items() if position not in expected]
    assert max(rest) < 0.3


def test_the_largest_heads(graph: LogitGraph) -> None:
    heads = graph.head_values.sum(-1)
    for name, value in LARGEST.items():
        layer, head = (int(x) for x in name[1:].split("H"))
        assert float(heads[layer, head]) == pytest.approx(value, abs=0.006)
    # heads that write nothing towards the logit, of which the removal costs it
    for layer, head in ((20, 0), (16, 0), (17, 4)):
        assert abs(float(heads[layer, head])) < 0.1
        assert float(graph.head_moved[layer, head].sum()) > 0.5


def test_edges_and_rest_sum_to_their_node(graph: LogitGraph) -> None:
    incoming = graph.rest.clone()
    incoming.index_put_((graph.targets, graph.edge_types), graph.weights, accumulate=True)
    assert torch.allclose(incoming, graph.totals, atol=1e-9)
    heads = graph.heads_of >= 0
    assert torch.allclose(graph.totals[heads, 0], graph.values[heads], atol=1e-6)
    assert len(graph.names) < 1000
