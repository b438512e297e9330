"""Figures and the page of rotary planes, and the text of a prompt, from tables made by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from tests.browser import payload
from tests.render.test_basis_and_measures_by_hand import LINE, SOURCE, bar_of, legend, size
from tests.render.test_by_hand import draw
from tl_geometry import render
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.logit_graph import TokenTable
from tl_geometry.render import figure, rotary
from tl_geometry.render.figure import WIDTH
from tl_geometry.scores.plane_tables import PlaneTable
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.relative import OffsetProfile

TERMS = ("pos-pos", "cvec-cvec", "pos-cvec")


def planes(*, terms: tuple[str, ...] = TERMS, rotated: bool = True) -> PlaneTable:
    """Three heads of layers 1 and 4 with planes of 8, 32 and 1000 tokens and one that is not
    rotated; the last head lacks the third."""
    waves = torch.tensor([8.0, 32.0, 1000.0, math.inf]).double().expand(3, 4).clone()
    waves[2, 2] = math.nan
    theta = 2 * math.pi / waves if rotated else torch.zeros(3, 4).double()
    cs = torch.zeros(3, 4, len(terms)).double()
    cs[0, 1] = torch.tensor([0.5, -0.2, 0.1])[: len(terms)]
    cs[0, 3] = torch.tensor([0.3, 0.2, 0.4])[: len(terms)]
    cs[1, 2, 0], cs[1, 0, 0] = 1.5, -0.5
    cs[2, 0, 0] = 0.25
    return PlaneTable(
        provenance=SOURCE,
        heads=((1, 0), (4, 0), (4, 2)),
        terms=terms,
        head_planes=HeadPlanes(torch.zeros(3, 8, dtype=torch.int64), theta, 64),
        cs=cs,
        gs=-cs,
    )


def profile(heads: tuple[tuple[int, int], ...] = ((4, 0), (1, 0)), **options: Any) -> OffsetProfile:
    """Offsets from -2 to 40 of two heads."""
    shape = len(heads), 43
    mean = draw(*shape)
    return OffsetProfile(
        **{
            "provenance": SOURCE,
            "heads": heads,
            "term": "total",
            "first": -2,
            "mean": mean,
            "low": mean - 1,
            "high": mean + 2,
            "cells": torch.ones(shape, dtype=torch.int64),
            "level": 0.9,
            **options,
        }
    )


def test_the_atlas_mixes_the_colour_of_the_largest_band_with_white() -> None:
    """By its share, from 15% on; a place without a head is white."""
    view = rotary.band_atlas(planes())
    axis = view.figure.axes[0]
    image: Any = axis.images[0].get_array()
    assert image.shape == (2, 3, 3)
    wanted = {(0, 0): ("pass", 0.9), (1, 0): ("far", 1.0), (1, 2): ("near", 0.25)}
    for row in range(2):
        for column in range(3):
            band, share = wanted.get((row, column), ("near", None))
            colour, strength = to_rgb(rotary.BANDS[band]), 0.15 + 0.85 * (share or 0)
            want = [1 - (1 - c) * strength for c in colour] if share else [1.0] * 3
            assert image[row, column].tolist() == pytest.approx(want, abs=1e-6)
    assert view.title == (
        "The band of wavelengths that carries each head: near in 1, far in 1, pass in 1 of 3"
    )
    box = axis.get_legend()
    assert box is not None
    assert [t.get_text() for t in box.get_texts()] == [
        "near: up to 16 tokens",
        "far: over 64 tokens",
        "pass: not rotated",
    ]
    patches: Any = box.get_patches()
    assert [to_hex(p.get_facecolor()) for p in patches] == [
        rotary.BANDS[b] for b in ("near", "far", "pass")
    ]
    assert box.get_texts()[0].get_fontsize() == 7
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("head", "layer")
    assert [t.get_text() for t in axis.get_yticklabels()] == ["1", "4"]
    assert axis.get_xticks().tolist() == [0, 1, 2]
    assert size(view) == pytest.approx((3.5, 2.6), abs=1e-3)
    assert axis.get_aspect() == "auto"
    assert (view.null, view.source) == (rotary.NULL, LINE)
    own = Figure().subplots()
    assert rotary.band_atlas(planes(), ax=own).figure is own.figure


def test_the_page_of_planes_opens_at_the_head_that_a_rotated_band_carries_most() -> None:
    """Or at the first head of a profile; heads without rotation count where there are no others."""
    found = planes()
    data = payload(rotary.bands_page(found))
    assert data["head"] == 1
    assert payload(rotary.bands_page(found, profile()))["head"] == 1
    assert payload(rotary.bands_page(found, profile(((4, 2), (1, 0)))))["head"] == 2
    assert payload(rotary.bands_page(planes(rotated=False)))["head"] == 0
    still = dataclasses.replace(found, cs=found.cs * torch.tensor([0, 0, 0, 1.0])[:, None])
    still = dataclasses.replace(still, cs=still.cs.nan_to_num())
    assert payload(rotary.bands_page(still))["head"] == 0


def test_the_page_of_planes_holds_shares_waves_and_profiles() -> None:
    """Planes that a head lacks are left out; shares are whole numbers of 1/10,000."""
    found = planes()
    view = rotary.bands_page(found, profile())
    data = payload(view)
    assert data["heads"] == [[0, 0], [1, 0], [1, 2]]
    assert (data["layers"], data["count"], data["marks"]) == ([1, 4], 3, [16, 64])
    assert data["bands"] == [
        ["near", "up to 16 tokens", rotary.BANDS["near"]],
        ["middle", "16 to 64 tokens", rotary.BANDS["middle"]],
        ["far", "over 64 tokens", rotary.BANDS["far"]],
        ["pass", "not rotated", rotary.BANDS["pass"]],
    ]
    assert data["groups"] == [[n, rotary.GROUPS[n]] for n in ("position", "content", "mixed")]
    assert data["terms"] == [[0], [1], [2]]
    assert data["waves"] == [[8, 32, 1000, None]] * 2 + [[8, 32, None]]
    assert data["shares"]["cs"]["planes"][0][1] == [5000, -2000, 1000]
    assert data["shares"]["gs"]["planes"][0][3] == [-3000, -2000, -4000]
    assert [len(rows) for rows in data["shares"]["cs"]["planes"]] == [4, 4, 3]
    assert data["shares"]["cs"]["bands"][0] == [0, 0.4, 0, 0.9]
    curves = data["profile"]
    assert set(curves["heads"]) == {"0", "1"}
    (offsets,) = [v for v in curves.values() if isinstance(v, list) and len(v) == 34]
    assert offsets == list(range(-2, 32))
    for key, row in (("1", 0), ("0", 1)):
        shown = curves["heads"][key]
        for values, want in zip(
            shown, (profile().mean, profile().low, profile().high), strict=True
        ):
            assert values == pytest.approx(want[row, :34].tolist(), rel=1e-3)
    assert curves["rows"] == {"1": 0, "0": 1}
    assert curves["said"] == "mean of total, with its 90% interval over prompts"
    assert (view.width, view.height) == (1000, 720)
    assert rotary.bands_page(found).height == 520
    alone = planes(terms=("mlp-attn", "attn-mlp"))
    own = payload(rotary.bands_page(alone))
    assert own["groups"] == [["all terms", rotary.GROUPS["all terms"]]]
    assert own["terms"] == [[0, 1]]
    said = r"profile: expected heads of the table, got \[\(0, 9\)\]"
    with pytest.raises(GeometryError, match=said):
        rotary.bands_page(found, profile(((4, 0), (0, 9))))


def test_a_deep_model_has_a_taller_page_and_atlas() -> None:
    """Rows of 19 pixels and of 0.16 inches."""
    count = 40
    theta = torch.ones(count, 1).double()
    deep = PlaneTable(
        provenance=SOURCE,
        heads=tuple((i, 0) for i in range(count)),
        terms=TERMS,
        head_planes=HeadPlanes(torch.zeros(count, 2, dtype=torch.int64), theta, 12),
        cs=draw(count, 1, 3),
        gs=draw(count, 1, 3),
    )
    assert rotary.bands_page(deep).height == 200 + 19 * count
    assert size(rotary.band_atlas(deep)) == pytest.approx((2.9, 0.16 * count + 1.2), abs=1e-3)
    assert "near in 40 of 40" in rotary.band_atlas(deep).title
    assert rotary._in_words(12)["middle"] == "16 to 16 tokens"


def bars_of(axis: Any) -> dict[str, list[tuple[float, float, float, float, str]]]:
    """Middle, bottom, height, width and hatch of the bars of each group."""
    return {
        c.get_label(): [
            (p.get_x() + p.get_width() / 2, p.get_y(), p.get_height(), p.get_width(), p.get_hatch())
            for p in c
        ]
        for c in axis.containers
    }


def test_bars_of_planes_are_stacked_from_zero_both_ways() -> None:
    """At the logarithm of their wavelengths; what is not rotated is hatched, at four times the
    longest."""
    view = rotary.head_planes(planes(), heads=[(1, 0), (4, 2)])
    first, second = view.figure.axes
    found = bars_of(first)
    middles = [math.log10(w) for w in (8, 32, 1000, 4000)]
    gap = 0.7 * math.log10(4)
    assert list(found) == ["position", "content", "mixed"]
    stacks = {
        "position": [(0, 0), (0, 0.5), (0, 0), (0, 0.3)],
        "content": [(0, 0), (0, -0.2), (0, 0), (0.3, 0.2)],
        "mixed": [(0, 0), (0.5, 0.1), (0, 0), (0.5, 0.4)],
    }
    for name, rows in stacks.items():
        for bar, middle, (bottom, height) in zip(found[name], middles, rows, strict=True):
            assert bar[:4] == pytest.approx((middle, bottom, height, gap), abs=1e-6)
        assert [bar[4] for bar in found[name]] == ["", "", "", "//"]
    colours = [to_hex(c[0].get_facecolor()) for c in first.containers]  # type: ignore[index]
    assert colours == [rotary.GROUPS[n] for n in ("position", "content", "mixed")]
    assert [bar[0] for bar in bars_of(second)["position"]] == pytest.approx(
        [math.log10(w) for w in (8, 32, 128)]
    )
    upright = [np.asarray(v.get_xdata()).tolist()[0] for v in first.lines[:2]]
    assert upright == pytest.approx([math.log10(16), math.log10(64)])
    assert np.asarray(first.lines[2].get_ydata()).tolist() == [0, 0]
    assert [t.get_text() for t in first.get_xticklabels()] == [f"$10^{{{t}}}$" for t in range(5)]
    assert first.get_xticks().tolist() == [0, 1, 2, 3, 4]
    assert [a.get_title() for a in (first, second)] == ["L1H0", "L4H2"]
    assert first.title.get_fontsize() == 9
    assert [a.get_ylabel() for a in (first, second)] == ["share", "share"]
    assert [a.get_xlabel() for a in (first, second)] == ["", "wavelength of the plane (tokens)"]
    assert legend(view) == ["position", "content", "mixed"]
    assert size(view) == pytest.approx((4.2, 3.8), abs=1e-3)
    assert view.title == "Which wavelengths carry L1H0, L4H2"
    assert view.caption == (
        "Each bar is the share of one plane in the covariance of scores, from fast to slow; grey "
        "lines stand at 16 and 64 tokens, hatched is not rotated."
    )
    still = bars_of(rotary.head_planes(planes(rotated=False)).figure.axes[0])
    assert still["position"][0][0] == pytest.approx(math.log10(4))
    assert still["position"][0][3] == pytest.approx(0.5)


def test_profiles_stand_beside_the_bars_of_their_heads() -> None:
    """Offsets below 32, a band for the interval, and a line at the token before."""
    shown = profile()
    view = rotary.head_planes(planes(), shown)
    assert size(view) == pytest.approx((8.4, 3.8), abs=1e-3)
    assert [a.get_title() for a in view.figure.axes] == ["L4H0", "", "L1H0", ""]
    for row in (0, 1):
        axis = view.figure.axes[2 * row + 1]
        curve, zero, before = axis.lines
        assert np.asarray(curve.get_xdata()).tolist() == list(range(-2, 32))
        assert np.allclose(np.asarray(curve.get_ydata()), shown.mean[row, :34])
        assert (curve.get_color(), curve.get_label()) == (figure.BLUE, "mean score")
        assert np.asarray(zero.get_ydata()).tolist() == [0, 0]
        assert np.asarray(before.get_xdata()).tolist() == [1, 1]
        assert before.get_label() == "the token before"
        (band,) = axis.collections
        edges: Any = band.get_paths()[0].vertices
        low, high = shown.low[row, :34], shown.high[row, :34]
        assert edges[:, 1].min() == pytest.approx(float(low.min()))
        assert edges[:, 1].max() == pytest.approx(float(high.max()))
        assert band.get_alpha() == 0.25
        assert not np.any(band.get_linewidth())
        assert axis.get_ylabel() == "score\n(before softmax)"
    assert [a.get_xlabel() for a in view.figure.axes] == [
        "",
        "",
        "wavelength of the plane (tokens)",
        "offset, query minus key (tokens)",
    ]
    assert legend(view) == ["position", "content", "mixed", "mean score", "the token before"]
    assert view.caption.endswith(
        " The curve is the mean of total at each offset, with its 90% interval over prompts."
    )
    with pytest.raises(GeometryError, match=r"heads: expected heads of the table and the profile"):
        rotary.head_planes(planes(), shown, heads=(4, 2))


@pytest.mark.parametrize("count", [12, 13])
def test_at_most_twelve_heads_have_a_row_of_bars(count: int) -> None:
    """More are refused by their number."""
    theta = torch.ones(count, 1).double()
    table = PlaneTable(
        provenance=SOURCE,
        heads=tuple((0, i) for i in range(count)),
        terms=TERMS,
        head_planes=HeadPlanes(torch.zeros(count, 2, dtype=torch.int64), theta, 40),
        cs=draw(count, 1, 3),
        gs=draw(count, 1, 3),
    )
    if count == 12:
        assert len(rotary.head_planes(table).figure.axes) == 12
        return
    with pytest.raises(GeometryError, match="heads: expected at most 12 to draw, got 13"):
        rotary.head_planes(table)


def tokens(values: list[float], texts: tuple[str, ...], constants: float = 0.5) -> TokenTable:
    """Tokens with these values, and the constants."""
    each = torch.tensor([*values, constants], dtype=torch.float64)
    return TokenTable(
        provenance=SOURCE,
        positions=(*range(len(texts)), -1),
        tokens=(*texts, "constants"),
        parts=("embed",),
        value=each,
        by_part=each[:, None],
    )


def test_tokens_are_boxes_of_their_colour_with_numbers_below() -> None:
    """White text above 0.6 of the scale, numbers above 5% of the largest."""
    values = [1.0, -0.6, 0.61, -0.05, 0.051, 0.0]
    texts = (" aa", "b", "c\n", "d", "$", "f")
    view = render.token_attribution(tokens(values, texts))
    axis = view.figure.axes[0]
    words = [t for t in axis.texts if t.get_fontsize() == 8]
    numbers = [t for t in axis.texts if t.get_fontsize() == 6.5]
    assert [t.get_text() for t in words] == [" aa", "b", "c↵", "d", r"\$", "f"]
    assert [t.get_color() for t in words] == ["white", "black", "white", "black", "black", "black"]
    places = [(1.5, 0), (3.5, 0), (5, 0), (0.5, 1), (2, 1), (3.5, 1)]
    assert [t.get_position() for t in words] == places
    assert [t.get_text() for t in numbers] == ["+1.00", "−0.60", "+0.61", "+0.05"]
    below = [places[i] for i in (0, 1, 2, 4)]
    assert [t.get_position() for t in numbers] == [(x, y + 0.43) for x, y in below]
    every: Any = axis.texts
    looks = {(t.get_ha(), t.get_va(), t.get_clip_on(), t.get_fontfamily()[0]) for t in every}
    assert looks == {("center", "center", False, "monospace")}
    boxes: Any = axis.patches
    assert [(b.get_x(), b.get_y()) for b in boxes] == [
        (x - w / 2, pytest.approx(y - 0.3))
        for (x, y), w in zip(places, (3, 1, 2, 1, 2, 1), strict=True)
    ]
    assert {b.get_height() for b in boxes} == {0.6}
    assert {(to_hex(b.get_edgecolor()), b.get_linewidth()) for b in boxes} == {("#dddddd", 0.4)}
    shade = mpl.colormaps[figure.DIVERGING]
    for box, value in zip(boxes, values, strict=True):
        assert box.get_facecolor() == pytest.approx(shade(0.5 + value / 2))
    assert (axis.get_xlim(), axis.get_ylim()) == ((0, 76), (1.7, -0.5))
    assert not axis.axison
    bar = bar_of(view)
    assert (bar.get_ylabel(), bar.get_ylim()) == ("logit", (-1, 1))
    assert size(view) == pytest.approx((WIDTH, 0.9 + 0.84), abs=1e-3)
    assert view.caption == (
        "Each token has the colour of its value, red for the logit and blue against it; values "
        "above 5% of the largest stand below. The tokens and the constants (+0.5) sum to 1.511."
    )
    assert (
        view.null == "All parts and the constants add up to the logit exactly: they have no null."
    )
    zero = render.token_attribution(tokens([0.0], ("a",)))
    assert bar_of(zero).get_ylim() == (-1, 1)
    assert render.token_attribution(tokens([0.0], ("a",)), width=20).figure.axes[0].get_xlim() == (
        0,
        20,
    )


@pytest.mark.parametrize(
    ("texts", "places"),
    [
        (("aaaa", "bb", "c"), [(0, 0), (4, 0), (0, 1)]),
        (("aaaa", "b", "\n", "c"), [(0, 0), (4, 0), (5, 0), (0, 1)]),
        (("aaaaaa", "\n", "c"), [(0, 0), (0, 1), (0, 2)]),
        (("a\nb", "c"), [(0, 0), (3, 0)]),
    ],
)
def test_a_token_that_fits_no_more_begins_a_line(
    texts: tuple[str, ...], places: list[tuple[int, int]]
) -> None:
    """Six characters fit into six."""
    from tl_geometry.render.token_view import lay_out

    assert [(t.x, t.line) for t in lay_out(texts, 6)] == places
    assert lay_out(["abcdefgh"], 6)[0].text == "abcde…"
