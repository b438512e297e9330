"""What do the positional and context vectors of a basis look like? Figures of how much variance
each part holds, the curve that positions lie on, which vectors point the same way, and tokens of
large norm. The report, the gallery and notebooks draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    GREY,
    PARTS,
    VERMILION,
    WIDTH,
    View,
    canvas,
    draw_matrix,
    draw_path,
    drawable,
    legend_beside,
    legend_outside,
    no_ticks,
    one_axes,
    panels,
    some,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXTS = 128
"""Most context vectors of a Gram matrix: about as many as there are positions."""
WORDS = {"pos": "position", "ctx": "context", "resid": "residual"}
"""Part -> its name in legends."""


def variance_shares(table: Anova, *, control: Anova | None = None, ax: Axes | None = None) -> View:
    """Share of each state's variance that is position, context and residual, beside that of an
    untrained control.

    The dashed line, where the table has one, is the context share of spliced windows, which have no
    common context.

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
    size = (WIDTH / len(tables), 2.6)
    figure, axes = panels(ax, len(tables), "table", size=size, sharey=True)
    for axis, current, name in zip(axes, tables, ("trained", "untrained control"), strict=False):
        for part, share in current.shares.items():
            line = {"ms": 3.5, "lw": 1.6, "color": PARTS[part], "label": WORDS[part]}
            axis.plot(current.states, share, "o-", **line)
        if current.ctx_null is not None:
            label = "null: context of spliced windows"
            line = {"color": PARTS["ctx"], "lw": 1.2, "label": label}
            axis.plot(current.states, current.ctx_null, "--", **line)
        axis.set(xlabel="state", xticks=whole_ticks(current.states), ylim=(0, 1.02))
        axis.set_title(name if control is not None else "", fontsize=9)
    axes[0].set_ylabel("share of variance")
    legend_outside(figure, axes[:1], "lower center", ax=ax)
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
    """How a share changes from the first to the last state, for a title."""
    first, last = (float(table.shares[part][i]) for i in (0, -1))
    if math.isnan(first) or math.isnan(last):
        return f"{name} not told apart"
    return f"{name} {100 * first:.2g}% to {100 * last:.2g}%"


def spirals(
    basis: PositionContext,
    *,
    control: PositionContext | None = None,
) -> View:
    """The positional basis of at most five evenly spaced states, each on its first two principal
    directions and coloured by position (Song & Zhong 2023, Fig. 1).

    Axes are scaled per panel. Above each panel stands the share of |pos|^2 that the two directions
    hold.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        control: the basis of the untrained control, on its own directions in a second row.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> spirals(basis).title
    'What curve do positions lie on in each state?'
    """
    require_basis(basis)
    if control is not None:
        require_basis(control, "control")
    chosen = some(basis.states, 5)
    bases = [b for b in (basis, control) if b is not None]
    ylabels = ["u2"] if control is None else ["trained: u2", "untrained control: u2"]
    figure, axes = canvas(len(chosen), len(bases), size=(WIDTH / len(chosen), 1.6))
    for row, (current, ylabel) in enumerate(zip(bases, ylabels, strict=True)):
        row_axes = axes[row * len(chosen) : (row + 1) * len(chosen)]
        curves = [_draw_curve(*each, current) for each in zip(row_axes, chosen, strict=True)]
        row_axes[0].set_ylabel(ylabel)
        figure.colorbar(curves[-1], ax=row_axes[-1], label="position", shrink=0.8)
    for axis in axes[-len(chosen) :]:
        axis.set_xlabel("u1")
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


def _draw_curve(axis: Axes, state: int, basis: PositionContext) -> Any:
    """Draw the positional vectors of one state on their two leading directions. Returns the points,
    for a colour bar."""
    pos = basis.pos[basis.index(state)]
    directions = linalg.svd(pos)
    points = pos @ directions.V[:, :2]
    outliers = _fit_axes(axis, points)
    # first and last column: a stream of one dimension has one direction, which serves both axes
    drawn = draw_path(axis, points[:, [0, -1]], range(*basis.window), 7.0)
    energy = directions.S.square()
    # a state without position has no energy
    share = energy[:2].sum() / energy.sum().clamp(min=1e-300)
    off = f", {outliers} off" if outliers else ""
    axis.set_title(f"state {state}: {float(share):.0%}{off}", fontsize=8)
    no_ticks(axis)
    return drawn


def _fit_axes(axis: Axes, points: Tensor) -> int:
    """Fit the axes to all but extreme points (more than 6 interquartile ranges from the median) and
    return how many lie outside."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=points.dtype)
    low, middle, high = torch.quantile(points, quartiles, dim=0)
    reach = 6 * (high - low)
    # where half of the points coincide the range is 0, and rounding must not make outliers
    inside = ((points - middle).abs() <= reach.clamp(min=1e-12)).all(1)
    shown = points[inside] if bool(inside.any()) else points
    for set_limits, values in ((axis.set_xlim, shown[:, 0]), (axis.set_ylim, shown[:, -1])):
        first, last = float(values.min()), float(values.max())
        # points that all lie in one place still need a frame
        margin = 0.06 * ((last - first) or 1.0)
        set_limits(first - margin, last + margin)
    return int((~inside).sum())


def gram(basis: PositionContext, state: int, *, ax: Axes | None = None) -> View:
    """Cosines between all positional and context vectors of one state, contexts ordered by document
    (Song & Zhong 2023, Fig. 2).

    Args:
        basis: from :func:`tl_geometry.decompose`. At most 128 of its context vectors are shown,
            evenly spaced; a basis without context vectors shows positions only.
        state: which state.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> gram(basis, 1).title
    'Which positions and contexts of state 1 point the same way?'
    """
    require_basis(basis)
    row = basis.index(state)
    vectors = {"positions": basis.pos[row]}
    if basis.ctx is not None:
        order = torch.arange(basis.contexts)
        if basis.labels is not None:
            order = torch.argsort(basis.labels, stable=True)
        evenly = torch.linspace(0, len(order) - 1, min(CONTEXTS, len(order))).long()
        vectors["contexts"] = basis.ctx[row, order[evenly]]
    rows, _ = linalg.normalize_rows(torch.cat([*vectors.values()]))
    figure, axis = one_axes(ax, (0.75 * WIDTH, 4.2))
    # cosines have one scale in all figures, so that states can be compared
    image = draw_matrix(axis, rows @ rows.T, -1.0, 1.0)
    positions = len(vectors["positions"])
    axis.axhline(positions - 0.5, color="k", lw=0.6)
    axis.axvline(positions - 0.5, color="k", lw=0.6)
    ticks = [positions / 2, (positions + len(rows)) / 2][: len(vectors)]
    axis.set_xticks(ticks, [*vectors])
    axis.set_yticks(ticks, [*vectors], rotation=90, va="center")
    figure.colorbar(image, ax=axis, label="cosine", shrink=0.8)
    axis.set_xlabel("vector (one for each position, one for each context)")
    axis.set_ylabel("vector (in the same order)")
    chance = rows.shape[1] ** -0.5  # standard deviation of the cosine of two random directions
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
) -> View:
    """Norm of every token of some contexts over its position, with the largest ones named.

    Where a few tokens stand far above the others, sums of squares describe mostly these few.

    Args:
        norms: norms of the tokens of some contexts.
        window: the positions, half-open.
        marked: position, norm and token of the largest, in descending order of norm.
        state: the state that the norms are of, for the label.
        title: what the figure shows.
        provenance: what the norms were computed from.

    >>> view = token_norms(
    ...     torch.rand(4, 8), (0, 8), [(0, 9.0, "the")], state=1, title="Norms",
    ...     provenance=Provenance(),
    ... )
    >>> view.title
    'Norms'
    """
    from matplotlib.ticker import LogFormatter

    figure, axis = one_axes(None, (WIDTH, 3.2))
    positions = torch.arange(*window)
    # thousands of points as vectors would make the SVG heavy
    cloud = {"s": 3, "color": GREY, "alpha": 0.35, "lw": 0, "rasterized": True}
    axis.scatter(positions.expand_as(norms).flatten(), norms.flatten(), **cloud)
    axis.plot(positions, norms.median(0).values, color=BLUE, lw=1, label="median of the contexts")
    at, largest = [position for position, _, _ in marked], [norm for _, norm, _ in marked]
    axis.scatter(at, largest, s=12, color=VERMILION, zorder=3)
    axis.set_yscale("log")
    # minor ticks have labels too: some where at most one power of ten is in view, all where the
    # axis spans at most half a decade
    for side in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        side(LogFormatter(minor_thresholds=(1.5, 0.5)))
    _name_largest(axis, marked, 3 * float(norms.median()), sum(window) / 2)
    axis.set(xlabel="position", ylabel=f"norm in state {state} (units of the stream)")
    legend_beside(axis, loc="lower left", bbox_to_anchor=(0.0, 1.0))
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


def _name_largest(
    axis: Axes, marked: Sequence[tuple[int, float, str]], least: float, middle: float
) -> None:
    """Write the names of at most eight marked tokens with a norm above ``least``, each on the side
    of its point that faces the ``middle`` of the window, where it stays inside the axes."""
    # a token at one position is named once, at its largest norm, however many contexts hold it
    largest: dict[tuple[int, str], float] = {}
    for position, norm, token in marked:
        largest.setdefault((position, token), norm)
    tall = [(position, norm, token) for (position, token), norm in largest.items() if norm > least]
    above = float("inf")
    for position, norm, token in tall[:8]:
        if norm > 0.8 * above:  # its name would overlap the last one written
            continue
        above = norm
        short = token if len(token) <= 16 else f"{token[:15]}…"
        right = position < middle
        place = {"xytext": (6 if right else -6, 0), "textcoords": "offset points"}
        axis.annotate(
            f"{drawable(visible(short))} at {position}",
            (position, norm),
            ha="left" if right else "right",
            va="center",
            fontsize=7,
            **place,
        )
