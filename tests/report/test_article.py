"""The report as an article: every figure has its anatomy, findings lead to figures, tables are
searched, and the page works in light, in dark and where it is narrow."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg
from tests.browser import Browser
from tests.render.test_rotary import tables
from tl_geometry import render
from tl_geometry.base.results import Provenance
from tl_geometry.render.figure import View, canvas
from tl_geometry.render.head_view import head_grid
from tl_geometry.render.page import PageView
from tl_geometry.render.writers import logit_figure
from tl_geometry.report.tables import Table, TableBlock
from tl_geometry.scores import offset_profile

COUNTS = (
    *(
        "state",
        "layer",
        "head",
        "position",
        "rank",
        "contexts",
        "frequency",
        "document",
        "u1",
        "u2",
    ),
    *("token", "singular directions", "directions", "goes on at block", "first block skipped"),
    *(
        "query",
        "key",
        "what is kept of W_QK",
        "what heads keep",
        "state t",
        "state t + τ",
        "state t + 1",
    ),
    *("u1", "u2", "directions kept, K", "trained: u2", "untrained control: u2"),
    *("pca 1", "pca 2", "u1 of state 4", "u2 of state 4"),
)
"""Labels of axes that count or name things."""
UNIT = re.compile(r"\(.+\)|share|ratio|cos|direction|coordinate|cosine|wavelength")
"""What a label of an axis holds besides: a unit, or a quantity that has none."""


def amiss(figure: View | PageView) -> list[str]:
    """What a figure lacks of the anatomy."""
    title, how = figure.title, figure.caption
    found = []
    if not title or not (title[0].isupper() or title[0].isdigit()) or title.endswith("."):
        found.append(f"title {title!r}")
    if not how or not (how[0].isupper() or how[0].isdigit()) or not how.rstrip().endswith("."):
        found.append(f"how to read it {how!r}")
    if not figure.source or figure.source in how:
        found.append("provenance apart")
    if not figure.null:
        found.append("null")
    if isinstance(figure, View):
        axes = [a for a in figure.figure.axes if a.get_visible() and a.get_label() != "<colorbar>"]
        labels = [text for a in axes for text in (a.get_xlabel(), a.get_ylabel()) if text]
        sides = ([a.get_xlabel() for a in axes], [a.get_ylabel() for a in axes])
        found += [f"label {side}" for side, given in zip("xy", sides) if not any(given)]
        found += [f"unit of {t!r}" for t in labels if t not in COUNTS and not UNIT.search(t)]
        texts = [t.get_text() for a in axes for t in _legend(a)]
        texts += [t.get_text() for held in figure.figure.legends for t in held.get_texts()]
        drawn = re.search(r"[Dd]ashed|[Dd]otted", figure.null)
        if drawn and not any("null" in text or "law" in text for text in texts):
            found.append("null in the legend")
    return found


def _legend(axis: Any) -> list[Any]:
    held = axis.get_legend()
    return [] if held is None else held.get_texts()


def test_every_figure_has_its_anatomy(made: tuple[Path, list[Any]]) -> None:
    _, figures = made
    assert len(figures) >= 20
    lacking = {figure.title: faults for figure in figures if (faults := amiss(figure))}
    assert not lacking, str(lacking)


FIGURES = (
    *("position", "fourier", "learning", "variance", "massive", "incoherence"),
    "what-curve-do-positions-lie-on-in-each-state",
    "which-positions-and-contexts-of-state-2-point-the-same-way",
    *("shares", "gain", "types", "heads", "example", "dominance"),
    *("lift", "blocks", "coverage", "sphere", "surrogates"),
    *("bundle", "maps", "residuals", "noise", "truncation", "skips"),
)
"""Names of the figures of a report with all sections on a model without rotation."""


def test_the_page_has_every_figure(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert sorted(re.findall(r'id="figure-([\w-]+)"', page)) == sorted(FIGURES)


def test_a_budget_that_cut_nothing_is_not_mentioned(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Losses are those of 16 windows of 64 tokens of this corpus." in page


def own_figures() -> list[View | PageView]:
    """Views that are read outside a report, or are in few reports."""
    planes, rotary = tables()
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=16)
    basis = tlg.decompose(model, windows, progress=False)
    spliced = tlg.decompose(model, tlg.corpus.splice(windows), progress=False)
    sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    found = tlg.explain_logit(model, windows[:1], 14, 5)
    split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    composed = tlg.composition(model, windows, layers=[1, 2], progress=False)
    return [
        render.band_atlas(planes),
        render.head_planes(planes),
        render.head_planes(planes, offset_profile(rotary)),
        render.bands_page(planes, offset_profile(rotary)),
        *(render.variance_shares(basis.anova(null=null)) for null in (None, spliced)),
        *(render.composition_figure(composed, share=share) for share in ("cs", "gs")),
        logit_figure(found),
        render.logit_page(found),
        render.split(split),
        render.heads(sweep),
        head_grid(sweep, "induction"),
    ]


def test_views_have_their_anatomy_by_themselves() -> None:
    drawn = own_figures()
    drawn += [page.image() for page in drawn if isinstance(page, PageView)]
    lacking = {figure.title: faults for figure in drawn if (faults := amiss(figure))}
    assert not lacking, str(lacking)
    for figure in drawn:  # the title stands above the picture, not inside too
        if isinstance(figure, View):
            assert figure.figure.get_suptitle() == ""
            assert all(a.get_title("left") == "" for a in figure.figure.axes)


def test_maps_of_colours_are_not_inverted_on_dark_pages() -> None:
    basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    sequential, plain = render.spirals(basis), render.variance_shares(basis.anova())
    assert 'class="kept"' in sequential.html()
    assert 'class="kept"' not in plain.html()


def test_a_figure_without_its_anatomy_is_seen() -> None:
    def view(**changed: str) -> View:
        figure, axes = canvas()
        axes[0].set(xlabel=changed.pop("x", "state"), ylabel=changed.pop("y", "loss (nats)"))
        if legend := changed.pop("legend", ""):
            axes[0].plot([0, 1], label=legend)
            axes[0].legend()
        whole = {"title": "Is it?", "caption": "Each point is one.", "null": "None.", "source": "m"}
        return View(figure, **(whole | changed))

    assert amiss(view()) == []
    assert amiss(view(null="The dashed line.", legend="null: noise")) == []
    for fault in (
        {"title": ""},
        {"title": "rank and corpus"},
        {"caption": "of P, Cvec and R"},
        {"caption": ""},
        {"source": ""},
        {"caption": "From m."},
        {"null": ""},
        {"null": "The dashed line.", "legend": "noise"},
        {"x": ""},
        {"y": "loss"},
    ):
        assert amiss(view(**fault)), fault


def test_findings_lead_to_figures(made: tuple[Path, list[Any]]) -> None:
    out, _ = made
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


def test_works_of_all_sections_are_cited(made: tuple[Path, list[Any]]) -> None:
    page = (made[0] / "report.html").read_text()
    cited = page.partition("Cite:")[2]
    assert all(name in cited for name in ("Song &amp; Zhong", "Sarfati", "Molina"))


def test_the_page_is_searched_and_draws_its_frames(
    made: tuple[Path, list[Any]], browser: Browser
) -> None:
    for dark, width in ((False, 1280), (True, 400)):
        with browser.open(made[0] / "report.html", width=width, dark=dark) as page:
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


def test_the_page_is_small(made: tuple[Path, list[Any]]) -> None:
    assert (made[0] / "report.html").stat().st_size < 3_000_000


def test_tables_are_for_people() -> None:
    rows = tuple((f"p{i}", "<b>") for i in range(30))
    facts = Table(names=("property", "value"), cells=rows, provenance=Provenance())
    text = TableBlock(name="facts", table=facts, about="Facts").html()
    assert text.count("<tr>") == 31
    assert "&lt;b&gt;" in text
    assert 'type="search"' in text
    assert "30 rows" in text
