"""How do states move from layer to layer? Figures of how many directions the output needs, of the
map from state to state by rotation and stretch and what it leaves, of whether this grows as noise
does, and of what it costs to skip blocks. The report, the gallery and a notebook draw them."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.base.tables import Table
from tl_geometry.flow import fit_noise_law
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.render import figure as draw
from tl_geometry.render.page import Page

STYLES = {"asymptotic": "-", "increment": ":"}
"""Line styles of the laws of noise: the asymptotic law is solid, that of independent increments
dotted."""
LENGTHS = 4
"""Most numbers of skipped blocks that have a panel."""
CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["toImage", "sendDataToCloud"]}
"""The tools that plotly shows: none that would send the figure to a server."""
MOST = 100
"""Most trajectories that are drawn, evenly spaced; more would hide each other."""
FEWEST = 3
"""Fewest pairs of states that a law of noise is fitted to."""


def truncation_figure(curve: Result | pd.DataFrame, *, ax: draw.Axes | None = None) -> draw.View:
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
    table = draw.frame(curve, "K", "kl", "kl_se", "baseline_mean", "baseline_median")
    figure, (axis,) = draw.panels(ax)
    first = table.iloc[0]
    chunks = "held out" if first.get("held_out") else "in-sample"
    look = {"color": draw.LINES[0], "ms": 3, "lw": 1.2, "label": chunks}
    axis.errorbar(table["K"], table["kl"], 2 * table["kl_se"], fmt="o-", **look)
    for name, style in (("mean", "--"), ("median", ":")):
        line = {"label": f"null: consecutive chunks, {name}", "color": draw.NULL, "lw": 1}
        axis.axhline(first[f"baseline_{name}"], ls=style, **line)
    axis.set_xscale("log", base=2)
    axis.set_xticks(table["K"], table["K"].astype(str))
    axis.set(xlabel="directions kept, K", ylabel="KL (nats)")
    draw.legend(figure, [axis], ax=ax)
    near = table["K"][(table["kl"] <= 0.1 * first["baseline_mean"]) & first.get("claimed", True)]
    reached = f"K = {near.min()} is the first" if len(near) else "no K is claimed to be"
    return draw.view(
        figure,
        curve,
        title="How many directions does the output need?",
        caption="Each point is how far the next-token distribution moves when states keep K "
        f"directions, with two standard errors; {reached} within a tenth of the mean null.",
        null="Grey lines are the KL between the model's own outputs on consecutive chunks.",
    )


def baseline_figure(report: Result | pd.DataFrame, *, ax: draw.Axes | None = None) -> draw.View:
    """Held-out relative error of each map from one state to the next: rotation and stretch beside
    its baselines (the identity, the best linear map, ...).

    Args:
        report: from :func:`tl_geometry.flow.flow_report`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=32)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> baseline_figure(tlg.flow_report(paths)).title
    'Which map predicts the next state?'
    """
    table: Any = draw.frame(report, "start", "end", "relative_error_out")
    states = sorted({*table["start"], *table["end"]})
    after = dict(itertools.pairwise(states))
    steps = table[table["end"] == table["start"].map(after)]
    columns = {"rotation and stretch": "relative_error_out"}
    columns |= {c.removeprefix("error_"): c for c in table if str(c).startswith("error_")}
    figure, (axis,) = draw.panels(ax)
    for colour, (name, column) in zip(draw.LINES, columns.items(), strict=False):
        width = 2 if column == "relative_error_out" else 1
        look = {"ms": 3, "lw": width, "color": colour, "label": name}
        axis.plot(steps["end"], steps[column], "o-", **look)
    axis.set(xlabel="the next state", xticks=draw.whole_ticks(steps["end"].tolist()))
    each = steps[[*columns.values()]].fillna(0.0)
    # on a linear axis one jump would flatten all the rest
    jumps = each.max(axis=None) > 5 * each.stack().median() > 0
    axis.set_yscale("log" if jumps else "linear")
    axis.set(ylabel="|error| / |state|", ylim=(None if jumps else 0, None))
    axis.axhline(1.0, color=draw.NULL, ls="--", lw=0.8, label="null: zero in its place")
    draw.legend(figure, [axis], ax=ax)
    return draw.view(
        figure,
        report,
        title="Which map predicts the next state?",
        caption="Each line is the error of one map from a state to the next, on chunks it was not "
        "fitted on.",
        null="Above the dashed line a map is worse than putting zero in the state's place.",
    )


def noise_figure(report: Table, *, ax: draw.Axes | None = None) -> draw.View:
    """Mean log variance of the residual over t + tau, one colour for each t, with the fitted laws
    of noise (Sarfati et al. 2025, Eq. 2).

    Args:
        report: from :func:`tl_geometry.flow.flow_report`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=32)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> noise_figure(tlg.flow_report(paths)).title
    'Does the residual grow as noise does?'
    """
    table: Any = draw.frame(report, "start", "end", "log_variance_in")
    figure, (axis,) = draw.panels(ax)
    starts = sorted(set(table["start"]))
    laws = [fit_noise_law(report, law=law) for law in STYLES] if len(table) >= FEWEST else []
    for fit in laws:  # entries of the legend, which needs no colours
        said = f"{fit.law} law: alpha {fit.alpha:.3g}, lambda {fit.rate:.3g}, R² {fit.r2:.2f}"
        axis.plot([], [], STYLES[fit.law], color="k", lw=1, label=said.replace("-", "−"))
    shade = draw.shades(figure, axis, starts, "t")
    for start, rows in table.groupby("start"):
        ends = torch.tensor(rows["end"].tolist(), dtype=torch.float64)
        axis.plot(rows["end"], rows["log_variance_in"], "o", ms=3, color=shade(start))
        for fit in laws:
            # the asymptotic law depends on the end state alone
            if fit.law == "increment" or start == starts[0]:
                variance = fit.variance(torch.full_like(ends, float(start)), ends)
                axis.plot(ends, variance.log(), STYLES[fit.law], lw=1, color=shade(start))
    draw.legend(figure, [axis], ax=ax)
    axis.set(xlabel="state t + τ", ylabel="mean ln variance")
    axis.set_xticks(draw.whole_ticks(sorted(set(table["end"]))))
    return draw.view(
        figure,
        report,
        title="Does the residual grow as noise does?",
        caption="Each point is the mean log variance of what the map from t to t + τ leaves, in "
        "the colour of t; lines are the laws of noise fitted to them, if there are enough states.",
        null="The dotted line is the law of independent increments.",
    )


def skip_figure(skips: Result | pd.DataFrame) -> draw.View:
    """How many blocks can be skipped for how much loss, at the last token of the chunks: a panel
    for each of at most four numbers of skipped blocks, a line for each map in their place.

    Panels end a little above the cost of forgetting the state (the map ``"mean"``) where that was
    measured.

    Args:
        skips: from :func:`tl_geometry.flow.skip_costs`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tokens = tlg.zoo.default_windows(model, 16, n=16).tokens
    >>> paths = tlg.trajectories(model, tokens[:8, :-1], states=range(5), progress=False)
    >>> skips = tlg.skip_costs(model, tokens[8:], paths, progress=False)
    >>> skip_figure(skips).title
    'How many blocks can be skipped for how much loss?'
    """
    table: Any = draw.frame(skips, "map_type", "from_layer", "skipped", "loss_increase")
    lengths = draw.some(sorted(set(table["skipped"])), LENGTHS)
    width = draw.WIDTH / max(len(lengths), 2)
    figure, axes = draw.panels(None, len(lengths), size=(width, 2.6), sharey=True)
    colours = dict(zip(table["map_type"].unique(), draw.LINES, strict=False))
    for axis, length in zip(axes, lengths, strict=True):
        for kind, colour in colours.items():
            rows = table[(table["skipped"] == length) & (table["map_type"] == kind)]
            rows = rows.sort_values("from_layer")
            null, name = kind == "mean", draw.drawable(str(kind))
            look = {"ms": 3, "lw": 2 if kind == "flow" else 1, "ls": "--" if null else "-"}
            look |= {"color": draw.NULL if null else colour, "marker": "o", "label": name}
            axis.plot(rows["from_layer"], rows["loss_increase"], **look)
        axis.set_title(f"{length} block{'s' if length > 1 else ''} skipped")
        axis.set_xlabel("first block skipped")
        axis.set_xticks(draw.whole_ticks(range(int(table["from_layer"].max()) + 1), 6))
    mean = table[table["map_type"] == "mean"]
    # a map that costs much more than forgetting may leave the panels
    high = (mean if len(mean) else table)["loss_increase"].max()
    top = 1.2 * high if high > 0 else None
    axes[0].set(ylim=(None, top), ylabel="loss increase (nats)")
    draw.legend(figure, axes)
    tested = f" of {int(table['test'].iloc[0])} held-out chunks" if "test" in table else ""
    null = "'mean' (dashed) forgets the state: what others must beat. What costs far more is above."
    return draw.view(
        figure,
        skips,
        title="How many blocks can be skipped for how much loss?",
        caption="Each line is a map in the place of the skipped blocks, at the last token"
        f"{tested}.",
        null=null if len(mean) else "The map 'mean', which forgets the state, was not measured.",
    )


class SpacePage(Page):
    """A page on which plotly draws. A notebook gets plotly's own type of output, which JupyterLab,
    Notebook 7 and VS Code display: the script would add 2 MB to every output."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        figure = self.parts[0]["figure"]
        return {"application/vnd.plotly.v1+json": figure, "text/plain": repr(self)}


def bundle_3d(ensemble: Trajectories) -> Page:
    """Paths of at most 100 trajectories through the states, on the first three singular directions
    of the last state, coloured by state (Sarfati et al. 2025, Fig. 1). Drag to turn, scroll to
    zoom.

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.

    Raises ``GeometryError`` without plotly.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> bundle_3d(paths).title
    'Do tokens travel through the layers as a bundle?'
    """
    found = importlib.util.find_spec("plotly") is not None
    expected, instead = "the extra plotly", 'pip install "tl-geometry[plotly]"'
    require(found, "plotly", expected=expected, got="none installed", instead=instead)
    from plotly.offline import get_plotlyjs

    rows = draw.some(range(len(ensemble)), MOST)
    X = ensemble.X.double()
    U = linalg.svd(X[:, -1]).V[:, :3]
    require(U.shape[1] == 3, "ensemble", expected="3 paths or more", got=len(ensemble))
    figure = paths_figure(X[rows] @ U, rows, ensemble.states)
    return SpacePage(
        title="Do tokens travel through the layers as a bundle?",
        caption=f"Each line is the path of one token through the states, {len(rows)} of "
        f"{len(ensemble)} trajectories; colour is the state.",
        parts=[{"kind": "plotly", "figure": {**json.loads(figure.to_json()), "config": CONFIG}}],
        begin={},
        height=660,
        source=ensemble.provenance.line(),
        null="No null is drawn: compare_ensembles sets gibberish beside them.",
        library=get_plotlyjs(),
    )


def paths_figure(points: Tensor, rows: Sequence[int], states: Sequence[int]) -> Any:
    """The plotly figure of paths ``[trajectory state 3]``, which are those of some ``rows``: a line
    for each, its points coloured by state."""
    import plotly.graph_objects as go

    colours = {"color": list(states), "colorscale": draw.ORDERED, "size": 2.5}
    traces = []
    for i, (x, y, z) in zip(rows, points.transpose(1, 2).tolist(), strict=True):
        marker = {**colours, "showscale": not traces, "colorbar": {"title": {"text": "state"}}}
        look = {"mode": "lines+markers", "line": {"color": "#8888", "width": 1.5}, "marker": marker}
        hovers = [f"trajectory {i}, state {state}" for state in states]
        traces.append(go.Scatter3d(x=x, y=y, z=z, hoverinfo="text", hovertext=hovers, **look))
    titles = {f"{s}axis": {"title": f"u{i} of state {states[-1]}"} for i, s in enumerate("xyz", 1)}
    layout = {"template": "none", "showlegend": False, "margin": dict.fromkeys("lrtb", 0)}
    return go.Figure(traces).update_layout(scene=titles, height=520, **layout)
