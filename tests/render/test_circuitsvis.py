"""The hardened circuitsvis views: tokens are data, figures live side by side, limits are said,
numbers are the tensor's."""

from __future__ import annotations

import dataclasses
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

import tl_geometry as tlg
from tests.browser import HOSTILE, Browser, as_cells, payload
from tests.induction import corpus, induction_model, prompts
from tl_geometry import GeometryError
from tl_geometry.render import circuitsvis as views
from tl_geometry.render.figure import DIVERGING
from tl_geometry.render.page import PageView
from tl_geometry.scores.split import ScoreSplit

pytestmark = pytest.mark.once

TEXTS = (*HOSTILE, *HOSTILE[:8])


@cache
def copying() -> ScoreSplit:
    """The hand-built induction model on a repeated sequence, with hostile texts for its tokens."""
    basis = tlg.decompose(induction_model(), corpus(), progress=False)
    split = tlg.split_scores(induction_model(), prompts(1), basis, heads=["L0H0", "L1H0"])
    return dataclasses.replace(split, str_tokens=TEXTS)


def figures() -> dict[str, PageView]:
    split = copying()
    return {
        "heads": views.attention_heads(split),
        "one": views.attention_heads(split.terms["cvec", "cvec"][0, 1:], TEXTS, names=HOSTILE[:1]),
    }


def test_red_is_positive_and_blue_negative_as_in_every_view() -> None:
    usual = colormaps[DIVERGING]
    for view in figures().values():
        props = payload(view)["props"]
        for end, name in ((1.0, "positiveColor"), (0.0, "negativeColor")):
            (red, _, blue), (r, _, b, _) = to_rgb(props[name]), usual(end)
            assert (red > blue) == (r > b) == (end == 1.0)
    image = figures()["one"].image
    assert image is not None
    drawn = image().figure.axes[0].images[0].get_cmap()
    assert [drawn(end)[0] > drawn(end)[2] for end in (0.0, 1.0)] == [False, True]


def test_the_colour_bar_takes_its_room_from_all_heads() -> None:
    image = figures()["heads"].image
    assert image is not None
    figure = image().figure
    figure.draw_without_rendering()
    *heads, _ = figure.axes
    sizes = torch.tensor([[*axis.get_position().size] for axis in heads])
    assert len(heads) > 1
    assert float((sizes - sizes[0]).abs().max()) < 1e-6


class Markup(HTMLParser):
    """Tags and attribute names of a page, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def test_tokens_are_no_markup_and_pages_hold_no_address() -> None:
    """Hostile tokens give the same tags as plain ones (the twin: written as they are, they do not),
    and the same figure the same page."""
    split = copying()
    plain = views.attention_heads(torch.eye(len(TEXTS))[None], ["a"] * len(TEXTS)).page
    for name, view in figures().items():
        assert Markup(view.page).found == Markup(plain).found, name
        assert [tag for tag, _ in Markup(view.html()).found] == [
            "style",
            "div",
            "iframe",
            "script",
        ], name
        assert "http" not in view.page.replace("http-equiv", ""), name
        assert len(view.html()) < 800_000, name
        assert view.page == figures()[name].page, name
    assert Markup(plain + split.str_tokens[1]).found != Markup(plain).found


def test_what_a_notebook_gets(tmp_path: Path) -> None:
    for name, view in figures().items():
        bundle = view._repr_mimebundle_()
        assert set(bundle) == {"text/html", "text/plain", "image/png"}
        assert bundle["text/plain"].startswith(view.title)
        assert "kB of HTML" in bundle["text/plain"]
        assert len(bundle["image/png"]) < 400_000
        assert view.save(tmp_path / f"{name}.html").read_text(encoding="utf-8") == view.page
        assert view.save(tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(GeometryError, match=r"a name ending in \.html"):
        figures()["one"].save(tmp_path / "x.gif")


def test_the_payload_is_the_tensor() -> None:
    split, seen = copying(), payload(figures()["heads"])["props"]
    values = torch.tensor(seen["attention"], dtype=torch.float64)
    assert torch.allclose(values, split.pattern()[0].double(), rtol=6e-4, atol=1e-12)


def test_limits_are_named() -> None:
    wide = torch.zeros(13, 64, 64)
    with pytest.raises(
        GeometryError,
        match=r"13 heads x 64 x 64 tokens: expected at most 50000, got 53248\. Use fewer heads",
    ):
        views.attention_heads(wide, ["a"] * 64)
    bad = torch.zeros(1, 3, 3)
    bad[0, 2, 0] = torch.nan
    with pytest.raises(GeometryError, match="1 NaN or infinite"):
        views.attention_heads(bad, list("abc"))
    with pytest.raises(GeometryError, match="texts of the tokens"):
        views.attention_heads(torch.zeros(1, 3, 3))
    with pytest.raises(GeometryError, match=r"texts of the tokens, for .3, 3. queries"):
        views.attention_heads(torch.zeros(1, 3, 3), list("ab"))


def test_a_split_gives_heads_and_the_patterns_of_its_first_prompt() -> None:
    basis = tlg.decompose(induction_model(), corpus(), progress=False)
    split = tlg.split_scores(induction_model(), prompts(2), basis, heads=["L0H0", "L1H0"])
    both = payload(views.attention_heads(split, TEXTS))["props"]
    assert both["attentionHeadNames"] == ["L0H0", "L1H0"]
    assert torch.allclose(torch.tensor(both["attention"]), split.pattern()[0], rtol=6e-4, atol=1e-6)


def test_the_scale_is_shared_and_what_lies_beyond_is_said() -> None:
    values = torch.tensor([[[1.0, 0.0], [4.0, -8.0]], [[0.5, 0.0], [0.25, 2.0]]])
    view = views.attention_heads(values, ["a", "b"])
    props = payload(view)["props"]
    assert (props["minValue"], props["maxValue"], payload(view)["signed"]) == (-8, 8, True)
    assert view.image is not None
    assert view.image().figure.axes[0].images[0].get_clim() == (-8, 8)
    assert not payload(views.attention_heads(values.abs(), ["a", "b"]))["signed"]
    assert payload(view)["props"]["maskUpperTri"]
    assert not payload(views.attention_heads(values.mT, ["a", "b"]))["props"]["maskUpperTri"]
    masked = torch.where(torch.ones(2, 2, dtype=torch.bool).tril(), values, -torch.inf)
    assert payload(views.attention_heads(masked, ["a", "b"])) == payload(view)


DRAWN = "document.body.dataset.drawn"
FIGURE = "document.getElementById('figure')"


@pytest.mark.nightly
@pytest.mark.parametrize("dark", [False, True])
def test_hostile_tokens_are_shown_and_nothing_runs(browser: Browser, dark: bool) -> None:
    made = figures()
    with browser.open(as_cells(*(v.html() for v in made.values())), dark=dark, height=2400) as page:
        for frame in (1, 2):
            page.wait(DRAWN, frame=frame)
        page.assert_harmless()
        assert page.evaluate("document.getElementById('after').textContent") == "the end"
        for frame, names in ((1, ["L0H0", "L1H0"]), (2, [HOSTILE[0]])):
            text = page.wait(f"{FIGURE}.innerText", frame=frame)
            assert all(name in text for name in names)
        drawn = (
            "(c => [c.length, c.every(x => x.getContext('2d').getImageData(0, 0, "
            "x.width, x.height).data.some(v => v))])"
        )
        canvases = f"{drawn}([...document.querySelectorAll('canvas')])"
        assert page.evaluate("document.getElementById('high').textContent", frame=1) == "1.00"
        assert page.wait(canvases, frame=1) == [3, True]  # two heads, and one of them enlarged
        assert page.wait(canvases, frame=2) == [2, True]


@pytest.mark.nightly
def test_plain_circuitsvis_does_none_of_this(browser: Browser) -> None:
    """The twin: circuitsvis's own pages run tokens, lose tokens, and delete what follows; so the
    tests above can fail."""
    from circuitsvis import tokens as plain

    def own(tokens: tuple[str, ...]) -> str:
        return plain.colored_tokens(list(tokens), [1.0] * len(tokens)).local_src

    after = '<p id="after">the end</p>'
    with browser.open("<!doctype html>" + own(HOSTILE[:1]) + after) as page:
        assert page.wait("window.planted") == 1  # it leaves its script
    with browser.open("<!doctype html>" + own(HOSTILE[1:2]) + after) as page:
        assert page.wait("window.planted") == 1  # it is set as HTML
    with browser.open("<!doctype html>" + own(("a", "<s>", "b")) + own(("c",)) + after) as page:
        assert page.wait("document.querySelector('.colored-tokens')?.innerText").split() == [
            "ab"
        ]  # no <s>
        page.wait("!document.getElementById('after')")  # nor what follows
        assert page.evaluate("document.querySelectorAll('.colored-tokens').length") == 1
