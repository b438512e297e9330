"""Figures of rotary planes show the numbers of their tables."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from tests.tiny import tiny, tokens
from tl_geometry import decompose, render, split_scores, sweep_heads
from tl_geometry.base.errors import GeometryError
from tl_geometry.render.rotary import BANDS
from tl_geometry.scores import PlaneTable, ScoreSplit

PROMPTS = tokens(batch=10, length=18, seed=7)


@cache
def tables(architecture: str = "neox") -> tuple[PlaneTable, ScoreSplit]:
    model = tiny("bridge", architecture)
    basis = decompose(model, tokens(24, 20, 2), progress=False)
    sweep = sweep_heads(model, PROMPTS, basis, detail="planes", progress=False)
    return sweep.planes(), split_scores(model, PROMPTS, basis, heads=["L0H1", "L1H2"])


@pytest.mark.parametrize("share", ["cs", "gs"])
def test_the_atlas_has_the_colour_of_the_largest_band(share: str) -> None:
    planes, _ = tables()
    bands = planes.by_band()
    drawn = render.band_atlas(planes, share=share)
    image = np.asarray(drawn.figure.axes[0].images[0].get_array())
    values = bands.total_cs if share == "cs" else bands.total_gs
    top, which = values.max(-1)
    for i, (layer, head) in enumerate(planes.heads):
        colour = np.array(to_rgb(BANDS[bands.bands[int(which[i])]]))
        strength = 0.15 + 0.85 * min(1.0, float(top[i]))
        assert np.allclose(image[layer, head], 1 - (1 - colour) * strength, atol=1e-6)
    assert all(
        f"{b} in {int((which == bands.bands.index(b)).sum())}" in drawn.title
        for b in bands.bands
        if bool((which == bands.bands.index(b)).any())
    )
    texts = [t.get_text() for t in drawn.figure.axes[0].get_legend().get_texts()]
    assert all(t.split(":")[0] in BANDS for t in texts)


def test_bars_are_the_shares_and_the_curve_is_the_profile() -> None:
    planes, split = tables()
    profile = split.offset_profile()
    drawn = render.head_planes(planes, profile)
    assert drawn.title == "Which wavelengths carry L0H1, L1H2"
    assert len(drawn.figure.axes) == 4
    row = planes.heads.index((0, 1))
    bars = [p for c in drawn.figure.axes[0].containers for p in c.patches]
    totals = np.zeros(3)
    for i, bar in enumerate(bars):
        totals[i % 3] += bar.get_height()
    assert np.allclose(totals, planes.total_cs[row].numpy(), atol=1e-9)
    middle = [bar.get_x() + bar.get_width() / 2 for bar in bars[:2]]
    assert np.allclose(middle, np.log10([2 * math.pi, 200 * math.pi]), atol=1e-5)
    curve = drawn.figure.axes[1].lines[0]
    assert np.allclose(curve.get_ydata(), profile.mean[0].numpy())
    assert np.allclose(curve.get_xdata(), profile.offsets.numpy())
    alone = render.head_planes(planes, heads="L1H3")
    assert len(alone.figure.axes) == 1
    with pytest.raises(GeometryError, match="heads of the table and the profile"):
        render.head_planes(planes, profile, heads="L1H3")
    with pytest.raises(GeometryError, match="share"):
        render.band_atlas(planes, share="es")


def test_the_page_has_a_column_for_each_band() -> None:
    planes, _ = tables()
    page = render.bands_page(planes)
    assert all(f"{s}_{b}" in page.page for s in ("cs", "gs") for b in BANDS)
    assert page.image is not None
    table = planes.by_band().by_head()
    assert len(table.rows()) == 8
    assert torch.allclose(table.cs.sum(-1), torch.ones(8).double(), atol=1e-6)
    assert {"near", "far", "pass"} >= set(table.dominant)


def test_a_model_without_rotation_is_one_hatched_bar() -> None:
    planes, split = tables("gpt2")
    drawn = render.head_planes(planes, split.offset_profile())
    bars = [p for c in drawn.figure.axes[0].containers for p in c.patches]
    assert len(bars) == 3
    assert {bar.get_hatch() for bar in bars} == {"//"}
    assert "pass in 8 of 8" in render.band_atlas(planes).title
