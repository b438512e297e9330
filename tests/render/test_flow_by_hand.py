"""Figures of the flow: sizes, labels, styles, limits and sentences, from tables made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.render.test_basis_and_measures_by_hand import bar_of, legend, size
from tests.render.test_by_hand import curve, flow_table
from tests.render.test_flow import paths, skips
from tl_geometry.render import figure, flow
from tl_geometry.render.figure import WIDTH


def looks(lines: Any) -> list[tuple[str, str, float]]:
    """Style, marker and width of some lines."""
    return [(v.get_linestyle(), v.get_marker(), v.get_linewidth()) for v in lines]


@pytest.mark.parametrize("held_out", [True, False])
def test_truncation_has_two_black_lines_for_its_baselines(held_out: bool) -> None:
    """The mean is dashed, the median dotted; the legend says on what the points were measured."""
    view = flow.truncation_figure(curve(held_out=held_out))
    axis = view.figure.axes[0]
    points, mean, median = axis.containers[0][0], *axis.lines[-2:]  # type: ignore[index]
    assert looks([points, mean, median]) == [
        ("-", "o", 1),
        ("--", "None", 1),
        (":", "None", 1),
    ]
    assert points.get_markersize() == 3
    assert [to_hex(v.get_color()) for v in (mean, median)] == ["#000000"] * 2
    assert not len(axis.get_xticks(minor=True))
    assert axis.xaxis.get_transform().base == 2  # type: ignore[attr-defined]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("directions kept, K", "KL (nats)")
    box = axis.get_legend()
    assert box is not None
    chunks = "held out" if held_out else "in-sample"
    assert {t.get_text() for t in box.get_texts()} == {
        f"{chunks}, every block, pilot",
        "null: consecutive chunks, mean",
        "null: consecutive chunks, median",
    }
    assert size(view) == (WIDTH, 2.8)
    assert view.title == "How many directions does the output need?"
    assert view.caption == (
        "Each point is how far the next-token distribution moves when states keep K directions, "
        "with two standard errors. No K up to 4 comes within a tenth of the mean baseline."
    )
    assert view.null == (
        "The black lines are the KL between the model's own outputs on consecutive chunks."
    )
    own = Figure().subplots()
    assert flow.truncation_figure(curve(held_out=True), ax=own).figure is own.figure


def test_needed_directions_stand_in_the_caption() -> None:
    """A number from the table, in a whole sentence."""
    low = dataclasses.replace(curve(held_out=True), kl=torch.tensor([2.0, 0.29, 0.1]).double())
    assert flow.truncation_figure(low).caption.endswith(
        "A tenth of the mean baseline is reached from 2 directions on."
    )
    none = dataclasses.replace(low, claimed=False)
    assert flow.truncation_figure(none).caption.endswith(
        "No K is claimed from fewer chunks than dimensions."
    )


def test_the_map_of_interest_has_a_wide_line_beside_its_baselines() -> None:
    """From zero on, with a dashed black null at one."""
    report = flow_table()
    view = flow.baseline_figure(report)
    axis = view.figure.axes[0]
    own, ridge, identity, null = axis.lines
    assert looks([own, ridge, identity, null]) == [
        ("-", "o", 2),
        ("-", "o", 1),
        ("-", "o", 1),
        ("--", "None", 0.8),
    ]
    assert [v.get_label() for v in axis.lines] == [
        "rotation and stretch",
        "ridge",
        "identity",
        "null: zero in its place",
    ]
    assert to_hex(str(null.get_color())) == "#000000"
    assert own.get_markersize() == 3
    assert axis.get_ylim()[0] == 0
    assert axis.get_xticks().tolist() == [2, 3, 4]
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "state t + 1",
        "relative error (|error| / |state|)",
    )
    assert view.title == "Which map predicts the next state?"
    assert view.null == (
        "Above the dashed line a map is worse than putting zero in the state's place."
    )
    box = axis.get_legend()
    assert box is not None
    assert box.get_texts()[0].get_fontsize() == 8
    zero = torch.zeros(4, 4).double()
    jump = zero.clone()
    jump[0, 1] = 1.0
    jumps = dataclasses.replace(
        report, held_out={"relative_error": jump}, baselines={"a": zero, "b": zero}
    )
    assert flow.baseline_figure(jumps).figure.axes[0].get_yscale() == "linear", "a median of zero"


def test_residuals_have_a_bar_above_each_panel() -> None:
    """In sequential colours, each on its own scale."""
    view = flow.residual_figure(flow_table())
    panels = [a for a in view.figure.axes if a.get_label() != "<colorbar>"]
    bars = [a for a in view.figure.axes if a.get_label() == "<colorbar>"]
    assert len(bars) == len(panels) == 4
    for panel, bar in zip(panels, bars, strict=True):
        assert panel.images[0].get_cmap().name == figure.SEQUENTIAL
        drawn: Any = bar
        assert drawn._colorbar.orientation == "horizontal"
        assert drawn._colorbar.ticklocation == "top"
        assert panel.title.get_fontsize() == 9
    assert size(view) == (WIDTH, 2.0)
    assert view.title == "What do rotation and stretch leave?"
    assert view.caption == (
        "Each cell is the map from state t to state t + τ, on chunks that it was not fitted on; a "
        "panel for each measure of what it leaves."
    )
    assert view.null == "A relative error of 1 is that of putting zero in the state's place."


def test_laws_of_noise_are_named_in_black_and_drawn_in_the_colours_of_states() -> None:
    """Solid for the asymptotic law; what was not fitted is said."""
    report = flow_table()
    view = flow.noise_figure(report)
    axis = view.figure.axes[0]
    box = axis.get_legend()
    assert box is not None
    handles: Any = box.legend_handles
    assert looks(handles) == [("-", "None", 1)]
    assert to_hex(handles[0].get_color()) == "#000000"
    assert box.get_texts()[0].get_fontsize() == 8
    assert not box.get_frame_on()
    points = [v for v in axis.lines if v.get_marker() == "o"]
    assert {v.get_markersize() for v in points} == {3}
    assert {v.get_linestyle() for v in points} == {"None"}
    assert axis.get_xticks().tolist() == [2, 3, 4]
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "state t + τ",
        "mean ln variance (of the residual)",
    )
    assert bar_of(view).get_ylabel() == "t"
    assert bar_of(view).get_ylim() == (1, 3)
    assert view.null == "No null is drawn: the law of independent increments was not fitted."
    fit = report.law("asymptotic")
    assert view.caption == (
        "Each point is the mean log variance of what the map from t to t + τ leaves, coloured by "
        "t; lines are the laws of noise fitted to the 9 trajectories that the maps were fitted on "
        f"(asymptotic: alpha {fit.alpha:.3g}, lambda {fit.rate:.3g}, R² {fit.r2:.2f})."
    ).replace("-", "−").replace("log−", "log-")
    both = dict(report.laws) | {"increment": report.laws["asymptotic"]}
    dotted = flow.noise_figure(dataclasses.replace(report, laws=both))
    assert dotted.null == "The dotted line is the law of independent increments."
    laws = [v for v in dotted.figure.axes[0].lines if v.get_linestyle() == ":"]
    assert {v.get_linewidth() for v in laws} == {1}


def test_no_law_of_noise_has_no_legend() -> None:
    """The caption says that none fits."""
    view = flow.noise_figure(dataclasses.replace(flow_table(), laws={}))
    assert view.figure.axes[0].get_legend() is None
    assert view.caption.endswith("(none fits).")


def test_a_bundle_is_a_figure_of_three_dimensions() -> None:
    """Every path has small points; the caption says how many there are."""
    view = flow.bundle_figure(paths(101))
    axis: Any = view.figure.axes[0]
    assert (size(view), axis.name) == ((4.6, 4.2), "3d")
    assert axis.collections[0].get_sizes().tolist() == [5]
    assert view.caption == (
        "Each line is the path of one token through the states, 100 of 101 trajectories; colour is "
        "the state."
    )
    assert view.null == "No null is drawn: gibberish and the untrained model are rows of a table."
    rows = flow.coordinates(paths(101))[0][:, -1]
    every = paths(101)
    U = torch.linalg.svd(every.X[:, -1].double()).Vh[:3].T
    places = [
        int(((every.X[:, -1].double() @ U).abs() - row.abs()).abs().sum(1).argmin()) for row in rows
    ]
    assert places == sorted(set(places)), "each once, in their order"


@pytest.mark.parametrize(("maps", "across"), [(1, WIDTH / 3), (2, 2 * WIDTH / 3), (4, WIDTH)])
def test_maps_of_skips_are_a_third_of_the_page_at_most(maps: int, across: float) -> None:
    """Rows begin at block 0, columns at block 1."""
    names = ("flow", "identity", "mean", "ridge")[:maps]
    view = flow.skip_figure(skips(6, (1, 2), names))
    assert size(view) == pytest.approx((across, 2.2), abs=1e-3)
    panels = [a for a in view.figure.axes if a.get_label() != "<colorbar>"]
    for axis in panels:
        assert axis.get_xlabel() == "goes on at block"
        assert axis.get_xticks().tolist() == [1, 2, 3, 4, 5]
        assert axis.get_yticks().tolist() == [0, 1, 2, 3, 4]
        assert axis.title.get_fontsize() == 9
        assert {t.get_fontsize() for t in axis.texts} == {6}
        texts: Any = axis.texts
        assert {(t.get_ha(), t.get_va()) for t in texts} == {("center", "center")}
    assert bar_of(view).get_ylabel() == "loss increase (nats)"
    assert view.title == "How many blocks can be skipped for how much loss?"
    assert view.caption == (
        "Each cell replaces the blocks from its row to its column by a map, a panel per map, at "
        "the last token of 7 held-out chunks."
    )


@pytest.mark.parametrize("lengths", [(1,), (1, 3), (1, 2, 3)])
def test_lines_of_skips_have_one_legend_and_the_flow_is_wide(lengths: tuple[int, ...]) -> None:
    """A single panel takes half of the page."""
    view = flow.skip_figure(skips(10, lengths, ("identity", "flow")))
    panels = view.figure.axes
    assert size(view) == pytest.approx((WIDTH / max(len(lengths), 2) * len(lengths), 2.6), abs=1e-3)
    assert legend(view) == ["identity", "flow"]
    for axis in panels:
        assert looks(axis.lines) == [("-", "o", 1), ("-", "o", 2)]
        assert {v.get_markersize() for v in axis.lines} == {2}
        assert axis.get_xlabel() == "first block skipped"
        assert axis.title.get_fontsize() == 9
    assert [a.get_ylabel() for a in panels] == ["loss increase (nats)", *[""] * (len(lengths) - 1)]
    assert len({axis.get_ylim() for axis in panels}) == 1, "one scale"
    assert view.caption == (
        "Each line is a map in the place of the skipped blocks, at the last token of 7 held-out "
        "chunks."
    )
    high = panels[0].get_ylim()[1]
    costs = [np.asarray(v.get_ydata()) for a in panels for v in a.lines]
    assert high > max(float(np.nanmax(c)) for c in costs), "without the mean nothing is cut"
