"""Figures of a basis and of measures: sizes, labels, limits, styles and sentences, as a reader sees
them."""

from __future__ import annotations

import dataclasses
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import tl_geometry as tlg
from tests.render.test_basis import made, panels
from tests.render.test_by_hand import draw
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.measures.context_report import ContextualReport
from tl_geometry.measures.position_report import PositionalReport
from tl_geometry.render import basis as views
from tl_geometry.render import figure, measures
from tl_geometry.render.figure import WIDTH, View

SOURCE = Provenance(model="m", corpus="c")
LINE = "m, c, float32"


def size(view: View) -> tuple[float, ...]:
    """Inches across and down."""
    return tuple(float(v) for v in view.figure.get_size_inches().round(4))


def legend(view: View) -> list[str]:
    """The entries of the legend of a figure."""
    return [t.get_text() for t in view.figure.legends[0].get_texts()]


def bar_of(view: View) -> Any:
    """The axes of the colour bar."""
    (bar,) = [a for a in view.figure.axes if a.get_label() == "<colorbar>"]
    return bar


def test_shares_of_variance_are_lines_of_the_colours_of_parts_from_zero_to_one() -> None:
    """The share of spliced windows is a thin dashed line in the colour of context."""
    table = dataclasses.replace(made().anova(), provenance=SOURCE)
    null = dataclasses.replace(table, ctx_null=table.shares["ctx"] / 2)
    view = views.variance_shares(null)
    (axis,) = view.figure.axes
    assert size(view) == (WIDTH, 2.6)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("state", "share of variance")
    assert axis.get_ylim() == (0, 1.02)
    assert axis.get_xticks().tolist() == [0, 1, 2]
    colours = {"position": "pos", "context": "ctx", "residual": "resid"}
    *shares, dashed = axis.lines
    for line in shares:
        assert line.get_color() == figure.PARTS[colours[str(line.get_label())]]
        look = (line.get_linestyle(), line.get_marker(), line.get_linewidth())
        assert look == ("-", "o", 1.6)
        assert line.get_markersize() == 3.5
    assert (dashed.get_linestyle(), dashed.get_marker()) == ("--", "None")
    assert (dashed.get_color(), dashed.get_linewidth()) == (figure.PARTS["ctx"], 1.2)
    assert np.asarray(dashed.get_xdata()).tolist() == [0, 1, 2]
    assert legend(view) == [*colours, "null: context of spliced windows"]
    assert view.null == (
        "Dashed: windows spliced from random places, which have no common context."
    )
    assert view.source == LINE
    assert view.caption == (
        "The shares of the variance of each state that position alone, context alone and both "
        "together (residual) make up; they add up to one."
    )
    beside = views.variance_shares(table, control=table)
    assert size(beside) == (WIDTH, 2.6)
    first, second = beside.figure.axes
    assert (first.get_ylabel(), second.get_ylabel()) == ("share of variance", "")
    assert first.get_shared_y_axes().joined(first, second)
    assert first.title.get_fontsize() == 9
    assert beside.null == ("No null is drawn: windows spliced from random places would give one.")
    own = Figure().subplots()
    inside = views.variance_shares(table, ax=own)
    assert not inside.figure.legends
    assert own.get_legend() is not None


def test_a_curve_of_positions_has_no_ticks_and_a_bar_of_positions() -> None:
    """The figure is as wide for one state as for five, and a second row takes as much again."""
    basis = made()
    view = views.spirals(basis)
    assert size(view) == (WIDTH, 1.6)
    assert size(views.spirals(basis, control=basis)) == (WIDTH, 3.2)
    assert size(views.spirals(made(1))) == (WIDTH, 1.6)
    assert bar_of(view).get_ylabel() == "position"
    bars = [
        a.get_ylabel()
        for a in views.spirals(basis, control=basis).figure.axes
        if a.get_label() == "<colorbar>"
    ]
    assert bars == ["position"] * 2
    for axis in panels(view):
        assert not len(axis.get_xticks())
        assert not len(axis.get_yticks())
        assert axis.title.get_fontsize() == 8
        assert axis.collections[0].get_sizes().tolist() == [7]
    assert [axis.get_xlabel() for axis in panels(view)] == ["u1"] * 3
    assert view.caption == (
        "Each point is the positional vector of one position, on the two leading directions of its "
        "state (3 of 3 states; axes scaled per panel). Above: the share of |pos|² that the two "
        "directions hold, and how many outliers lie off the frame."
    )
    assert view.null == "No null is drawn: the measures of position have theirs."


def test_a_stream_of_one_dimension_and_a_state_without_position_have_a_curve() -> None:
    """One direction serves both axes; a share of nothing is 0%."""
    line = tlg.decompose_activations(torch.randn(1, 4, 6, 1, dtype=torch.float64))
    (axis,) = panels(views.spirals(line))
    points = np.asarray(axis.collections[0].get_offsets())
    assert np.allclose(points[:, 0], points[:, 1])
    assert axis.get_title() == "state 0: 100%"
    same = torch.ones(1, 4, 5, 6, dtype=torch.float64)
    (axis,) = panels(views.spirals(tlg.decompose_activations(same)))
    assert axis.get_title() == "state 0: 0%"


def test_points_at_the_edge_of_six_ranges_are_inside() -> None:
    """The median counts from both sides, and ranges of nothing take rounding."""
    line = torch.linspace(-2, 2, 9, dtype=torch.float64)
    edge = torch.stack([line, line], 1)
    edge[8, 0] = 12.0  # quartiles at -1 and 1, so that six ranges are 12
    assert views._fit_axes(views.canvas()[1][0], edge) == 0
    same = torch.zeros(9, 2, dtype=torch.float64)
    for far, off in ((1e-13, 0), (1e-11, 1)):
        same[8, 1] = far
        assert views._fit_axes(views.canvas()[1][0], same) == off


def test_cosines_are_named_on_every_side() -> None:
    """Thin black lines part positions from contexts; names stand upright beside the map."""
    basis = made()
    view = views.gram(basis, 2)
    axis: Any = view.figure.axes[0]
    assert size(view) == (0.75 * WIDTH, 4.2)
    assert bar_of(view).get_ylabel() == "cosine"
    assert axis.images[0].get_clim() == (-1, 1)
    assert axis.get_xlabel() == "vector (one for each position, one for each context)"
    assert axis.get_ylabel() == "vector (in the same order)"
    assert [(to_hex(line.get_color()), line.get_linewidth()) for line in axis.lines] == [
        ("#000000", 0.6)
    ] * 2
    assert {t.get_rotation() for t in axis.get_yticklabels()} == {90}
    assert {t.get_va() for t in axis.get_yticklabels()} == {"center"}
    assert view.title == "Which positions and contexts of state 2 point the same way?"
    assert view.null == "Random directions of as many dimensions have a cosine of 0 ± 0.41."
    assert view.caption == (
        "Each cell is the cosine of two vectors, positions first, then contexts ordered by "
        "document: red is alike, blue opposite."
    )
    own = Figure().subplots()
    assert views.gram(basis, 0, ax=own).figure is own.figure


def test_contexts_of_a_document_stand_together_in_their_order() -> None:
    """Also where the labels are not sorted."""
    basis = made(labels=[1, 0, 1, 0, 1, 0, 1, 0])
    image: Any = views.gram(basis, 1).figure.axes[0].images[0].get_array()
    assert basis.ctx is not None
    order = [1, 3, 5, 7, 0, 2, 4, 6]
    wanted = torch.cosine_similarity(
        basis.ctx[1, order][:, None], basis.ctx[1, order][None], dim=-1
    )
    assert np.allclose(np.asarray(image)[12:, 12:], wanted)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (2.0, 5.5, ["2", "3", "4", "5"]),
        (2.0, 7.0, ["2", "3", "4", "6"]),
        (1.0, 9.0, []),
        (30.0, 65.0, ["30", "40", "50", "60"]),
    ],
)
def test_norms_have_numbers_between_powers_of_ten_where_these_are_few(
    low: float, high: float, labels: list[str]
) -> None:
    """All in half a decade, some in one, none in more."""
    axis = norms_of(low, high).figure.axes[0]
    axis.figure.draw_without_rendering()  # type: ignore[union-attr]
    least, most = axis.get_ylim()
    ticks = zip(axis.yaxis.get_minorticklocs(), axis.get_yticklabels(minor=True), strict=True)
    texts = [t.get_text() for at, t in ticks if least <= at <= most]
    assert [text for text in texts if text] == labels
    major = dict(zip(axis.get_yticks().tolist(), axis.get_yticklabels(), strict=True))
    assert major[10].get_text() == "10"


def norms_of(low: float, high: float) -> View:
    """Norms of three contexts in a window of eight positions."""
    values = torch.linspace(low, high, 24).view(3, 8)
    return views.token_norms(
        values, (2, 10), [(4, high, "a")], state=3, title="T", provenance=SOURCE
    )


def test_tokens_are_small_pale_points_and_the_largest_orange_above_them() -> None:
    """The median of each position is a blue line, named above the axes at the left."""
    view = norms_of(1.0, 9.0)
    axis = view.figure.axes[0]
    assert size(view) == (WIDTH, 3.2)
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "position",
        "norm in state 3 (units of the stream)",
    )
    cloud, largest = axis.collections
    assert to_hex(cloud.get_facecolor()[0]) == figure.GREY  # type: ignore[index]
    assert (cloud.get_alpha(), cloud.get_linewidths().tolist()) == (0.35, [0])  # type: ignore[union-attr]
    assert cloud.get_sizes().tolist() == [3]  # type: ignore[attr-defined]
    assert largest.get_sizes().tolist() == [12]  # type: ignore[attr-defined]
    assert to_hex(largest.get_facecolor()[0]) == figure.VERMILION  # type: ignore[index]
    assert largest.get_zorder() == 3
    assert (axis.lines[0].get_color(), axis.lines[0].get_linewidth()) == (figure.BLUE, 1)
    box = axis.get_legend()
    assert box is not None
    assert [t.get_text() for t in box.get_texts()] == ["median of the contexts"]
    anchor = box.get_bbox_to_anchor().transformed(axis.transAxes.inverted())
    assert (anchor.x0, anchor.y0, box._loc) == pytest.approx((0, 1, 3))  # type: ignore[attr-defined]
    assert (view.title, view.source) == ("T", LINE)
    assert view.caption == (
        "Each point is a token of 3 sampled contexts; the largest are orange, named where they "
        "exceed three times the median."
    )
    assert view.null == "The line is the median token of each position."


def test_names_of_large_tokens_stand_six_points_beside_them() -> None:
    """To the right in the first half of the window, to the left in the second."""
    marked = [(2, 90.0, "$a\u202e"), (9, 9.0, "b")]
    view = views.token_norms(
        torch.ones(3, 8), (2, 10), marked, state=1, title="", provenance=SOURCE
    )
    notes: Any = view.figure.axes[0].texts
    assert [n.xyann for n in notes] == [(6, 0), (-6, 0)]
    assert [n.xy for n in notes] == [(2, 90), (9, 9)]
    assert {(n.get_va(), n.get_fontsize(), n.anncoords) for n in notes} == {
        ("center", 7, "offset points")
    }
    assert [n.get_text() for n in notes] == [r"\$a\u202e at 2", "b at 9"]


def positional(states: int = 3, **options: Any) -> PositionalReport:
    """A report of random numbers."""
    names = [*measures.POSITIONAL]
    values = {n: draw(states, seed=i) for i, n in enumerate(names)}
    return PositionalReport(
        **{
            "states": tuple(range(states)),
            "values": values,
            "errors": {},
            "nulls": {},
            "spreads": {},
            "curve": {"rank": draw(3, states), "low_frequency": draw(3, states, seed=4)},
            "curve_contexts": (2, 4, 9),
            "provenance": SOURCE,
            "k": 1,
            "fourier": draw(states, 7, 7) - 0.5,
            **options,
        }
    )


def contextual() -> ContextualReport:
    """A report of random numbers, with its nulls."""
    nulls = [(n, null) for n in ("incoherence_avg", "incoherence_max") for null in ("flipped",)]
    return ContextualReport(
        states=(0, 1),
        values={n: draw(2, seed=i) for i, n in enumerate(measures.CONTEXTUAL)}
        | {"incoherence_max": draw(2, seed=9)},
        errors={},
        nulls={pair: draw(2, seed=20) for pair in nulls},
        spreads={},
        curve={},
        curve_contexts=(),
        provenance=SOURCE,
        names=(),
        similarity=None,
    )


def test_fourier_blocks_say_their_state_and_share() -> None:
    """Five states at most, on one scale about zero, with the null of the states that are drawn."""
    nulls = {("low_frequency", "shuffled"): torch.tensor([0.9, 0.1, 0.2, 0.3, 0.4, 0.5]).double()}
    report = positional(6, nulls=nulls)
    view = measures.fourier(report)
    shown = panels(view)
    rows = [0, 1, 2, 4, 5]
    shares = [float(report["low_frequency"][row]) for row in rows]
    assert [a.get_title() for a in shown] == [
        f"state {row}: {share:.0%}" for row, share in zip(rows, shares, strict=True)
    ]
    assert size(view) == (WIDTH, 1.9)
    assert size(measures.fourier(positional(2))) == (WIDTH, 1.9)
    high = float(report.fourier[rows].abs().max())
    for axis, row in zip(shown, rows, strict=True):
        assert axis.images[0].get_clim() == (-high, high)
        assert np.allclose(np.asarray(axis.images[0].get_array()), report.fourier[row])
        assert axis.get_xlabel() == "frequency"
        assert axis.get_xticks().tolist() == [0, 2, 4, 6]
        assert axis.title.get_fontsize() == 8
    assert [a.get_ylabel() for a in shown] == ["frequency", "", "", "", ""]
    assert bar_of(view).get_ylabel() == "coefficient"
    assert view.null == "In random order they hold 90%."
    assert view.caption.endswith("is the share of the energy in the first 7 frequencies.")
    later = dataclasses.replace(report, nulls={k: v.flip(0) for k, v in nulls.items()})
    later.nulls["low_frequency", "shuffled"][3] = 0.99
    assert measures.fourier(later).null == "In random order they hold 90%.", "state 3 is not drawn"
    assert measures.fourier(positional()).null == ""
    zero = dataclasses.replace(positional(1), fourier=torch.full((1, 2, 2), torch.nan).double())
    assert measures.fourier(zero).figure.axes[0].images[0].get_clim() == (-1, 1)


def test_a_measure_has_its_name_unit_error_and_nulls() -> None:
    """Measured values are black points, nulls dashed lines in their colours; no error is drawn
    where it is not a number."""
    errors = {"stable_rank": torch.tensor([0.1, torch.nan, 0.2]).double()}
    nulls = {
        ("stable_rank", "noise"): draw(3, seed=31),
        ("stable_rank", "shuffled"): draw(3, seed=32),
        ("rank", "noise"): draw(3, seed=33),
    }
    report = positional(errors=errors, nulls=nulls)
    view = measures.measure_curves(report, ["stable_rank", "low_frequency"])
    first, second = view.figure.axes
    assert [a.get_title() for a in (first, second)] == ["stable rank", "low frequency"]
    assert [a.get_ylabel() for a in (first, second)] == ["directions", "share of energy"]
    assert {a.get_xlabel() for a in (first, second)} == {"state"}
    assert first.get_xticks().tolist() == [0, 1, 2]
    assert first.title.get_fontsize() == 9
    points, caps, (bars,) = first.containers[0]
    look = (points.get_color(), points.get_marker(), points.get_markersize())
    assert look == ("k", "o", 3)
    assert points.get_linewidth() == 1
    assert [cap.get_markersize() for cap in caps] == [4, 4]
    lengths = [float(s[1][1] - s[0][1]) / 2 for s in bars.get_segments()]
    assert lengths == pytest.approx([0.1, 0, 0.2])
    assert second.containers[0][2] == ()
    dashed = [line for line in first.lines if line.get_linestyle() == "--"]
    assert [line.get_color() for line in dashed] == [figure.GREY, figure.VERMILION]
    assert [line.get_linewidth() for line in dashed] == [1, 1]
    assert [line.get_label() for line in dashed] == ["null: noise", "null: shuffled"]
    for line, null in zip(dashed, list(nulls.values()), strict=False):
        assert np.asarray(line.get_xdata()).tolist() == [0, 1, 2]
        assert np.allclose(np.asarray(line.get_ydata()), null)
    assert set(legend(view)) == {"measured", "null: noise", "null: shuffled"}
    assert view.title == "Do measures of position stand above their nulls?"
    assert view.source == LINE
    assert view.caption == (
        "Points are measured, bars one jackknife standard error (for 95% times Student's t, with "
        "one degree of freedom fewer than groups)."
    )
    assert view.null == "Dashed lines are nulls: a measure that lies on one is no finding."
    long = measures.measure_curves(positional(9), ["rank"]).figure.axes[0]
    assert long.get_xticks().tolist() == [0, 2, 4, 6, 8]
    large = positional(values={"rank": torch.tensor([1e4, 2e4, 3e4]).double()})
    shown = measures.measure_curves(large, ["rank"]).figure
    shown.draw_without_rendering()
    offset = shown.axes[0].yaxis.get_offset_text().get_text()
    assert "times" in offset, "a power of ten in words of mathematics"


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2), (5, 3, 2), (8, 3, 3)]
)
def test_panels_of_measures_stand_three_in_a_row_and_four_in_a_square(
    count: int, columns: int, rows: int
) -> None:
    """The page is as wide for any number."""
    view = measures.measure_curves(positional(), measures.POSITIONAL[:count])
    assert size(view) == (WIDTH, pytest.approx(2.0 * rows))
    places = [a.get_subplotspec() for a in view.figure.axes]
    assert max(p.colspan.stop for p in places if p) == columns
    assert max(p.rowspan.stop for p in places if p) == rows


def test_measures_of_context_have_their_own_names_and_question() -> None:
    """By default those that the report has, in their order; none is refused."""
    view = measures.measure_curves(contextual())
    assert view.title == "Do measures of context stand above their nulls?"
    assert [a.get_title() for a in view.figure.axes] == [
        "mean |cos|",
        "overlap",
        "intra",
        "inter",
        "compactness cvec",
        "compactness raw",
    ]
    assert [a.get_ylabel() for a in view.figure.axes] == [
        "|cos|",
        "share",
        "|cos|",
        "|cos|",
        "share",
        "share",
    ]
    with pytest.raises(GeometryError, match=r"names: expected some of rank, .*, got none"):
        measures.measure_curves(positional(), [])
    aligned = measures.incoherence(contextual())
    assert size(aligned) == (WIDTH, 2.4)
    assert [a.get_title() for a in aligned.figure.axes] == ["mean |cos|", "largest |cos|"]
    assert [a.get_ylim()[0] for a in aligned.figure.axes] == [0, 0]
    assert legend(aligned) == ["null: flipped", "measured"]
    assert [a.lines[-1].get_color() for a in aligned.figure.axes] == [figure.PINK] * 2
    assert aligned.caption.startswith("Mean and largest |cos| between positional and context")
    assert aligned.null.startswith("On a dashed line it is chance: random directions, coordinates")


def test_a_learning_curve_has_a_line_for_each_state_over_numbers_of_contexts() -> None:
    """On a logarithmic axis, with a tick for each number and the colour of each state."""
    report = positional()
    view = measures.learning_curve(report, "low_frequency")
    axis, bar = view.figure.axes
    assert size(view) == (WIDTH, 2.6)
    assert (axis.get_xscale(), bar.get_ylabel()) == ("log", "state")
    assert [t.get_text() for t in axis.get_xticklabels()] == ["2", "4", "9"]
    assert axis.get_xticks().tolist() == [2, 4, 9]
    assert not len(axis.get_xticks(minor=True))
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "contexts",
        "low frequency (share of energy)",
    )
    for i, line in enumerate(axis.lines):
        assert np.allclose(np.asarray(line.get_ydata()), report.curve["low_frequency"][:, i])
        assert line.get_color() == pytest.approx(mpl.colormaps[figure.SEQUENTIAL](i / 2))
        assert (line.get_marker(), line.get_markersize(), line.get_linewidth()) == ("o", 3, 1)
    assert view.title == "Does the low frequency still grow with the corpus?"
    expected = "learning_curve: expected one of no measure .jackknife=False., got 'rank'"
    with pytest.raises(GeometryError, match=expected):
        measures.learning_curve(positional(curve={}), "rank")
