"""The built site: a page of the API begins with a summary, and every internal link
leads to a page, file or anchor that is there.

The site is built once, by ``python -m tests --only docs``, which runs before the tests; where it is
not built, the test of it is skipped with that reason.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = [pytest.mark.once, pytest.mark.nightly]

DOCS = Path(__file__).resolve().parents[2] / "docs"
SITE, PICTURES = DOCS / "_build" / "html", DOCS / "pictures.py"
LINKS = {"a": "href", "img": "src", "link": "href", "script": "src", "iframe": "src"}


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {"", "top"}  # every browser goes to the top for these
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        if link := found.get(LINKS.get(tag, "")):
            self.links.add(link)


def broken(site: Path) -> list[str]:
    """``page -> link`` of every internal link that leads nowhere."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else None
            if not target.is_file() or (anchors and unquote(parts.fragment) not in anchors):
                found.append(f"{path.relative_to(site)} -> {link}")
    return found


@pytest.fixture
def built() -> None:
    """Skips where there is no site."""
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built (python -m tests --only docs)")


@pytest.mark.usefixtures("built")
def test_a_page_of_the_api_begins_with_its_main_functions_and_names_examples() -> None:
    page = (SITE / "api" / "scores.html").read_text("utf-8")
    names = ("split_scores", "sweep_heads", "offset_profile", "ScoreSplit")
    entries = [page.index(f'id="tl_geometry.scores.{name}"') for name in names]
    rows = [page.index(f'href="#tl_geometry.scores.{name}"', page.index("<h1>")) for name in names]
    assert rows == sorted(rows)
    assert max(rows) < min(entries)
    used = page[entries[0] :].split("Examples that use it", 1)[1]
    assert "examples/heads/induction.html" in used[:600]


@pytest.mark.usefixtures("built")
def test_the_gallery_shows_examples_in_the_order_of_reading() -> None:
    page = (SITE / "examples" / "index.html").read_text("utf-8")
    cards = page[page.index('class="sphx-glr-thumbnails"') :]
    shown = re.findall(r"sphx_glr_(\w+)_thumb", cards)
    order = re.findall(r'^    "(\w+)": \(\d+, \d+, \d+\),$', PICTURES.read_text("utf-8"), re.M)
    assert shown == order
    assert shown[0] == "tokens"
    assert len(shown) > 15


@pytest.mark.usefixtures("built")
def test_no_internal_link_of_the_site_is_broken() -> None:
    assert not broken(SITE)
    assert len(list(SITE.rglob("*.html"))) > 50
    index = re.findall(r"\]\(([^)]+)\)", (SITE / "llms.txt").read_text("utf-8"))
    assert len(index) > 15
    assert not [link for link in index if not (SITE / link).is_file()]


def test_planted_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.html").write_text('<p id="here">b</p><a href="../outside.html">x</a>', "utf-8")
    (tmp_path / "sub" / "c d.txt").write_text("", "utf-8")
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="#top"></a><a href="https://absent.org/x"></a>'
        '<a href="sub/c%20d.txt"></a><a href="b.html#gone"></a><a href="#lost"></a>'
        '<a href="absent.html"></a><img src="absent.png"><a href="mailto:a@b.c"></a>',
        "utf-8",
    )
    assert broken(tmp_path) == [
        "a.html -> #lost",
        "a.html -> absent.html",
        "a.html -> absent.png",
        "a.html -> b.html#gone",
        "b.html -> ../outside.html",
    ]
