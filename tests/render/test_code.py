"""The code that a page offers gives the numbers that it shows, and is copied where frames may not
use the clipboard."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.browser import Browser, as_cells, payload, without_policy
from tests.render.test_browser import table
from tests.render.test_graph_means_view import average, pair
from tests.render.test_graph_view import traced
from tests.render.test_logit_view import explained
from tests.render.test_rotary import tables
from tests.splits import synthetic
from tests.tiny import tiny, tokens
from tl_geometry import render
from tl_geometry.base.results import Result
from tl_geometry.render import split_view
from tl_geometry.render.page import PageView
from tl_geometry.render.split_view import draw_panels, panel_code, panels_of
from tl_geometry.scores import OffsetProfile, PlaneTable, offset_profile
from tl_geometry.scores.split import ScoreSplit

CODE = "document.querySelector('.code code').textContent"


def two_prompts() -> ScoreSplit:
    split = synthetic(3, 12)
    q, k = (torch.cat([x, x.flip(2)], 1) for x in (split.q, split.k))
    return dataclasses.replace(split, q=q, k=k)


def largest(values: torch.Tensor) -> float:
    """Of a cell or a block of cells, the value of the largest size."""
    flat = values.reshape(-1)
    return float(flat[flat.abs().argmax()])


@pytest.mark.parametrize("panels", ["groups", "terms", ["content", "pos-cvec"]])
@pytest.mark.parametrize("centered", [False, True])
def test_the_code_of_a_panel_gives_its_values(panels: Any, centered: bool) -> None:
    split = dataclasses.replace(synthetic(2, 9), bias=torch.randn(2, 9, 9))
    chosen = panels_of(split, panels)
    drawn = draw_panels(split, chosen, centered=centered).values
    names = {"split": split}
    for panel, code in enumerate(panel_code(chosen, centered)):
        found = eval(code, names)[0].double()
        torch.testing.assert_close(found[split.allowed], drawn[:, panel][split.allowed])


def check_split(browser: Browser, split: ScoreSplit, page_text: str) -> None:
    """Of every panel of every head at some cells."""
    rows = "[...document.querySelectorAll('.read b')].map(b => [+b.dataset.value, +b.dataset.half])"
    names = {"split": split}
    with browser.open(page_text, width=900) as page:
        page.wait("document.body.dataset.drawn")
        for head in range(page.evaluate("DATA.heads.length")):
            page.evaluate(f"heads.value = {head}; heads.onchange(); 0")
            for panel in range(page.evaluate("DATA.planes.length")):
                for query, key in ((4, 1), (5, 3)):
                    page.evaluate(f"point({query}, {key}, {panel}); 0")
                    value, half = page.evaluate(rows)[panel]
                    found = largest(eval(page.evaluate(CODE), names))
                    assert abs(found - value) <= half * (1 + 1e-4)


@pytest.mark.slow
def test_the_code_of_a_cell_gives_what_is_read_there(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = two_prompts()
    view = render.split(split, ["L0H2", "L0H1"], context=1, panels="terms", centered=True)
    check_split(browser, split, view.page)
    free = without_policy(view.page)
    for old, new in [
        ("${range(query)}, ${range(key)}", "${range(key)}, ${range(query)}"),
        ("DATA.rows[state.head]", "state.head"),
        ("DATA.context", "0"),
    ]:
        assert free.count(old) == 1, old
        with pytest.raises(AssertionError):
            check_split(browser, split, free.replace(old, new))
    monkeypatch.setattr(split_view, "CELLS", 6)
    check_split(browser, split, render.split(split).page)


@pytest.mark.slow
def test_a_click_keeps_the_code_and_keys_move_and_copy_it(browser: Browser) -> None:
    """In a sandboxed frame, where there is no clipboard to ask."""
    view = render.split(synthetic(1, 12))
    below = "<textarea style='position:fixed;right:0;top:0'></textarea>"
    with browser.open(as_cells(view.html(), below), width=1100, height=1200) as page:
        page.wait("document.body.dataset.drawn", frame=1)
        left, top = page.evaluate(
            "(r => [r.left, r.top])(document.querySelector('iframe').getBoundingClientRect())"
        )
        x, y = page.evaluate("(r => [r.left, r.top])(sheet.getBoundingClientRect())", frame=1)
        (a, b), cell = page.evaluate("[corner(4), DATA.cell]", frame=1)
        at = lambda q, k: (left + x + a + (k + 0.5) * cell, top + y + b + (q + 0.5) * cell)
        page.click(*at(7, 2))
        page.hover(*at(9, 9))
        page.wait(f"{CODE} === 'split.total()[0, 0, 9, 9]'", frame=1)
        page.hover(left + 400, top + 20)
        page.wait(f"{CODE} === 'split.total()[0, 0, 7, 2]'", frame=1)
        page.tab.keyboard.press("ArrowDown")
        page.tab.keyboard.press("ArrowRight")
        page.tab.keyboard.press("c")
        page.wait("document.querySelector('.code button').textContent === 'copied'", frame=1)
        page.tab.locator("textarea").focus()
        page.tab.keyboard.press("Control+V")
        assert page.evaluate("document.querySelector('textarea').value") == (
            "split.total()[0, 0, 8, 3]"
        )
        page.assert_harmless()


def check_graph(browser: Browser, page_text: str) -> None:
    """Of every node, and of the lists of its edges."""
    graph, lists, seen = traced(), "[...document.querySelectorAll('.card')]", 0
    of_lists = (
        f"{lists}.map(c => [c.querySelector('.code code')?.textContent, "
        "[...c.querySelectorAll('.line:has(button)')].map(r => +r.dataset.value)])"
    )
    with browser.open(page_text, width=1100) as page:
        page.wait("document.body.dataset.drawn")
        for i, node in enumerate(page.evaluate("DATA.nodes")):
            page.evaluate(f"choose({i}); 0")
            value = eval(page.evaluate(CODE), {"graph": graph})
            assert float(value) == pytest.approx(node["value"], rel=1e-4)
            for code, weights in page.evaluate(of_lists):
                if code is None:
                    continue
                found = [weight for *_, weight in eval(code, {"graph": graph})]
                if "edges_from" in code:  # the page does not hold all of them
                    near = lambda x, of=found: min(of, key=lambda y: abs(y - x), default=0.0)
                    found = [near(weight) for weight in weights]
                assert weights == pytest.approx(found[: len(weights)], rel=1e-3)
                seen += len(weights)
        page.assert_harmless()
    assert seen > 100


@pytest.mark.slow
def test_the_code_of_a_node_gives_its_number_and_its_edges(browser: Browser) -> None:
    text = render.graph_page(traced()).page
    check_graph(browser, text)
    free = without_policy(text)
    for old, new in [
        ("end ? 'edges_from' : 'edges_into'", "end ? 'edges_into' : 'edges_from'"),
        ("'${TYPES[type]}'", "'${TYPES[(type + 1) % 3]}'"),
        ("graph.values[${", "graph.moved[${"),
    ]:
        assert free.count(old) == 1, old
        with pytest.raises(AssertionError):
            check_graph(browser, free.replace(old, new))


def check_edges(browser: Browser, graph: Any, page_text: str) -> None:
    """Of every edge in the lists of some nodes."""
    picked = (
        "[...cards.querySelectorAll('.edge')].map(b => { b.click(); const row = b.parentElement; "
        "return [+row.dataset.value, row.querySelector('code').textContent]; })"
    )
    seen = 0
    with browser.open(page_text, width=1100, height=1200) as page:
        page.wait("document.body.dataset.drawn")
        for node in range(0, page.evaluate("N.length"), 2):
            page.evaluate(f"choose({node}); 0")
            for value, code in page.evaluate(picked):
                # a comparison has a weight in each of its graphs, NaN where it lacks the edge
                found = eval(code, {"graph": graph}).nan_to_num().mean()
                assert float(found) == pytest.approx(value, rel=1e-3)
                seen += 1
            assert page.evaluate("cards.querySelectorAll('.line .code').length <= 1")
        page.assert_harmless()
    assert seen > 30


@pytest.mark.slow
def test_the_code_of_an_edge_gives_its_weight(browser: Browser) -> None:
    for graph in (traced(), average(), pair()):
        text = render.graph_page(graph).page
        check_edges(browser, graph, text)
        assert text.count("DATA.at[e]") == 1
        wrong = without_policy(text).replace("DATA.at[e]", "e")
        with pytest.raises(AssertionError):
            check_edges(browser, graph, wrong)


@pytest.mark.slow
def test_a_click_on_a_line_gives_the_code_of_its_edge(browser: Browser) -> None:
    graph = traced()
    with browser.open(render.graph_page(graph).page, width=1100, height=1200) as page:
        page.wait("document.body.dataset.drawn")
        edge, at, x, y = page.evaluate(
            "(p => { const e = +p.dataset.edge, m = p.getPointAtLength(p.getTotalLength() / 2), "
            "s = svg.getBoundingClientRect(); return [e, DATA.at[e], s.left + m.x, s.top + m.y]; })"
            "([...svg.querySelectorAll('path[data-edge]')].find(p => p.getBBox().width > 300))"
        )
        page.click(x, y)
        code = "cards.querySelector('.line .code code').textContent"
        page.wait(f"{code} === 'graph.weights[{at}]'", timeout=10)
        assert page.evaluate(f"state.node === DATA.edges[{edge}][1]")
        page.assert_harmless()


def test_nodes_of_an_average_and_of_a_comparison_are_those_of_the_graph() -> None:
    for graph in (average(), pair()):
        data = payload(render.graph_page(graph))
        found = [graph.values[int(node["lookup"])] for node in data["nodes"]]
        means = [float(values.mean()) for values in found]
        assert [node["value"] for node in data["nodes"]] == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize("measured", ["sweep", "weights"])
def test_the_place_of_a_column_is_that_in_the_data_frame(measured: str) -> None:
    """Of numbers of any name: a reader sees "relative position", the table keeps its own key."""
    model, prompts = tiny("bridge", "llama"), tokens(12, 16)
    basis = tlg.decompose(model, prompts, normalize=True, progress=False)
    raw = tlg.decompose(model, prompts, progress=False)
    given: Result = (
        tlg.sweep_heads(model, prompts, basis, progress=False)
        if measured == "sweep"
        else tlg.weight_geometry(model, raw)
    )
    frame, shown = given.to_dataframe(), payload(render.heads(given))["columns"]
    assert len(shown) > 10
    for column in shown.values():
        values = [math.nan if v is None else v for v in column["values"]]
        assert frame.iloc[:, column["at"]].tolist() == pytest.approx(values, rel=1e-4, nan_ok=True)


def check_heads(browser: Browser, given: Result, page_text: str) -> None:
    """Of every column of two heads."""
    with browser.open(page_text, width=1100) as page:
        page.wait("document.body.dataset.drawn")
        for column in page.evaluate("Object.keys(DATA.columns)"):
            page.evaluate(f"choose.value = {column!r}; choose.onchange(); 0")
            for head in (0, 3):
                page.evaluate(f"show({head}); 0")
                shown = page.evaluate(f"DATA.columns[state.value].values[{head}]")
                found = float(eval(page.evaluate(CODE), {"table": given}))
                assert found == pytest.approx(math.nan if shown is None else shown, nan_ok=True)


@pytest.mark.slow
def test_the_code_of_a_head_gives_its_number(browser: Browser) -> None:
    given = table()
    check_heads(browser, given, render.heads(given).page)
    shifted = without_policy(render.heads(given).page).replace("[${i},", "[${i + 1},")
    with pytest.raises(AssertionError):
        check_heads(browser, given, shifted)


def check_planes(
    browser: Browser, planes: PlaneTable, profile: OffsetProfile, page_text: str
) -> None:
    """Of every cell, band, bar and dot, for every head and both shares."""
    numbers = ".atlas button, .side rect, .side circle, .side .key:has(b)"
    hovered = (
        f"[...document.querySelectorAll('{numbers}')].map(n => {{ "
        "n.dispatchEvent(new PointerEvent('pointerenter')); "
        f"return [{CODE}, +(n.querySelector('b') ?? n).dataset.value]; }})"
    )
    names = {"planes": planes, "profile": profile}
    with browser.open(page_text, width=1000, height=1000) as page:
        page.wait("document.body.dataset.drawn")
        for share in ("cs", "gs"):
            page.evaluate(f"choose.value = '{share}'; choose.onchange(); 0")
            for head in range(len(planes.heads)):
                page.evaluate(f"show({head}); 0")
                each = page.evaluate(hovered)
                for code, value in each:
                    # bars hold whole numbers of 1/10,000, all else has four digits
                    rel, half = (0, 6e-5) if ".sum()" in code else (1e-3, 0)
                    assert float(eval(code, names)) == pytest.approx(value, rel=rel, abs=half)
                assert len(each) > len(planes.heads) + 6
        page.assert_harmless()


@pytest.mark.slow
def test_the_code_of_rotary_planes_gives_their_numbers(browser: Browser) -> None:
    planes, split = tables()
    # offsets below -31 are not shown
    profile = dataclasses.replace(offset_profile(split), first=-40)
    text = render.bands_page(planes, profile).page
    check_planes(browser, planes, profile, text)
    free = without_policy(text)
    for old, new in [
        ("[${i}, ${b}]", "[${i}, 0]"),
        ("total_${state.share}", "total_cs"),
        ("[${i}, ${m}, ", "[${i}, 0, "),
        ("DATA.terms[g]", "DATA.terms[0]"),
        ("DATA.profile.rows[i]", "0"),
        ("offsets[k] - DATA.profile.first", "k"),
    ]:
        assert free.count(old) == 1, old
        with pytest.raises(AssertionError):
            check_planes(browser, planes, profile, free.replace(old, new))


@pytest.mark.slow
def test_a_click_keeps_the_code_of_a_plane(browser: Browser) -> None:
    planes, _ = tables()
    middle = "(r => [r.left + r.width / 2, r.top + r.height / 2])({}.getBoundingClientRect())"
    tallest = (
        "[...document.querySelectorAll('rect')].reduce((a, b) => "
        "+a.getAttribute('height') > +b.getAttribute('height') ? a : b)"
    )
    with browser.open(render.bands_page(planes).page, width=1000) as page:
        page.wait("document.body.dataset.drawn")
        first = page.evaluate(CODE)
        assert first.startswith("planes.by_band().total_cs[")
        x, y = page.evaluate(middle.format(tallest))
        page.hover(x, y)
        page.wait(f"{CODE}.startsWith('planes.cs[')", timeout=10)
        bar = page.evaluate(CODE)
        page.hover(5, 5)
        page.wait(f"{CODE} === {first!r}", timeout=10)
        page.click(x, y)
        page.hover(*page.evaluate(middle.format("cells[0]")))
        page.wait(f"{CODE}.startsWith('planes.by_band().total_cs[0, ')", timeout=10)
        page.hover(5, 5)
        page.wait(f"{CODE} === {bar!r}", timeout=10)
        page.assert_harmless()


def check_logit(browser: Browser, view: PageView, names: dict[str, Any]) -> None:
    pairs = (
        "[...document.querySelectorAll('.pair')].map(p => [p.querySelector('.code code')"
        ".textContent, +p.querySelector('summary b').dataset.value])"
    )
    with browser.open(view.page, width=1100) as page:
        page.wait("document.body.dataset.drawn")
        for query in range(page.evaluate("DATA.queries.length")):
            page.evaluate(f"choose({query}); 0")
            found = page.evaluate(pairs)
            assert found
            for code, value in found:
                assert float(eval(code, names)) == pytest.approx(value, rel=1e-4)


@pytest.mark.slow
def test_the_code_of_a_source_gives_what_was_written_from_it(browser: Browser) -> None:
    several = explained()
    view = render.logit_page(several)
    check_logit(browser, view, {"explanations": several})
    check_logit(browser, render.logit_page(several[0]), {"explanation": several[0]})
    with pytest.raises(AssertionError):
        check_logit(browser, view, {"explanations": several[::-1]})
