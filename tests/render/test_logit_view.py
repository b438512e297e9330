"""The page of one logit: its numbers are those of the explanation, every list sums to what it
claims to, clicks change what is shown, and no token runs."""

from __future__ import annotations

import dataclasses
import re
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
from tests.modules import copy_of
from tl_geometry import render
from tl_geometry.base import html
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.render import logit_view
from tl_geometry.render.logit_view import followers

PROMPT = "def f(width, height):\n    return width * height"


@cache
def explained(*, writers: bool = False) -> tuple[LogitExplanation, ...]:
    """The last positions of a text in which names come back, by position and content or by
    writers."""
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 32, n=8)
    basis = None if writers else tlg.decompose(model, windows, progress=False)
    ids = model.to_tokens(PROMPT, prepend_bos=True)
    places = range(ids.shape[1] - (2 if writers else 4), ids.shape[1] - 1)
    return tuple(tlg.explain_logit(model, ids, i, int(ids[0, i + 1]), basis, top=8) for i in places)


def hostile() -> list[LogitExplanation]:
    texts = (HOSTILE * 3)[: len(explained()[0].str_tokens)]
    return [
        dataclasses.replace(e, str_tokens=texts, target_tokens=(HOSTILE[i], HOSTILE[i + 1]))
        for i, e in enumerate(explained())
    ]


@pytest.mark.parametrize("writers", [False, True])
def test_the_page_adds_up_to_the_logit(writers: bool) -> None:
    check_sums(logit_view, writers=writers)


def check_sums(module: Any, *, writers: bool = False) -> None:
    """Every list of the page sums to its number, the page to the logit, and its numbers are those
    of the explanation's table."""
    each = explained(writers=writers)
    for e, q in zip(each, payload(module.logit_page(each))["queries"], strict=True):
        near = pytest.approx
        pairs = [(head["name"], pair) for head in q["heads"] for pair in head["pairs"]]
        written = sum(pair["written"] for _, pair in pairs) + sum(v for _, v in q["rest"])
        assert written == near(e.logit, abs=2e-3)
        assert (q["total"], q["logit"]) == (near(e.total, rel=1e-4), near(e.logit, rel=1e-4))
        table = {(row[0], row[3]): row[5:] for row in e.rows()}
        for name, pair in pairs:
            assert (name, pair["source"]) in table
            row = table[name, pair["source"]]
            assert (pair["written"], pair["attention"], pair["total"]) == near(row, rel=1e-4)
            for mode in (0, 1):
                total = sum(v for _, v in pair["score"][mode])
                assert total == near(pair["total"], abs=2e-3)
                assert sum(v for _, v in pair["value"][mode]) == near(pair["written"], abs=1e-3)
        assert q["marks"] == near(
            e.heads.sum((0, 1))[: e.position + 1].tolist(), rel=1e-3, abs=1e-9
        )
        for head in q["heads"]:
            layer, number = map(int, re.findall(r"\d+", head["name"]))
            assert head["sum"] == near(float(e.heads[layer, number].sum()), rel=1e-4)
            own = e.heads[layer, number, : e.position + 1].tolist()
            assert head["marks"] == near(own, rel=1e-3, abs=1e-9)


def test_groups_and_writers_are_sums_of_terms() -> None:
    check_groups(logit_view)


def check_groups(module: Any) -> None:
    """Groups of terms, and writers of the key, are sums over the right side."""
    e = explained()[-1]
    data = payload(module.logit_page(e))
    assert data["details"] == ["groups", "all 9 terms"]
    pair = data["queries"][0]["heads"][0]["pairs"][0]
    terms, context = e.pair_terms[0], e.parts.index("cvec")
    content, keys, queries = (
        float(terms[context, context]),
        float(terms[:, context].sum()),
        float(terms[context].sum()),
    )
    found = dict(pair["score"][0])
    assert found["content"] == pytest.approx(content, rel=1e-4)
    assert found["position-content"] == pytest.approx(keys - content, rel=1e-3, abs=1e-4)
    assert found["content-position"] == pytest.approx(queries - content, rel=1e-3, abs=1e-4)
    assert dict(pair["score"][1])["cvec-cvec"] == found["content"]
    w = explained(writers=True)[-1]
    data = payload(module.logit_page(w))
    assert data["details"][0] == "writers of the key"
    pair = data["queries"][0]["heads"][0]["pairs"][0]
    by_key = w.pair_terms[0].sum(0)
    best = int(by_key.abs().argmax())
    assert pair["score"][0][0] == [w.parts[best], pytest.approx(float(by_key[best]), rel=1e-4)]
    assert pair["score"][1][0][0] == "-".join(w.terms(0)[0][:2])
    assert re.fullmatch(r"\d+ smaller terms", pair["score"][1][-1][0])


def test_faults_of_the_page_are_seen() -> None:
    def check(module: Any) -> None:
        check_sums(module)
        check_sums(module, writers=True)

    check(copy_of(logit_view))
    check_groups(copy_of(logit_view))


def test_induction_opens_where_the_head_copies() -> None:
    each = explained()
    view = render.circuitsvis.induction(each)
    data = payload(view)
    q = data["queries"][data["first"]]
    copied = lambda e, h: float(e.heads[h][followers(e)].sum())
    best = max((copied(e, p[:2]), e.position, p[:2]) for e in each for p in e.pairs)
    assert q["position"] == best[1]
    assert "L{}H{}".format(*best[2]) in [head["name"] for head in q["heads"]]
    assert best[0] > 1
    texts = each[0].str_tokens
    assert all(texts[j - 1] == texts[q["position"]] for j in q["copies"])
    assert view.title.startswith("L1")


def test_refusals() -> None:
    each = explained()
    for wrong, options, text in [
        ([], {}, "explanations of logits, got none"),
        ([each[0], each[0]], {}, "one explanation a position"),
        ([each[0], explained(writers=True)[0]], {}, "explanations of one prompt"),
        (each, {"query": 0}, "query: expected one of the explained positions"),
    ]:
        with pytest.raises(GeometryError, match=text):
            render.logit_page(wrong, **options)


def test_without_texts_tokens_are_numbers_and_alibi_is_a_position_term() -> None:
    e = dataclasses.replace(explained()[0], str_tokens=())
    assert payload(render.logit_page(e))["tokens"][:3] == ["0", "1", "2"]
    e = dataclasses.replace(e, pair_alibi=torch.full((8,), 2.0).double())
    data = payload(render.logit_page(e))["queries"][0]["heads"][0]["pairs"][0]["score"]
    plain = payload(render.logit_page(explained()[0]))["queries"][0]["heads"][0]["pairs"][0]
    before = dict(plain["score"][0])
    assert dict(data[0])["position"] == pytest.approx(before["position"] + 2, rel=1e-3)
    assert dict(data[1])["alibi-alibi"] == 2.0


STATE = """({
  here: document.querySelector('.here').dataset.at, title: document.querySelector('h1').textContent,
  arcs: [...document.querySelectorAll('path')].map(p => [p.dataset.pair, p.getAttribute('d')]),
  cards: [...document.querySelectorAll('.card:not(.rest)')].map(c => [
    c.getAttribute('aria-label'), +c.querySelector('.top b').dataset.value,
    [...c.querySelectorAll('.pair')].map(d => [
      +d.dataset.source, ...[...d.querySelectorAll('[data-value]:not([role])')].map(
        b => +b.dataset.value),
      [...d.querySelectorAll('[role=listitem]')].map(b => [b.dataset.name, +b.dataset.value])])]),
})"""


def centre(page: Any, selector: str) -> tuple[float, float]:
    rect = f"document.querySelector(`{selector}`).getBoundingClientRect()"
    x, y = page.evaluate(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({rect})")
    return x, y


@pytest.mark.slow
def test_a_click_on_a_token_shows_its_logit(browser: Browser, tmp_path: Path) -> None:
    each = explained()
    view = render.logit_page(each)
    with browser.open(view.save(tmp_path / "a.html"), width=1100, height=900) as page:
        page.wait("document.body.dataset.drawn")
        before = page.evaluate(STATE)
        last = each[-1]
        page.click(*centre(page, f"[data-at='{last.position}']"))
        after = page.evaluate(STATE)
        assert (before["here"], after["here"]) == (str(each[0].position), str(last.position))
        assert before["arcs"] != after["arcs"]
        assert before["title"] != after["title"]
        shown = {(name, pair[0]): pair[1:4] for name, _, pairs in after["cards"] for pair in pairs}
        table = {(row[0], row[3]): row[5:] for row in last.rows()}
        assert {f"{name} {j}" for name, j in shown} == {pair for pair, _ in after["arcs"]}
        for key, values in shown.items():
            assert values == pytest.approx(table[key], rel=1e-4)
        page.click(*centre(page, ".card:nth-child(2) button"))  # one head alone
        alone = page.evaluate(STATE)
        name = alone["cards"][1][0]
        assert {pair.split()[0] for pair, _ in alone["arcs"]} == {name}
        marks = page.evaluate("tokens.map(t => t.dataset.value)")
        layer, head = map(int, re.findall(r"\d+", name))
        expected = last.heads[layer, head, : last.position + 1].tolist()
        assert [float(v) for v in marks if v != ""] == pytest.approx(expected, rel=1e-3, abs=1e-9)
        page.evaluate("switches[1].focus()")
        page.tab.keyboard.press("Enter")  # all terms
        many = page.evaluate(STATE)["cards"][0][2][0][-1]
        assert len(many) == 12
        assert sum(v for _, v in many[:9]) == pytest.approx(shown[next(iter(shown))][2], abs=2e-3)
        page.evaluate(f"document.querySelector('[data-at=\"{each[0].position}\"]').focus()")
        page.tab.keyboard.press("Enter")
        assert page.evaluate(STATE)["title"] == before["title"]
        page.assert_harmless()


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_hostile_tokens_stay_text_at_any_width(browser: Browser, dark: bool) -> None:
    view = render.logit_page(hostile())
    with browser.open(view.page, dark=dark, width=400) as page:
        page.wait("document.body.dataset.drawn")
        shown = page.evaluate("tokens.map(t => t.textContent)")
        assert shown == [html.token_text(t) for t in hostile()[0].str_tokens]
        page.evaluate("tokens.forEach(t => t.click()); 0")
        assert page.evaluate(FITS)
        page.assert_harmless()
        unlit = "[...document.querySelectorAll('.bars u')].every(u => u.offsetWidth < 200)"
        assert page.evaluate(unlit)
    check_beside_itself(browser, view, dark=dark)


@pytest.mark.slow
def test_a_notebook_holds_the_image_and_the_page_above_it(browser: Browser) -> None:
    check_notebook(browser, render.logit_page(hostile()), limit=500_000)


@pytest.mark.slow
def test_hostile_tokens_run_without_the_escapes_and_the_policy(browser: Browser) -> None:
    """The twin: the page with tokens as they are."""
    check_escapes_matter(browser, render.logit_page(hostile()))


DRAWN = """({
  bars: [...document.querySelectorAll('.pair[open] [role=listitem]')].map(r => {
    const u = r.querySelector('u'), t = r.querySelector('i');
    return [+r.dataset.value, u.offsetLeft + u.offsetWidth / 2 - t.clientWidth / 2, u.offsetWidth,
            getComputedStyle(u).backgroundColor];
  }),
  arcs: [...document.querySelectorAll('path')].map(p => [p.dataset.pair, +p.getAttribute(
    'stroke-width'), getComputedStyle(p).stroke]),
  written: Object.fromEntries(pairs().map(([h, _, p]) => [
    `${at().heads[h].name} ${p.source}`, p.written])),
})"""


def check_drawn(page: Any) -> None:
    """Bars and arcs are as long and as wide as their numbers, red and to the right where these are
    positive."""
    page.wait("document.body.dataset.drawn")
    seen = page.evaluate(DRAWN)
    large = [bar for bar in seen["bars"] if bar[2] >= 4]
    assert {bar[0] > 0 for bar in large} == {True, False}
    for value, middle, _, colour in large:
        assert (value > 0) == (middle > 0)
        assert colour == (RED if value > 0 else BLUE)
    arcs = [(seen["written"][pair], wide, colour) for pair, wide, colour in seen["arcs"]]
    assert len(arcs) >= 3
    for value, wide, colour in arcs:
        assert colour == (RED if value > 0 else BLUE)
        assert wide == pytest.approx(0.8 + 5 * abs(value) / page.evaluate("DATA.limit"), rel=1e-6)


@pytest.mark.slow
def test_bars_and_arcs_are_drawn_to_their_numbers(browser: Browser) -> None:
    text = render.logit_page(explained()).page
    with browser.open(text, width=1100) as page:
        check_drawn(page)
    free = without_policy(text)
    for old, new in [
        ("colour = v => v < 0", "colour = v => v > 0"),
        ("value < 0 ? 'right' : 'left'", "value > 0 ? 'right' : 'left'"),
        ("Math.abs(pair.written) / DATA.limit", "pair.attention / DATA.limit"),
    ]:
        assert free.count(old) == 1
        with (
            browser.open(free.replace(old, new), width=1100) as page,
            pytest.raises(AssertionError),
        ):
            check_drawn(page)


IN_SIGHT = """(i => {
  const a = text.getBoundingClientRect(), b = tokens[i].getBoundingClientRect();
  return b.top >= a.top && b.bottom <= a.bottom;
})"""
"""Whether a token stands inside the box of the text."""


@pytest.mark.slow
def test_a_long_text_is_scrolled_to_what_is_looked_at(browser: Browser) -> None:
    explanation = explained()[0]
    low = without_policy(render.logit_page(explanation).page)
    low = low.replace("max-height:420px", "max-height:60px")
    start, click = "see(at().position);", "line.onclick = () => see(pair.source);"
    for removed, sights in ((None, (True, True)), (start, (False, True)), (click, (True, False))):
        assert removed is None or low.count(removed) == 1
        with browser.open(low.replace(removed or "", ""), width=400) as page:
            page.wait("document.body.dataset.drawn")
            chosen = page.evaluate(f"{IN_SIGHT}({explanation.position})")
            source = page.evaluate("Math.min(...pairs().map(([,, pair]) => pair.source))")
            page.evaluate(f"text.scrollTop = tokens[{source}].offsetTop > 60 ? 0 : 999")
            page.evaluate(f"document.querySelector('[data-source=\"{source}\"] summary').click()")
            assert (chosen, page.evaluate(f"{IN_SIGHT}({source})")) == sights
