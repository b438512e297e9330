"""Figures of rotary planes show the numbers of their tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from tests.browser import HOSTILE, Browser, as_cells, payload
from tests.modules import copy_of
from tests.tiny import tiny, tokens
from tl_geometry import decompose, render, split_scores, sweep_heads
from tl_geometry.base.errors import GeometryError
from tl_geometry.render import rotary
from tl_geometry.render.figure import PARTS, View
from tl_geometry.render.rotary import BANDS
from tl_geometry.scores import PlaneTable, ScoreSplit, offset_profile

PROMPTS = tokens(batch=10, length=18, seed=7)


@cache
def tables(architecture: str = "neox") -> tuple[PlaneTable, ScoreSplit]:
    model = tiny("bridge", architecture)
    basis = decompose(model, tokens(24, 20, 2), progress=False)
    sweep = sweep_heads(model, PROMPTS, basis, detail="planes", progress=False)
    return sweep.planes(), split_scores(model, PROMPTS, basis, heads=["L0H1", "L1H2"])


def containers(drawn: View) -> Any:
    """The bars of the first axes, by their label."""
    return drawn.figure.axes[0].containers


def test_the_atlas_has_the_colour_of_the_largest_band() -> None:
    planes, _ = tables()
    bands = planes.by_band()
    drawn = render.band_atlas(planes)
    image = np.asarray(drawn.figure.axes[0].images[0].get_array())
    top, which = bands.total_cs.max(-1)
    for i, (layer, head) in enumerate(planes.heads):
        colour = np.array(to_rgb(BANDS[bands.bands[int(which[i])]]))
        strength = 0.15 + 0.85 * min(1.0, float(top[i]))
        assert np.allclose(image[layer, head], 1 - (1 - colour) * strength, atol=1e-6)
    assert all(
        f"{b} in {int((which == bands.bands.index(b)).sum())}" in drawn.title
        for b in bands.bands
        if bool((which == bands.bands.index(b)).any())
    )
    assert " in 0" not in drawn.title
    legend = drawn.figure.axes[0].get_legend()
    assert legend is not None
    texts = [t.get_text() for t in legend.get_texts()]
    assert all(t.split(":")[0] in BANDS for t in texts)


def luminance(colour: str) -> float:
    """Relative luminance of sRGB (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_bands_have_colours_of_their_own() -> None:
    parts = {*PARTS.values(), *rotary.GROUPS.values()}
    pairs = [(a, b) for a in BANDS.values() for b in (parts | set(BANDS.values())) - {a}]
    assert min(math.dist(to_rgb(a), to_rgb(b)) for a, b in pairs) > 0.15
    grey = sorted(luminance(c) for c in BANDS.values())
    assert all(b - a > 0.04 for a, b in itertools.pairwise(grey))
    for paper in ("#ffffff", "#121212"):  # contrast of a patch on light and on dark pages
        ends = [sorted((luminance(paper), luminance(c))) for c in BANDS.values()]
        assert all((high + 0.05) / (low + 0.05) > 1.9 for low, high in ends)


def test_bars_are_the_shares_and_the_curve_is_the_profile() -> None:
    planes, split = tables()
    profile = offset_profile(split)
    drawn = render.head_planes(planes, profile)
    assert drawn.title == "Which wavelengths carry L0H1, L1H2"
    assert len(drawn.figure.axes) == 4
    row = planes.heads.index((0, 1))
    bars = [p for c in containers(drawn) for p in c]
    totals = np.zeros(3)
    for i, bar in enumerate(bars):
        totals[i % 3] += bar.get_height()
    assert np.allclose(totals, planes.total_cs[row].numpy(), atol=1e-9)
    middle = [bar.get_x() + bar.get_width() / 2 for bar in bars[:2]]
    assert np.allclose(middle, np.log10([2 * math.pi, 200 * math.pi]), atol=1e-5)
    bars_axis = drawn.figure.axes[0]
    ticks = [f"$10^{{{tick:.0f}}}$" for tick in bars_axis.get_xticks()]
    assert [label.get_text() for label in bars_axis.get_xticklabels()] == ticks
    curve = drawn.figure.axes[1].lines[0]
    assert np.allclose(curve.get_ydata(), profile.mean[0].numpy())
    assert np.allclose(curve.get_xdata(), profile.offsets.numpy())
    assert "95% interval over prompts" in drawn.caption
    few = dataclasses.replace(profile, low=profile.low * math.nan, high=profile.high * math.nan)
    assert "interval" not in render.head_planes(planes, few).caption
    turned = planes.head_planes
    equal = dataclasses.replace(turned, theta=turned.theta.clamp(min=0.1, max=0.1))
    same = dataclasses.replace(planes, head_planes=equal)
    widths = [p.get_width() for c in containers(render.head_planes(same, profile)) for p in c]
    assert min(widths) > 0.1, "planes of one wavelength stand in one place"
    alone = render.head_planes(planes, heads="L1H3")
    assert len(alone.figure.axes) == 1
    with pytest.raises(GeometryError, match="heads of the table and the profile"):
        render.head_planes(planes, profile, heads="L1H3")


@pytest.mark.parametrize("share", ["cs", "gs"])
def test_the_page_holds_the_table(share: str) -> None:
    check_page(rotary, share)


def test_faults_of_the_page_are_seen() -> None:
    def check(module: Any) -> None:
        for share in ("cs", "gs"):
            check_page(module, share)

    check(copy_of(rotary))


def check_page(module: Any, share: str) -> None:
    """The page has the shares of the table, in groups, and the profile."""
    planes, split = tables()
    profile = offset_profile(split)
    view = module.bands_page(planes, profile)
    data = payload(view)
    assert [name for name, _, _ in data["bands"]] == list(BANDS)
    assert data["share"] == "cs"
    assert view.title == render.band_atlas(planes).title
    total = planes.total_cs if share == "cs" else planes.total_gs
    bands = planes.by_band()
    each = bands.total_cs if share == "cs" else bands.total_gs
    for i in range(len(planes.heads)):
        shown = np.array(data["shares"][share]["planes"][i]) / 1e4
        assert np.allclose(shown.sum(1), total[i].numpy(), atol=2e-4)
        assert np.allclose(data["shares"][share]["bands"][i], each[i].numpy(), rtol=1e-3)
        context = [t.count("cvec") for t in planes.terms]
        own = (planes.cs if share == "cs" else planes.gs)[i]
        for g, count in ((0, 0), (1, 2), (2, 1)):
            member = torch.tensor([c == count for c in context])
            assert np.allclose(shown[:, g], own[:, member].sum(-1).numpy(), atol=1e-4)
    assert [name for name, _ in data["groups"]] == ["position", "content", "mixed"]
    assert data["head"] == planes.heads.index((0, 1))
    known = {str(planes.heads.index(h)) for h in profile.heads}
    assert set(data["profile"]["heads"]) == known
    curve = data["profile"]["heads"][str(planes.heads.index((1, 2)))]
    for shown, values in zip(curve, (profile.mean, profile.low, profile.high), strict=True):
        assert np.allclose(shown, values[1].numpy(), rtol=1e-3)
    assert payload(module.bands_page(planes))["profile"] is None
    table = bands.by_head()
    assert torch.allclose(table.cs.sum(-1), torch.ones(8).double(), atol=1e-6)
    assert {"near", "far", "pass", "unclear"} >= set(table.dominant)
    fewer = dataclasses.replace(profile, heads=((0, 1), (9, 9)))
    with pytest.raises(GeometryError, match="profile: expected heads of the table"):
        module.bands_page(planes, fewer)


BARS = """[...document.querySelectorAll('rect')].map(
  r => [+r.dataset.value, +r.dataset.wave, +r.getAttribute('height'), r.dataset.group])"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_click_on_a_head_shows_its_planes(browser: Browser, dark: bool) -> None:
    planes, split = tables()
    view = render.bands_page(planes, offset_profile(split))
    with browser.open(view.page, dark=dark, width=1000) as page:
        page.wait("document.body.dataset.drawn")
        at = planes.heads.index((1, 2))
        box = f"cells[{at}].getBoundingClientRect()"
        page.click(*page.evaluate(f"(r => [r.left + 4, r.top + 9])({box})"))
        assert page.evaluate("document.querySelector('h2').textContent") == "L1H2"
        bars = page.evaluate(BARS)
        total = planes.total_cs[at].tolist()
        count = len(bars) // 3
        drawn = [sum(b[0] for b in bars[3 * m : 3 * m + 3]) for m in range(count)]
        assert drawn == pytest.approx(total[:count], abs=3e-4)
        tall = max(bars, key=lambda b: b[2])
        assert abs(tall[0]) == max(abs(b[0]) for b in bars)
        waves = planes.wavelength[at]
        assert bars[0][1] == pytest.approx(float(waves[0]), rel=1e-3)
        dots = page.evaluate("[...document.querySelectorAll('circle')].map(c => +c.dataset.value)")
        assert dots == pytest.approx(offset_profile(split).mean[1].tolist(), rel=1e-3)
        page.tab.keyboard.press("ArrowRight")
        assert page.evaluate("document.querySelector('h2').textContent") == "L1H3"
        assert page.evaluate("document.querySelectorAll('circle').length") == 0
        page.evaluate("{const s = document.querySelector('select'); s.value = 'gs'; s.onchange()}")
        other = page.evaluate(BARS)
        at = planes.heads.index((1, 3))
        drawn = [sum(b[0] for b in other[3 * m : 3 * m + 3]) for m in range(count)]
        assert drawn == pytest.approx(planes.total_gs[at].tolist()[:count], abs=3e-4)
        bands = planes.by_band()
        names = [bands.bands[i] for i in bands.total_gs.nan_to_num().argmax(-1).tolist()]
        assert page.evaluate("cells.map(c => c.dataset.band)") == names
        page.assert_harmless()
    with browser.open(as_cells(view.html()), dark=dark, width=400) as page:
        page.wait("document.body.dataset.drawn", frame=1)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth", frame=1)
        page.assert_harmless()


@pytest.mark.slow
def test_a_name_from_a_model_stays_text(browser: Browser, tmp_path: Path) -> None:
    planes, _ = tables("gpt2")  # nothing is rotated
    for name in HOSTILE[:4]:
        source = dataclasses.replace(planes.provenance, model=name)
        view = render.bands_page(dataclasses.replace(planes, provenance=source))
        with browser.open(view.save(tmp_path / "bands.html")) as page:
            page.wait("document.body.dataset.drawn")
            assert name in page.evaluate("document.body.textContent")
            assert page.evaluate("document.querySelectorAll('rect').length") == 3
            page.assert_harmless()


def test_a_model_without_rotation_is_one_hatched_bar() -> None:
    planes, split = tables("gpt2")
    drawn = render.head_planes(planes, offset_profile(split))
    bars = [p for c in containers(drawn) for p in c]
    assert len(bars) == 3
    assert {bar.get_hatch() for bar in bars} == {"//"}
    assert "pass in 8 of 8" in render.band_atlas(planes).title
