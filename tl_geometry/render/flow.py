"""How do states move from layer to layer? Figures of the bundle of paths, of how many directions
the output needs, of the residual of a map by rotation and stretch, of whether this residual grows
as noise does, and of what it costs to skip blocks. The report, the gallery and a notebook draw
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tl_geometry.base.html import signed
from tl_geometry.flow.alignment import top_directions
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.noise import LAWS
from tl_geometry.flow.reports import FlowReport
from tl_geometry.flow.skipping import SkipMap
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.render.figure import (
    SEQUENTIAL,
    WIDTH,
    View,
    canvas,
    draw_matrix,
    draw_paths_3d,
    legend_beside,
    legend_outside,
    one_axes,
    shades,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESIDUALS = ("relative_error", "log_variance", "mean_over_sd", "abs_kurtosis")
"""Measures of the residual of a map, a panel each."""
LAW_STYLES = dict(zip(LAWS, ("-", ":"), strict=True))
"""Line styles of the laws of noise: the asymptotic law is solid, that of independent increments
dotted."""
MOST_PATHS = 100
"""Most trajectories that a bundle shows, chosen with a fixed seed; more would hide each other."""
FEW = 8
"""Most states for which each cell has its number written in it."""
DEEP, MOST_LENGTHS = 9, 4
"""A model with more than ``DEEP`` states, measured for at most ``MOST_LENGTHS`` lengths of skips,
is drawn as lines: its matrix would be nearly empty."""
COST = "loss increase (nats)"
"""Label of the cost of a skip."""


def coordinates(ensemble: Trajectories) -> tuple[Tensor, list[str]]:
    """Paths ``[trajectory state 3]`` of at most :data:`MOST_PATHS` trajectories, on the first three
    singular directions of the last state; and the names of these axes."""
    rows = torch.arange(len(ensemble))
    if len(rows) > MOST_PATHS:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(rows), generator=generator)[:MOST_PATHS].sort().values
    paths = ensemble.X[rows]
    state = ensemble.states[-1]
    U = top_directions(ensemble.aligned_bases(align="none"), ensemble.row(state), 3)
    return paths.double() @ U, [f"u{i} of state {state}" for i in (1, 2, 3)]


def bundle_figure(ensemble: Trajectories) -> View:
    """Paths in three dimensions, coloured by state (Sarfati et al. 2025, Fig. 1). The report shows
    this figure; it is also the image of :func:`tl_geometry.render.bundle_3d`."""
    points, names = coordinates(ensemble)
    figure, axis = one_axes(None, (4.6, 4.2), subplot_kw={"projection": "3d"})
    draw_paths_3d(axis, points, ensemble.states, names, size=5.0)
    return View(
        figure,
        title="Do tokens travel through the layers as a bundle?",
        caption=f"Each line is the path of one token through the states, {len(points)} of "
        f"{len(ensemble)} trajectories; colour is the state.",
        null="No null is drawn: gibberish and the untrained model are rows of a table.",
        source=ensemble.provenance.line(),
    )


def truncation_figure(curve: TruncationCurve, *, ax: Axes | None = None) -> View:
    """KL divergence over the number of directions kept, beside the KL between outputs on
    consecutive chunks (Sarfati et al. 2025, Fig. 2c).

    Args:
        curve: from :func:`tl_geometry.flow.truncation_kl`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> curve = tlg.flow.truncation_kl(model, windows, paths, progress=False)
    >>> truncation_figure(curve).title
    'How many directions does the output need?'
    """
    figure, axis = one_axes(ax)
    chunks = "held out" if curve.held_out else "in-sample"
    label = f"{chunks}, {curve.where} block, {curve.positions}"
    axis.errorbar(curve.K, curve.kl, 2 * curve.kl_se, fmt="o-", ms=3, lw=1, label=label)
    null = "null: consecutive chunks"
    axis.axhline(curve.baseline_mean, color="k", ls="--", lw=1, label=f"{null}, mean")
    axis.axhline(curve.baseline_median, color="k", ls=":", lw=1, label=f"{null}, median")
    axis.set_xscale("log", base=2)
    axis.set_xticks(curve.K, [str(k) for k in curve.K])
    axis.set(xlabel="directions kept, K", ylabel="KL (nats)")
    legend_beside(axis)
    needed = curve.needed()
    if not curve.claimed:
        reached = "No K is claimed from fewer chunks than dimensions."
    elif needed is not None:
        reached = f"A tenth of the mean baseline is reached from {needed} directions on."
    else:
        reached = f"No K up to {max(curve.K)} comes within a tenth of the mean baseline."
    return View(
        figure,
        title="How many directions does the output need?",
        caption="Each point is how far the next-token distribution moves when states keep K "
        f"directions, with two standard errors. {reached}",
        null="The black lines are the KL between the model's own outputs on consecutive chunks.",
        source=curve.provenance.line(),
    )


def residual_figure(report: FlowReport) -> View:
    """What rotation and stretch from state t to state t + tau leave unexplained, as maps over both
    states (Sarfati et al. 2025, Fig. 4).

    Args:
        report: from :func:`tl_geometry.flow.flow_report`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=32)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> report = tlg.flow_report(paths)
    >>> residual_figure(report).title
    'What do rotation and stretch leave?'
    """
    figure, axes = canvas(len(RESIDUALS), size=(WIDTH / len(RESIDUALS), 2.0))
    # half a state beyond both ends, so that cells are centred on whole states
    first, last = report.states[0] - 0.5, report.states[-1] + 0.5
    ticks = whole_ticks(report.states, 6)
    for axis, name in zip(axes, RESIDUALS, strict=True):
        table, extent = report.held_out[name], (first, last, first, last)
        image = axis.imshow(table.numpy(), origin="lower", extent=extent, cmap=SEQUENTIAL)
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set(xlabel="state t + τ", ylabel="state t" if axis is axes[0] else "")
        axis.set(xticks=ticks, yticks=ticks)
        figure.colorbar(image, ax=axis, location="top", shrink=0.9)
    return View(
        figure,
        title="What do rotation and stretch leave?",
        caption="Each cell is the map from state t to state t + τ, on chunks that it was "
        "not fitted on; a panel for each measure of what it leaves.",
        null="A relative error of 1 is that of putting zero in the state's place.",
        source=report.provenance.line(),
    )


def baseline_figure(report: FlowReport, *, ax: Axes | None = None) -> View:
    """Held-out relative error of each map from one state to the next: rotation and stretch beside
    its baselines (the identity, the best linear map, ...).

    Args:
        report: from :func:`tl_geometry.flow.flow_report`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=32)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> report = tlg.flow_report(paths)
    >>> baseline_figure(report).title
    'Which map predicts the next state?'
    """
    figure, axis = one_axes(ax)
    tables = {"rotation and stretch": report.held_out["relative_error"], **report.baselines}
    # the first diagonal holds the maps from each state to the next
    steps = {name: table.diagonal(1) for name, table in tables.items()}
    for name, errors in steps.items():
        width = 2 if name == "rotation and stretch" else 1
        axis.plot(report.states[1:], errors, "o-", ms=3, lw=width, label=name)
    axis.set(xlabel="state t + 1", xticks=whole_ticks(report.states[1:]))
    axis.set(ylabel="relative error (|error| / |state|)", ylim=(0, None))
    each = torch.cat([errors.nan_to_num() for errors in steps.values()])
    if float(each.max()) > 5 * float(each.median()) > 0:
        axis.set_yscale("log")  # on a linear axis one jump would flatten all the rest
    axis.axhline(1.0, color="k", ls="--", lw=0.8, label="null: zero in its place")
    legend_beside(axis)
    return View(
        figure,
        title="Which map predicts the next state?",
        caption="Each line is the error of one map from a state to the next, on chunks it was not "
        "fitted on.",
        null="Above the dashed line a map is worse than putting zero in the state's place.",
        source=report.provenance.line(),
    )


def noise_figure(report: FlowReport, *, ax: Axes | None = None) -> View:
    """Mean log variance of the residual over t + tau, one colour for each t, with the fitted laws
    of noise (Sarfati et al. 2025, Eq. 2).

    Args:
        report: from :func:`tl_geometry.flow.flow_report`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=32)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> report = tlg.flow_report(paths)
    >>> noise_figure(report).title
    'Does the residual grow as noise does?'
    """
    figure, axis = one_axes(ax)
    table = report.in_sample["log_variance"]
    laws = {law: style for law, style in LAW_STYLES.items() if law in report.laws}
    for law, style in laws.items():  # entries of the legend, which needs no colours
        axis.plot([], [], style, color="k", lw=1, label=f"{law} law")
    shade = shades(figure, axis, report.states[:-1], "t")
    states = torch.tensor(report.states, dtype=torch.float64)
    for i, start in enumerate(report.states[:-1]):
        ends, look = states[i + 1 :], {"color": shade(start)}
        axis.plot(ends, table[i, i + 1 :], "o", ms=3, **look)
        for law, style in laws.items():
            if law == "increment" or i == 0:  # the asymptotic law depends on the end state alone
                variance = report.law(law).variance(states[i].expand_as(ends), ends)
                axis.plot(ends, variance.log(), style, lw=1, **look)
    if laws:
        axis.legend(fontsize=8, frameon=False)
    axis.set(xlabel="state t + τ", ylabel="mean ln variance (of the residual)")
    axis.set_xticks(whole_ticks(report.states[1:]))
    fits = [(law, report.law(law)) for law in laws]
    parameters = [
        f"{law}: alpha {signed(fit.alpha, '.3g')}, lambda {signed(fit.rate, '.3g')}, "
        f"R² {signed(fit.r2)}"
        for law, fit in fits
    ]
    caption = (
        "Each point is the mean log variance of what the map from t to t + τ leaves, coloured by "
        f"t; lines are the laws of noise fitted to the {report.train} trajectories that the maps "
        f"were fitted on ({'; '.join(parameters) or 'none fits'})."
    )
    return View(
        figure,
        title="Does the residual grow as noise does?",
        caption=caption,
        null="The dotted line is the law of independent increments."
        if "increment" in laws
        else "No null is drawn: the law of independent increments was not fitted.",
        source=report.provenance.line(),
    )


def skip_figure(skips: SkipMap) -> View:
    """How many blocks can be skipped for how much loss, at the last token of the chunks. Each map
    has a panel: rows are the first skipped block, columns the block where the model goes on.

    All panels have one colour scale. It ends at the cost of forgetting the state (the map
    ``"mean"``) where that was measured. A deep model of which few pairs were measured has a line
    for each map instead, and one panel for each number of skipped blocks.

    Args:
        skips: from :func:`tl_geometry.skip_map`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=16)
    >>> skips = tlg.flow.skip_map(model, windows, progress=False)
    >>> skip_figure(skips).title
    'How many blocks can be skipped for how much loss?'
    """
    tables = {name: skips.table(name, "loss_increase") for name in skips.map_types}
    lengths = sorted({end - start for start, end in skips.pairs()})
    states = len(next(iter(tables.values())))
    if states > DEEP and len(lengths) <= MOST_LENGTHS:
        figure = _lines(tables, lengths)
        how = "Each line is a map in the place of the skipped blocks"
    else:
        figure = _matrices(tables, skips.pairs() if states <= FEW else ())
        how = "Each cell replaces the blocks from its row to its column by a map, a panel per map"
    return View(
        figure,
        title="How many blocks can be skipped for how much loss?",
        caption=f"{how}, at the last token of {skips.test} held-out chunks.",
        null="The map 'mean' forgets the state: what every other must beat."
        if "mean" in tables
        else "",
        source=skips.provenance.line(),
    )


def _matrices(tables: Mapping[str, Tensor], numbered: Sequence[tuple[int, int]]) -> Figure:
    """One panel for each map: the cost of every pair of states, written out for the pairs in
    ``numbered``."""
    reference = tables.get("mean", torch.stack([*tables.values()]))
    high = float(reference.nan_to_num().max())
    figure, axes = canvas(len(tables), size=(WIDTH / max(len(tables), 3), 2.2), sharey=True)
    for axis, (map_type, table) in zip(axes, tables.items(), strict=True):
        last = len(table) - 1
        # rows are the first skipped blocks, from 0; columns the blocks that go on, from 1
        draw_matrix(axis, table[:-1, 1:], 0.0, high, extent=(0.5, last + 0.5, last - 0.5, -0.5))
        axis.set_title(map_type, fontsize=9)
        axis.set_xlabel("goes on at block")
        axis.set(xticks=whole_ticks(range(1, last + 1), 6), yticks=whole_ticks(range(last), 6))
        for start, end in numbered:
            cost = float(table[start, end])
            text = f"{cost:.2f}" if cost < 10 else f"{cost:.3g}"
            look = {"fontsize": 6, "color": "white" if cost < high / 2 else "black"}
            axis.text(end, start, text, ha="center", va="center", **look)
    axes[0].set_ylabel("first block skipped")
    figure.colorbar(axes[-1].images[0], ax=axes, label=COST, shrink=0.8)
    return figure


def _lines(tables: Mapping[str, Tensor], lengths: Sequence[int]) -> Figure:
    """One panel for each number of skipped blocks: the cost over the first skipped block."""
    figure, axes = canvas(len(lengths), size=(WIDTH / max(len(lengths), 2), 2.6), sharey=True)
    for axis, length in zip(axes, lengths, strict=True):
        for map_type, table in tables.items():
            costs = table.diagonal(length)
            width = 2 if map_type == "flow" else 1
            axis.plot(range(len(costs)), costs, "o-", ms=2, lw=width, label=map_type)
        axis.set_title(f"{length} block{'s' if length > 1 else ''} skipped", fontsize=9)
        axis.set_xlabel("first block skipped")
    if "mean" in tables:
        # a map that costs much more than forgetting may leave the panels
        axes[0].set_ylim(None, 1.2 * float(tables["mean"].nan_to_num().max()))
    axes[0].set_ylabel(COST)
    legend_outside(figure, axes)
    return figure
