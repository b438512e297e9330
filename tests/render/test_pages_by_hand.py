"""Pages of attention, of a logit and of paths in space: what their data hold, how high they are,
and their images, from tables made by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from tests.browser import payload
from tests.modules import copy_of
from tests.render.test_basis_and_measures_by_hand import size
from tests.render.test_by_hand import draw
from tests.render.test_flow import paths
from tests.render.test_writers import explained
from tests.splits import synthetic
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.html import signed
from tl_geometry.render import circuitsvis, logit_view, space
from tl_geometry.render.figure import NEGATIVE, POSITIVE
from tl_geometry.render.page import caption_height, text_data, text_lines
from tl_geometry.render.writers import KnockoutMarks


@pytest.mark.parametrize(("heads", "height"), [(1, 818), (6, 818), (7, 916), (12, 916)])
def test_a_page_of_heads_has_a_row_for_every_six(heads: int, height: int) -> None:
    """Values of any kind have names by their number, and a scale up to the largest."""
    values = torch.zeros(heads, 2, 2)
    values[:, 1, 0] = -0.5
    view = circuitsvis.attention_heads(values, [" a", "b"])
    props = payload(view)["props"]
    assert (view.width, view.height, view.title) == (800, height, "Attention heads")
    assert props["attentionHeadNames"] == [f"Head {i}" for i in range(heads)]
    assert props["tokens"] == ["␣a", "b"]
    assert (props["positiveColor"], props["negativeColor"]) == (POSITIVE, NEGATIVE)
    assert (payload(view)["limit"], payload(view)["signed"]) == (0.5, True)
    assert view.caption == (
        "Values by query (row) and key (column), 2 tokens; full colour at 0.5, one scale for all "
        "heads."
    )
    nothing = circuitsvis.attention_heads(0 * values, ["a", "b"])
    assert (payload(nothing)["limit"], payload(nothing)["signed"]) == (1.0, False)


def test_a_page_of_patterns_ends_at_one_and_takes_other_names() -> None:
    """A split brings its names and tokens; others replace them."""
    split = synthetic(2, 3)
    view = circuitsvis.attention_heads(split)
    data = payload(view)
    assert (data["limit"], data["signed"]) == (1.0, False)
    assert data["props"]["tokens"] == ["␣t0", "␣t1", "␣t2"]
    assert data["props"]["attentionHeadNames"] == ["L0H0", "L0H1"]
    assert view.caption.startswith("Pattern by query (row) and key (column), 3 tokens; full colour")
    other = payload(circuitsvis.attention_heads(split, list("xyz"), names=["a", "b"]))["props"]
    assert (other["tokens"], other["attentionHeadNames"]) == (["x", "y", "z"], ["a", "b"])


def test_attention_that_no_page_holds_is_refused() -> None:
    """A batch, too few names, no heads; fifty thousand cells are drawn."""
    free = copy_of(circuitsvis)
    said = r"attention: expected \[head query key\], got .*\. Use attention\[batch\]"
    for shape in ((2, 2), (1, 2, 2, 2)):
        with pytest.raises(GeometryError, match=said):
            free.attention_heads(torch.zeros(shape), ["a", "b"])
    with pytest.raises(GeometryError, match="names: expected 2 names, one per head, got 1"):
        circuitsvis.attention_heads(torch.zeros(2, 1, 1), ["a"], names=["x"])
    with pytest.raises(GeometryError, match="attention: expected at least one head, got none"):
        circuitsvis.attention_heads(torch.zeros(0, 1, 1), ["a"])
    most = circuitsvis.attention_heads(torch.zeros(5, 100, 100), ["a"] * 100)
    assert len(most.data["props"]["attention"]) == 5
    said = (
        r"cells of 6 heads x 100 x 100 tokens: expected at most 50000, got 60000\. "
        r"Use fewer heads= or tokens, or render.split"
    )
    with pytest.raises(GeometryError, match=said):
        circuitsvis.attention_heads(torch.zeros(6, 100, 100), ["a"] * 100)


@pytest.mark.parametrize(
    ("heads", "tokens", "wanted", "named"),
    [
        (1, 24, (4.4, 4.4), True),
        (1, 25, (4.4, 4.4), False),
        (2, 3, (4.6, 2.3), False),
        (4, 3, (9.2, 2.3), False),
        (5, 3, (9.2, 4.6), False),
    ],
)
def test_the_image_of_heads_names_the_tokens_of_one(
    heads: int, tokens: int, wanted: tuple[float, float], named: bool
) -> None:
    """Four heads in a row; keys after the query are grey where all are hidden."""
    values = torch.ones(heads, tokens, tokens).tril()
    view = circuitsvis.attention_heads(values, ["$a"] * tokens).image()
    assert size(view) == pytest.approx(wanted, abs=1e-3)
    maps = view.figure.axes[:-1]
    assert [a.get_title() for a in maps] == [f"Head {i}" for i in range(heads)]
    for axis in maps:
        assert to_hex(axis.get_facecolor()) == "#dddddd"
        assert axis.title.get_fontsize() == 8
        texts = [r"\$a"] * tokens if named else []
        assert [t.get_text() for t in axis.get_xticklabels()] == texts
        assert [t.get_text() for t in axis.get_yticklabels()] == texts
        assert {t.get_rotation() for t in axis.get_xticklabels()} <= {90}
        assert {t.get_fontsize() for t in axis.get_xticklabels()} <= {6}
        assert axis.images[0].get_clim() == (-1, 1)
        shown = np.ma.filled(np.ma.asarray(axis.images[0].get_array()), np.nan)
        assert np.isnan(shown[0, 1:]).all()
        assert shown[-1].tolist() == [1] * tokens
    later = circuitsvis.attention_heads(torch.ones(1, 2, 2), ["a", "b"]).image()
    assert not np.isnan(np.asarray(later.figure.axes[0].images[0].get_array())).any()


def test_paths_in_space_have_lines_and_points_for_each_state() -> None:
    """Lines lead to the points of a state and break between trajectories; the slider ends paths
    at a state."""
    points = draw(2, 3, 3)
    found: Any = space.paths_figure(points, [2, 4, 5], ["u", "v", "w"])
    lines, marks = found.data[::2], found.data[1::2]
    assert [t.mode for t in found.data] == ["lines", "markers"] * 3
    assert {t.hoverinfo for t in lines} == {"skip"}
    for t, (line, mark) in enumerate(zip(lines, marks, strict=True)):
        for axis, name in enumerate("xyz"):
            shown = [points[i, max(0, t - 1) : t + 1, axis].tolist() for i in range(2)]
            flat = np.array([*shown[0], np.nan, *shown[1], np.nan])
            assert np.array_equal(np.asarray(line[name]), flat, equal_nan=True)
            assert mark[name].tolist() == points[:, t, axis].tolist()
        state = (2, 4, 5)[t]
        assert list(mark.hovertext) == [f"trajectory {i}, state {state}" for i in range(2)]
        assert (mark.hoverinfo, mark.marker.size, mark.marker.coloraxis) == (
            "text",
            2.5,
            "coloraxis",
        )
        assert list(mark.marker.color) == [state] * 2
        assert line.line.width == 2
    from plotly.colors import sample_colorscale

    assert [t.line.color for t in lines] == sample_colorscale("Viridis", [0.0, 0.5, 1.0])
    layout = found.layout
    (slider,) = layout.sliders
    assert [step.label for step in slider.steps] == ["2", "4", "5"]
    assert [step.args[0]["visible"] for step in slider.steps] == [
        [True] * 2 + [False] * 4,
        [True] * 4 + [False] * 2,
        [True] * 6,
    ]
    assert {step.method for step in slider.steps} == {"restyle"}
    assert (slider.active, slider.currentvalue.prefix) == (2, "to state ")
    assert (slider.pad.t, slider.pad.b) == (8, 16)
    scene = layout.scene
    assert [scene[f"{side}axis"].title.text for side in "xyz"] == ["u", "v", "w"]
    assert (scene.aspectmode, scene.camera.center.z) == ("auto", -0.12)
    assert (scene.camera.eye.x, scene.camera.eye.y, scene.camera.eye.z) == (1.4, 1.4, 0.9)
    assert (scene.camera.center.x, scene.camera.center.y) == (0, 0)
    assert (layout.coloraxis.cmin, layout.coloraxis.cmax) == (2, 5)
    assert list(layout.coloraxis.colorbar.tickvals) == [2, 4, 5]
    assert layout.coloraxis.colorbar.title.text == "state"
    assert (layout.coloraxis.colorbar.thickness, layout.coloraxis.colorbar.len) == (12, 0.6)
    assert layout.showlegend is False
    assert [layout.margin[side] for side in "lrtb"] == [0] * 4
    one: Any = space.paths_figure(points[:, :1], [3], ["u", "v", "w"])
    assert (one.layout.coloraxis.cmin, one.layout.coloraxis.cmax) == (3, 4)
    assert one.data[0].line.color == sample_colorscale("Viridis", [0.0])[0]


def test_a_page_of_paths_has_the_tools_and_the_sentences_of_its_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notebook gets plotly's own output; without plotly it says what to install."""
    ensemble = paths(4)
    view = space.bundle_3d(ensemble)
    image = view.image()
    assert (view.title, view.caption, view.null) == (image.title, image.caption, image.null)
    assert (view.width, view.height) == (784, 540 + caption_height(image.caption))
    shown = view.payload()["figure"]
    assert shown["config"]["displaylogo"] is False
    assert shown["config"]["modeBarButtons"] == [space.BUTTONS]
    assert len(shown["data"]) == 10
    assert view.figure is view.data["figure"]
    monkeypatch.setattr(space.PageView, "_repr_mimebundle_", lambda *_: {"text/html": 1, "a": 2})
    assert view._repr_mimebundle_() == {"application/vnd.plotly.v1+json": shown, "a": 2}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = r'views in three dimensions need plotly: pip install "tl-geometry\[plotly\]"'
    with pytest.raises(GeometryError, match=said):
        space.bundle_3d(ensemble)


def test_the_page_of_a_logit_has_cards_of_five_heads_and_the_rest() -> None:
    """The rest and the cards sum to what heads and others wrote; bars share one scale."""
    found = explained()
    view = logit_view.logit_page(found)
    data = payload(view)
    (query,) = data["queries"]
    order = list(dict.fromkeys(pair[:2] for pair in found.pairs))[:5]
    assert [card["name"] for card in query["heads"]] == [f"L{l}H{h}" for l, h in order]
    inside = 0.0
    for head, card in zip(order, query["heads"], strict=True):
        own = [p for p, pair in enumerate(found.pairs) if pair[:2] == head]
        assert [p["source"] for p in card["pairs"]] == [found.pairs[p][2] for p in own]
        for p, pair in zip(own, card["pairs"], strict=True):
            value = float(found.heads[found.pairs[p]])
            inside += value
            assert pair["written"] == pytest.approx(value, rel=1e-4)
            assert pair["code"] == f"heads[{head[0]}, {head[1]}, {found.pairs[p][2]}]"
            names = ["position (pos)", "content (cvec)"]
            parts = found.pair_values[p].tolist()
            assert dict(pair["value"][0]) == pytest.approx(
                dict(zip(names, parts, strict=True)), rel=1e-4
            )
            assert len(pair["score"][1]) == 4
    rest = dict(query["rest"])
    assert query["rest"][0][0] == "other heads and sources"
    assert rest["other heads and sources"] == pytest.approx(
        float(found.heads.sum()) - inside, rel=1e-3, abs=1e-4
    )
    assert [name for name, _ in query["rest"][1:]] == sorted(
        found.other_names, key=lambda n: -abs(float(found.others[found.other_names.index(n)]))
    )
    assert query["target"] == "␣a − b"
    assert (query["position"], query["token"], data["first"]) == (45, "t3", 0)
    marks = [v for shown in (query, *query["heads"]) for v in shown["marks"]]
    assert data["limit"] == max(abs(v) for v in marks)
    assert len(query["marks"]) == 46
    for at, kind in enumerate(("score", "value")):
        values = [
            abs(v)
            for card in query["heads"]
            for pair in card["pairs"]
            for bars in pair[kind]
            for _, v in bars
        ]
        assert data["longest"][at] == max(values)
    assert data["details"] == ["groups", "all 4 terms"]
    assert (data["most"], data["legend"], query["unseen"]) == (9, "", [])
    total = float(found.heads.sum() + found.others.sum())
    assert view.caption == (
        "Contributions to the logit before any soft cap, every later norm frozen at its scale: "
        f"they sum to {signed(total, '.4f')}, the model's logit is −1.2500 (difference "
        f"{found.error:.0e} of the sum of sizes); scores are relative to the mean over the allowed "
        "keys, terms have the query part first."
    )
    assert (view.width, view.null) == (1080, logit_view.EXACT)


@pytest.mark.parametrize(("tokens", "unseen"), [(50, 0), (50, 2), (50, 12), (4000, 0)])
def test_the_height_of_a_page_of_a_logit_is_that_of_its_rows(tokens: int, unseen: int) -> None:
    """Text of 53 pixels a line, at most 420, then cards in rows of three; 1100 at most."""
    text = text_data(["abc"] * tokens)
    bars = [["a", 1.0]] * 3
    pair = {"score": [bars, bars * 3], "value": [bars[:2], bars]}
    card = {"pairs": [pair, pair]}
    query = {"rest": [["a", 1.0]] * 4, "unseen": [["L0H0", "x"]] * unseen, "heads": [card] * 3}
    cards = [100 + 17 * 4, *[126 + 24 * 2 + 17 * 5] * 3]
    if unseen:
        cards.append(60 + 36 * min(9, unseen))
    rows = sorted(cards)[-2:]  # of four or five cards
    lines = text_lines(text, 1040, 7, 14)
    assert (lines > 8) == (tokens > 50)
    want = min(1100, 180 + min(53 * lines, 420) + sum(rows))
    assert logit_view._height(text, query) == want


@pytest.mark.parametrize(
    ("most", "names"),
    [
        (1, ["b", "3 smaller terms"]),
        (2, ["b", "d", "2 smaller terms"]),
        (3, ["b", "d", "a", "c"]),
        (4, ["b", "d", "a", "c"]),
    ],
)
def test_a_list_ends_with_the_sum_of_what_it_leaves_out(most: int, names: list[str]) -> None:
    """A single one has its own name."""
    bars = [("a", 1.0), ("b", -4.0), ("c", 0.5), ("d", 2.0)]
    found = logit_view._listed(bars, most, "terms")
    assert [name for name, _ in found] == names
    assert sum(v or 0.0 for _, v in found) == -0.5


def test_writers_are_listed_by_key_and_knockouts_that_disagree_without_a_card() -> None:
    """The short list has one sum for each writer of the key, and one for ALiBi."""
    found = dataclasses.replace(
        explained(), parts=("mlp0", "embed"), pair_alibi=torch.full((14,), 9.0).double()
    )
    hidden = next((l, h) for l in (0, 1) for h in range(3) if (l, h) not in shown_heads(found))
    first = shown_heads(found)[0]
    marks = KnockoutMarks({first: "one", hidden: "two"}, (hidden, first), "read")
    query = logit_view._query(found, marks)
    assert query["unseen"] == [[f"L{hidden[0]}H{hidden[1]}", "two"]]
    assert [(c["removed"], c["differs"]) for c in query["heads"][:2]] == [
        ("one", True),
        ("", False),
    ]
    pair = query["heads"][0]["pairs"][0]
    terms = found.pair_terms[0]
    keys = {"mlp0": terms[:, 0].sum(), "embed": terms[:, 1].sum(), "alibi": 9.0}
    assert dict(pair["score"][0]) == pytest.approx(
        {name: float(v) for name, v in keys.items()}, rel=1e-4
    )
    assert len(pair["score"][1]) == 5
    assert logit_view._details(found) == ["writers of the key", "writers of query and key"]


def shown_heads(found: Any) -> list[tuple[int, int]]:
    """The heads that have a card."""
    return list(dict.fromkeys(pair[:2] for pair in found.pairs))[:5]
