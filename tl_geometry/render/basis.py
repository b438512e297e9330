"""Views of a positional and context basis: shares, norms, the positional curves, the normalised
Gram matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.html import visible
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.variance import Anova
from tl_geometry.render.figure import (
    BLUE,
    DIVERGING,
    GREY,
    PARTS,
    SEQUENTIAL,
    VERMILION,
    WIDTH,
    View,
    canvas,
    drawable,
    one_panel,
    some,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {"pos": "position", "ctx": "context", "resid": "residual"}
"""What the parts are called in legends."""


def variance_shares(table: Anova, *, control: Anova | None = None, ax: Axes | None = None) -> View:
    """Share of each state's variance that is position, context and residual; an untrained control
    beside it.

    The dashed line is the context share of spliced windows (no common context), where the table
    holds one.

    Args:
        table: from :meth:`~tl_geometry.PositionContext.anova`.
        control: the same of the untrained control, in a second panel.
        ax: axes to draw into (without ``control``).

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> variance_shares(basis.anova()).title[:19]
    'Shares of variance:'
    """
    tables = [t for t in (table, control) if t is not None]
    one_panel(ax, len(tables), "table")
    figure, axes = canvas(len(tables), ax=ax, size=(WIDTH / len(tables), 2.6), sharey=True)
    for axis, current, name in zip(axes, tables, ("trained", "untrained control"), strict=False):
        for part, value in current.shares.items():
            line = {"ms": 3.5, "lw": 1.6, "color": PARTS[part], "label": WORDS.get(part, part)}
            axis.plot(current.states, value.numpy(), "o-", **line)
        if current.ctx_null is not None:
            null = current.ctx_null.numpy()
            label = "null: context of spliced windows"
            axis.plot(current.states, null, "--", color=PARTS["ctx"], lw=1.2, label=label)
        axis.set_xlabel("state")
        axis.set_xticks(whole_ticks(current.states))
        axis.set_ylim(0, 1.02)
        axis.set_title(name if control is not None else "", fontsize=9)
    axes[0].set_ylabel("share of variance")
    lines, labels = axes[0].get_legend_handles_labels()
    where = {"loc": "outside lower center", "ncol": len(labels)} if ax is None else {}
    (figure if ax is None else axes[0]).legend(lines, labels, fontsize=7, frameon=False, **where)
    title = f"Shares of variance: {_change(table, 'pos', 'position')}, "
    title += _change(table, "ctx", "context")
    return View(
        figure,
        title=title,
        caption="The shares of the variance of each state that position alone, context alone and "
        "both together (residual) make up; they add up to one.",
        null="No null is drawn: windows spliced from random places would give one."
        if table.ctx_null is None
        else "Dashed: windows spliced from random places, which have no common context.",
        source=table.provenance.line(),
    )


def _change(table: Anova, part: str, name: str) -> str:
    """How a share changes from the first to the last state, in words."""
    first, last = (float(table.shares[part][i]) for i in (0, -1))
    if math.isnan(first) or math.isnan(last):
        return f"{name} not told apart"
    return f"{name} {100 * first:.2g}% to {100 * last:.2g}%"


def norms(basis: PositionContext, *, ax: Axes | None = None) -> View:
    """Root-mean-square norms per state: of the mean, of a positional vector, of a context vector,
    of the residual.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> norms(basis).title
    'How large is each part of a state?'
    """
    require_basis(basis)
    figure, axes = canvas(ax=ax, size=(WIDTH, 2.8))
    table, t = basis.anova(), basis.window[1] - basis.window[0]
    n = basis.contexts * t
    values = {
        "mean": torch.linalg.vector_norm(basis.mean, dim=-1),
        "pos": (table.pos / n).sqrt(),
        "ctx": (table.ctx / n).sqrt(),
        "resid": (table.resid / n).sqrt(),
    }
    for name, value in values.items():
        axes[0].semilogy(
            basis.states,
            value.clamp(min=1e-12).numpy(),
            "o-",
            ms=3,
            color=PARTS[name],
            label=WORDS.get(name, name),
        )
    axes[0].set_xlabel("state")
    axes[0].set_xticks(whole_ticks(basis.states))
    axes[0].set_ylabel("norm (units of the stream)")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return View(
        figure,
        title="How large is each part of a state?",
        caption="Each line is the root mean square norm of one part over contexts and positions; "
        "the axis is logarithmic.",
        null="Sizes have no null: the parts add up to the state exactly.",
        source=basis.provenance.line(),
    )


def spirals(
    basis: PositionContext,
    *,
    states: tuple[int, ...] | None = None,
    control: PositionContext | None = None,
) -> View:
    """The positional basis of each state on its first two principal directions, shaded by position
    (Song & Zhong 2023, Fig. 1).

    Axes are scaled per panel; the share of |pos|^2 that the two directions hold stands above it.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        states: which, by default at most seven at even distances.
        control: the basis of the untrained control, on its own directions in a second row.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> spirals(basis).title
    'What curve do positions lie on in each state?'
    """
    require_basis(basis)
    if control is not None:
        require_basis(control, "control")
    chosen = states or tuple(some(basis.states, 5))
    rows = [b for b in (basis, control) if b is not None]
    figure, axes = canvas(len(chosen), len(rows), size=(WIDTH / min(len(chosen), 5), 1.6))
    for r, current in enumerate(rows):
        for c, state in enumerate(chosen):
            axis = axes[r * len(chosen) + c]
            pos = current.pos[current.index(state)]
            found = linalg.svd(pos)
            points = pos @ found.V[:, :2]
            outside = _fit_axes(axis, points)
            x, y = points[:, 0].numpy(), points[:, -1].numpy()
            axis.plot(x, y, color="#8888", lw=0.6, zorder=1)
            shade = axis.scatter(x, y, c=range(*current.window), cmap=SEQUENTIAL, s=7, zorder=2)
            held = found.S[:2].square().sum() / found.S.square().sum().clamp(min=1e-300)
            axis.set_title(
                f"state {state}: {float(held):.0%}" + (f", {outside} off" if outside else ""),
                fontsize=8,
            )
            axis.set_xticks([])
            axis.set_yticks([])
            if r == len(rows) - 1:
                axis.set_xlabel("u1")
            if c == 0:
                axis.set_ylabel(
                    "u2" if control is None else ("trained: u2", "untrained control: u2")[r]
                )
            if c == len(chosen) - 1:
                figure.colorbar(shade, ax=axis, label="position", shrink=0.8)
    caption = (
        f"Each point is the positional vector of one position, on the two leading directions of "
        f"its state ({len(chosen)} of {len(basis.states)} states; axes scaled per panel). Above: "
        "the share of |pos|² that the two directions hold, and how many outliers lie off the frame."
    )
    return View(
        figure,
        title="What curve do positions lie on in each state?",
        caption=caption,
        null="No null is drawn: the measures of position have theirs."
        if control is None
        else "The lower row is the untrained control.",
        source=basis.provenance.line(),
    )


def _fit_axes(axis: Axes, points: Tensor) -> int:
    """Fit the axes to all but extreme points (beyond 6 interquartile ranges) and return how many
    lie outside."""
    low, middle, high = torch.quantile(
        points, torch.tensor([0.25, 0.5, 0.75], dtype=points.dtype), dim=0
    )
    reach = 6 * (high - low)
    inside = ((points - middle).abs() <= reach.clamp(min=1e-12)).all(1)
    kept = points[inside] if bool(inside.any()) else points
    for limit, axis_points in ((axis.set_xlim, kept[:, 0]), (axis.set_ylim, kept[:, -1])):
        span = float(axis_points.max() - axis_points.min()) or 1.0
        limit(float(axis_points.min()) - 0.06 * span, float(axis_points.max()) + 0.06 * span)
    return int((~inside).sum())


def gram(
    basis: PositionContext, state: int, *, contexts: int = 128, ax: Axes | None = None
) -> View:
    """Cosines between all positional vectors and (ordered by document) context vectors of one state
    (Song & Zhong 2023, Fig. 2).

    Args:
        basis: from :func:`tl_geometry.decompose`; without context vectors only positions are shown.
        state: which state.
        contexts: at most so many context vectors, at even distances.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> gram(basis, 1).title
    'Which positions and contexts of state 1 point the same way?'
    """
    require_basis(basis)
    row = basis.index(state)
    pos, _ = linalg.normalize_rows(basis.pos[row])
    blocks = [pos]
    if basis.ctx is not None:
        order = (
            torch.arange(basis.contexts)
            if basis.labels is None
            else torch.argsort(basis.labels, stable=True)
        )
        picked = order[torch.linspace(0, len(order) - 1, min(contexts, len(order))).long()]
        blocks.append(linalg.normalize_rows(basis.ctx[row, picked])[0])
    rows = torch.cat(blocks)
    figure, axes = canvas(ax=ax, size=(0.75 * WIDTH, 4.2))
    image = axes[0].imshow(
        (rows @ rows.T).numpy(), cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest"
    )
    for line in (axes[0].axhline, axes[0].axvline):
        line(len(pos) - 0.5, color="k", lw=0.6)
    ticks = [len(pos) / 2, len(pos) + (len(rows) - len(pos)) / 2][: len(blocks)]
    axes[0].set_xticks(ticks, ["positions", "contexts"][: len(blocks)])
    axes[0].set_yticks(ticks, ["positions", "contexts"][: len(blocks)], rotation=90, va="center")
    figure.colorbar(image, ax=axes[0], label="cosine", shrink=0.8)
    axes[0].set_xlabel("vector (one for each position, one for each context)")
    axes[0].set_ylabel("vector (in the same order)")
    chance = rows.shape[1] ** -0.5
    return View(
        figure,
        title=f"Which positions and contexts of state {state} point the same way?",
        caption="Each cell is the cosine of two vectors, positions first, then contexts ordered by "
        "document: red is alike, blue opposite.",
        null=f"Random directions of as many dimensions have a cosine of 0 ± {chance:.2f}.",
        source=basis.provenance.line(),
    )


def token_norms(
    norms: Float[Tensor, "sample position"],
    window: tuple[int, int],
    marked: Sequence[tuple[int, float, str]],
    *,
    state: int,
    title: str,
    provenance: Provenance,
    ax: Axes | None = None,
) -> View:
    """Norm of every token of some contexts by its position, the largest ones named.

    Where a few tokens stand far above the others, sums of squares are about them.

    Args:
        norms: of the tokens of some contexts.
        window: the positions, half-open.
        marked: position, norm and token of the largest, descending.
        state: which state they are of, for the label.
        title: what the figure shows.
        provenance: what the norms were computed from.
        ax: axes to draw into.

    >>> view = token_norms(
    ...     torch.rand(4, 8), (0, 8), [(0, 9.0, "the")], state=1, title="Norms",
    ...     provenance=Provenance(),
    ... )
    >>> view.title
    'Norms'
    """
    from matplotlib.ticker import LogFormatter

    figure, axes = canvas(ax=ax, size=(WIDTH, 3.2))
    axis, positions = axes[0], torch.arange(*window)
    axis.scatter(
        positions.expand_as(norms).flatten(),
        norms.flatten(),
        s=3,
        color=GREY,
        alpha=0.35,
        lw=0,
        rasterized=True,
    )
    axis.plot(positions, norms.median(0).values, color=BLUE, lw=1, label="median of the contexts")
    axis.scatter(
        [p for p, _, _ in marked], [n for _, n, _ in marked], s=12, color=VERMILION, zorder=3
    )
    axis.set_yscale("log")
    for side in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        side(LogFormatter(minor_thresholds=(1.5, 0.5)))
    seen: dict[tuple[int, str], float] = {}
    for position, norm, token in marked:  # the largest of each position and token
        seen.setdefault((position, token), norm)
    usual, below = float(norms.median()), 0.0
    for (position, token), norm in [item for item in seen.items() if item[1] > 3 * usual][:8]:
        if below and norm > 0.8 * below:  # its name would lie on the one above
            continue
        right, below = position < (window[0] + window[1]) / 2, norm
        short = token if len(token) <= 16 else f"{token[:15]}…"
        axis.annotate(
            f"{drawable(visible(short))} at {position}",
            (position, norm),
            xytext=(6 if right else -6, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=7,
        )
    axis.set_xlabel("position")
    axis.set_ylabel(f"norm in state {state} (units of the stream)")
    axis.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    caption = (
        f"Each point is a token of {len(norms)} sampled contexts; the largest are orange, named "
        "where they exceed three times the median."
    )
    return View(
        figure,
        title=title,
        caption=caption,
        null="The line is the median token of each position.",
        source=provenance.line(),
    )
