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
from tl_geometry.flow.residuals import flow_map
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.render.figure import (
    BLUE,
    SEQUENTIAL,
    VERMILION,
    View,
    canvas,
    require_3d,
    shades,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIME = "coolwarm"
"""Colour of layers, blue first and red last, as published."""


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
    'Bundle of trajectories'
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
    if shade is not None:
        figure.colorbar(
            shade, ax=axis, label="state", shrink=0.6, pad=0.15, ticks=whole_ticks(ensemble.states)
        )
    caption = f"{len(points)} of {len(ensemble)} trajectories; {ensemble.provenance.line()}"
    return View(figure, title="Bundle of trajectories", caption=caption)


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
    'First singular coordinate'
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
        title="First singular coordinate",
        caption=f"height normalised per state; {ensemble.provenance.line()}",
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
    'Angles between directions'
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
        title="Angles between directions",
        caption=f"{align} alignment; {ensemble.provenance.line()}",
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
    'Singular values'
    """
    S = ensemble.aligned_bases(align="none").S
    figure, axes = canvas(ax=ax, size=(4.6, 3.0))
    colour = shades(figure, axes[0], ensemble.states, "state", TIME)
    for t, state in enumerate(ensemble.states):
        values = S[t, 1:512]
        axes[0].loglog(
            range(2, 2 + len(values)), values.clamp(min=1e-12), color=colour(state), lw=1
        )
    axes[0].set(xlabel="rank", ylabel="singular value")
    return View(
        figure,
        title="Singular values",
        caption=f"from rank 2, blue first layers, red last; {ensemble.provenance.line()}",
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
    'Output with K directions'
    """
    require(len(curves) > 0, "curves", expected="at least one", got="none")
    figure, axes = canvas(ax=ax, size=(4.4, 3.0))
    for curve in curves:
        name = (
            f"{'held out' if curve.held_out else 'in-sample'}, {curve.where} block, "
            f"{curve.positions}"
        )
        axes[0].errorbar(curve.K, curve.kl, yerr=2 * curve.kl_se, fmt="o-", ms=3, lw=1, label=name)
    first = curves[0]
    axes[0].axhline(
        first.baseline_mean, color=VERMILION, ls="--", lw=1, label="consecutive chunks, mean"
    )
    axes[0].axhline(
        first.baseline_median, color=VERMILION, ls=":", lw=1, label="consecutive chunks, median"
    )
    axes[0].set_xscale("log", base=2)
    axes[0].set(xlabel="directions kept, K", ylabel="KL (nats)")
    axes[0].legend(fontsize=7)
    low = (
        f"10% of the mean baseline from K = {first.needed()}"
        if first.claimed
        else "no K claimed from fewer chunks than dimensions"
    )
    caption = f"two standard errors; {low}; {first.provenance.line()}"
    return View(figure, title="Output with K directions", caption=caption)


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
    'Residuals of rotation and stretch'
    """
    tables = report.held_out if held_out else report.in_sample
    unknown = [n for n in names if n not in tables]
    require(not unknown, "names", expected=f"some of {', '.join(tables)}", got=unknown)
    figure, axes = canvas(len(names), size=(2.7, 2.5))
    for axis, name in zip(axes, names, strict=True):
        image = axis.imshow(
            tables[name].numpy(), cmap=SEQUENTIAL, origin="lower", extent=_extent(report.states)
        )
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set(xlabel="t + τ", ylabel="t")
        figure.colorbar(image, ax=axis, shrink=0.8)
    where = "held out" if held_out else "in-sample"
    return View(
        figure,
        title="Residuals of rotation and stretch",
        caption=f"{where}; {report.provenance.line()}",
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
    'Maps from one state to the next'
    """
    figure, axes = canvas(ax=ax, size=(4.4, 3.0))
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
        xlabel="t + 1",
        ylabel="relative error, t to t + 1",
        ylim=(0, None),
        xticks=whole_ticks(report.states[1:]),
    )
    steps = [table.diagonal(1).nan_to_num() for table in curves.values()]
    usual = max(float(step.quantile(0.9)) for step in steps)
    if max(float(step.max()) for step in steps) > 5 * usual > 0:
        axes[0].set_yscale("log")  # one jump would flatten all the rest
    axes[0].legend(fontsize=7)
    return View(
        figure,
        title="Maps from one state to the next",
        caption=f"held out; {report.provenance.line()}",
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
    'Law of the residual variance'
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = canvas(ax=ax, size=(4.8, 3.0))
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
    axes[0].set(xlabel="t + τ", ylabel="mean ln variance")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    said = [
        f"{n}: alpha {report.law(n).alpha:.3g}, lambda {report.law(n).rate:.3g}, R² "
        f"{report.law(n).r2:.2f}"
        for n in report.laws
    ]
    caption = (
        f"colour by t; line: asymptotic law, dotted: increment law; {'; '.join(said)}; "
        f"{report.provenance.line()}"
    )
    return View(figure, title="Law of the residual variance", caption=caption)


def clouds(
    ensemble: Trajectories,
    start: Sequence[int],
    end: Sequence[int],
    *,
    train: Trajectories | None = None,
    plane: tuple[int, int] = (2, 3),
    signs: str = "U",
    limit: int = 1000,
) -> View:
    """True states and their extrapolations on a plane of singular directions of the end state
    (Sarfati et al. 2025, Fig. 3).

    A grid: start states down, end states across. The paper shows (u2, u3); u1 is the mean.

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        start: states to begin from.
        end: states to extrapolate to; a pair that goes back is left empty.
        train: trajectories that directions and maps are fitted on, which makes it held out.
        plane: which two singular directions, from 1.
        signs: how the directions are signed, see :func:`tl_geometry.flow.residuals.flow_map`.
        limit: at most so many trajectories.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> clouds(paths, [1, 2], [3, 4]).title
    'True and extrapolated states'
    """
    aligned = (train or ensemble).aligned_bases(align="greedy")
    a, b = plane
    require(
        1 <= a != b >= 1 and max(a, b) <= aligned.rank,
        "plane",
        expected=f"two of 1 to {aligned.rank}",
        got=plane,
    )
    figure, axes = canvas(len(end), len(start), size=(2.0, 2.0))
    for axis, (s, e) in zip(axes, [(s, e) for s in start for e in end], strict=True):
        axis.set_xticks([])
        axis.set_yticks([])
        if s >= e:
            axis.set_axis_off()
            continue
        i, j = ensemble.row(s), ensemble.row(e)
        U = top_directions(aligned, j, max(plane))[:, [a - 1, b - 1]]
        moved = flow_map(aligned, i, j, signs=signs)(ensemble.X[:limit, i].double()) @ U
        true = ensemble.X[:limit, j].double() @ U
        axis.scatter(*true.T, s=2, color=BLUE, alpha=0.5, lw=0, label="true")
        axis.scatter(*moved.T, s=2, color=VERMILION, alpha=0.5, lw=0, label="extrapolated")
        axis.set_title(f"{s} → {e}", fontsize=8)
        axis.set_xlabel(f"u{a}")
        axis.set_ylabel(f"u{b}")
    shown = next((x for x in axes if x.collections), None)
    if shown is not None:
        shown.legend(fontsize=6, markerscale=3)
    held = "held out" if train is not None else "in-sample"
    return View(
        figure,
        title="True and extrapolated states",
        caption=f"plane (u{a}, u{b}) of the end state; {held}; {ensemble.provenance.line()}",
    )
