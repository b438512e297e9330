"""Pages of any width and on paper: nothing is cut, wide windows are used, no blank is left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser import FITS, Browser, as_cells, without_policy
from tests.render.test_graph_view import traced
from tests.render.test_logit_view import explained
from tests.splits import synthetic
from tl_geometry import render

pytestmark = pytest.mark.slow

CANVAS = "document.querySelector('.scroll canvas').getBoundingClientRect()"


def check_split(browser: Browser, page_text: str) -> None:
    """As large as the window allows, in a container of its own where that is too narrow."""
    with browser.open(page_text, width=1200, height=900) as page:
        page.wait("document.body.dataset.drawn")
        assert 800 < page.evaluate(f"{CANVAS}.width") <= 1176
        assert page.evaluate(FITS)
        page.resize(400, 900)
        page.wait(f"{CANVAS}.width < 800")
        page.evaluate("point(9, 4); 0")
        assert page.evaluate(FITS)
        x, y = page.evaluate(f"(([a, b], r) => [r.left + a, r.top + b])(corner(0), {CANVAS})")
        cell = page.evaluate("DATA.cell")
        page.hover(x + 3.5 * cell, y + 7.5 * cell)
        page.wait("state.at[0] === 7 && state.at[1] === 3", timeout=10)
        page.assert_harmless()


def check_start(browser: Browser, page_text: str) -> None:
    """The sheet opens at its start; a mark that was chosen stays in sight in a narrower window."""
    start = "sheet.scrollLeft === 0 && sheet.scrollTop === 0"
    with browser.open(page_text, width=400) as page:
        page.wait("document.body.dataset.drawn")
        assert page.evaluate("sheet.scrollWidth > sheet.clientWidth")
        page.evaluate("new Promise(requestAnimationFrame)")  # the observer has seen the sheet
        assert page.evaluate(start)
        page.evaluate("slider.value = 20; slider.oninput(); 0")
        assert page.evaluate(start)
    with browser.open(page_text, width=1280) as page:
        page.wait("document.body.dataset.drawn")
        last = "N.reduce((best, n, i) => i && n.position > N[best].position ? i : best, 1)"
        page.evaluate(f"choose({last}); 0")
        page.resize(400, 900)
        page.wait(
            "(([a, b]) => a.left > b.left && a.right < b.right)"
            "([pressed(), sheet].map(n => n.getBoundingClientRect()))",
            timeout=5,
        )


def test_a_graph_opens_at_its_start(browser: Browser) -> None:
    text = render.graph_page(traced()).page
    check_start(browser, text)
    free = without_policy(text)
    assert free.count("if (state.node) reveal();") == 1
    for new in ("reveal();", ""):
        with pytest.raises((AssertionError, TimeoutError)):
            check_start(browser, free.replace("if (state.node) reveal();", new))


@pytest.mark.parametrize("whole", [True, False])
def test_no_code_of_a_graph_is_cut(whole: bool, browser: Browser) -> None:
    text = render.graph_page(traced()).page
    if not whole:
        text = without_policy(text).replace("white-space:pre-wrap;overflow-wrap:anywhere", "")
    cut = "[...document.querySelectorAll('code')].filter(c => c.scrollWidth > c.clientWidth).length"
    for width in (400, 1280):
        with browser.open(text, width=width) as page:
            page.wait("document.body.dataset.drawn")
            page.evaluate("choose(3); cards.querySelector('.edge').click(); 0")
            assert (page.evaluate(cut) == 0) == whole
            assert page.evaluate(FITS)


def test_a_split_fits_its_window(browser: Browser) -> None:
    text = render.split(synthetic(1, 25)).page
    check_split(browser, text)
    free = without_policy(text)
    for old, new in [
        ("{ fit(); drawBar(); draw(); }", "{}"),
        ("DATA.cell = Math.max(least", "DATA.cell = Math.min(least"),
        (".scroll{overflow-x:auto}", ""),
    ]:
        assert free.count(old) == 1, old
        with pytest.raises((AssertionError, TimeoutError)):
            check_split(browser, free.replace(old, new))


def test_a_narrow_page_has_both_colour_bars(browser: Browser) -> None:
    with browser.open(render.split(synthetic(1, 9)).page, width=400) as page:
        page.wait("document.body.dataset.drawn")
        assert page.evaluate("document.querySelector('canvas').getBoundingClientRect().right < 400")
        painted = "[...barPen.getImageData(74 * f, 37 * f, 1, 1).data]"
        colour = page.evaluate(f"(f => {painted})(devicePixelRatio || 1)")
        assert colour == pytest.approx([33, 145, 140, 255], abs=4)


def paper(page: Any) -> None:
    """A sheet of paper with its margins."""
    page.wait("document.body.dataset.drawn")
    page.tab.emulate_media(media="print")
    page.evaluate("document.body.style.width = '718px'; dispatchEvent(new Event('beforeprint'))")


@pytest.mark.parametrize("prepared", [True, False])
def test_paper_cuts_nothing(prepared: bool, browser: Browser) -> None:
    split, graph = render.split(synthetic(1, 25)).page, render.graph_page(traced()).page
    if not prepared:
        split, graph = (
            without_policy(p).replace("@media print", "@media none") for p in (split, graph)
        )
        graph = graph.replace("'beforeprint'", "'never'")
    with browser.open(split, width=1200, height=900) as page:
        paper(page)
        assert page.evaluate(f"{CANVAS}.right <= 718") == prepared
    with browser.open(graph, width=1200, height=900) as page:
        page.evaluate("slider.value = N.length; slider.oninput(); 0")
        paper(page)
        whole = (
            "sheet.scrollWidth <= sheet.clientWidth + 2 && sheet.scrollHeight <= sheet.clientHeight"
        )
        assert page.evaluate(whole) == prepared


def test_the_frame_of_a_logit_is_as_tall_as_its_page(browser: Browser) -> None:
    rest = "innerHeight - document.querySelector('body > p:last-of-type').getBoundingClientRect()"
    for explanations in (explained(), explained(writers=True)):
        view = render.logit_page(explanations)
        with browser.open(as_cells(view.html()), width=1200) as page:
            page.wait("document.body.dataset.drawn", frame=1)
            assert -40 < page.evaluate(f"{rest}.bottom", frame=1) < 120
