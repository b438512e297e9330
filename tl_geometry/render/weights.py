"""What do the weights of heads read and write, where do tokens travel, and what does it cost to
change the model? Figures of the diagonal and the leading block of W_QK or W_OV, of paths of tokens
on the sphere, and of edits of a live model. The report, the gallery and a notebook draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, head_name
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw
from tl_geometry.sphere.paths import TokenPaths
from tl_geometry.weights.geometry import WeightGeometry

NAMED = 16
"""Most paths whose end has the text of its token; more would overlap."""
SIZE = 60
"""Most entries of the diagonal, and most directions of the basis, that a panel shows."""


def weight_blocks(
    geometry: WeightGeometry,
    heads: Iterable[Head] | Head | None = None,
    *,
    ax: draw.Axes | None = None,
) -> draw.View:
    """Absolute values of the diagonal of each head (red), and of its off-diagonal block in the
    directions of the basis above the threshold (blue) (Song & Zhong 2023, Fig. 5).

    Each head has a panel. Red cells are the first entries of diag(W) in the model's coordinates,
    blue cells entries in the first directions of the basis; both are scaled to their largest value
    in the head. The dashed frame is the k x k block.

    Args:
        geometry: from :func:`tl_geometry.weight_geometry`.
        heads: some of its heads, ``(layer, head)`` or ``"L5H1"``; those of the first layer by
            default.
        ax: axes to draw one head into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> geometry = tlg.weight_geometry(model, basis)
    >>> weight_blocks(geometry, "L1H0").title
    'Which directions does W_QK of each head read?'
    """
    draw.require_result(geometry, WeightGeometry, "geometry", "weight_geometry(model, basis)")
    first = [pair for pair in geometry.heads if pair[0] == geometry.heads[0][0]]
    rows = checks.head_rows(first if heads is None else heads, geometry.heads, "weight_geometry")
    columns = min(4, len(rows))
    # inches: a panel takes a third of the width at most, so that a single one stays small
    panel = (draw.WIDTH / max(columns, 3), 2.0)
    figure, axes = draw.panels(ax, len(rows), columns=columns, size=panel)
    size = min(SIZE, *geometry.block.shape[-2:])
    across, down = ("key", "query") if geometry.matrix == "QK" else ("output", "input")
    table = draw.frame(geometry, "k", "threshold", "lift")
    pictures = _pictures(geometry, rows, torch.tensor(table["threshold"].iloc[rows].tolist()), size)
    for axis, row, picture in zip(axes, rows, pictures, strict=True):
        axis.imshow(picture.numpy(), interpolation="nearest")
        edge = table["k"].iloc[row] - 0.5
        axis.plot([-0.5, edge, edge], [edge, edge, -0.5], "k--", lw=0.5)
        axis.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xticks=[], yticks=[])
        axis.set_title(f"{head_name(geometry.heads[row])}: {table['lift'].iloc[row]:.3g} x chance")
        axis.set(xlabel=f"{across} direction", ylabel=f"{down} direction")
    verb = "read" if geometry.matrix == "QK" else "write"
    return draw.view(
        figure,
        geometry,
        title=f"Which directions does W_{geometry.matrix} of each head {verb}?",
        caption="Blue cells are entries in the directions of the basis above the threshold, red "
        "ones the diagonal in the model's own coordinates; the frame holds leading positions.",
        null="Above each panel: its concentration in the frame over that of a random subspace.",
    )


def _pictures(
    geometry: WeightGeometry, rows: Sequence[int], least: Tensor, size: int
) -> Float[Tensor, "head row column 3"]:
    """Colour images: the block in blue and the diagonal in red on white. Colours follow the square
    root, which makes small entries visible too."""
    block = geometry.block[rows, :size, :size].abs()
    block = torch.where(block > least[:, None, None], block, 0.0)
    diagonal = torch.diag_embed(geometry.diagonal[rows, :size].abs())

    def scaled(x: Tensor) -> Tensor:
        # a head without entries above the threshold is white
        return (x / x.amax((-2, -1), keepdim=True).clamp(min=1e-300)).sqrt().unsqueeze(-1)

    # each factor tints white by its colour; cells with both show a mix
    blue, red = torch.tensor([0.0, 0.45, 0.70]), torch.tensor([0.84, 0.10, 0.11])
    return (1 - scaled(block) * (1 - blue)) * (1 - scaled(diagonal) * (1 - red))


def sphere_paths(
    paths: TokenPaths, context: int = 0, positions: Sequence[int] | None = None
) -> draw.View:
    """Paths of tokens through the layers in three dimensions, coloured by state. The ends of at
    most 16 paths have the text of their token.

    Args:
        paths: from :func:`tl_geometry.sphere.token_paths`.
        context: which prompt.
        positions: some of its positions, all by default.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> paths = tlg.sphere.token_paths(model, "for i in range(3):", prepend_bos=True)
    >>> sphere_paths(paths).title
    'Where do tokens travel on the sphere of the norm?'
    """
    draw.require_result(paths, TokenPaths, "paths", "token_paths(model, tokens)")
    batch, length = paths.tokens.shape
    checks.index(context, batch, "context")
    chosen = list(checks.indices(positions, length, "positions"))
    figure, (axis,) = draw.panels(None, size=(5.2, 4.6), subplot_kw={"projection": "3d"})
    axis.set_box_aspect(None, zoom=1.1)
    points = paths.coordinates[context][chosen]
    states = range(points.shape[1])
    drawn = [draw.path(axis, path, states, 12.0) for path in points]
    axis.set(xlabel="principal axis 1", ylabel="principal axis 2", zlabel="principal axis 3")
    axis.locator_params(nbins=4)
    # any path can stand for the colour bar: all have the same states; the pad clears the z labels
    bar = {"label": "state", "shrink": 0.6, "pad": 0.15, "ticks": draw.whole_ticks(states)}
    figure.colorbar(drawn[-1], ax=axis, **bar)
    for place in draw.some(range(len(chosen)), NAMED):
        text = paths.str_tokens[context][chosen[place]]
        axis.text(*points[place, -1].tolist(), f" {draw.drawable(text)}", fontsize=7, zorder=9)
    held = "" if math.isnan(paths.shown) else f", which hold {paths.shown:.0%} of their variance"
    return draw.view(
        figure,
        paths,
        title="Where do tokens travel on the sphere of the norm?",
        caption="Each line is the path of one token over the unit sphere, from the embedding to "
        f"its last state, where its text stands; principal axes fitted on {paths.fitted_on}{held}.",
        null="No null is drawn: the paths are the model's own, exactly.",
    )


def effect_bars(effects: Result | pd.DataFrame, *, ax: draw.Axes | None = None) -> draw.View:
    """Change of a metric under each edit of the live model, with its 95% interval, the largest
    first; red raises it, blue lowers it. Controls are grey, below their edit.

    Args:
        effects: from :func:`tl_geometry.interventions.effects`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=12)
    >>> edits = tlg.interventions.each(model, ["L0H0", "L1H2"])
    >>> effects = tlg.interventions.effects(model, windows, edits, progress=False)
    >>> effect_bars(effects).title
    'What does L0H0 do to the loss?'
    """
    table: Any = draw.frame(effects, "edit", "change", "change_low", "change_high")
    bars: list[tuple[str, float, float, str]] = []
    for edit, rows in table.groupby("edit", sort=False):
        change, high = rows[["change", "change_high"]].iloc[0]
        # NaN, and no bar, where there are too few prompts for an interval
        error, colour = high - change, draw.POSITIVE if change > 0 else draw.NEGATIVE
        bars.append((str(edit), change, error, colour))
        beside = rows[rows["control"] != ""] if "control" in rows else rows.head(0)
        bars += [
            (f"   {row['control']}", row["control_change"], math.nan, draw.CONTROL)
            for row in beside.to_dict("records")
        ]
    names, changes, errors, colours = zip(*bars, strict=True)
    figure, (axis,) = draw.panels(ax, size=(draw.WIDTH, 0.3 * len(bars) + 0.9))
    places = range(len(bars))
    look = {"color": colours, "ecolor": draw.NULL, "capsize": 2, "height": 0.7}
    axis.barh(places, changes, xerr=errors, **look)
    axis.set_yticks(places, [draw.drawable(name) for name in names])
    axis.invert_yaxis()
    axis.axvline(0, color=draw.NULL, lw=0.6)
    metric = getattr(effects, "metric", "metric")
    unit = " (nats per token)" if metric == "loss" else ""
    axis.set(xlabel=f"change in the {metric}{unit}", ylabel="edit")
    return draw.view(
        figure,
        effects,
        title=f"What does {names[0]} do to the {metric}?",
        caption="Each bar is an edit of the live model, with its 95% interval over prompts (none "
        "below 10).",
        null="Grey bars are controls of the edit above them."
        if "control" in table
        else "No control is drawn: effects(..., control=) measures them.",
    )
