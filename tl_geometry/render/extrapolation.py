"""A view of extrapolated states: where rotation and stretch put them, and where they are."""

from __future__ import annotations

from collections.abc import Sequence

from tl_geometry.base.errors import require
from tl_geometry.flow.alignment import top_directions
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.residuals import flow_map
from tl_geometry.render.figure import BLUE, VERMILION, View, canvas


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
    'Where do extrapolated states lie?'
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
        title="Where do extrapolated states lie?",
        caption=f"Each panel shows true and extrapolated states on the plane (u{a}, u{b}) of the "
        f"end state; {held}.",
        source=ensemble.provenance.line(),
    )
