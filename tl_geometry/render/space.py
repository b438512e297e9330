"""Paths in three dimensions, to be turned with the mouse: one self-contained page, no network."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.render.flow import bundle_figure, coordinates
from tl_geometry.render.page import PageView, document
from tl_geometry.render.weights import sphere_paths
from tl_geometry.sphere.paths import TokenPaths


def bundle_3d(
    ensemble: Trajectories,
    *,
    reference: int | None = None,
    axes: Sequence[int] | None = None,
    limit: int = 100,
    hide_last: bool = False,
    seed: int = 0,
) -> PageView:
    """Paths of at most ``limit`` trajectories over (u1, u2, u3) of a reference state, turned by
    dragging, zoomed by scrolling.

    ``axes`` takes three Cartesian coordinates in place of singular directions; ``hide_last`` leaves
    out the last state, which often dwarfs the others. Coordinates are scaled by the largest and
    rounded to four digits.
    """
    points, names = coordinates(ensemble, reference=reference, axes=axes, limit=limit, seed=seed)
    states = list(ensemble.states)
    if hide_last and len(states) > 1:
        points, states = points[:, :-1], states[:-1]
    image = functools.partial(bundle_figure, ensemble, reference=reference, axes=axes, limit=limit)
    said = f"{len(points)} of {len(ensemble)} trajectories"
    labels = [f"trajectory {i}" for i in range(len(points))]
    return _page(
        "Bundle of trajectories",
        points,
        states,
        names,
        labels,
        said,
        ensemble.provenance.line(),
        image,
        marked=False,
    )


def sphere_3d(
    paths: TokenPaths, context: int = 0, positions: Sequence[int] | None = None
) -> PageView:
    """Paths of tokens through the layers on the norm's sphere, turned by dragging; the last state
    is labelled by its token."""
    batch, length = paths.tokens.shape
    checks.index(context, batch, "context")
    chosen = checks.indices(positions, length, "positions")
    points = paths.coordinates[context, list(chosen)].double()
    labels = [html.token_text(paths.str_tokens[context][t]) for t in chosen]
    names = [f"{paths.method} {i + 1}" for i in range(3)]
    image = functools.partial(sphere_paths, paths, context, positions)
    said = f"states on the unit sphere, axes ({paths.method}) fitted on {paths.fitted_on}"
    states = range(points.shape[1])
    return _page(
        "Paths on the sphere",
        points,
        states,
        names,
        labels,
        said,
        paths.provenance.line(),
        image,
        marked=True,
    )


def _page(
    title: str,
    points: Float[Tensor, "trajectory state 3"],
    states: Sequence[int],
    names: Sequence[str],
    labels: Sequence[str],
    said: str,
    source: str,
    image: functools.partial,
    *,
    marked: bool,
) -> PageView:
    scale = float(points.abs().max()) or 1.0
    paths = (points / scale * 1e4).round().to(torch.int64).tolist()
    caption = f"{said}, 1 = {scale:.4g}; {source}"
    data = {
        "paths": [[[v / 1e4 for v in p] for p in path] for path in paths],
        "states": list(states),
        "names": list(names),
        "labels": list(labels),
        "marked": marked,
        "caption": caption,
    }
    return PageView(
        document(title, data, "paths"),
        title=title,
        caption=caption,
        width=784,
        height=600,
        image=image,
    )
