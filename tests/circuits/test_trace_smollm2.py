"""The graph of a real decoder's logit on "When Mary and John ...": the numbers of a plain torch
computation that was made before this library had a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.models.reconstruction import reconstruction_bound

pytestmark = [pytest.mark.smollm2]
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
def model() -> Any:
    return tlg.zoo.smollm2()


@pytest.fixture(scope="module")
def graph(model: Any) -> LogitGraph:
    return tlg.trace_logit(model, PROMPT, " Mary", against=" John", prepend_bos=True)


def bound(graph: LogitGraph, *, moved: bool) -> float:
    """What rounding of a float32 model may leave of a sum, by the library's own rule."""
    values = (graph.leaf_values, graph.head_values, graph.mlp_values)
    more = (graph.leaf_moved, graph.head_moved, graph.mlp_moved) if moved else ()
    size = sum(float(x.abs().sum()) for x in (*values, *more)) + abs(graph.constant_value)
    return reconstruction_bound(2**-24, size)


def test_the_logit_by_token(graph: LogitGraph) -> None:
    assert graph.value == pytest.approx(5.28731, abs=1e-4)
    table = graph.tokens()
    # the bound is 1.5e-4 here, and 2e-6 was measured
    assert float(table.value.sum()) == pytest.approx(graph.value, abs=bound(graph, moved=False))
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


def test_all_edges_sum_to_their_node_and_to_what_it_wrote(model: Any) -> None:
    """Of a graph that is not pruned, on a prompt of a few tokens. The bounds are 9e-5 and 1.5e-4
    here; 1.2e-6 was measured of values, 6e-7 of queries and keys, 9e-7 of what was written."""
    graph = tlg.trace_logit(model, "Mary and", " John", against=" Mary", prepend_bos=True, keep=1.0)
    values, everything = bound(graph, moved=False), bound(graph, moved=True)
    assert float(graph.tokens().value.sum()) == pytest.approx(graph.value, abs=values)
    incoming = torch.zeros_like(graph.totals)
    incoming.index_put_((graph.targets, graph.edge_types), graph.weights, accumulate=True)
    off = (incoming - graph.totals)[graph.totals[:, 0] != 0].abs()
    assert float(off[:, 0].max()) < values
    assert float(off[:, 1:].max()) < everything
    value_edges = graph.edge_types == 0
    outgoing = torch.zeros_like(graph.values)
    outgoing.index_put_((graph.sources[value_edges],), graph.weights[value_edges], accumulate=True)
    writes = (torch.arange(len(graph.names)) > 0) & (graph.positions >= 0)
    assert float((outgoing - graph.values)[writes].abs().max()) < values
    assert float(graph.values.abs().max()) > 1e3 * values  # no vacuous bound
