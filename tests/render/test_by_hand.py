"""Every number of a figure is that of its table: points, bars, signs and which curve is which, with
faults planted in the modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

from tests.modules import copy_of
from tl_geometry.base.results import Provenance
from tl_geometry.flow.reports import FlowReport
from tl_geometry.flow.residuals import Maps
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.measures.position_report import PositionalReport
from tl_geometry.render import figure, flow, head_view, measures


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=g, dtype=torch.float64) + 0.1


def bars(axis: Any) -> list[list[float]]:
    """Half the length of each error bar, container by container."""
    found = []
    for container in axis.containers:
        segments = container[2][0].get_segments()
        found.append([float(s[1][1] - s[0][1]) / 2 for s in segments])
    return found


def curve(*, held_out: bool) -> TruncationCurve:
    values = {
        n: draw(3, seed=i) for i, n in enumerate(("kl", "kl_se", "kl_reverse", "top1", "top5"))
    }
    once = {"where": "every", "positions": "pilot", "fitted": 9, "claimed": True}
    return TruncationCurve(
        K=(1, 2, 4),
        baseline_mean=3.0,
        baseline_median=2.0,
        held_out=held_out,
        provenance=Provenance(),
        **values,
        **once,
    )


def flow_table() -> FlowReport:
    maps = [{n: draw(4, 4, seed=30 * k + i) for i, n in enumerate(Maps._fields)} for k in (1, 2)]
    return FlowReport(
        states=(1, 2, 3, 4),
        in_sample=maps[0],
        held_out=maps[1],
        baselines={"ridge": draw(4, 4, seed=90), "identity": draw(4, 4, seed=91)},
        isotropy={},
        laws={"asymptotic": torch.tensor([0.5, 0.2, -0.7, 0.9, 1.0, 6.0]).double()},
        anomalies={},
        outliers=(),
        train=9,
        test=9,
        provenance=Provenance(),
    )


def check_flow(module: Any) -> None:
    for held_out in (True, False):
        c = curve(held_out=held_out)
        axis = module.truncation_figure(c).figure.axes[0]
        assert axis.containers[0][0].get_ydata().tolist() == pytest.approx(c.kl.tolist())
        assert bars(axis)[0] == pytest.approx((2 * c.kl_se).tolist()), "two standard errors"
        names = [t.get_text() for t in axis.get_legend().get_texts()]
        assert any(n.startswith("held out" if held_out else "in-sample") for n in names)
        level = {line.get_label(): line.get_ydata()[0] for line in axis.lines}
        assert level["null: consecutive chunks, mean"] == 3
        assert level["null: consecutive chunks, median"] == 2
    report = flow_table()
    axis = module.baseline_figure(report).figure.axes[0]
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axis.lines}
    own = report.held_out["relative_error"].diagonal(1).tolist()
    assert lines["rotation and stretch"] == pytest.approx(own), "held out, as the caption says"
    for name, table in report.baselines.items():
        assert lines[name] == pytest.approx(table.diagonal(1).tolist())
    with mpl.rc_context(figure.SETTINGS):
        colours = [to_hex(line.get_color()) for line in axis.lines]
    assert len(set(colours)) == len(lines) == 4, "the null has a colour of its own"
    axis = module.noise_figure(report).figure.axes[0]
    points = [line.get_ydata().tolist() for line in axis.lines if line.get_marker() == "o"]
    table = report.in_sample["log_variance"]
    assert points == [pytest.approx(table[i, i + 1 :].tolist()) for i in range(3)]
    law = [line.get_ydata().tolist() for line in axis.lines if line.get_linestyle() == "-"]
    assert pytest.approx([-0.6931 + 0.2 * t for t in (2, 3, 4)], abs=0.01) in law
    assert "dotted" not in module.noise_figure(report).null, "the dotted law is not drawn"
    both = dict(report.laws) | {"increment": report.laws["asymptotic"]}
    assert "dotted" in module.noise_figure(dataclasses.replace(report, laws=both)).null


def check_measures(module: Any) -> None:
    names = {"stable_rank": draw(3, seed=1), "roughness": draw(3, seed=2)}
    report = PositionalReport(
        states=(0, 1, 2),
        values=names,
        errors={n: 0.1 * draw(3, seed=5 + i) for i, n in enumerate(names)},
        nulls={
            ("stable_rank", "noise"): draw(3, seed=8),
            ("roughness", "shuffled"): draw(3, seed=9),
        },
        spreads={},
        curve={},
        curve_contexts=(),
        provenance=Provenance(),
        k=1,
        fourier=draw(3, 2, 2),
    )
    shown = module.measure_curves(report, tuple(names)).figure.axes
    for axis, name in zip(shown, names, strict=False):
        assert axis.containers[0][0].get_ydata().tolist() == pytest.approx(report[name].tolist())
        assert bars(axis)[0] == pytest.approx(report.errors[name].tolist())
        null = next(v for (m, _), v in report.nulls.items() if m == name)
        dashed = [v.get_ydata().tolist() for v in axis.lines if v.get_linestyle() == "--"]
        assert dashed == [pytest.approx(null.tolist())]


def check_map(module: Any) -> None:
    heads, values = ((0, 0), (0, 1), (1, 0), (1, 1)), torch.tensor([0.9, -0.9, 0.4, 0.0])
    view, axes = figure.canvas(1)
    module.draw_map(axes[0], heads, values, "title", -1.0, 1.0)
    image = axes[0].images[0]
    assert np.asarray(image.get_array()).flatten().tolist() == pytest.approx([0.9, -0.9, 0.4, 0.0])
    red, blue = image.to_rgba(np.array([0.9, -0.9]))
    assert red[0] > red[2], "positive is red"
    assert blue[2] > blue[0]
    assert [t.get_text() for t in axes[0].texts] == ["0.90", "-0.90", "0.40", "0.00"]
    assert view is not None


def test_figures_by_hand() -> None:
    mpl.use("Agg")
    check_flow(copy_of(flow))
    check_measures(copy_of(measures))
    check_map(copy_of(head_view))


def test_a_map_with_both_signs_has_the_diverging_colours_and_zero_in_their_middle() -> None:
    for values, colours, ends in (
        ([-0.5, 2.0], figure.DIVERGING, (-2.0, 2.0)),
        ([0.5, 2.0], figure.SEQUENTIAL, (0.0, 2.0)),
    ):
        shown = torch.tensor(values)
        axis = figure.canvas(1)[1][0]
        head_view.draw_map(axis, [(0, 0), (0, 1)], shown, "", *head_view.scale("loss", shown))
        image = axis.images[0]
        assert image.get_cmap().name == mpl.colormaps[colours].name
        assert image.get_clim() == ends
