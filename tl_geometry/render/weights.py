"""Views of weights: diagonal and block of each head, coverage curves, paths on the sphere."""

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
from tl_geometry.interventions.effects import Effects
from tl_geometry.interventions.surrogates import SurrogateEffect
from tl_geometry.render.figure import (
    BLUE,
    GREY,
    SEQUENTIAL,
    WIDTH,
    View,
    canvas,
    drawable,
    head_names,
    one_panel,
    require_3d,
    shades,
    whole_ticks,
)
from tl_geometry.sphere.paths import TokenPaths
from tl_geometry.weights.heads import TokenReadout, WeightGeometry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in pixels."""


CONTROLS = ("random", "bias", "uniform")
"""Words in the names of conditions that are controls."""
SPHERE = "Where do tokens travel on the sphere of the norm?"
SPHERE_NULL = "No null is drawn: the paths are the model's own, exactly."
"""Title and null of paths on the sphere, drawn flat or in space."""


def weight_blocks(
    geometry: WeightGeometry,
    heads: Iterable[Head] | Head | None = None,
    *,
    size: int = 60,
    ax: Axes | None = None,
) -> View:
    """Each head's diagonal (red) and rotated off-diagonal block above the threshold (blue), in
    absolute value (Song & Zhong 2023, Fig. 5).

    One panel per head; red cells show the first entries of diag(W) in the model's coordinates, blue
    cells the first directions of the basis, each scaled to its head's largest value. The dashed
    frame is the k x k block.

    Args:
        geometry: from :func:`tl_geometry.weight_geometry`.
        heads: some of its heads, ``(layer, head)`` or ``"L5H1"``; those of the first layer by
            default.
        size: at most so many entries and directions.
        ax: axes to draw one head into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> geometry = tlg.weight_geometry(model, basis)
    >>> weight_blocks(geometry, "L1H0").title
    'Which directions does W_QK of each head read?'
    """
    n_layers, n_heads = 1 + max(l for l, _ in geometry.heads), 1 + max(h for _, h in geometry.heads)
    chosen = list(
        checks.heads(heads, n_layers, n_heads, geometry.layers[0] if heads is None else None)
    )
    one_panel(ax, len(chosen), "head")
    rows = [geometry.head(pair) for pair in chosen]
    columns = min(4, len(rows))
    figure, axes = canvas(
        columns, -(-len(rows) // columns), ax=ax, size=(WIDTH / max(columns, 3), 2.0)
    )
    size = min(size, *geometry.block.shape[-2:])
    depth = dict(zip(geometry.layers, geometry.k, strict=True))
    pictures = _pictures(geometry, rows, size)
    for axis, row, (layer, head), picture in zip(axes, rows, chosen, pictures, strict=False):
        axis.imshow(picture.numpy(), interpolation="nearest")
        k = depth[layer] - 0.5
        axis.plot([-0.5, k, k], [k, k, -0.5], "k--", lw=0.5)
        axis.set_xlim(-0.5, size - 0.5)
        axis.set_ylim(size - 0.5, -0.5)
        lift = float(geometry.lift[row])
        axis.set_title(f"{head_name((layer, head))}: {lift:.3g} x chance", fontsize=8)
        ends = ("key", "query") if geometry.matrix == "QK" else ("output", "input")
        axis.set_xlabel(f"{ends[0]} direction", fontsize=8)
        axis.set_ylabel(f"{ends[1]} direction", fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
    for axis in axes[len(rows) :] if ax is None else ():
        axis.axis("off")
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
    """Colour images: white paper, blue for the block, red for the diagonal."""
    block = geometry.block[rows, :size, :size].abs()
    block = torch.where(block > geometry.threshold[rows, None, None], block, 0.0)
    diagonal = torch.diag_embed(geometry.diagonal[rows, :size].abs())

    def scaled(x: Tensor) -> Tensor:
        return (x / x.amax((-2, -1), keepdim=True).clamp(min=1e-300)).sqrt().unsqueeze(-1)

    blue, red = torch.tensor([0.0, 0.45, 0.70]), torch.tensor([0.84, 0.10, 0.11])
    return (1 - scaled(block) * (1 - blue)) * (1 - scaled(diagonal) * (1 - red))


def coverage_curves(
    readout: TokenReadout, layers: Iterable[int] | int | None = None, *, ax: Axes | None = None
) -> View:
    """Cumulative share of the singular values of each head, one line per head and one colour per
    layer.

    Args:
        readout: from :func:`tl_geometry.token_readout`.
        layers: some of its layers, all by default.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> readout = tlg.token_readout(model)
    >>> coverage_curves(readout, layers=0).title
    'In how many directions does W_QK of a head lie?'
    """
    present = sorted({l for l, _ in readout.heads})
    chosen = present if layers is None else checks.indices(layers, 1 + max(present), "layers")
    require(set(chosen) <= set(present), "layers", expected=f"layers {present}", got=chosen)
    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    steps = range(1, readout.values.shape[1] + 1)
    shade = shades(figure, axes[0], sorted(chosen), "layer")
    for (layer, _), curve in zip(readout.heads, readout.coverage, strict=True):
        if layer in chosen:
            axes[0].plot(steps, curve, color=shade(layer), lw=0.8)
    axes[0].plot(
        steps, [s / len(steps) for s in steps], "k:", lw=0.8, label="null: equal singular values"
    )
    axes[0].set_xlabel("singular directions")
    axes[0].set_ylabel("share of the sum of singular values")
    axes[0].legend(fontsize=7, frameon=False)
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
    """Paths of tokens through the layers in three dimensions, colour by state, the last state
    labelled by its token where there is room (in the interactive :func:`sphere_3d` all are).

    Args:
        paths: from :func:`tl_geometry.sphere.token_paths`.
        context: which prompt.
        positions: some of its tokens, all by default.
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
    figure, axes = canvas(ax=ax, size=(5.2, 4.6), subplot_kw={"projection": "3d"})
    axis: Any = axes[0]
    require_3d(axis)
    axis.set_box_aspect(None, zoom=1.1)
    points = paths.coordinates[context]
    shade = None
    for t in chosen:
        x, y, z = points[t].unbind(-1)
        axis.plot(x, y, z, color="#8888", lw=0.8)
        shade = axis.scatter(x, y, z, c=range(len(x)), cmap=SEQUENTIAL, s=12, depthshade=False)
    for n, name in enumerate("xyz", 1):
        axis.set(**{f"{name}label": f"{paths.method} {n}"})
        axis.locator_params(axis=name, nbins=4)
    if shade is not None:
        figure.colorbar(
            shade,
            ax=axis,
            label="state",
            shrink=0.6,
            pad=0.12,
            ticks=whole_ticks(range(points.shape[1])),
        )
    names = [drawable(html.token_text(paths.str_tokens[context][t])) for t in chosen]
    named = _name_ends(axis, points[list(chosen), -1], names)
    return View(
        figure,
        title=SPHERE,
        caption=f"{sphere_caption(paths)} {named} of {len(names)} tokens have room for their name.",
        null=SPHERE_NULL,
        source=paths.provenance.line(),
    )


def sphere_caption(paths: TokenPaths) -> str:
    """How the paths are read, and on what axes."""
    held = "" if math.isnan(paths.shown) else f", which hold {paths.shown:.0%} of their variance"
    return (
        "Each line is the path of one token over the unit sphere, from the embedding to its last "
        f"state, where its text stands; axes ({paths.method}) fitted on {paths.fitted_on}{held}."
    )


def _name_ends(axis: Any, ends: Float[Tensor, "token 3"], names: Sequence[str]) -> int:
    """Write names beside points, each at the first of four sides where it is over no other, as the
    axes are turned now; return how many found room."""
    from matplotlib.patheffects import withStroke
    from mpl_toolkits.mplot3d.proj3d import proj_transform

    halo = [withStroke(linewidth=2, foreground="white")]
    x, y, z = ends.double().numpy().T
    x, y, _ = proj_transform(x, y, z, axis.get_proj())
    pixels = axis.transData.transform(np.stack([x, y], 1))
    wide, high = 5.2, 11.0  # of a character of 7 points, in pixels
    taken: list[Box] = []
    for (u, v), end, name in zip(pixels.tolist(), ends.tolist(), names, strict=True):
        for across, up in product(("left", "right"), ("bottom", "top")):
            left = u + 3 if across == "left" else u - 3 - wide * len(name)
            low = v if up == "bottom" else v - high
            box = (left, low, left + wide * len(name), low + high)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                said = f" {name}" if across == "left" else f"{name} "
                axis.text(*end, said, fontsize=7, ha=across, va=up, path_effects=halo, zorder=9)
                break
    return len(taken)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def surrogate_bars(effect: SurrogateEffect, *, ax: Axes | None = None) -> View:
    """Change in next-token loss when W_QK is replaced by each part of it; controls are grey.

    Args:
        effect: from :func:`tl_geometry.interventions.surrogate_effect`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> effect = tlg.interventions.surrogate_effect(model, windows, basis)
    >>> surrogate_bars(effect).title
    'Which part of W_QK carries the loss?'
    """
    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    change = effect.loss - effect.clean_loss
    colours = [GREY if part in ("random", "none", "whole") else BLUE for part in effect.parts]
    axes[0].bar([part.replace("_", " ") for part in effect.parts], change.tolist(), color=colours)
    axes[0].axhline(0, color="k", lw=0.6)
    axes[0].set_xlabel("what is kept of W_QK")
    axes[0].set_ylabel("change in loss (nats per token)")
    caption = (
        f"Each bar is what the loss of {effect.clean_loss:.3f} nats rises by when W_QK of "
        f"{head_names(effect.heads)} is replaced by one part of it."
    )
    return View(
        figure,
        title="Which part of W_QK carries the loss?",
        caption=caption,
        null="Grey bars are controls: a random subspace of the same rank, no W_QK at all.",
        source=effect.provenance.line(),
    )


def effect_bars(effects: Effects, measure: str = "loss", *, ax: Axes | None = None) -> View:
    """Change of a measure under each condition of an edit of the live model, with its 95% interval;
    controls are grey.

    Args:
        effects: from :func:`tl_geometry.interventions.dominant_only` and others.
        measure: ``"loss"``, ``"induction_loss"`` or ``"kl"``.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> effects = tlg.interventions.dominant_only(model, windows, basis, progress=False)
    >>> effect_bars(effects).title
    'What is left of the model when heads keep only a part of their scores?'
    """
    figure, axes = canvas(ax=ax, size=(WIDTH, 0.32 * len(effects.conditions) + 0.9))
    kept = effects.conditions[1:]
    found = [effects.change(name, measure) for name in kept]
    value = [float(f.value) for f in found]
    error = [0.0 if bool(f.high.isnan()) else float(f.high - f.value) for f in found]
    control = [any(word in name for word in CONTROLS) for name in kept]
    axes[0].barh(
        kept, value, xerr=error, color=[GREY if c else BLUE for c in control], capsize=2, height=0.7
    )
    axes[0].invert_yaxis()
    axes[0].axvline(0, color="k", lw=0.6)
    axes[0].set_xlabel(f"change in {measure.replace('_', ' ')} (nats per token)")
    axes[0].set_ylabel("what heads keep")
    return View(
        figure,
        title="What is left of the model when heads keep only a part of their scores?",
        caption=f"Each bar is an edit of the live model, with its 95% interval over "
        f"{effects.losses.shape[1]} prompts (none below 10).",
        null="Grey bars are controls: a random term, only constants, uniform attention.",
        source=effects.provenance.line(),
    )
