"""Pages and images of a graph and of a split: what their data hold, how large they are, and where
they draw what, from tables made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from tests.browser import payload
from tests.render.test_basis_and_measures_by_hand import size
from tests.splits import synthetic
from tl_geometry import render
from tl_geometry.render import graph_view, split_view
from tl_geometry.render.figure import NEGATIVE, POSITIVE
from tl_geometry.render.graph_nodes import DrawnGraph, shown_token
from tl_geometry.render.page import caption_height, text_data, text_lines


def graph(**options: Any) -> DrawnGraph:
    """The logit, constants, a token at 0, two heads and an MLP at 2, and edges of all marks."""
    fields: dict[str, Any] = {
        "names": ("logit", "constants", "embed", "L0H1", "L0H3", "mlp1"),
        "lookups": tuple("abcdef"),
        "layers": torch.tensor([2, -1, -1, 0, 0, 1]),
        "heads_of": torch.tensor([-1, -1, -1, 1, 3, -1]),
        "positions": torch.tensor([2, -1, 0, 2, 2, 2]),
        "values": torch.tensor([4.0, 0.5, 1.0, -2.0, 0.0, 3.0]).double(),
        "moved": torch.zeros(6).double(),
        "totals": torch.zeros(6, 3).double(),
        "attention": torch.zeros(6, 0).double(),
        "sources": torch.tensor([2, 3, 4, 5, 2]),
        "targets": torch.tensor([3, 0, 0, 0, 4]),
        "edge_types": torch.tensor([0, 0, 0, 0, 1]),
        "weights": torch.tensor([1.0, -2.0, 0.0, 4.0, 1.0]).double(),
        "node_numbers": torch.zeros(6, 0),
        "edge_numbers": torch.zeros(5, 0),
        "node_marks": torch.tensor([0, 0, 1, 0, 2, 0]),
        "edge_marks": torch.tensor([1, 2, 0, 0, 0]),
        "dashes": ((9, 4), (2, 4)),
        "blocks": 2,
        "reached": torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5]).double(),
        "written": 6.5,
        "whole": "all",
        "columns": (("$x", "0"), ("y", "1"), ("", "last")),
        "title": "T",
        "target": "t",
        "value": "V.",
        "kept": "k",
        "legend": "L.",
        "source": "s",
    }
    return DrawnGraph(**{**fields, **options})


def test_the_image_of_a_graph_has_marks_dashes_and_widths() -> None:
    """The first mark is the first dashes; nodes that one graph has are hollow; value edges
    alone are drawn, as wide as their share of the largest value."""
    view = graph_view.graph_figure(graph())
    axis = view.figure.axes[0]
    drawn: list[Any] = sorted(axis.lines, key=lambda line: line.get_linewidth())
    assert [line.get_linewidth() for line in drawn] == pytest.approx([0.2, 1.2, 2.2, 4.2])
    dashes = [line._unscaled_dash_pattern for line in drawn]
    assert [tuple(d[1]) if d[1] else None for d in dashes] == [None, (9, 4), (2, 4), None]
    assert {d[0] for d in dashes} == {0}
    assert [line.get_color() for line in drawn] == [NEGATIVE, POSITIVE, NEGATIVE, POSITIVE]
    assert {(line.get_alpha(), line.get_zorder()) for line in drawn} == {(0.6, 1)}
    marks: Any = axis.collections
    assert [float(m.get_sizes()[0]) for m in marks] == pytest.approx(
        [165, 15 + 18.75, 15 + 37.5, 90, 15, 15 + 112.5]
    )
    signs = [POSITIVE, POSITIVE, POSITIVE, NEGATIVE, NEGATIVE, POSITIVE]
    assert [to_hex(m.get_edgecolor()[0]) for m in marks] == signs
    faces = [to_hex(m.get_facecolor()[0]) for m in marks]
    assert faces == [*signs[:2], "#ffffff", signs[3], "#ffffff", signs[5]]
    corners = [len(m.get_paths()[0].vertices) for m in marks]
    assert corners[0] == corners[5] == 5, "a diamond and a square"
    assert corners[2] == 4, "a triangle"
    assert len({corners[1], corners[3], corners[4]}) == 1, "discs"
    assert {m.get_zorder() for m in marks} == {2}
    places = [tuple(np.asarray(m.get_offsets())[0].tolist()) for m in marks]
    third = [2 - 0.5 + 1 / 3, 2 - 0.5 + 2 / 3]
    want = [(2, 3), (0, 0), (1, 0), (third[0], 1), (third[1], 1), (2, 2)]
    assert places == [pytest.approx(p) for p in want]
    notes: Any = axis.texts
    assert [(n.get_text(), n.xyann, n.get_fontsize()) for n in notes] == [
        ("H1", (4, 4), 6),
        ("H3", (4, 4), 6),
    ]


def test_the_image_of_a_graph_names_columns_and_rows() -> None:
    """Only those with a node; the caption says how many nodes of how many."""
    view = graph_view.graph_figure(graph())
    axis = view.figure.axes[0]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["constants", r"\$x 0", "last"]
    assert [t.get_text() for t in axis.get_yticklabels()] == [
        "embeddings",
        "block 0",
        "MLP 1",
        "logit",
    ]
    ticks: Any = axis.get_xticklabels()
    looks = {(t.get_rotation(), t.get_ha()) for t in ticks}
    assert looks == {(45, "right")}
    assert {t.get_fontsize() for t in axis.get_yticklabels()} == {7}
    assert axis.xaxis.get_tick_params()["length"] == 0
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "token and its position",
        "block (those with a node)",
    )
    assert size(view) == pytest.approx((6.0, 2.4), abs=1e-3)
    assert view.caption == (
        "V. The 6 largest of 6 nodes, as large as what they write towards the logit; lines are "
        "value edges, red for it and blue against it; triangles are tokens, squares MLPs. L."
    )
    assert not graph_view.graph_figure(graph(legend="")).caption.endswith(" ")
    wide = graph(positions=torch.tensor([2, -1, *range(4)]), columns=(("x", "1"),) * 4)
    assert size(graph_view.graph_figure(wide))[0] == 6.0
    assert view.null == graph_view.SUMS


def test_the_data_of_a_graph_hold_shapes_rows_and_the_largest_edges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Edges to nodes that are left out are left out; nodes have their texts."""
    drawn = graph()
    data = graph_view._payload(drawn, torch.arange(6))
    assert [n["shape"] for n in data["nodes"]] == [
        "logit",
        "constants",
        "token",
        "head",
        "head",
        "mlp",
    ]
    assert [n["row"] for n in data["nodes"]] == [5, 0, 0, 1, 1, 4]
    assert [n["mark"] for n in data["nodes"]] == [0, 0, 1, 0, 2, 0]
    assert data["tokens"] == [[0, "$x", "0"], [2, "", "last"]]
    assert data["at"] == [3, 1, 2, 0, 4]
    assert [edge[:5] for edge in data["edges"]] == [
        [5, 0, 0, 4.0, 0],
        [3, 0, 0, -2.0, 2],
        [4, 0, 0, 0.0, 0],
        [2, 3, 0, 1.0, 1],
        [2, 4, 1, 1.0, 0],
    ]
    assert (data["start"], data["all"], data["prompts"], data["blocks"]) == (6, 6, 0, 2)
    assert data["dashes"] == [[9, 4], [2, 4]]
    # four rows with a node, two without
    assert graph_view._height(data) == 640 + 22 * 4 + 3 * 2
    assert graph_view._caption(drawn, data) == (
        "V. The page holds 6 of the graph’s 6 nodes (k) and of each node the 12 largest edges of a "
        "type, 5 of 5; the other edges are in its last line, “everything else”. What is written "
        "adds up along value edges; what is moved is first order in the attention and adds up to "
        "nothing."
    )
    fewer = graph_view._payload(drawn, torch.tensor([0, 2, 3]))
    assert [edge[:2] for edge in fewer["edges"]] == [[2, 0], [1, 2]]
    assert "(3 smaller are left out)" in graph_view._caption(drawn, fewer)
    monkeypatch.setattr(graph_view, "LISTED", 2)
    assert graph_view._payload(drawn, torch.arange(6))["at"] == [3, 1, 0, 4]
    tall = {"nodes": [{"row": i} for i in range(80)], "start": 80, "blocks": 40}
    assert graph_view._height(tall) == 1180


@pytest.mark.parametrize("length", [24, 25])
def test_a_token_of_a_graph_has_at_most_twenty_four_characters(length: int) -> None:
    """Longer ones end in an ellipsis."""
    assert shown_token("w" * length) == ("w" * 24 if length == 24 else "w" * 23 + "…")


@pytest.mark.parametrize(
    ("tokens", "panels", "cell", "rows", "columns"),
    [
        (20, None, 9, 2, 3),
        (20, ["pos-pos"], 9, 2, 2),
        (20, "terms", 9, 3, 4),
        (61, None, 3, 2, 3),
        (100, None, 1.84, 2, 3),
        (250, None, 1.0, 2, 3),
    ],
)
def test_the_page_of_a_split_has_the_size_of_its_grid(
    tokens: int, panels: Any, cell: float, rows: int, columns: int
) -> None:
    """Cells of three pixels on are whole; the page is never narrower than a page of text."""
    view = render.split(synthetic(1, tokens), panels=panels)
    data = payload(view)
    assert data["cell"] == pytest.approx(cell)
    width = math.ceil(96 + columns * (cell * tokens + 16) + 12)
    grid = math.ceil(rows * (cell * tokens + 22) + 76)
    assert data["canvas"] == [width, grid]
    across = max(width, 708)
    names = data["planes"]
    readings = math.ceil(len(names) / ((across - 24) // 118))
    buttons = math.ceil((150 + sum(8 * len(n) + 38 for n in names)) / across)
    text = min(180, 24 * text_lines(text_data([f" t{i}" for i in range(tokens)]), across, 3, 12))
    assert view.width == across + 24
    assert view.height == 188 + grid + 34 * (readings + buttons) + text + caption_height(
        view.caption
    )


@pytest.mark.parametrize(("heads", "tokens"), [(1, 7), (3, 50)])
def test_the_image_of_a_split_leaves_gaps_and_names(heads: int, tokens: int) -> None:
    """Gaps of 6% of a panel, of 14% between rows of one head; bars name pattern and score."""
    view = render.split(synthetic(heads, tokens)).image()
    axis, pattern, score = view.figure.axes
    rows, columns = (2, 3) if heads == 1 else (3, 6)
    high = tokens + math.ceil(tokens * (0.14 if heads == 1 else 0.06))
    wide = tokens + math.ceil(tokens * 0.06)
    sheet: Any = axis.images[0].get_array()
    assert sheet.shape == ((rows - 1) * high + tokens, (columns - 1) * wide + tokens, 4)
    inch = 2.1 if heads == 1 else 1.0
    across = 1.15 * inch * columns + 0.8
    side = 0.9 * (across - 1.4) / (1.06 * columns)
    down = side * rows * high / tokens + (0.7 if heads == 1 else 0.65)
    assert size(view) == pytest.approx((across, down), abs=1e-3)
    assert [pattern.get_ylabel(), score.get_ylabel()] == ["pattern", "score"]
    assert pattern.get_ylim() == (0, 1)
    assert not any(s.get_visible() for s in axis.spines.values())
    assert {t.get_fontsize() for t in axis.texts} == {8 if heads == 1 else 6.5}
    texts: Any = axis.texts
    assert {t.get_va() for t in texts} == {"bottom"}
    first = axis.texts[0].get_position()
    assert first == pytest.approx((0, -0.5 - 0.02 * tokens))
    if heads > 1:
        assert axis.get_yticks().tolist() == [r * high + tokens / 2 for r in range(rows)]
        assert not len(axis.get_xticks())
    assert split_view.NULL == view.null == "Terms are exact: they have no null."
