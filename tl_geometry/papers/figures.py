"""What do the experiments on training formats draw? Grids of bases over training and inference
formats, curves over training, and cosines of positions. :mod:`~tl_geometry.papers.random_tokens`,
:mod:`~tl_geometry.papers.arithmetic` and :mod:`~tl_geometry.papers.characters` call these
functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.measures import positional
from tl_geometry.render.figure import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PINK,
    SEQUENTIAL,
    VERMILION,
    View,
    canvas,
    draw_matrix,
    legend_outside,
    no_ticks,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, VERMILION, GREEN, PINK, AMBER, GREY)
"""One colour per line, in order of appearance."""
SEEDS = "Lines of one colour differ by their seed alone: that spread is chance."


Bases = Mapping[tuple[str, str], Float[Tensor, "state position d_model"]]
"""``bases[trained, measured]`` is the basis of a model trained on one format, measured on
another."""


def format_planes(bases: Bases, state: int, *, half: int, start: int = 0, source: str = "") -> View:
    """Positional bases on their two leading directions, a row per training format and a column per
    inference format (Song & Zhong 2023, Fig. 6 a to c and 42 to 50).

    Args:
        bases: by training and inference format.
        state: the state that is drawn.
        half: position where the random half begins; crosses mark positions from here on.
        start: position of the first row of a basis.
        source: what the bases were computed from, for the foot of the figure.

    >>> import torch
    >>> formats = ("text", "noise")
    >>> bases = {(a, b): torch.randn(2, 8, 4) for a in formats for b in formats}
    >>> format_planes(bases, 1, half=4).title
    'Positional bases by training and inference format, state 1'
    """
    formats = list(dict.fromkeys(trained for trained, _ in bases))
    figure, axes = canvas(len(formats), len(formats), size=(2.1, 2.0))
    dots: Any = None
    for axis, (trained, measured) in zip(axes, product(formats, formats), strict=True):
        dots = _draw_plane(axis, bases[trained, measured][state], half, start)
        no_ticks(axis)
        if trained == formats[0]:
            axis.set_title(f"measured on {measured}", fontsize=8)
        if measured == formats[0]:
            axis.set_ylabel(f"trained on {trained}", fontsize=8)
    figure.colorbar(dots, ax=axes, label="position", shrink=0.5)
    return View(
        figure,
        title=f"Positional bases by training and inference format, state {state}",
        caption=f"Each panel shows the two leading directions of pos at state {state} to its own "
        f"scale; crosses are positions from {half} on.",
        null="No null is drawn: formats that a model was not trained on are the comparison.",
        source=source,
    )


def _draw_plane(axis: Axes, pos: Float[Tensor, "position d_model"], half: int, start: int) -> Any:
    """Draw one basis on its two leading directions; return the points, for the colour bar."""
    points = pos @ linalg.svd(pos).V[:, :2]
    positions = range(start, start + len(pos))
    axis.plot(points[:, 0], points[:, 1], lw=0.4, color="#bbbbbb", zorder=0)
    # one colour scale for both halves, so that a colour means the same position in every panel
    limits: dict[str, Any] = {"cmap": SEQUENTIAL, "vmin": start, "vmax": positions[-1]}
    for marker, half_rows in (("o", slice(0, half - start)), ("x", slice(half - start, None))):
        x, y = points[half_rows, 0], points[half_rows, 1]
        dots = axis.scatter(x, y, c=positions[half_rows], s=9, lw=0.8, marker=marker, **limits)
    return dots


def training_curves(
    rows: Sequence[Mapping[str, Any]],
    measures: Sequence[str],
    *,
    by: str,
    caption: str,
    source: str = "",
) -> View:
    """Measures against steps of training: a panel per measure, a line per seed, and a colour per
    value of the column ``by``.

    Args:
        rows: measurements, each with ``"seed"``, ``"step"``, the column ``by`` and the measures.
        measures: names of the measures.
        by: the column that colours tell apart.
        caption: what a reader must know about the rows.
        source: what they were measured on, for the foot of the figure.

    >>> rows = [{"seed": 0, "step": s, "task": "sums", "rank": s} for s in (0, 10)]
    >>> training_curves(rows, ["rank"], by="task", caption="").title
    'Geometry over training'
    """
    columns = min(4, len(measures))
    figure, axes = panels(None, len(measures), "measure", columns=columns, size=(2.7, 2.3))
    groups = dict.fromkeys(row[by] for row in rows)
    colours = dict(zip(groups, cycle(COLOURS), strict=False))  # cycles never end
    lines = list(dict.fromkeys((row[by], row["seed"]) for row in rows))
    for axis, measure in zip(axes, measures, strict=True):
        for group, seed in lines:
            points = [row for row in rows if (row[by], row["seed"]) == (group, seed)]
            steps, values = [row["step"] for row in points], [row[measure] for row in points]
            axis.plot(steps, values, ".-", ms=4, lw=1, color=colours[group], label=str(group))
        axis.set_title(measure.replace("_", " "), fontsize=9)
        axis.set_xlabel("steps")
    legend_outside(figure, axes[:1])
    title = "Geometry over training"
    return View(figure, title=title, caption=caption, null=SEEDS, source=source)


def state_cosines(
    basis: PositionContext, *, labels: Sequence[str] = (), title: str = "Cosines of position"
) -> View:
    """Cosines between positional vectors, a panel per state.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        labels: names of all positions from 0 on, such as the tokens of one context; positions
            outside the window are left out.
        title: of the figure.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> state_cosines(basis).title
    'Cosines of position'
    """
    require_basis(basis)
    figure, axes = canvas(len(basis.states), size=(1.9, 2.0))
    image = None
    for axis, state, pos in zip(axes, basis.states, basis.pos, strict=True):
        # cosines have one scale in all figures, so that states can be compared
        image = draw_matrix(axis, positional.normalized_gram(pos), -1.0, 1.0)
        axis.set_title(f"state {state}", fontsize=8)
        if labels:
            names = labels[slice(*basis.window)]
            axis.set_xticks(range(len(names)), names, fontsize=5)
            axis.set_yticks(range(len(names)), names, fontsize=5)
    figure.colorbar(image, ax=axes, shrink=0.7)  # type: ignore[arg-type]
    named = "; the tokens of one context name them" if labels else ""
    return View(
        figure,
        title=title,
        caption=f"Each cell is the cosine of two positions{named}.",
        null="No null is drawn: the measures of position have theirs.",
        source=basis.provenance.line(),
    )
