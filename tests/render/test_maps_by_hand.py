"""Maps of heads from tables made by hand: cells, numbers, sizes in pixels, labels and sentences."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.browser import payload
from tests.modules import copy_of
from tests.render.test_basis_and_measures_by_hand import LINE, SOURCE, bar_of, size
from tests.tiny import tiny
from tests.tiny import tokens as random_tokens
from tl_geometry import render
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.render import figure, head_view, sweeps
from tl_geometry.render.figure import WIDTH
from tl_geometry.render.page import caption_height
from tl_geometry.scores.sweep_table import SweepTable


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Table(Result):
    """Any columns, one row for each head."""

    names: tuple[str, ...]
    cells: tuple[tuple[object, ...], ...]

    def columns(self) -> list[str]:
        return list(self.names)

    def rows(self) -> list[list[object]]:
        return [list(row) for row in self.cells]


def grid_of(layers: int, count: int) -> Table:
    """Every head of some layers, with one number."""
    rows = tuple((l, h, float(l + h)) for l in range(layers) for h in range(count))
    return Table(provenance=SOURCE, names=("layer", "head", "loss"), cells=rows)


FEW = Table(
    provenance=SOURCE,
    names=("layer", "head", "kind", "flag", "lift", "cs_pos-pos", "n"),
    cells=((3, 0, "x", True, 0.25, 0.5, 7), (5, 2, "y", False, math.nan, -0.1, 9)),
)
"""Two heads, in layers 3 and 5, with columns of words, of flags and of numbers."""


@pytest.mark.parametrize(
    ("layers", "count", "cell", "width"),
    [(1, 2, 46, 560), (2, 13, 46, 678), (3, 14, 45, 710), (2, 16, 40, 720), (4, 64, 14, 976)],
)
def test_the_page_of_heads_has_the_size_of_its_map(
    layers: int, count: int, cell: int, width: int
) -> None:
    """Cells are 46 pixels wide at most and 14 at least; rows are 22 high."""
    view = render.heads(grid_of(layers, count))
    data = payload(view)
    height = 22 * layers + 42
    assert (data["cell"], data["count"], data["canvas"]) == (cell, count, [width, height])
    assert view.width == max(width, 708) + 24
    said = caption_height(f"{view.caption} {view.null}")
    assert view.height == 172 + height + 136 + said
    assert view.caption == (
        f"Each cell is one of {layers * count} heads. Choose the number that is shown; click a "
        "head for its whole row, nulls among it."
    )
    assert view.title == "Every number of every head"
    assert render.heads(grid_of(1, 1), title="Mine").title == "Mine"


def test_the_page_of_heads_holds_numbers_and_words_of_the_table() -> None:
    """The first of its usual columns is shown, else the first number; flags are words."""
    view = render.heads(FEW)
    data = payload(view)
    assert data["heads"] == [[0, 0], [1, 2]]
    assert (data["layers"], data["count"], data["read"]) == ([3, 5], 3, 24)
    assert data["words"] == {"kind": ["x", "y"], "flag": ["True", "False"]}
    assert {name: column["at"] for name, column in data["columns"].items()} == {
        "lift": 4,
        "cs_pos-pos": 5,
        "n": 6,
    }
    assert data["columns"]["lift"] == {"at": 4, "values": [0.25, None], "scale": [0.0, 0.3]}
    assert data["said"] == {
        "kind": "kind",
        "flag": "flag",
        "lift": "lift",
        "cs_pos-pos": "share of pos-pos",
        "n": "n",
    }
    assert data["value"] == "lift"
    assert payload(render.heads(FEW, "n"))["value"] == "n"
    assert payload(render.heads(grid_of(1, 1)))["value"] == "loss"
    both = dataclasses.replace(FEW, names=("layer", "head", "cs_position", "b", "lift", "c", "n"))
    assert payload(render.heads(both))["value"] == "lift", "a column of words is no number"
    assert (view.source, view.null) == (LINE, head_view.NULL)
    assert view.image().title == "Every head: lift"
    assert render.heads(FEW, "cs_pos-pos").image().title == "Every head: share of pos-pos"


def test_tables_that_are_no_maps_are_refused() -> None:
    """Without layer or head, and with two rows of a head."""
    bare = dataclasses.replace(FEW, names=("layer", "number", *FEW.names[2:]))
    said = (
        r"heads: expected a table with a row for each layer and head, got Table\. "
        r"Use sweep_heads\(model, tokens, basis\) or weight_geometry\(model, basis\)"
    )
    with pytest.raises(GeometryError, match=said):
        render.heads(bare)
    twice = dataclasses.replace(FEW, cells=FEW.cells[:1] * 2)
    said = "table: expected one row per layer and head, got Table of layer, head, kind, flag, ..."
    with pytest.raises(GeometryError, match=said):
        render.heads(twice)


@pytest.mark.parametrize(
    ("layers", "count", "wanted", "numbers"),
    [
        (10, 16, (9.8, 4.6), 160),
        (11, 15, (9.3, 3.4), 0),
        (2, 16, (9.8, 1.88), 32),
        (1, 3, (3.3, 1.54), 3),
        (3, 32, (9.0, 2.22), 96),
        (6, 32, (9.0, 2.4), 0),
    ],
)
def test_the_image_of_a_map_has_numbers_where_cells_are_few(
    layers: int, count: int, wanted: tuple[float, float], numbers: int
) -> None:
    """Up to 160 cells; cells with numbers are taller."""
    view = head_view.head_grid(grid_of(layers, count))
    axis = view.figure.axes[0]
    assert size(view) == pytest.approx(wanted, abs=1e-4)
    assert len(axis.texts) == numbers
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("head", "layer", "")
    assert axis.get_aspect() == "auto"
    assert (view.title, view.caption) == ("Every head: loss", "Each cell is a head: its loss.")


@pytest.mark.parametrize(
    ("low", "high", "value", "colour", "text"),
    [
        (-1.0, 1.0, 0.59, "black", "0.59"),
        (-1.0, 1.0, 0.6, "white", "0.60"),
        (-1.0, 1.0, -0.59, "black", "-0.59"),
        (-1.0, 1.0, -0.7, "white", "-0.70"),
        (0.0, 1.0, 0.5, "white", "0.50"),
        (0.0, 1.0, 0.51, "black", "0.51"),
        (0.0, 40.0, 20.5, "black", "20.5"),
        (0.0, 10.0, 9.994, "black", "9.99"),
        (0.0, 10.0, 10.0, "black", "10"),
        (-1.0, 1.0, -0.001, "black", "0.00"),
        (0.0, 2000.0, 1234.0, "black", "1.23e+03"),
    ],
)
def test_numbers_of_a_map_are_read_on_their_colours(
    low: float, high: float, value: float, colour: str, text: str
) -> None:
    """Black on bright cells: the middle of signed colours, the upper half of the others."""
    _, (axis,) = figure.canvas()
    head_view.draw_map(axis, [(2, 1)], torch.tensor([value], dtype=torch.float64), "$a", low, high)
    texts: Any = axis.texts
    (written,) = texts
    assert (written.get_text(), written.get_color()) == (text, colour)
    assert written.get_position() == (1, 0)
    assert (written.get_ha(), written.get_va(), written.get_fontsize()) == ("center", "center", 6.5)
    assert axis.get_title() == r"\$a"
    assert axis.title.get_fontsize() == 9
    cells = np.ma.filled(np.ma.asarray(axis.images[0].get_array()), np.nan)
    assert np.isnan(cells[0, 0])
    assert cells[0, 1] == value


@pytest.mark.parametrize(("count", "step"), [(17, 1), (18, 2), (40, 5)])
def test_at_most_seventeen_heads_and_layers_have_their_number(count: int, step: int) -> None:
    """Layers by their own numbers."""
    _, (axis,) = figure.canvas()
    head_view.name_heads(axis, range(100, 100 + count), count)
    ticks = list(range(0, count, step))
    assert axis.get_xticks().tolist() == axis.get_yticks().tolist() == ticks
    assert [t.get_text() for t in axis.get_yticklabels()] == [str(100 + i) for i in ticks]
    assert axis.get_xlabel() == "head"


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("loss", [1.0], (0.0, 1.0)),
        ("loss", [1.01], (0.0, 1.2)),
        ("loss", [0.0], (0.0, 1.0)),
        ("loss", [-0.0], (0.0, 1.0)),
        ("cs_a", [3.0], (-1.0, 1.0)),
        ("gs_a", [0.3], (-0.3, 0.3)),
        ("es_a", [3.0], (0.0, 3.0)),
        ("loss", [-3.0, 1.0], (-3.0, 3.0)),
        ("loss", [math.inf, 0.9], (0.0, 1.0)),
    ],
)
def test_ends_of_a_scale(name: str, values: list[float], ends: tuple[float, float]) -> None:
    """From zero where nothing is negative, but for shares, which end at 1."""
    assert head_view.scale(name, torch.tensor(values, dtype=torch.float64)) == pytest.approx(ends)


def test_a_bar_is_pointed_where_a_value_is_beyond_it() -> None:
    """On either side, and in any of the maps; its label is that of the caller."""
    for values, extend in (([0.5, 1.0], "neither"), ([0.5, 1.1], "both"), ([-1.1, 0.0], "both")):
        made, axes = figure.canvas(2)
        for axis, value in zip(axes, values, strict=True):
            head_view.draw_map(
                axis, [(0, 0)], torch.tensor([value], dtype=torch.float64), "", -1.0, 1.0
            )
        head_view.map_bar(axes, "of mine")
        bar: Any = made.axes[-1]
        assert bar._colorbar.extend == extend
        assert bar.get_ylabel() == "of mine"
        assert bar.get_yticks().tolist() == [-1, -0.5, 0, 0.5, 1]


@cache
def small() -> SweepTable:
    """The sweep of a tiny model: two layers of four heads."""
    model = tiny("bridge", "gpt2")
    basis = tlg.decompose(model, random_tokens(12, 16), progress=False)
    return tlg.sweep_heads(model, random_tokens(2, 16), basis, progress=False)


@pytest.mark.parametrize("share", ["cs", "gs"])
def test_maps_of_shares_ask_their_question(share: str) -> None:
    """A panel for each group, in words; the null is the largest share with position destroyed."""
    table = small()
    view = sweeps.head_shares(table, share=share)
    maps = view.figure.axes[:-1]
    assert [a.get_title() for a in maps] == list(table.groups)
    assert [a.get_ylabel() for a in maps] == ["layer", "", ""]
    for axis, column in zip(maps, getattr(table, f"group_{share}").T, strict=True):
        shown = np.asarray(axis.images[0].get_array()).ravel()
        assert shown.tolist() == pytest.approx(column.tolist())
    assert bar_of(view).get_ylabel() == "share"
    assert size(view) == pytest.approx((WIDTH, 2.6), abs=1e-3)
    said = {"cs": "the covariance of its scores", "gs": "its gain"}[share]
    assert view.caption == (
        f"Each cell is a head: the part of {said} that terms without content, with only content, "
        "and with both hold. Red is positive, blue negative; the panels add up to one."
    )
    assert (
        view.title
        == {
            "cs": "Which heads attend by position, which by content?",
            "gs": "Where attention goes, is it by position or by content?",
        }[share]
    )
    destroyed = torch.full((len(table.heads),), torch.nan).double()
    for known, null in (
        ({}, "Shares have no null here."),
        ({3: -0.5}, "With position destroyed, the share of position is at most -0.50."),
        ({3: 0.25, 5: 0.125}, "With position destroyed, the share of position is at most 0.25."),
    ):
        values = destroyed.clone()
        for at, value in known.items():
            values[at] = value
        changed = dataclasses.replace(table, details={f"{share}_position_null": values})
        assert sweeps.head_shares(changed, share=share).null == null
    other = {"cs": "gs", "gs": "cs"}[share]
    changed = dataclasses.replace(table, details={f"{other}_position_null": destroyed + 1})
    assert sweeps.head_shares(changed, share=share).null == "Shares have no null here."
    with pytest.raises(GeometryError, match="share: expected one of 'cs', 'gs', got 'es'"):
        sweeps.head_shares(table, share="es")


def test_maps_of_head_types_say_what_uniform_attention_pays() -> None:
    """One scale for the three, and the attention beside it."""
    table = small()
    base = {"previous": 0.11, "induction": 0.22, "duplicate": 0.333}
    changed = dataclasses.replace(table, baselines={**table.baselines, **base})
    view = sweeps.head_types(changed)
    maps = view.figure.axes[:-1]
    assert [a.get_title() for a in maps] == [
        "previous (uniform 0.11)",
        "induction (uniform 0.22)",
        "duplicate (uniform 0.33)",
    ]
    for axis, name in zip(maps, base, strict=True):
        shown = np.asarray(axis.images[0].get_array()).ravel()
        assert shown.tolist() == pytest.approx(table.types[name].tolist())
    assert [a.get_ylabel() for a in maps] == ["layer", "", ""]
    assert bar_of(view).get_ylabel() == "attention"
    assert size(view) == pytest.approx((WIDTH, 2.6), abs=1e-3)
    assert view.caption == (
        "Each cell is a head: the mean attention that it pays, on repeated random tokens, to where "
        "a head of that type looks."
    )
    assert view.null == "What uniform attention would pay stands above each panel."
    assert view.source == table.provenance.line()


@pytest.mark.parametrize(("layers", "height"), [(13, 2.6), (14, 2.62), (40, 6.0)])
def test_maps_of_deep_models_are_taller(layers: int, height: float) -> None:
    """A row takes 0.13 inches, whatever heads a layer has."""
    deep = SimpleNamespace(heads=[(2 * i, j) for i in range(layers) for j in (0, 1)])
    own = copy_of(sweeps)._height(deep)
    assert own == pytest.approx(height)
