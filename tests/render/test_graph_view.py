"""The page of a logit's graph: its numbers are those of the graph, every list sums to what it
claims to, it begins with the nodes that a smaller graph would have, and no token runs."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
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
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.render import graph_nodes, graph_view
from tl_geometry.render.graph_nodes import drawn_graph
from tl_geometry.render.writers import logit_figure

pytestmark = pytest.mark.once


@cache
def traced(keep: float = 0.9) -> LogitGraph:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=1)
    ids = windows.tokens[0].tolist()
    return tlg.trace_logit(model, windows, ids[15], against=ids[3], position=14, keep=keep)


def hostile() -> LogitGraph:
    graph = traced()
    texts = (HOSTILE * 3)[: len(graph.token_ids)]
    return dataclasses.replace(graph, str_tokens=texts, target_tokens=(HOSTILE[0], HOSTILE[3]))


def held_nodes(graph: LogitGraph, data: dict[str, Any]) -> list[int]:
    return [graph.node(n["name"], n["position"]) for n in data["nodes"]]


@pytest.mark.slow
def test_the_numbers_are_those_of_the_graph() -> None:
    check_numbers(graph_view)


def check_numbers(module: Any) -> None:
    graph = traced()
    data = payload(module.graph_page(graph))
    held = held_nodes(graph, data)
    assert len(held) == len(set(held)) == len(graph.names)
    near = pytest.approx
    for i, n in zip(held, data["nodes"], strict=True):
        assert (n["value"], n["moved"]) == near(
            (float(graph.values[i]), float(graph.moved[i])), rel=1e-4
        )
        assert n["totals"] == near(graph.totals[i].tolist(), rel=1e-4)
        for position, paid in n["paid"]:
            assert paid == near(float(graph.attention[i, position]), rel=1e-2)
        assert bool(n["paid"]) == bool(graph.heads_of[i] >= 0)
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for source, target, kind, weight, *_ in data["edges"]:
        found.setdefault((held[target], kind), []).append((held[source], weight))
    for i in range(len(graph.names)):
        for kind, name in enumerate(("value", "query", "key")):
            expected = [(s, w) for s, _, w in graph.edges_into(i, name)[: module.LISTED]]
            shown = found.get((i, kind), [])
            assert [s for s, _ in shown] == [s for s, _ in expected]
            assert [w for _, w in shown] == near([w for _, w in expected], rel=1e-3)
    assert len(data["edges"]) < len(graph.weights)  # or nothing was chosen
    every = [graph.leaf_values, graph.head_values, graph.mlp_values]
    written = sum(float(x.abs().sum()) for x in every) + abs(graph.constant_value)
    assert data["written"] == near(written, rel=1e-4)


@pytest.mark.slow
def test_a_negative_logit_has_a_minus_sign_in_every_caption() -> None:
    graph = dataclasses.replace(traced(), value=-0.094, values=-traced().values)
    view = render.graph_page(graph)
    assert "T is −0.0940, before" in view.caption
    assert "the logit −0.09 of" in view.title
    model = tlg.zoo.embedded()
    ids = tlg.zoo.default_windows(model, 16, n=1).tokens
    logits = model(ids)[0, 14]
    found = tlg.explain_logit(model, ids, 14, (int(logits.argmin()), int(logits.argmax())), top=4)
    found = dataclasses.replace(found, target_tokens=("a-b", "c"))
    logit = f"−{-found.logit:.2f}"
    page, figure = render.logit_page(found), logit_figure(found)
    assert f"they sum to {logit}" in page.caption
    assert f"the model's logit is {logit}" in page.caption
    assert f"sums to {logit}; the logit at position 14 is {logit}." in figure.caption
    assert f"the logit {logit} of “a-b” minus “c”" in figure.title  # a token keeps its hyphen


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
def test_a_node_appears_with_the_share_of_a_graph_that_has_it(keep: float) -> None:
    small, graph = traced(keep), traced()
    reached = graph_nodes.reach(graph)
    names = lambda g, rows: {(g.names[i], int(g.positions[i])) for i in rows if i > 1}
    shown = (reached < keep * (1 - 1e-6)).nonzero()[:, 0].tolist()
    assert names(graph, shown) == names(small, range(len(small.names)))
    assert 2 < len(small.names) < len(graph.names)
    # the twin: by what a node writes alone, nodes that matter by moving attention are missed
    without = dataclasses.replace(graph, moved=torch.zeros_like(graph.moved))
    assert not torch.equal(graph_nodes.reach(without), reached)


def test_refusals_and_a_graph_without_texts() -> None:
    graph = traced()
    bare = dataclasses.replace(graph, str_tokens=())
    assert [14, f"<{graph.token_ids[14]}>", "14"] in payload(render.graph_page(bare))["tokens"]


def test_a_head_lists_the_attention_that_it_paid() -> None:
    """The six largest, of at least 0.0005."""
    graph = traced()
    drawn = drawn_graph(graph)
    paid = torch.zeros_like(drawn.attention)
    paid[:, 3:10] = torch.tensor([0.3, 0.2, 0.1, 0.0004, 0.0006, 0.05, 0.04])
    view = render.graph_page(dataclasses.replace(graph, attention=paid))
    nodes = view.data["nodes"]
    heads = [n["paid"] for n in nodes if n["shape"] == "head"]
    wanted = [[3, 0.3], [4, 0.2], [5, 0.1], [8, 0.05], [9, 0.04], [7, 0.0006]]
    assert heads
    assert all(own == wanted for own in heads)
    many = torch.full_like(paid, 0.01)
    view = render.graph_page(dataclasses.replace(graph, attention=many))
    assert {len(n["paid"]) for n in view.data["nodes"]} == {0, 6}
    assert view.data["start"] == 40
    assert view.data["all"] == len(graph.names)


LISTS = """[...document.querySelectorAll('.card')].filter(c => c.querySelector('.sum')).map(c => [
  c.getAttribute('aria-label'), +c.querySelector('[data-total]').dataset.total,
  [...c.querySelectorAll('.line')].map(r => +r.dataset.value)])"""


@pytest.mark.nightly
def test_every_list_sums_to_its_number(browser: Browser) -> None:
    graph = traced()
    with browser.open(render.graph_page(graph).page, width=1100) as page:
        page.wait("document.body.dataset.drawn")
        held = held_nodes(graph, page.evaluate("DATA"))
        seen = set()
        for at, i in enumerate(held):
            page.evaluate(f"choose({at}); 0")
            for title, total, rows in page.evaluate(LISTS):
                assert sum(rows) == pytest.approx(total, abs=1e-6)
                expected = {
                    "Who wrote it": graph.value,
                    "What it read (value edges)": float(graph.totals[i, 0]),
                    "Why: who wrote its query": float(graph.totals[i, 1]),
                    "Why: who wrote the keys": float(graph.totals[i, 2]),
                    "Who read it (value edges)": float(graph.values[i]),
                }[title]
                assert total == pytest.approx(expected, rel=1e-4)
                seen.add(title)
        assert len(seen) == 5
        page.assert_harmless()


@pytest.mark.nightly
def test_the_slider_a_click_and_the_arrow_keys(browser: Browser) -> None:
    graph = traced()
    with browser.open(render.graph_page(graph).page, width=1100, height=1200) as page:
        page.wait("document.body.dataset.drawn")
        count = "+document.querySelector('output').dataset.count"
        marks = "document.querySelectorAll('.node').length"
        before = page.evaluate(marks)
        assert before == page.evaluate(count) == min(graph_view.START, len(graph.names))
        page.evaluate("slider.value = N.length; slider.oninput(); 0")
        assert page.evaluate(marks) == page.evaluate(count) == len(graph.names)
        page.evaluate("slider.value = 3; slider.oninput(); 0")
        assert page.evaluate(marks) == 3
        reaching = page.evaluate("+document.querySelector('output').dataset.reaching")
        drawn = page.evaluate(
            "drawnEdges(visible()).map(e => DATA.edges[e]).filter(e => N[e[1]].shape === 'logit')"
        )
        assert reaching == pytest.approx(sum(edge[3] for edge in drawn))
        page.evaluate("slider.value = 30; slider.oninput(); 0")
        chosen = "document.querySelector('h2').textContent"
        first = page.evaluate(chosen)
        assert first.startswith("logit")
        page.evaluate("pressed().focus()")
        page.tab.keyboard.press("ArrowDown")
        second = page.evaluate(chosen)
        assert second != first
        assert page.evaluate("document.activeElement === pressed()")
        page.tab.keyboard.press("ArrowUp")
        assert page.evaluate(chosen) == first
        x, y = page.evaluate(
            "(r => [r.left + r.width / 2, r.top + r.height / 2])([...svg.querySelectorAll('.node')]"
            ".find(n => N[+n.dataset.node].shape === 'head').getBoundingClientRect())"
        )
        page.click(x, y)
        page.wait("N[state.node].shape === 'head'")
        titles = page.evaluate("[...document.querySelectorAll('h3')].map(h => h.textContent)")
        assert "Where it looked" in titles
        assert "Why: who wrote its query" in titles
        source = page.evaluate("document.querySelector('.line button').textContent")
        page.evaluate("document.querySelector('.line button').focus()")
        page.tab.keyboard.press("Enter")
        assert page.evaluate(chosen) == source  # an edge leads to its other end
        page.assert_harmless()


DRAWN = """[...svg.querySelectorAll('path[data-edge]')].map(p => {
  const [s, t, type, weight] = DATA.edges[+p.dataset.edge];
  return [weight, +p.getAttribute('stroke-width'), getComputedStyle(p).stroke, type,
          p.getAttribute('stroke-dasharray')]; })"""
MARKS = """[...svg.querySelectorAll('.node')].map(g => [N[+g.dataset.node].value,
  getComputedStyle(g.querySelector('.disc')).fill, N[+g.dataset.node].moved,
  g.querySelector('.ring') && getComputedStyle(g.querySelector('.ring')).stroke])"""


def check_drawn(page: Any) -> None:
    """Lines and marks have the colours of their signs, larger weights have wider lines, and each
    type of edge its own dashes."""
    page.wait("document.body.dataset.drawn")
    page.evaluate("slider.value = N.length; slider.oninput(); 0")
    page.evaluate(
        "choose(into.findIndex(own => new Set(own.map(e => DATA.edges[e][2])).size === 3)); 0"
    )
    lines = page.evaluate(DRAWN)
    assert {line[0] > 0 for line in lines} == {True, False}
    assert {(line[3], line[4]) for line in lines} >= {(0, None), (1, "6 3"), (2, "2 2.5")}
    for weight, _, colour, *_ in lines:
        assert colour == (RED if weight > 0 else BLUE)
    lines.sort(key=lambda line: abs(line[0]))
    widths = [line[1] for line in lines]
    assert widths == sorted(widths)
    assert widths[-1] > 2 * widths[0]
    marks = page.evaluate(MARKS)
    for value, fill, moved, ring in marks:
        assert fill == (RED if value > 0 else BLUE)
        assert ring in (None, RED if moved > 0 else BLUE)
    assert any(mark[3] for mark in marks)


@pytest.mark.nightly
def test_lines_and_marks_are_drawn_to_their_numbers(browser: Browser) -> None:
    text = render.graph_page(traced()).page
    with browser.open(text, width=1100) as page:
        check_drawn(page)
    free = without_policy(text)
    for old, new in [
        ("colour = v => v < 0", "colour = v => v > 0"),
        ("style.stroke = colour(n.moved)", "style.stroke = colour(-n.moved)"),
        ("['', '6 3', '2 2.5']", "['', '2 2.5', '6 3']"),
        ("Math.abs(weight) / largest) ** 1.5", "1 - Math.abs(weight) / largest) ** 1.5"),
    ]:
        assert free.count(old) == 1, old
        with (
            browser.open(free.replace(old, new), width=1100) as page,
            pytest.raises(AssertionError),
        ):
            check_drawn(page)


@pytest.mark.nightly
@pytest.mark.parametrize("dark", [False, True])
def test_hostile_tokens_stay_text_at_any_width(browser: Browser, dark: bool) -> None:
    graph = hostile()
    view = render.graph_page(graph)
    with browser.open(view.page, dark=dark, width=400) as page:
        page.wait("document.body.dataset.drawn")
        page.evaluate("slider.value = N.length; slider.oninput(); 0")
        shown = page.evaluate("[...tokens.querySelectorAll('b')].map(b => b.textContent)")
        cut = [graph_nodes.shown_token(t).removesuffix("…") for t in graph.str_tokens]
        assert [t.removesuffix("…") for t in shown if t != "constants"] == [
            cut[i] for i in sorted({int(p) for p in graph.positions if p >= 0})
        ]
        page.evaluate("N.forEach((_, i) => choose(i)); 0")
        assert page.evaluate(FITS)
        page.assert_harmless()
    check_beside_itself(browser, view, dark=dark)


@pytest.mark.nightly
def test_hostile_tokens_run_without_the_escapes_and_the_policy(browser: Browser) -> None:
    """The twin: the page with tokens as they are."""
    check_escapes_matter(browser, render.graph_page(hostile()))


@pytest.mark.nightly
def test_a_notebook_holds_the_image_and_the_page_above_it(browser: Browser) -> None:
    check_notebook(browser, render.graph_page(hostile()), limit=900_000)


@pytest.mark.nightly
def test_the_page_is_saved_with_its_source(browser: Browser, tmp_path: Path) -> None:
    view = render.graph_page(traced())
    with browser.open(view.save(tmp_path / "graph.html")) as page:
        page.wait("document.body.dataset.drawn")
        assert "How this was made" in page.evaluate("document.body.innerText")
    assert view.save(tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
