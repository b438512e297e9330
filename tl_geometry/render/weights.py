"""What do the weights of heads read and write, and what does it cost to change them? Figures of the
diagonal and the leading block of W_QK or W_OV, of the coverage of singular values, of paths of
tokens on the sphere, and of the loss when W_QK is replaced or the model is edited. The report, the
gallery and a notebook draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.checks import Head, head_name
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.interventions.effect_tables import Effects
from tl_geometry.render.figure import (
    BLUE,
    GREY,
    WIDTH,
    View,
    draw_paths_3d,
    drawable,
    no_ticks,
    one_axes,
    panels,
    shades,
)
from tl_geometry.sphere import TokenPaths
from tl_geometry.weights import TokenReadout, WeightGeometry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 60
"""Most entries of the diagonal, and most directions of the basis, that a panel shows."""


def weight_blocks(
    geometry: WeightGeometry,
    heads: Iterable[Head] | Head | None = None,
    *,
    ax: Axes | None = None,
) -> View:
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
    n_layers, n_heads = (1 + max(numbers) for numbers in zip(*geometry.heads, strict=True))
    layer = geometry.heads[0][0] if heads is None else None
    chosen = checks.heads(heads, n_layers, n_heads, layer)
    rows = [geometry.head(pair) for pair in chosen]
    columns = min(4, len(rows))
    # inches: a panel takes a third of the width at most, so that a single one stays small
    panel = (WIDTH / max(columns, 3), 2.0)
    figure, axes = panels(ax, len(rows), "head", columns=columns, size=panel)
    size = min(SIZE, *geometry.block.shape[-2:])
    depth, lifts = geometry["k"].tolist(), geometry["lift"].tolist()
    across, down = ("key", "query") if geometry.matrix == "QK" else ("output", "input")
    pictures = _pictures(geometry, rows, size)
    for axis, row, (layer, head), picture in zip(axes, rows, chosen, pictures, strict=True):
        axis.imshow(picture.numpy(), interpolation="nearest")
        edge = depth[row] - 0.5
        axis.plot([-0.5, edge, edge], [edge, edge, -0.5], "k--", lw=0.5)
        axis.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
        axis.set_title(f"{head_name((layer, head))}: {lifts[row]:.3g} x chance", fontsize=8)
        axis.set_xlabel(f"{across} direction", fontsize=8)
        axis.set_ylabel(f"{down} direction", fontsize=8)
        no_ticks(axis)
    caption = (
        f"Blue cells are entries of W_{geometry.matrix} in the directions of the basis, above the "
        f"threshold; red ones are |diag(W_{geometry.matrix})| in the model's own coordinates; the "
        "dashed frame holds the leading directions of position."
    )
    verb = "read" if geometry.matrix == "QK" else "write"
    return View(
        figure,
        title=f"Which directions does W_{geometry.matrix} of each head {verb}?",
        caption=caption,
        null="Above each panel: its concentration in the frame over that of a random subspace.",
        source=geometry.provenance.line(),
    )


def _pictures(
    geometry: WeightGeometry, rows: Sequence[int], size: int
) -> Float[Tensor, "head row column 3"]:
    """Colour images: the block in blue and the diagonal in red on white. Colours follow the square
    root, which makes small entries visible too."""
    block = geometry.block[rows, :size, :size].abs()
    block = torch.where(block > geometry["threshold"][rows, None, None], block, 0.0)
    diagonal = torch.diag_embed(geometry.diagonal[rows, :size].abs())

    def scaled(x: Tensor) -> Tensor:
        # a head without entries above the threshold is white
        return (x / x.amax((-2, -1), keepdim=True).clamp(min=1e-300)).sqrt().unsqueeze(-1)

    # each factor tints white by its colour; cells with both show a mix
    blue, red = torch.tensor([0.0, 0.45, 0.70]), torch.tensor([0.84, 0.10, 0.11])
    return (1 - scaled(block) * (1 - blue)) * (1 - scaled(diagonal) * (1 - red))


def coverage_curves(readout: TokenReadout, *, ax: Axes | None = None) -> View:
    """Cumulative share of the singular values of each head, one line per head, coloured by layer.

    Args:
        readout: from :func:`tl_geometry.token_readout`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> coverage_curves(tlg.token_readout(model)).title
    'In how many directions does W_QK of a head lie?'
    """
    figure, axis = one_axes(ax)
    count = readout.values.shape[1]
    steps = range(1, count + 1)
    shade = shades(figure, axis, sorted({layer for layer, _ in readout.heads}), "layer")
    for (layer, _), curve in zip(readout.heads, readout.coverage, strict=True):
        axis.plot(steps, curve, color=shade(layer), lw=0.8)
    equal = [step / count for step in steps]
    axis.plot(steps, equal, "k:", lw=0.8, label="null: equal singular values")
    axis.set(xlabel="singular directions", ylabel="share of the sum of singular values")
    axis.legend(fontsize=7, frameon=False)
    return View(
        figure,
        title=f"In how many directions does W_{readout.matrix} of a head lie?",
        caption="Each line is a head: the cumulative share of its singular values. The steeper it "
        "begins, the fewer directions the head uses.",
        null="The dotted line has equal singular values.",
        source=readout.provenance.line(),
    )


def sphere_paths(
    paths: TokenPaths,
    context: int = 0,
    positions: Sequence[int] | None = None,
    *,
    ax: Axes | None = None,
) -> View:
    """Paths of tokens through the layers in three dimensions, coloured by state. The end of a path
    has the text of its token where there is room.

    Args:
        paths: from :func:`tl_geometry.sphere.token_paths`.
        context: which prompt.
        positions: some of its positions, all by default.
        ax: axes to draw into, with ``projection="3d"``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> paths = tlg.sphere.token_paths(model, "for i in range(3):", prepend_bos=True)
    >>> sphere_paths(paths).title
    'Where do tokens travel on the sphere of the norm?'
    """
    batch, length = paths.tokens.shape
    checks.index(context, batch, "context")
    chosen = checks.indices(positions, length, "positions")
    figure, axis = one_axes(ax, (5.2, 4.6), subplot_kw={"projection": "3d"})
    got = type(axis).__name__
    require(hasattr(axis, "get_zlim"), "ax", expected="axes with projection='3d'", got=got)
    axis.set_box_aspect(None, zoom=1.1)
    points = paths.coordinates[context]
    states = range(points.shape[1])
    axes = [f"axis {n}" for n in (1, 2, 3)]
    draw_paths_3d(axis, points[list(chosen)], states, axes, size=12.0)
    names = [drawable(html.token_text(paths.str_tokens[context][t])) for t in chosen]
    named = _name_ends(axis, points[list(chosen), -1], names)
    held = "" if math.isnan(paths.shown) else f", which hold {paths.shown:.0%} of their variance"
    return View(
        figure,
        title="Where do tokens travel on the sphere of the norm?",
        caption="Each line is the path of one token over the unit sphere, from the embedding to "
        f"its last state, where its text stands; principal axes fitted on {paths.fitted_on}"
        f"{held}. {named} of {len(names)} tokens have room for their name.",
        null="No null is drawn: the paths are the model's own, exactly.",
        source=paths.provenance.line(),
    )


def _name_ends(axis: Any, ends: Float[Tensor, "token 3"], names: Sequence[str]) -> int:
    """Write names beside points. Each takes the first of four corners where it covers no other
    name, seen as the axes are turned now. Return how many found room."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox
    from mpl_toolkits.mplot3d.proj3d import proj_transform

    # a white outline, so that names are readable on lines
    halo = [withStroke(linewidth=2, foreground="white")]
    x, y, z = ends.double().numpy().T
    x, y, _ = proj_transform(x, y, z, axis.get_proj())
    pixels = axis.transData.transform(np.stack([x, y], 1))
    wide, high = 5.2, 11.0  # pixels of a character of 7 points at matplotlib's 100 pixels an inch
    taken: list[Bbox] = []
    for (u, v), end, name in zip(pixels.tolist(), ends.tolist(), names, strict=True):
        width = wide * len(name)
        for across, up in product(("left", "right"), ("bottom", "top")):
            # 3 pixels between a point and its name
            left = u + 3 if across == "left" else u - 3 - width
            box = Bbox.from_bounds(left, v if up == "bottom" else v - high, width, high)
            if not box.count_overlaps(taken):
                taken.append(box)
                text = f" {name}" if across == "left" else f"{name} "
                axis.text(*end, text, fontsize=7, ha=across, va=up, path_effects=halo, zorder=9)
                break
    return len(taken)


def effect_bars(effects: Effects, *, ax: Axes | None = None) -> View:
    """Change of a metric under each edit of the live model, with its 95% interval, the largest
    first. Controls are grey.

    Args:
        effects: from :func:`tl_geometry.interventions.effects`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=12)
    >>> edits = tlg.interventions.each(model, ["L0H0", "L1H2"])
    >>> effects = tlg.interventions.effects(model, windows, edits)
    >>> effect_bars(effects).title
    'What does L0H0 do to the loss?'
    """
    bars: list[tuple[str, Tensor, str]] = []
    for name in dict.fromkeys(str(row[0]) for row in effects.rows()):
        bars.append((name, effects.changes[effects.edits.index(name)], BLUE))
        for control in effects.controls_of(name):
            change = (effects.controls[name, control] - effects.clean).mean(0)
            beside = control if len(effects.edits) == 1 else f"{name}: {control}"
            bars.append((beside, change, GREY))
    names, values, colours = zip(*bars, strict=True)
    figure, axis = one_axes(ax, (WIDTH, 0.32 * len(bars) + 0.9))
    changes = [paired_interval(value) for value in values]
    # no bar where there are too few prompts for an interval
    errors = [float((change.high - change.value).nan_to_num()) for change in changes]
    shown = [drawable(name) for name in names]
    means = [float(change.value) for change in changes]
    axis.barh(shown, means, xerr=errors, color=colours, capsize=2, height=0.7)
    axis.invert_yaxis()
    axis.axvline(0, color="k", lw=0.6)
    unit = " (nats per token)" if effects.metric == "loss" else ""
    axis.set(xlabel=f"change in {effects.metric}{unit}", ylabel="edit of the live model")
    return View(
        figure,
        title=f"What does {names[0]} do to the {effects.metric}?",
        caption=f"Each bar is an edit of the live model, with its 95% interval over "
        f"{len(effects.clean)} prompts (none below 10).",
        null="Grey bars are controls." if effects.controls else "No control is drawn.",
        source=effects.provenance.line(),
    )
