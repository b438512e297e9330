"""The report as an article: findings lead to figures, tables are searched, and the page works in
light, in dark and where it is narrow."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.browser import Browser
from tl_geometry.base.results import Provenance
from tl_geometry.base.tables import Table
from tl_geometry.report.tables import TableBlock

pytestmark = [pytest.mark.once, pytest.mark.slow]


FIGURES = (
    *("position", "fourier", "learning", "variance", "massive", "incoherence"),
    "what-curve-do-positions-lie-on-in-each-state",
    "which-positions-and-contexts-of-state-2-point-the-same-way",
    *("shares", "gain", "types", "heads", "example"),
    *("lift", "blocks", "coverage", "sphere", "surrogates"),
    *("bundle", "maps", "residuals", "noise", "truncation", "skips"),
)
"""Names of the figures of a report with all sections on a model without rotation."""


def test_the_page_has_every_figure(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert sorted(re.findall(r'id="figure-([\w-]+)"', page)) == sorted(FIGURES)


def test_findings_lead_to_figures(folder: Path) -> None:
    out = folder
    page = (out / "report.html").read_text()
    ids = re.findall(r'\sid="([^"]+)"', page.partition("<body>")[2].replace("srcdoc=", " x="))
    head = page.partition('id="findings"')[2].partition('class="about"')[0]
    assert head.count('class="find') == 5
    links = re.findall(r'href="#([^"]+)"', page)
    assert set(links) <= set(ids)
    assert len([i for i in ids if i.startswith(("figure-", "table-"))]) == len(
        {i for i in ids if i.startswith(("figure-", "table-"))}
    )
    parts = [json.loads(p.read_text()) for p in (out / "sections").glob("*.json")]
    found = [f for part in parts for f in part["findings"]]
    assert len(found) >= 8
    assert page.count('class="find') == len(found)
    named = [re.findall(r"\ue000([\w.]+):", f["said"] + f["beside"]) for f in found]
    assert all(files and all((out / file).exists() for file in files) for files in named)
    assert page.index("evidence for nothing") < page.index('id="findings"')


def test_works_of_all_sections_are_cited(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    cited = page.partition("Cite:")[2]
    assert all(name in cited for name in ("Song &amp; Zhong", "Sarfati", "Molina"))


@pytest.mark.nightly
def test_the_page_is_searched_and_draws_its_frames(folder: Path, browser: Browser) -> None:
    for dark, width in ((False, 1280), (True, 400)):
        with browser.open(folder / "report.html", width=width, dark=dark) as page:
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width
            seen = (
                "(() => { const t = document.getElementById('table-heads'); t.open = true;"
                "const f = t.querySelector('input'); f.value = 'content'; "
                "f.dispatchEvent(new Event('input', {bubbles: true}));"
                "const rows = [...t.querySelectorAll('tbody tr')];"
                "return [rows.length, rows.filter(r => !r.hidden).length, "
                "rows.filter(r => !r.hidden).every(r => r.textContent.includes('content'))]; })()"
            )
            every, left, right = page.evaluate(seen)
            assert every == 16
            assert 0 < left < 16
            assert right
            page.evaluate("document.querySelector('#figure-example iframe').scrollIntoView()")
            is_drawn = "!!document.querySelector('canvas') && document.body.dataset.drawn"
            deadline = time.monotonic() + 60
            drawn = False
            while not drawn and time.monotonic() < deadline:  # frames load when they come near
                drawn = any(frame.evaluate(is_drawn) for frame in page.frames[1:])
                time.sleep(0.2)
            assert drawn
            assert not [text for text in page.errors if "Security" in text or "Error" in text]
            assert not [url for url in page.asked if url.startswith("http")]


def test_the_page_is_small(folder: Path) -> None:
    assert (folder / "report.html").stat().st_size < 3_000_000


def test_tables_are_for_people() -> None:
    rows = tuple((f"p{i}", "<b>") for i in range(30))
    facts = Table(names=("property", "value"), cells=rows, provenance=Provenance())
    text = TableBlock(name="facts", table=facts, about="Facts").html()
    assert text.count("<tr>") == 31
    assert "&lt;b&gt;" in text
    assert 'type="search"' in text
    assert "30 rows" in text
