"""The page of an average graph and of two graphs: its numbers are those of the tables, line styles
say what intervals and presence say, sums hold, and no text runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.browser import (
    BLUE,
    FITS,
    HOSTILE,
    RED,
    Browser,
    check_beside_itself,
    check_escapes_matter,
    check_notebook,
    payload,
    without_policy,
)
from tl_geometry import render
from tl_geometry.circuits import AverageGraph, LogitGraph, average_graphs
from tl_geometry.circuits.graph_comparison import GraphComparison
from tl_geometry.circuits.logit_graph import EDGE_TYPES
from tl_geometry.render import graph_nodes, graph_view

near = pytest.approx


@cache
def traced() -> tuple[LogitGraph, ...]:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 8, n=11)
    return tuple(
        tlg.trace_logit(model, windows[i : i + 1], 5, against=9, keep=0.5) for i in range(11)
    )


@cache
def average() -> AverageGraph:
    return average_graphs(traced())


@cache
def pair() -> GraphComparison:
    return traced()[0].compare(traced()[1])


def named(texts: tuple[str, ...]) -> AverageGraph:
    """An average over places with these names (two, and the rest), and tokens."""
    positions = [{texts[0]: 1, texts[1]: -1}] * 11
    graph = average_graphs(traced(), positions=positions)
    return dataclasses.replace(graph, place_tokens=texts[2 : 2 + len(graph.place_tokens)])


def keys_of(data: dict[str, Any]) -> dict[tuple[str, ...], list[Any]]:
    """What a page holds of each edge, by the names and places of its ends."""
    places = {i: place for i, _, place in data["tokens"]}
    end = lambda n: (
        n["name"],
        "" if n["shape"] in ("logit", "constants") else places[n["position"]],
    )
    nodes = data["nodes"]
    return {
        (*end(nodes[s]), *end(nodes[t]), EDGE_TYPES[kind]): rest
        for s, t, kind, *rest in data["edges"]
    }


def check_average(view: Any, graph: AverageGraph) -> None:
    data = payload(view)
    assert (data["prompts"], len(data["dashes"])) == (11, 1)
    table = {tuple(row[:5]): row[5:] for row in graph.edges().rows()}
    edges = keys_of(data)
    assert 50 < len(edges) <= len(table)
    for key, (weight, mark, low, high, prompts) in edges.items():
        expected: Any = table[key]
        assert (weight, low, high, prompts) == (
            near(expected[0], rel=1e-3),
            *near_all(expected[1:]),
        )
        assert mark == int(expected[1] <= 0 <= expected[2])
    assert {mark for _, mark, *_ in edges.values()} == {0, 1}
    rows: dict[Any, Any] = {tuple(row[:2]): row[2:] for row in graph.rows()}
    places = {i: place for i, _, place in data["tokens"]}
    for n in data["nodes"]:
        place = "" if n["shape"] in ("logit", "constants") else places[n["position"]]
        value, low, high, moved, _, _, _, prompts = rows[n["name"], place]
        assert (n["value"], n["moved"]) == near((value, moved), rel=1e-3, abs=1e-9)
        assert n["numbers"] == near_all((low, high, prompts))
    assert data["nodes"][0]["value"] == near(graph.value, rel=1e-5)


def near_all(values: Any) -> list[Any]:
    return [near(v, rel=5e-3, abs=1e-12) for v in values]


def test_an_average_has_the_numbers_of_its_table() -> None:
    graph = average()
    check_average(render.graph_page(graph), graph)
    for wrong in (
        dataclasses.replace(graph, weights_low=graph.weights_low - 1),
        dataclasses.replace(graph, edge_prompts=graph.edge_prompts + 1),
        dataclasses.replace(graph, sources=graph.sources.flip(0)),
        dataclasses.replace(graph, positions=graph.positions.flip(0)),
    ):
        with pytest.raises((AssertionError, KeyError)):
            check_average(render.graph_page(wrong), graph)


def test_few_prompts_have_no_interval_and_no_dots() -> None:
    view = render.graph_page(average_graphs(traced()[:4]))
    edges = payload(view)["edges"]
    assert all(edge[4] == 0 and edge[5] is None and edge[6] is None for edge in edges)
    assert "no intervals" in payload(view)["legend"]
    assert "dotted" not in payload(view)["legend"]


def check_pair(view: Any, graph: GraphComparison) -> None:
    edges = keys_of(payload(view))
    table: dict[Any, Any] = {tuple(row[:5]): row[5:] for row in graph.edges().rows()}
    for key, (weight, mark, first, other) in edges.items():
        expected: Any = [None if math.isnan(v) else v for v in table[key]]
        assert [first, other] == [None if v is None else near(v, rel=5e-3) for v in expected]
        assert weight == near(sum(v or 0.0 for v in expected) / 2, rel=1e-3)
        assert mark == (1 if expected[1] is None else 2 if expected[0] is None else 0)
    assert {mark for _, mark, *_ in edges.values()} == {0, 1, 2}
    data = payload(view)
    places = {i: place for i, _, place in data["tokens"]}
    rows: dict[Any, Any] = {tuple(row[:2]): row[2:] for row in graph.rows()}
    for n in data["nodes"]:
        place = "" if n["shape"] in ("logit", "constants") else places[n["position"]]
        value, other, moved, other_moved, kept, other_kept = rows[n["name"], place]
        mean = near(((value + other) / 2, (moved + other_moved) / 2), rel=1e-3, abs=1e-9)
        assert (n["value"], n["moved"]) == mean
        assert n["mark"] == (0 if kept and other_kept else 1 if kept else 2)


def test_a_comparison_has_both_numbers_and_says_which_graph_has_an_edge() -> None:
    graph = pair()
    view = render.graph_page(graph)
    check_pair(view, graph)
    assert f"{graph.node_jaccard:.0%} (by chance {graph.node_jaccard_by_chance:.0%})" in view.title
    for wrong in (
        dataclasses.replace(graph, weights=graph.weights.flip(1)),
        dataclasses.replace(graph, kept=graph.kept.flip(1)),
        dataclasses.replace(graph, values=-graph.values),
    ):
        with pytest.raises(AssertionError):
            check_pair(render.graph_page(wrong), graph)


GRAPHS: list[Callable[[], Any]] = [average, pair]


@pytest.mark.parametrize("graph", GRAPHS)
def test_value_edges_and_the_rest_sum_to_what_a_node_writes(graph: Any) -> None:
    drawn = graph_nodes.drawn_graph(graph())
    heads = (drawn.heads_of >= 0).nonzero()[:, 0]
    assert torch.allclose(drawn.totals[heads, 0], drawn.values[heads])
    assert float(drawn.totals[0, 0]) == near(float(drawn.values[0]))
    assert drawn.names[0] == "logit"
    assert bool(drawn.totals[:, 1:].isnan().all())
    tokens = [i for i, name in enumerate(drawn.names) if name == "embed"]
    assert tokens
    assert not drawn.totals[tokens, 0].any()


def test_the_page_begins_with_the_logit() -> None:
    assert payload(render.graph_page(average()))["nodes"][0]["shape"] == "logit"


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_image_has_the_styles_of_the_page(graph: Any) -> None:
    view = render.graph_page(graph())
    axis = view.image().figure.axes[0]
    styles = {line.get_linestyle() for line in axis.lines}
    assert styles == {"-", "--"}  # matplotlib's word for any dashes
    assert len(axis.collections) == min(graph_view.START, len(graph().names))
    solid = render.graph_page(traced()[0]).image().figure.axes[0]
    assert {line.get_linestyle() for line in solid.lines} == {"-"}


DRAWN = """[...svg.querySelectorAll('path[data-edge]')].map(p => [DATA.edges[+p.dataset.edge][4],
  !!p.getAttribute('stroke-dasharray'), DATA.edges[+p.dataset.edge][3],
  getComputedStyle(p).stroke])"""
HOLLOW = """[...svg.querySelectorAll('.node')].map(g => [N[+g.dataset.node].mark,
  getComputedStyle(g.querySelector('.disc')).fillOpacity])"""
LISTS = """[...document.querySelectorAll('.card')].filter(c => c.querySelector('.sum')).map(c => [
  +c.querySelector('[data-total]').dataset.total,
  [...c.querySelectorAll('.line')].map(r => +r.dataset.value)])"""


def check_styles(page: Any) -> None:
    page.wait("document.body.dataset.drawn")
    page.evaluate("slider.value = N.length; slider.oninput(); 0")
    lines = page.evaluate(DRAWN)
    assert {mark for mark, *_ in lines} >= {0, 1}
    for mark, dashed, weight, colour in lines:
        assert dashed == bool(mark)
        assert colour == (RED if weight > 0 else BLUE)
    for mark, opacity in page.evaluate(HOLLOW):
        assert (float(opacity) < 0.5) == bool(mark)


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_styles_and_sums_on_the_page(graph: Any, browser: Browser) -> None:
    text = render.graph_page(graph()).page
    with browser.open(text, width=1100) as page:
        check_styles(page)
        page.evaluate("choose(0); 0")
        first = page.evaluate("document.querySelector('.line small').textContent")
        assert ("of 11 prompts" in first) or ("in the first" in first)
        for at in range(0, page.evaluate("N.length"), 7):
            page.evaluate(f"choose({at}); 0")
            for total, rows in page.evaluate(LISTS):
                assert sum(rows) == near(total, abs=1e-6)
        page.assert_harmless()
    old = "if (marked) options['stroke-dasharray']"
    assert text.count(old) == 1
    broken = without_policy(text).replace(old, "if (!marked) options['stroke-dasharray']")
    broken = broken.replace("DATA.dashes[mark - 1]", "DATA.dashes[0]")
    with browser.open(broken, width=1100) as page, pytest.raises(AssertionError):
        check_styles(page)


@pytest.mark.slow
def test_hostile_names_of_places_stay_text(browser: Browser) -> None:
    view = render.graph_page(named((HOSTILE[0], HOSTILE[3], *HOSTILE[4:7])))
    for dark in (False, True):
        with browser.open(view.page, dark=dark, width=400) as page:
            page.wait("document.body.dataset.drawn")
            page.evaluate("slider.value = N.length; slider.oninput(); 0")
            page.evaluate("N.forEach((_, i) => choose(i)); 0")
            assert page.evaluate(FITS)
            page.assert_harmless()
    check_beside_itself(browser, view, dark=True)
    check_escapes_matter(browser, view)
    check_notebook(browser, view, limit=900_000)
