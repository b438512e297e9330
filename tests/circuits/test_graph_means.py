"""Graphs of several prompts: means and counts are those of the graphs one by one, and sums hold."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.models import loadable, tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits import trace_logit
from tl_geometry.circuits.graph_comparison import GraphComparison
from tl_geometry.circuits.graph_means import AverageGraph, average_graphs
from tl_geometry.circuits.logit_graph import LogitGraph

LENGTH = 9


@cache
def traced(
    count: int = 12, architecture: str = "llama", length: int = LENGTH, **options: Any
) -> tuple[LogitGraph, ...]:
    model = tiny(loadable(architecture)[0][0], architecture)
    prompts = tokens(batch=count, length=length, seed=3)
    settings: dict[str, Any] = {"keep": 0.6, "against": 9} | options
    return tuple(trace_logit(model, row[None], 5, **settings) for row in prompts)


def complete(graph: LogitGraph, table: str) -> dict[tuple[str, int], float]:
    """Value or moved of every component at every position, by a loop."""
    out = {}
    for name, row in zip(graph.leaf_names, getattr(graph, f"leaf_{table}"), strict=True):
        out |= {(name, i): float(v) for i, v in enumerate(row)}
    for l, heads in enumerate(getattr(graph, f"head_{table}")):
        for h, row in enumerate(heads):
            out |= {(f"L{l}H{h}", i): float(v) for i, v in enumerate(row)}
    for l, row in enumerate(getattr(graph, f"mlp_{table}")):
        out |= {(f"mlp{l}", i): float(v) for i, v in enumerate(row)}
    return out


@pytest.mark.parametrize("named", [False, True])
def test_blocks_heads_and_places_are_those_of_the_names(named: bool) -> None:
    graphs = traced()[:6]
    positions = NAMED if named else None
    average = average_graphs(graphs, positions=positions)
    pair = graphs[0].compare(graphs[1], positions=positions and positions[:2])
    for found in (average, pair):
        order = ["first", "end", "elsewhere"] if named else [str(i) for i in range(LENGTH)]
        where = zip(found.layers.tolist(), found.heads_of.tolist(), strict=True)
        for name, place, at, (layer, head) in zip(
            found.names, found.places, found.positions.tolist(), where, strict=True
        ):
            if head >= 0:
                assert name == f"L{layer}H{head}"
            else:
                assert name == f"mlp{layer}" if layer >= 0 else not name.startswith(("mlp", "L"))
            assert place == ("" if name in ("logit", "constants") else order[at])
            end = order.index("end" if named else str(LENGTH - 1))
            assert name != "logit" or at == end
            assert name != "constants" or at == -1
        assert len(found.place_tokens) == len(order)
    texts = [{g.str_tokens[i] for g in graphs[:2] if g.str_tokens} for i in (1, LENGTH - 1)]
    if named:
        assert [set(t.split("|")) - {""} for t in pair.place_tokens[:2]] == texts
        assert pair.place_tokens[2] == ""  # more than two tokens


def unbalanced(average: AverageGraph, size: float) -> int:
    """Nodes whose value edges and rest do not sum to their value."""
    incoming = average.rest.clone()
    value_edges = average.edge_types == 0
    incoming.index_add_(0, average.targets[value_edges], average.weights[value_edges])
    writes = torch.tensor([not n.startswith(("L", "mlp", "logit")) for n in average.names])
    return int(((incoming - average.values).abs() > 1e-6 * size)[~writes].sum())


NAMED = [{"first": 1, "end": -1}] * 6


@pytest.mark.parametrize("positions", [None, NAMED])
@pytest.mark.parametrize("mlp", ["frozen", "leaf"])
def test_the_mean_of_the_logit_is_the_sum_of_means(mlp: str, positions: Any) -> None:
    graphs = traced(6, "llama", mlp=mlp)
    average = average_graphs(graphs, positions=positions)
    size = float(sum(g.head_values.abs().sum() + g.leaf_values.abs().sum() for g in graphs))
    mean = sum(g.value for g in graphs) / 6
    assert float(average.tokens().mean.sum()) == pytest.approx(mean, abs=1e-6 * size)
    reading = (
        average
        if mlp == "frozen"
        else dataclasses.replace(
            average, names=tuple(n.replace("mlp", "leaf") for n in average.names)
        )
    )
    assert unbalanced(reading, size) == 0
    assert unbalanced(dataclasses.replace(reading, rest=torch.zeros_like(average.rest)), size) > 0
    logit = average.names.index("logit")
    into = average.weights[average.targets == logit].sum() + average.rest[logit]
    assert float(into) == pytest.approx(mean, abs=1e-6 * size)
    if positions:
        assert set(average.places) == {"first", "end", "elsewhere", ""}
        values: dict[Any, Any] = {(row[0], row[1]): row[2] for row in average.rows()}
        for name, position in (("first", 1), ("end", LENGTH - 1)):
            for (writer, place), value in values.items():
                if place == name:
                    every = [complete(g, "values")[writer, position] for g in graphs]
                    assert value == pytest.approx(sum(every) / 6, rel=1e-5, abs=1e-9)


def test_prompts_of_other_lengths_align_by_name() -> None:
    graphs = (*traced(5), *traced(5, length=LENGTH + 3))
    positions = [{"name": 2, "end": -1}] * 5 + [{"name": 4, "end": -1}] * 5
    average = average_graphs(graphs, positions=positions)
    assert average.value == pytest.approx(sum(g.value for g in graphs) / 10)
    table = {row[0]: row[1] for row in average.tokens().rows()}
    by_name = [float(g.leaf_values[:, p["name"]].sum()) for g, p in zip(graphs, positions)]
    assert table["name"] == pytest.approx(sum(by_name) / 10, rel=1e-5, abs=1e-8)
    swapped = average_graphs(graphs, positions=positions[::-1])
    assert {row[0]: row[1] for row in swapped.tokens().rows()}["name"] != table["name"]
    found = graphs[0].compare(graphs[-1], positions=[positions[0], positions[-1]])
    assert set(found.places) <= {"name", "end", "elsewhere", ""}


def test_no_interval_below_ten_prompts() -> None:
    few, many = average_graphs(traced()[:9]), average_graphs(traced()[:10])
    for name in ("values_low", "values_high", "moved_low", "weights_high", "token_values_low"):
        assert bool(getattr(few, name).isnan().all())
        assert not bool(getattr(many, name).isnan().any())
    assert few.value_low != few.value_low
    assert many.value_low < many.value < many.value_high


def test_averages_and_comparisons_come_back_from_their_files(tmp_path: Path) -> None:
    average = average_graphs(traced())
    again = AverageGraph.load(average.save(tmp_path / "average"))
    assert again.rows() == average.rows()
    assert again.edges().rows() == average.edges().rows()
    assert again.tokens().rows() == average.tokens().rows()
    found = traced()[0].compare(traced()[1])
    loaded = GraphComparison.load(found.save(tmp_path / "comparison"))
    assert loaded.rows() == found.rows()
    assert str(loaded.edges().rows()) == str(found.edges().rows())  # NaN differs from itself
    assert loaded.provenance == found.provenance


def test_what_does_not_align_is_refused() -> None:
    graphs, longer = traced(), traced(5, length=LENGTH + 3)
    other = traced(2, "gpt2")
    for wrong, positions, text in [
        (graphs[:1], None, "two or more graphs"),
        ((graphs[0], longer[0]), None, "prompts of as many tokens.*Use positions="),
        ((graphs[0], other[0]), None, r"one model.*Use graph\.compare"),
        ((graphs[0], traced(2, keep=0.5)[0]), None, "one model, keep="),
        (graphs[:2], [{"end": -1}], "names for each of 2 graphs"),
        (graphs[:2], [{"end": -1}, {"END": -1}], "the same names"),
        (graphs[:2], [{"end": 99}] * 2, "position of 'end'"),
        (graphs[:2], [{"a": 8, "b": -1}] * 2, "one name a position"),
        (graphs[:2], [{"elsewhere": 1}] * 2, "names other than 'elsewhere'"),
        (graphs[:2], [{}] * 2, "names other than"),
        (graphs[:2], [{"a": 8}, {"a": 2}], "one name for where the logit is read"),
    ]:
        with pytest.raises(GeometryError, match=text):
            average_graphs(wrong, positions=positions)
    with pytest.raises(GeometryError, match="graphs of one shape"):
        graphs[0].compare(other[0])


# ---- two graphs


def test_a_graph_shares_everything_with_itself() -> None:
    graph = traced()[0]
    found = graph.compare(graph)
    assert found.node_jaccard == found.edge_jaccard == 1
    for value in (found.value_correlation, found.moved_correlation, found.edge_correlation):
        assert value == pytest.approx(1)
    assert 0 < found.node_jaccard_by_chance < 0.7
    flipped = dataclasses.replace(graph, weights=-graph.weights)
    assert graph.compare(flipped).edge_correlation == pytest.approx(-1)
