"""Pages of any width and on paper: nothing is cut, wide windows are used, no blank is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import COVERED, FITS, Browser, Page, as_cells, without_policy
from tests.render.test_browser import bundle, table
from tests.render.test_circuitsvis import figures
from tests.render.test_graph_view import traced
from tests.render.test_logit_view import explained
from tests.render.test_rotary import tables
from tests.splits import synthetic
from tl_geometry import render
from tl_geometry.render.page import PageView
from tl_geometry.scores import offset_profile

pytestmark = pytest.mark.slow

CANVAS = "document.querySelector('.scroll canvas').getBoundingClientRect()"


def check_split(browser: Browser, page_text: str) -> None:
    """As large as the window allows, in a container of its own where that is too narrow."""
    with browser.open(page_text, width=1200, height=900) as page:
        page.wait("document.body.dataset.drawn")
        assert 800 < page.evaluate(f"{CANVAS}.width") <= 1176
        assert page.evaluate(FITS)
        page.resize(400, 900)
        page.wait(f"{CANVAS}.width < 800", timeout=10)
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


def test_the_text_of_a_split_is_broken_into_lines(browser: Browser) -> None:
    """Also tokens between which no browser breaks a line."""
    text = render.split(synthetic(1, 25)).page
    for page_text, fits in ((text, True), (text.replace("display:inline-block;", ""), False)):
        with browser.open(without_policy(page_text), width=400) as page:
            page.wait("document.body.dataset.drawn")
            strip = "document.querySelector('.text')"
            assert page.evaluate(f"{strip}.scrollWidth <= {strip}.clientWidth") == fits


def test_a_narrow_page_has_both_colour_bars(browser: Browser) -> None:
    with browser.open(render.split(synthetic(1, 9)).page, width=400) as page:
        page.wait("document.body.dataset.drawn")
        assert page.evaluate("document.querySelector('canvas').getBoundingClientRect().right < 400")
        painted = "[...barPen.getImageData(74 * f, 37 * f, 1, 1).data]"
        colour = page.evaluate(f"(f => {painted})(devicePixelRatio || 1)")
        assert colour == pytest.approx([33, 145, 140, 255], abs=4)


def paper(page: Page) -> None:
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


def views() -> list[PageView]:
    """One of each type of page."""
    planes, split = tables()
    return [
        render.split(synthetic(1, 25)),
        render.split(synthetic(2, 30), panels="terms"),
        render.heads(table()),
        render.logit_page(explained()),
        render.logit_page(explained(writers=True)),
        render.graph_page(traced()),
        render.bands_page(planes, offset_profile(split)),
        bundle(),
        figures()["heads"],
    ]


def see(page: Page, frame: int) -> None:
    """Scroll to a frame: out of sight, browsers observe no sizes in it."""
    page.frames[frame].frame_element().scroll_into_view_if_needed()


def check_frames(browser: Browser, shown: list[str], width: int, *, dark: bool = False) -> None:
    """Frames are as wide as the window allows and as high as their pages."""
    body = f'<body data-theme="{"dark" if dark else "light"}">'
    with browser.open(as_cells(body, *shown), width=width) as page:
        for frame in range(1, len(shown) + 1):
            page.wait("document.body.dataset.drawn", frame=frame)
            see(page, frame)
            page.wait(AS_HIGH, frame=frame, timeout=10)
            assert page.evaluate(FITS, frame=frame), frame
            # the event of a new height may come after the height
            page.wait(f"dark.matches === {str(dark).lower()}", frame=frame, timeout=10)
        assert page.evaluate(FITS)
        page.assert_harmless()


AS_HIGH = """(r => document.documentElement.scrollHeight <= innerHeight && r >= 0 && r < 13)(
  innerHeight - document.body.getBoundingClientRect().bottom)"""


@pytest.mark.parametrize("width", [400, 736, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_frames_have_the_size_of_their_pages(width: int, dark: bool, browser: Browser) -> None:
    check_frames(browser, [view.html() for view in views()], width, dark=dark)


def test_a_frame_without_its_script_or_of_fixed_width_is_seen(browser: Browser) -> None:
    shown = render.split(synthetic(1, 25)).html()
    for old, new in (("data?.tlgHeight", "data?.unheard"), ("width:100%", "width:732px")):
        assert old in shown
        with pytest.raises((AssertionError, TimeoutError)):
            check_frames(browser, [shown.replace(old, new)], 400)


def test_a_frame_follows_its_page(browser: Browser) -> None:
    """What a reader opens, and another width, change its height; the image behind it stays
    covered."""
    shown = render.logit_page(explained())._repr_mimebundle_()["text/html"]
    height = "document.querySelector('iframe').clientHeight"
    with browser.open(as_cells(shown), width=736) as page:
        page.wait("document.body.dataset.drawn", frame=1)
        page.wait(AS_HIGH, frame=1, timeout=10)
        before = page.evaluate(height)
        for opened, compared in (("false", "<"), ("true", "=="), (None, "<")):
            change = f"d.open = {opened}" if opened else "d.remove()"
            page.evaluate(
                f"document.querySelectorAll('details').forEach(d => {{ {change}; }})", frame=1
            )
            page.wait(f"{height} {compared} {before}", timeout=10)
            page.wait(AS_HIGH, frame=1, timeout=10)
        assert page.evaluate(COVERED)
        page.resize(400, 900)
        page.wait(AS_HIGH, frame=1, timeout=10)


@pytest.mark.parametrize("theme", ["auto", "dark"])
def test_the_site_leaves_a_live_view_above_its_image(theme: str, browser: Browser) -> None:
    css = (Path(__file__).parents[2] / "docs" / "_static" / "site.css").read_text("utf-8")
    shown = render.split(synthetic(1, 9))._repr_mimebundle_()["text/html"]
    covered = (
        f"{COVERED} && (r => document.elementFromPoint(r.left + r.width / 2, r.top + 9))"
        "(document.querySelector('img').getBoundingClientRect()).tagName === 'IFRAME'"
    )
    spare = ":not(:where(.tlg-frame > img))"
    assert css.count(spare) == 3
    for style, above in ((css, True), (css.replace(spare, ""), False)):
        cell = f'<style>{style}</style><body data-theme="{theme}"><article>{shown}</article></body>'
        with browser.open(as_cells(cell), width=736, height=1200, dark=True) as page:
            page.wait("document.body.dataset.drawn", frame=1)
            assert page.evaluate(covered) == above


def test_only_a_frame_sets_its_own_height(browser: Browser) -> None:
    """Another frame, another message and what is no height change nothing."""
    other = "<iframe id='other' sandbox='allow-scripts' srcdoc='<p>other</p>'></iframe>"
    shown = render.split(synthetic(1, 9)).html()
    heights = "[...document.querySelectorAll('iframe')].map(f => f.clientHeight)"
    with browser.open(as_cells(shown, other), width=736) as page:
        page.wait("document.body.dataset.drawn", frame=1)
        page.wait(AS_HIGH, frame=1, timeout=10)
        before = page.evaluate(heights)
        page.evaluate("parent.postMessage({tlgHeight: 900}, '*')", frame=2)
        for message in ("{tlgHeight: 'x'}", "{tlgHeight: -5}", "{}", "null", "'text'"):
            page.evaluate(f"parent.postMessage({message}, '*')", frame=1)
        page.evaluate("new Promise(r => setTimeout(r, 200))")
        assert page.evaluate(heights) == before
        page.evaluate("parent.postMessage({tlgHeight: 900}, '*')", frame=1)
        page.wait(f"{heights}[0] === 900", timeout=10)
        assert page.errors == []
