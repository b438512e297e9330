"""Figures of the flow: every panel, point and sentence by plain loops over its table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgba
from torch import Tensor

from tests.render.test_by_hand import curve, draw, flow_table
from tl_geometry.base.results import Provenance
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.skipping import METRICS, SkipMap
from tl_geometry.render import flow
from tl_geometry.render.figure import SEQUENTIAL


def skips(states: int, lengths: tuple[int, ...], maps: tuple[str, ...]) -> SkipMap:
    """Costs of random size for each map, of skips of these lengths, the longer the more."""
    start, end = torch.meshgrid(torch.arange(states), torch.arange(states), indexing="ij")
    measured = torch.isin(end - start, torch.tensor(lengths))
    costs = [9 * (end - start) ** 2 * draw(states, states, seed=i) for i in range(len(maps))]
    costs[0][0, 1] = 10.0
    values = {
        (name, metric): torch.where(measured, cost, torch.nan)
        for name, cost in zip(maps, costs, strict=True)
        for metric in METRICS
    }
    return SkipMap(
        values=values, loss=1.0, map_types=maps, train=5, test=7, provenance=Provenance()
    )


def test_every_cost_of_a_skip_stands_in_its_cell() -> None:
    found = skips(6, (1, 2, 3), ("flow", "identity", "mean"))
    view = flow.skip_figure(found)
    *panels, bar = view.figure.axes
    high = float(found.table("mean", "loss_increase").nan_to_num().max())
    assert [axis.get_title() for axis in panels] == list(found.map_types)
    assert bar.get_ylabel() == "loss increase (nats)"
    assert panels[0].get_ylabel() == "first block skipped"
    assert "at the last token of 7 held-out chunks" in view.caption
    assert view.null.startswith("The map 'mean' forgets")
    for axis, name in zip(panels, found.map_types, strict=True):
        table, (image,) = found.table(name, "loss_increase"), axis.images
        assert image.get_clim() == (0, high)
        left, right, bottom, top = image.get_extent()
        assert (left, right, bottom, top) == (0.5, 5.5, 4.5, -0.5), "a cell is centred on its pair"
        cells = np.ma.filled(np.ma.asarray(image.get_array()), np.nan)
        written = {t.get_position(): t for t in axis.texts}
        assert len(written) == 5 + 4 + 3
        for start in range(5):
            for end in range(1, 6):
                cost = float(table[start, end])
                assert cells[start, end - 1] == pytest.approx(cost, nan_ok=True)
                if math.isnan(cost):
                    continue
                text = written[end, start]
                assert float(text.get_text()) == pytest.approx(cost, rel=0.01)
                assert len(text.get_text()) <= 4
                assert text.get_color() == ("white" if cost < high / 2 else "black")


def test_maps_without_the_mean_have_the_scale_of_the_largest_cost() -> None:
    found = skips(4, (1, 2), ("flow", "identity"))
    view = flow.skip_figure(found)
    costs = [found.table(name, "loss_increase").nan_to_num().max() for name in found.map_types]
    assert view.figure.axes[0].images[0].get_clim()[1] == float(max(costs))
    assert view.null == ""


@pytest.mark.parametrize(
    ("states", "lengths", "lines", "written"),
    [
        (8, (1,), False, 7),
        (9, (1, 2), False, 0),
        (10, (1, 2, 3, 4), True, 0),
        (10, (1, 2, 3, 4, 5), False, 0),
    ],
)
def test_deep_models_with_few_lengths_have_lines_and_small_ones_numbers(
    states: int, lengths: tuple[int, ...], lines: bool, written: int
) -> None:
    found = skips(states, lengths, ("flow", "mean"))
    # forgetting may cost more over a short skip
    found.values["mean", "loss_increase"][0, 1] = 1e4
    view = flow.skip_figure(found)
    first = view.figure.axes[0]
    assert bool(first.lines) == lines
    assert bool(first.images) != lines
    assert view.caption.startswith("Each line is a map" if lines else "Each cell replaces")
    assert len(first.texts) == written
    if not lines:
        return
    assert len(view.figure.axes) == len(lengths)
    forgetting = float(found.table("mean", "loss_increase").nan_to_num().max())
    for axis, length in zip(view.figure.axes, lengths, strict=True):
        assert axis.get_title() == f"{length} block{'' if length == 1 else 's'} skipped"
        pairs = range(states - length)
        assert axis.get_ylim()[1] == pytest.approx(1.2 * forgetting)
        for line in axis.lines:
            table = found.table(str(line.get_label()), "loss_increase")
            assert np.asarray(line.get_xdata()).tolist() == list(pairs)
            assert np.asarray(line.get_ydata()).tolist() == [
                float(table[i, i + length]) for i in pairs
            ]


def test_residuals_are_those_on_held_out_chunks_centred_on_their_states() -> None:
    report = flow_table()
    view = flow.residual_figure(report)
    panels = [axis for axis in view.figure.axes if axis.get_label() != "<colorbar>"]
    assert [axis.get_title() for axis in panels] == [n.replace("_", " ") for n in flow.RESIDUALS]
    for axis, name in zip(panels, flow.RESIDUALS, strict=True):
        (image,) = axis.images
        assert np.allclose(np.asarray(image.get_array()), report.held_out[name])
        assert tuple(image.get_extent()) == (0.5, 4.5, 0.5, 4.5)
        assert image.origin == "lower"
        assert axis.get_xticks().tolist() == axis.get_yticks().tolist() == [1, 2, 3, 4]
        assert axis.get_xlabel() == "state t + τ"
    assert [axis.get_ylabel() for axis in panels] == ["state t", "", "", ""]


def test_errors_of_very_different_sizes_have_a_logarithmic_axis() -> None:
    def scaled(largest: float) -> str:
        ones = torch.ones(4, 4, dtype=torch.float64)
        jump = ones.clone()
        jump[2, 3] = largest
        report = dataclasses.replace(
            flow_table(), held_out={"relative_error": ones}, baselines={"ridge": jump}
        )
        axis = flow.baseline_figure(report).figure.axes[0]
        at = [np.asarray(line.get_xdata()).tolist() for line in axis.lines[:2]]
        assert at == [[2, 3, 4]] * 2
        assert np.asarray(axis.lines[2].get_ydata()).tolist() == [1, 1], "the null"
        return axis.get_yscale()

    assert scaled(5.0) == "linear"
    assert scaled(5.1) == "log"


def test_the_caption_says_how_many_directions_reach_a_tenth_of_the_baseline() -> None:
    given = curve(held_out=True)  # with a baseline of 3
    for kl, claimed, said in (
        ([2.0, 0.29, 0.1], True, "is reached from 2 directions on."),
        ([2.0, 1.0, 0.5], True, "No K up to 4 comes within a tenth"),
        ([2.0, 0.29, 0.1], False, "No K is claimed from fewer chunks"),
    ):
        changed = dataclasses.replace(given, kl=torch.tensor(kl).double(), claimed=claimed)
        view = flow.truncation_figure(changed)
        assert said in view.caption
        axis = view.figure.axes[0]
        drawn: Any = axis.containers[0]
        assert np.asarray(drawn[0].get_xdata()).tolist() == [1, 2, 4]
        assert axis.get_xticks().tolist() == [1, 2, 4]
        assert [t.get_text() for t in axis.get_xticklabels()] == ["1", "2", "4"]
        assert axis.get_xscale() == "log"


def test_points_and_laws_of_noise_stand_at_the_states_where_maps_end() -> None:
    report = flow_table()
    laws = {
        "asymptotic": report.laws["asymptotic"],
        "increment": torch.tensor([0.7, 0.3, -0.4, 0.8, 1.0, 6.0]).double(),
    }
    report = dataclasses.replace(report, laws=laws)
    view = flow.noise_figure(report)
    axis = view.figure.axes[0]
    by_style: dict[str, list[Any]] = {}
    for line in axis.lines:
        if len(np.asarray(line.get_xdata())):
            style = "o" if line.get_marker() == "o" else str(line.get_linestyle())
            by_style.setdefault(style, []).append(line)
    assert [len(by_style[style]) for style in ("o", "-", ":")] == [3, 1, 3]
    for i, (point, law) in enumerate(zip(by_style["o"], by_style[":"], strict=True)):
        ends = [float(s) for s in report.states[i + 1 :]]
        assert np.asarray(point.get_xdata()).tolist() == ends
        assert np.asarray(law.get_xdata()).tolist() == ends
        start = torch.full((len(ends),), float(report.states[i])).double()
        wanted = report.law("increment").variance(start, torch.tensor(ends).double()).log()
        assert np.allclose(np.asarray(law.get_ydata()), wanted)
        shade = colormaps[SEQUENTIAL](i / 2)  # states 1, 2 and 3
        assert to_rgba(point.get_color()) == pytest.approx(shade)
        assert to_rgba(law.get_color()) == pytest.approx(shade)
    for name in laws:
        fit = report.law(name)
        said = f"{name}: alpha {fit.alpha:.3g}, lambda {fit.rate:.3g}, R² {fit.r2:.2f}"
        assert said.replace("-", "−") in view.caption
    legend = axis.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["asymptotic law", "increment law"]


def paths(count: int) -> Trajectories:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(count, 5, 6, generator=generator) * torch.tensor([4.0, 3, 2, 1, 0.5, 0.1])
    return Trajectories(X=X, states=(2, 3, 4, 5, 6), position=-1, provenance=Provenance())


def test_a_bundle_has_each_path_on_the_directions_of_the_last_state() -> None:
    for count in (100, 101):
        points, names = flow.coordinates(paths(count))
        assert len(points) == 100
        torch.manual_seed(count)
        assert torch.equal(flow.coordinates(paths(count))[0], points), "a fixed seed"
        assert names == [f"u{i} of state 6" for i in (1, 2, 3)]
    ensemble = paths(9)
    view = flow.bundle_figure(ensemble)
    assert "9 of 9 trajectories" in view.caption
    axis: Any = view.figure.axes[0]
    assert [axis.get_xlabel(), axis.get_ylabel(), axis.get_zlabel()] == names
    axes: Tensor = torch.linalg.svd(ensemble.X[:, -1].double()).Vh[:3]
    for line, points, path in zip(axis.lines, axis.collections, ensemble.X, strict=True):
        found = np.abs(np.stack(line.get_data_3d(), -1))
        assert np.allclose(found, (path.double() @ axes.T).abs().numpy(), atol=1e-6)
        assert points.get_array().tolist() == [2, 3, 4, 5, 6], "coloured by state"
