"""Graphs of several prompts: means and counts are those of the graphs one by one, sums hold, and
what two graphs share stands beside what chance gives."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from tests.tiny import loadable, tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits import graph_comparison, trace_logit
from tl_geometry.circuits.graph_comparison import GraphComparison, jaccard_by_chance
from tl_geometry.circuits.graph_means import AverageGraph, average_graphs
from tl_geometry.circuits.logit_graph import EDGE_TYPES, LogitGraph

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


def edges_of(graph: LogitGraph) -> dict[tuple[str, str, str, str, str], float]:
    end = lambda i: (graph.names[i], str(int(graph.positions[i])) if i > 1 else "")
    return {
        (*end(int(s)), *end(int(t)), EDGE_TYPES[int(e)]): float(w)
        for s, t, e, w in zip(
            graph.sources, graph.targets, graph.edge_types, graph.weights, strict=True
        )
    }


def check_means(average: AverageGraph, graphs: tuple[LogitGraph, ...]) -> None:
    near = lambda x: pytest.approx(x, rel=1e-6, abs=1e-9)
    n, reach = len(graphs), stats.t.ppf(0.975, len(graphs) - 1) / len(graphs) ** 0.5
    tables = {name: [complete(g, name) for g in graphs] for name in ("values", "moved")}
    kept = [{(m, int(p)) for m, p in zip(g.names, g.positions, strict=True)} for g in graphs]
    sizes = [abs(float(str(row[2]))) for row in average.rows()]
    assert sizes == sorted(sizes, reverse=True)  # by value, whatever nodes move
    rows: dict[Any, Any] = {tuple(row[:2]): row[2:] for row in average.rows()}
    assert len(rows) == len(set().union(*kept))
    for (name, place), (value, low, high, moved, *_, prompts) in rows.items():
        if not place:
            continue
        key = (name, int(place))
        every = torch.tensor([table[key] for table in tables["values"]]).double()
        assert value == near(float(every.mean()))
        spread = reach * float(every.std())
        assert (low, high) == (near(value - spread), near(value + spread))
        assert moved == near(sum(table[key] for table in tables["moved"]) / n)
        assert prompts == sum(key in nodes for nodes in kept)
    assert average.value == near(sum(g.value for g in graphs) / n)
    found: dict[Any, list[float]] = defaultdict(list)
    for graph in graphs:
        for key, weight in edges_of(graph).items():
            found[key].append(weight)
    table = average.edges().rows()
    assert len(table) == len(found)
    for *key, mean, low, high, prompts in table:
        weights = found[tuple(key)]
        assert prompts == len(weights)
        every = torch.tensor(weights + [0.0] * (n - len(weights))).double()
        spread = reach * float(every.std())
        assert (mean, low, high) == (
            near(float(every.mean())),
            near(float(every.mean()) - spread),
            near(float(every.mean()) + spread),
        )


def test_means_and_counts_are_those_of_the_graphs() -> None:
    graphs = traced()
    average = average_graphs(graphs)
    check_means(average, graphs)
    for wrong in (
        dataclasses.replace(average, values=average.moved),
        dataclasses.replace(average, weights=-average.weights),
        dataclasses.replace(average, node_prompts=average.node_prompts - 1),
        dataclasses.replace(average, targets=average.targets.flip(0)),
    ):
        with pytest.raises((AssertionError, KeyError)):
            check_means(wrong, graphs)


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


def test_a_comparison_is_that_of_the_two_graphs() -> None:
    a, b = traced()[:2]
    found = a.compare(b)
    tables = [[complete(g, name) for g in (a, b)] for name in ("values", "moved")]
    kept = [{(m, int(p)) for m, p in zip(g.names, g.positions, strict=True)} for g in (a, b)]
    nodes = {key for key in kept[0] | kept[1] if key[0] not in ("logit", "constants")}
    rows: dict[Any, Any] = {(r[0], int(str(r[1]))): r[2:] for r in found.rows() if r[1]}
    assert set(rows) == nodes
    for key, row in rows.items():
        expected = [table[key] for pair in tables for table in pair]
        assert row[:4] == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert list(row[4:]) == [key in of for of in kept]
    both = {key for key in nodes if key in kept[0] and key in kept[1]}
    assert found.node_jaccard == pytest.approx(len(both) / len(nodes))
    assert 0 < len(both) < len(nodes)
    pairs = torch.tensor([rows[key][:2] for key in sorted(nodes)]).double()
    assert found.value_correlation == pytest.approx(float(torch.corrcoef(pairs.T)[0, 1]))
    edges = [edges_of(a), edges_of(b)]
    table: dict[Any, Any] = {tuple(r[:5]): r[5:] for r in found.edges().rows()}
    assert set(table) == edges[0].keys() | edges[1].keys()
    for key, weights in table.items():
        expected = [of.get(key, torch.nan) for of in edges]
        assert weights == pytest.approx(expected, rel=1e-6, nan_ok=True)
    shared = [w for key, w in table.items() if key in edges[0] and key in edges[1]]
    pairs = torch.tensor(shared).double()
    assert found.edge_correlation == pytest.approx(float(torch.corrcoef(pairs.T)[0, 1]))
    inside = {
        key
        for key in table
        if (key[0], int(key[1] or -1)) in both
        and (key[2] == "logit" or (key[2], int(key[3])) in both)
    }
    of_both = inside & edges[0].keys() & edges[1].keys()
    assert found.edge_jaccard == pytest.approx(len(of_both) / len(inside))
    assert 0 < len(of_both) < len(inside)


def test_a_graph_shares_everything_with_itself() -> None:
    graph = traced()[0]
    found = graph.compare(graph)
    assert found.node_jaccard == found.edge_jaccard == 1
    for value in (found.value_correlation, found.moved_correlation, found.edge_correlation):
        assert value == pytest.approx(1)
    assert 0 < found.node_jaccard_by_chance < 0.7
    flipped = dataclasses.replace(graph, weights=-graph.weights)
    assert graph.compare(flipped).edge_correlation == pytest.approx(-1)


def test_chance_is_that_of_random_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    for first, second, all_of in ((3, 5, 9), (40, 10, 60), (1, 1, 2)):
        draws = torch.tensor(
            [
                float((a & b).sum() / (a | b).sum())
                for a, b in (
                    [
                        torch.rand(all_of, generator=generator).argsort().argsort() < n
                        for n in (first, second)
                    ]
                    for _ in range(3000)
                )
            ]
        )
        error = float(draws.std()) / 3000**0.5
        assert abs(jaccard_by_chance(first, second, all_of) - float(draws.mean())) < 4 * error
        naive = first * second / all_of / (first + second)  # the twin
        assert abs(naive - float(draws.mean())) > 4 * error
    assert jaccard_by_chance(0, 0, 5) != jaccard_by_chance(0, 0, 5)


def random_edges(graph: LogitGraph, generator: torch.Generator) -> LogitGraph:
    """Of the edges of each type into each node of a complete graph a random third."""
    into = 3 * graph.targets + graph.edge_types
    order = torch.rand(len(into), generator=generator).double() + into
    order = order.argsort()
    ordered = into[order]
    first = torch.searchsorted(ordered, ordered)
    sizes = into.bincount()[ordered]
    chosen = order[torch.arange(len(into)) - first < (sizes + 2) // 3]
    return dataclasses.replace(
        graph,
        sources=graph.sources[chosen],
        targets=graph.targets[chosen],
        edge_types=graph.edge_types[chosen],
        weights=graph.weights[chosen],
    )


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "neox"])  # neox: parallel blocks
def test_chance_of_edges_is_that_of_random_sources(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The possible sources are known: those of the complete graph."""
    model = tiny(loadable(architecture)[0][0], architecture)
    prompt = tokens(batch=1, length=6, seed=3)
    graph = trace_logit(model, prompt, 5, against=9, keep=1.0)
    without_constants = graph.sources != 1
    graph = dataclasses.replace(
        graph,
        **{
            name: getattr(graph, name)[without_constants]
            for name in ("sources", "targets", "edge_types", "weights")
        },
    )
    generator = torch.Generator().manual_seed(0)

    def gaps() -> torch.Tensor:
        found = [
            random_edges(graph, generator).compare(random_edges(graph, generator))
            for _ in range(30)
        ]
        return torch.tensor([f.edge_jaccard - f.edge_jaccard_by_chance for f in found])

    gap = gaps()
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / 30**0.5 + 0.005
    monkeypatch.setattr(
        graph_comparison,
        "_possible_sources",
        lambda placed, shared, into, parallel: torch.full((len(into),), len(shared)),
    )
    gap = gaps()
    assert abs(float(gap.mean())) > 4 * float(gap.std()) / 30**0.5 + 0.005
