"""Colour bars end at the values that are shown: from 0, or about 0 where a number can be negative,
and their ends have numbers."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.browser import Browser, without_policy
from tl_geometry import render
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance, Result
from tl_geometry.render import circuitsvis, head_view
from tl_geometry.render.figure import View
from tl_geometry.scores.sweep import SweepTable


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Numbers(Result):
    """Three heads, and columns of each kind of scale."""

    def columns(self) -> list[str]:
        return ["layer", "head", "cs_pos-pos", "gs_pos-pos", "induction", "loss_change"]

    def rows(self) -> list[list[object]]:
        return [
            [0, 0, 0.013, 0.4, 0.02, -0.5],
            [0, 1, 0.05, -37.0, 0.27, 0.25],
            [1, 0, -0.0085, 0.1, 0.0, 1.9],  # seven characters, more than a cell has room for
        ]


ENDS = {
    "cs_pos-pos": (-0.05, 0.05),
    "gs_pos-pos": (-1.0, 1.0),
    "induction": (0.0, 0.3),
    "loss_change": (-2.0, 2.0),
}
"""The colour scale of each column."""
TABLE = Numbers(provenance=Provenance())


class Empty(Numbers):
    def rows(self) -> list[list[object]]:
        return []


class Unmeasured(Numbers):
    def columns(self) -> list[str]:
        return ["layer", "head"]

    def rows(self) -> list[list[object]]:
        return [row[:2] for row in super().rows()]


@cache
def swept() -> SweepTable:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=8)
    basis = tlg.decompose(model, windows, progress=False)
    return tlg.sweep_heads(model, windows, basis, progress=False)


def check_bar(drawn: View, low: float, high: float, *, pointed: bool = False) -> None:
    """All maps have this scale, and the bar its ends."""
    *maps, bar = drawn.figure.axes
    assert {axis.images[0].get_clim() for axis in maps} == {(low, high)}
    colours: Any = bar
    assert colours._colorbar.extend == ("both" if pointed else "neither")
    assert bar.get_ylim() == (low, high)
    ticks = bar.get_yticks().tolist()
    assert (ticks[0], ticks[-1]) == (low, high)
    assert ticks == pytest.approx(np.linspace(low, high, 5).tolist())


@pytest.mark.parametrize("column", ENDS)
def test_the_image_of_a_column(column: str) -> None:
    beyond = column == "gs_pos-pos"
    check_bar(head_view.head_grid(TABLE, column), *ENDS[column], pointed=beyond)


def test_a_table_without_rows_or_without_numbers_is_refused() -> None:
    with pytest.raises(GeometryError, match="table: expected one row per layer and head"):
        render.heads(Empty(provenance=Provenance()))
    with pytest.raises(GeometryError, match="table: expected a column of numbers"):
        render.heads(Unmeasured(provenance=Provenance()))


@pytest.mark.parametrize("share", ["cs", "gs"])
def test_maps_of_shares_have_one_scale_about_zero(
    share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = getattr(swept(), f"group_{share}") / 10
    monkeypatch.setattr(SweepTable, f"group_{share}", values)
    drawn = render.head_shares(swept(), share=share)
    high, largest = drawn.figure.axes[0].images[0].get_clim()[1], float(values.abs().max())
    assert largest <= high < 1.34 * largest < 0.2
    check_bar(drawn, -high, high)


def test_maps_of_head_types_have_one_scale_from_zero() -> None:
    table = swept()
    names = ("previous", "induction", "duplicate")
    tenth = dataclasses.replace(table, types={n: v / 10 for n, v in table.types.items()})
    largest = max(float(tenth.types[name].max()) for name in names)
    drawn = render.head_types(tenth)
    high = drawn.figure.axes[0].images[0].get_clim()[1]
    assert largest <= high < 1.34 * largest < 0.2
    check_bar(drawn, 0.0, high)


def test_the_bar_of_patterns_begins_at_white() -> None:
    values = torch.tensor([[[1.0, 0.0], [4.0, 8.0]]])
    for given, low in ((values, 0.0), (-values, -8.0)):
        drawn = circuitsvis.attention_heads(given, ["a", "b"]).image()
        axis, bar = drawn.figure.axes
        assert bar.get_ylim() == (low, 8.0)
        assert axis.images[0].to_rgba(np.array([0.0]))[0, :3] == pytest.approx(0.97, abs=0.01)


def test_ends_are_rounded_up_and_no_value_is_beyond_them() -> None:
    for value in torch.logspace(-6, 6, 500, dtype=torch.float64).tolist():
        low, high = head_view.scale("loss", torch.tensor([value, torch.nan, torch.inf]))
        assert low == 0
        assert value <= high * (1 + 1e-9) < 1.34 * value
        assert float(f"{high:.2g}") == high
    assert head_view.scale("loss", torch.tensor([torch.nan, 0.0])) == (0.0, 1.0)


def check_page(browser: Browser, page_text: str) -> None:
    """The numbers at the bar, and the colour of the largest value."""
    numbers = (
        "(said => { barPen.fillText = text => text !== '' && said.push(text); draw(); "
        "return said.map(text => +text.replace('−', '-')); })([])"
    )
    painted = "(f => [...{}.getImageData({} * f, {} * f, 1, 1).data])(devicePixelRatio || 1)"
    with browser.open(page_text, width=1000) as page:
        page.wait("document.body.dataset.drawn")
        for column, (low, high) in ENDS.items():
            page.evaluate(f"choose.value = {column!r}; choose.onchange(); 0")
            found = page.evaluate(numbers)
            assert found == ([low, 0, high] if low else [low, high])
            # left of the bar, where it is marked that some values are beyond it
            marked = page.evaluate(painted.format("barPen", 12, 6))[3] > 0
            assert marked == (column == "gs_pos-pos")
        page.evaluate("choose.value = 'induction'; choose.onchange(); 0")
        # a corner of the cell of L0H1, whose value is 0.9 of the scale, and that place of the bar
        cell = page.evaluate(painted.format("pen", "(LEFT + c + 3)", "(TOP + 3)"))
        bar = page.evaluate(painted.format("barPen", 24 + 180, 6))
        assert cell == pytest.approx(bar, abs=4)
        page.assert_harmless()


@pytest.mark.slow
def test_the_bar_of_a_page_has_the_range_of_its_column(browser: Browser) -> None:
    text = render.heads(TABLE).page
    check_page(browser, text)
    free = without_policy(text)
    for old, new in [
        (
            "bar(barPen, 24, 2, 200, high, low < 0, '', low);",
            "bar(barPen, 24, 2, 200, 1, low < 0, '');",
        ),
        ("shade(v, high, low < 0, low)", "shade(v, 1, low < 0, low)"),
        ("Math.abs(v) > high))", "Math.abs(v) > 100))"),
    ]:
        assert free.count(old) == 1, old
        with pytest.raises(AssertionError):
            check_page(browser, free.replace(old, new))
