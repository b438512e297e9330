"""Views of an ensemble of trajectories: the bundle, angles between aligned bases, spectra,
truncation, residuals, noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.flow.alignment import top_directions
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.noise import LAWS
from tl_geometry.flow.reports import FlowReport
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.render.figure import (
    BLUE,
    SEQUENTIAL,
    WIDTH,
    View,
    canvas,
    require_3d,
    shades,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUNDLE = "Do tokens travel through the layers as a bundle?"
BUNDLE_NULL = "No null is drawn: gibberish and the untrained model are rows of a table."
"""Title and null of the bundle, drawn flat or in space."""
TIME = SEQUENTIAL
"""Colours of states: red and blue are signs."""


def coordinates(
    ensemble: Trajectories,
    *,
    reference: int | None = None,
    axes: Sequence[int] | None = None,
    k: int = 3,
    limit: int = 100,
    seed: int = 0,
) -> tuple[Tensor, list[str]]:
    """Paths ``[trajectory state k]`` of at most ``limit`` trajectories and the names of the axes.

    On the first ``k`` singular directions of the ``reference`` state (default the last), or on
    Cartesian coordinates ``axes`` (from 0; the paper shows 268, 218 and 590 of GPT-2-medium). Which
    trajectories are taken is chosen by ``seed``.
    """
    n = len(ensemble)
    rows = (
        torch.arange(n)
        if n <= limit
        else torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:limit].sort().values
    )
    if axes is not None:
        d = ensemble.X.shape[2]
        require(
            len(axes) == k and all(0 <= a < d for a in axes),
            "axes",
            expected=f"{k} coordinates from 0 to {d - 1}",
            got=tuple(axes),
        )
        return ensemble.X[rows][:, :, list(axes)].double(), [f"coordinate {a}" for a in axes]
    state = ensemble.states[-1] if reference is None else reference
    U = top_directions(ensemble.aligned_bases(align="none"), ensemble.row(state), k)
    return ensemble.X[rows].double() @ U, [f"u{i + 1} of state {state}" for i in range(k)]


def bundle_figure(
    ensemble: Trajectories,
    *,
    reference: int | None = None,
    axes: Sequence[int] | None = None,
    limit: int = 100,
    ax: Axes | None = None,
) -> View:
    """Paths in three dimensions, coloured by state (Sarfati et al. 2025, Fig. 1);
    :func:`tl_geometry.render.bundle_3d` is a view that turns.

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        reference: state whose singular directions (u1, u2, u3) are the axes, by default the last.
        axes: three Cartesian coordinates in place of singular directions.
        limit: at most so many trajectories.
        ax: axes to draw into, with ``projection="3d"``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> bundle_figure(paths, limit=5).title
    'Do tokens travel through the layers as a bundle?'
    """
    points, names = coordinates(ensemble, reference=reference, axes=axes, limit=limit)
    figure, drawn = canvas(ax=ax, size=(4.6, 4.2), subplot_kw={"projection": "3d"})
    axis: Any = drawn[0]
    require_3d(axis)
    for path in points:
        axis.plot(*path.T, color="#8886", lw=0.5)
    shade = None
    for t, state in enumerate(ensemble.states):
        shade = axis.scatter(
            *points[:, t].T,
            c=[state] * len(points),
            cmap=TIME,
            vmin=ensemble.states[0],
            vmax=ensemble.states[-1],
            s=5,
            depthshade=False,
        )
    axis.set(xlabel=names[0], ylabel=names[1], zlabel=names[2])
    axis.locator_params(nbins=4)
    if shade is not None:
        figure.colorbar(
            shade, ax=axis, label="state", shrink=0.6, pad=0.15, ticks=whole_ticks(ensemble.states)
        )
    return View(
        figure,
        title=BUNDLE,
        caption=bundle_caption(len(points), len(ensemble)),
        null=BUNDLE_NULL,
        source=ensemble.provenance.line(),
    )


def bundle_caption(drawn: int, count: int) -> str:
    """How the bundle is read."""
    return (
        f"Each line is the path of one token through the states, {drawn} of {count} trajectories; "
        "colour is the state."
    )


def first_coordinate(ensemble: Trajectories, *, bins: int = 60, ax: Axes | None = None) -> View:
    """Histogram of the first singular coordinate of every state, one row each: nearly the ensemble
    mean, far from zero.

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        bins: of each histogram.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> first_coordinate(paths).title
    'How far from zero is the mean of each state?'
    """
    aligned = ensemble.aligned_bases(align="none")
    figure, axes = canvas(ax=ax, size=(4.4, max(3.2, 0.16 * len(ensemble.states) + 0.8)))
    for t, state in enumerate(ensemble.states):
        value = ensemble.X[:, t].double() @ aligned.U[t, :, 0]
        value = value * (1 if float(value.mean()) >= 0 else -1)
        count, edge = torch.histogram(
            value.cpu() / float(aligned.S[t, 0]) * len(ensemble) ** 0.5, bins=bins
        )
        height = count / count.max()
        axes[0].fill_between(
            (edge[:-1] + edge[1:]) / 2,
            state + torch.zeros_like(height),
            state + 0.9 * height,
            color=BLUE,
            alpha=0.6,
        )
    axes[0].set(xlabel="u1 coordinate / its root mean square", ylabel="state")
    return View(
        figure,
        title="How far from zero is the mean of each state?",
        caption="Each row is the histogram of the first singular coordinate of one state, of equal "
        "height.",
        source=ensemble.provenance.line(),
    )


def angle_maps(
    ensemble: Trajectories, k: int = 4, *, align: str = "greedy", ax: Axes | None = None
) -> View:
    """Degrees between direction i at every two states, one panel for each of the first ``k``
    (Sarfati et al. 2025, Fig. 2a).

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        k: how many directions.
        align: how directions of two states are paired, see
            :func:`tl_geometry.flow.fit_aligned_bases`.
        ax: axes to draw direction 1 into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> angle_maps(paths, 2).title
    'How far do singular directions turn from state to state?'
    """
    angles = ensemble.angles(k, align=align)
    figure, axes = canvas(len(angles), ax=ax, size=(2.3, 2.4), sharey=True)
    image = None
    for i, axis in enumerate(axes):
        image = axis.imshow(
            angles[i].numpy(),
            vmin=0,
            vmax=90,
            cmap=SEQUENTIAL,
            origin="lower",
            extent=_extent(ensemble.states),
        )
        axis.set_title(f"direction {i + 1}", fontsize=9)
        axis.set_xlabel("state")
    axes[0].set_ylabel("state")
    if image is not None:
        figure.colorbar(image, ax=axes, label="degrees", shrink=0.8)
    return View(
        figure,
        title="How far do singular directions turn from state to state?",
        caption=f"Each cell is the angle between one direction at two states ({align} alignment).",
        source=ensemble.provenance.line(),
    )


def _extent(states: Sequence[int]) -> tuple[float, float, float, float]:
    return (states[0] - 0.5, states[-1] + 0.5, states[0] - 0.5, states[-1] + 0.5)


def spectra_figure(ensemble: Trajectories, *, ax: Axes | None = None) -> View:
    """Singular values of every state against rank, log-log; rank 1 (the mean) is left out (Sarfati
    et al. 2025, Fig. 2b).

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> spectra_figure(paths).title
    'In how many directions does the bundle spread?'
    """
    S = ensemble.aligned_bases(align="none").S
    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    colour = shades(figure, axes[0], ensemble.states, "state", TIME)
    for t, state in enumerate(ensemble.states):
        values = S[t, 1:512]
        axes[0].loglog(
            range(2, 2 + len(values)), values.clamp(min=1e-12), color=colour(state), lw=1
        )
    axes[0].set(xlabel="rank", ylabel="singular value (units of the stream)")
    return View(
        figure,
        title="In how many directions does the bundle spread?",
        caption="Each line is a state, blue the first and red the last; both axes are logarithmic, "
        "and rank 1, the mean, is left out.",
        null="No null is drawn: gibberish and the untrained model are rows of a table.",
        source=ensemble.provenance.line(),
    )


def truncation_figure(*curves: TruncationCurve, ax: Axes | None = None) -> View:
    """KL against the number of directions kept, with the distance of unrelated chunks (Sarfati et
    al. 2025, Fig. 2c).

    Args:
        curves: one or several, from :func:`tl_geometry.flow.truncation_kl`; the baselines are those
            of the first.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> curve = tlg.flow.truncation_kl(model, windows, paths, progress=False)
    >>> truncation_figure(curve).title
    'How many directions does the output need?'
    """
    require(len(curves) > 0, "curves", expected="at least one", got="none")
    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    for curve in curves:
        name = (
            f"{'held out' if curve.held_out else 'in-sample'}, {curve.where} block, "
            f"{curve.positions}"
        )
        axes[0].errorbar(curve.K, curve.kl, yerr=2 * curve.kl_se, fmt="o-", ms=3, lw=1, label=name)
    first = curves[0]
    axes[0].axhline(
        first.baseline_mean, color="k", ls="--", lw=1, label="null: consecutive chunks, mean"
    )
    axes[0].axhline(
        first.baseline_median,
        color="k",
        ls=":",
        lw=1,
        label="null: consecutive chunks, median",
    )
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(first.K, [str(k) for k in first.K])
    axes[0].minorticks_off()
    axes[0].set(xlabel="directions kept, K", ylabel="KL (nats)")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    needed = first.needed()
    low = (
        "No K is claimed from fewer chunks than dimensions."
        if not first.claimed
        else f"A tenth of the mean baseline is reached from {needed} directions on."
        if needed is not None
        else f"No K up to {max(first.K)} comes within a tenth of the mean baseline."
    )
    return View(
        figure,
        title="How many directions does the output need?",
        caption="Each point is how far the next-token distribution moves when states keep K "
        f"directions, with two standard errors. {low}",
        null="The dashed lines are the distance of unrelated chunks.",
        source=first.provenance.line(),
    )


def residual_figure(
    report: FlowReport,
    names: Sequence[str] = ("relative_error", "log_variance", "mean_over_sd", "abs_kurtosis"),
    *,
    held_out: bool = True,
) -> View:
    """Maps over (t, t + tau) of what rotation and stretch leave (Sarfati et al. 2025, Fig. 4).

    Args:
        report: from :func:`tl_geometry.flow.flow_report`.
        names: some of its tables, a panel each.
        held_out: of trajectories that the maps were not fitted on.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=32)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> report = tlg.flow_report(paths)
    >>> residual_figure(report).title
    'What do rotation and stretch leave?'
    """
    from matplotlib.ticker import MaxNLocator

    tables = report.held_out if held_out else report.in_sample
    unknown = [n for n in names if n not in tables]
    require(not unknown, "names", expected=f"some of {', '.join(tables)}", got=unknown)
    figure, axes = canvas(len(names), size=(WIDTH / max(len(names), 3), 2.0))
    for axis, name in zip(axes, names, strict=True):
        image = axis.imshow(
            tables[name].numpy(), cmap=SEQUENTIAL, origin="lower", extent=_extent(report.states)
        )
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set(xlabel="state t + τ", ylabel="state t" if axis is axes[0] else "")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axis, location="top", shrink=0.9)
    where = "chunks that the map was not fitted on" if held_out else "the chunks it was fitted on"
    return View(
        figure,
        title="What do rotation and stretch leave?",
        caption=f"Each cell is the map from state t to state t + τ, on {where}; a panel for each "
        "measure of what it leaves.",
        null="A relative error of 1 is that of putting zero in the state's place.",
        source=report.provenance.line(),
    )


def baseline_figure(report: FlowReport, *, ax: Axes | None = None) -> View:
    """Held-out relative error of one layer's step by each map: rotation and stretch beside the
    identity, the best linear map, ...

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
    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    curves = {"rotation and stretch": report.held_out["relative_error"], **report.baselines}
    for name, table in curves.items():
        step = table.diagonal(1)
        axes[0].plot(
            report.states[1:],
            step,
            "o-",
            ms=3,
            lw=2 if name == "rotation and stretch" else 1,
            label=name,
        )
    axes[0].set(
        xlabel="state t + 1",
        ylabel="relative error (|error| / |state|)",
        ylim=(0, None),
        xticks=whole_ticks(report.states[1:]),
    )
    steps = [table.diagonal(1).nan_to_num() for table in curves.values()]
    usual = float(torch.cat(steps).median())
    if max(float(step.max()) for step in steps) > 5 * usual > 0:
        axes[0].set_yscale("log")  # one jump would flatten all the rest
    axes[0].axhline(1.0, color="k", ls="--", lw=0.8, label="null: zero in its place")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return View(
        figure,
        title="Which map predicts the next state?",
        caption="Each line is the error of one map from a state to the next, on chunks it was not "
        "fitted on.",
        null="Above the dashed line a map is worse than putting zero in the state's place.",
        source=report.provenance.line(),
    )


def noise_figure(report: FlowReport, *, ax: Axes | None = None) -> View:
    """Mean log variance of residuals against t + tau, one line for each t, with both laws (Sarfati
    et al. 2025, Eq. 2).

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
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    table = report.in_sample["log_variance"]
    states = torch.tensor(report.states, dtype=torch.float64)
    shade = shades(figure, axes[0], report.states[:-1], "t", TIME)
    for i in range(len(states) - 1):
        colour = shade(report.states[i])
        ends = states[i + 1 :]
        axes[0].plot(ends, table[i, i + 1 :], "o", ms=3, color=colour)
        for law, style in zip(LAWS, ("-", ":"), strict=True):
            if law in report.laws and (law == "increment" or i == 0):
                axes[0].plot(
                    ends,
                    report.law(law).variance(states[i].expand_as(ends), ends).log(),
                    style,
                    color=colour,
                    lw=1,
                )
    styles = [
        Line2D([], [], color="k", ls=style, lw=1, label=f"{law} law")
        for law, style in zip(LAWS, ("-", ":"), strict=True)
        if law in report.laws
    ]
    axes[0].legend(handles=styles, fontsize=8, frameon=False)
    axes[0].set(xlabel="state t + τ", ylabel="mean ln variance (of the residual)")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    said = [
        f"{n}: alpha {report.law(n).alpha:.3g}, lambda {report.law(n).rate:.3g}, R² "
        f"{report.law(n).r2:.2f}"
        for n in report.laws
    ]
    caption = (
        "Each point is the mean log variance of what the map from t to t + τ leaves, coloured by "
        f"t; lines are two laws of noise fitted to them, the {report.train} trajectories that the "
        f"maps were fitted on ({'; '.join(said)})."
    )
    return View(
        figure,
        title="Does the residual grow as noise does?",
        caption=caption,
        null="The dotted line is the law of independent increments.",
        source=report.provenance.line(),
    )
