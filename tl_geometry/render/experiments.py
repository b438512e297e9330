"""Views of the training-format experiments: grids over training and inference formats, curves over
training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import positional
from tl_geometry.render.figure import DIVERGING, SEQUENTIAL, View, canvas
from tl_geometry.scores.split import ScoreSplit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#999999")
"""One colour per line (Okabe-Ito), in order of appearance."""


def _cells(
    bases: Mapping[tuple[str, str], Tensor], state: int, size: tuple[float, float]
) -> tuple[Any, list[tuple[Axes, Tensor]]]:
    """A figure with a row per training format and a column per inference format, and each panel
    with its basis."""
    formats = list(dict.fromkeys(trained for trained, _ in bases))
    figure, axes = canvas(len(formats), len(formats), size=size)
    pairs = [(a, b) for a in formats for b in formats]
    for axis, (trained, measured) in zip(axes, pairs, strict=True):
        axis.set_xticks([])
        axis.set_yticks([])
        if trained == formats[0]:
            axis.set_title(f"measured on {measured}", fontsize=8)
        if measured == formats[0]:
            axis.set_ylabel(f"trained on {trained}", fontsize=8)
    return figure, [(axis, bases[pair][state]) for axis, pair in zip(axes, pairs, strict=True)]


def format_planes(bases: Mapping[str, Tensor], state: int, *, half: int, start: int = 0) -> View:
    """Positional bases on their two leading directions, a row per training format (Song & Zhong
    2023, Fig. 6 a to c and 42 to 50).

    ``bases["trained|measured"]`` is ``[state position d_model]``; rows are positions ``start``
    on; from ``half`` on points are crosses.
    """
    figure, cells = _cells(bases, state, (2.1, 2.0))
    image = None
    for axis, pos in cells:
        points = positional.pca_view(pos, linalg.svd(pos).V, 2)
        places = range(start, start + len(pos))
        axis.plot(points[:, 0], points[:, 1], lw=0.4, color="#bbbbbb", zorder=0)
        for marker, part in (("o", slice(0, half - start)), ("x", slice(half - start, None))):
            image = axis.scatter(
                points[part, 0],
                points[part, 1],
                c=places[part],
                cmap=SEQUENTIAL,
                s=9,
                lw=0.8,
                marker=marker,
                vmin=start,
                vmax=places[-1],
            )
    figure.colorbar(image, ax=[axis for axis, _ in cells], label="position", shrink=0.5)
    caption = (
        f"two leading directions of pos at state {state}, each panel to its own scale; crosses: "
        f"from position {half} on"
    )
    return View(
        figure,
        title=f"Positional bases by training and inference format, state {state}",
        caption=caption,
    )


def format_cosines(bases: Mapping[str, Tensor], state: int, *, half: int, start: int = 0) -> View:
    """Cosines between positions, a row per training format; lines mark position ``half``."""
    figure, cells = _cells(bases, state, (2.1, 1.9))
    image = None
    for axis, pos in cells:
        gram = positional.normalized_gram(pos).gram
        image = axis.imshow(
            gram.numpy(), cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest", aspect="auto"
        )
        for line in (axis.axhline, axis.axvline):
            line(half - start - 0.5, color="k", lw=0.5, ls=":")
    figure.colorbar(image, ax=[axis for axis, _ in cells], label="cosine", shrink=0.5)
    caption = (
        f"cosines between positional vectors at state {state}, positions {start} on; dotted: "
        "position "
        f"{half}"
    )
    return View(
        figure,
        title=f"Cosines of position by training and inference format, state {state}",
        caption=caption,
    )


def training_curves(
    rows: Sequence[Mapping[str, Any]], measures: Sequence[str], *, by: str, caption: str
) -> View:
    """Measures against steps of training, a panel each: a line per seed, a colour per value of the
    column ``by``."""
    figure, axes = canvas(min(4, len(measures)), -(-len(measures) // 4), size=(2.7, 2.3))
    kinds = list(dict.fromkeys(row[by] for row in rows))
    for axis, measure in zip(axes, measures, strict=False):
        for kind, colour in zip(kinds, COLOURS, strict=False):
            for i, seed in enumerate(dict.fromkeys(row["seed"] for row in rows)):
                line = [
                    (row["step"], row[measure])
                    for row in rows
                    if row[by] == kind and row["seed"] == seed
                ]
                axis.plot(
                    *zip(*line, strict=True),
                    ".-",
                    ms=4,
                    lw=1,
                    color=colour,
                    label=str(kind) if i == 0 else None,
                )
        axis.set_title(measure.replace("_", " "), fontsize=9)
        axis.set_xlabel("steps")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        fontsize=7,
        title=by,
        title_fontsize=7,
    )
    for axis in axes[len(measures) :]:
        axis.set_visible(False)
    return View(figure, title="Geometry over training", caption=caption)


def scatter(
    rows: Sequence[Mapping[str, Any]], measures: Sequence[str], score: str, *, by: str, caption: str
) -> View:
    """A score against each measure, a panel each, a colour per value of the column ``by``; points
    are joined in the order of steps."""
    figure, axes = canvas(min(3, len(measures)), -(-len(measures) // 3), size=(2.8, 2.3))
    kinds = list(dict.fromkeys(row[by] for row in rows))
    for axis, measure in zip(axes, measures, strict=False):
        for kind, colour in zip(kinds, COLOURS, strict=False):
            for i, seed in enumerate(dict.fromkeys(row["seed"] for row in rows)):
                line = [
                    (row[measure], row[score])
                    for row in rows
                    if row[by] == kind and row["seed"] == seed
                ]
                axis.plot(
                    *zip(*line, strict=True),
                    ".-",
                    ms=5,
                    lw=0.4,
                    color=colour,
                    label=str(kind) if i == 0 else None,
                )
        axis.set_xlabel(measure.replace("_", " "), fontsize=8)
    axes[0].set_ylabel(score.replace("_", " "))
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        fontsize=7,
        title=by,
        title_fontsize=7,
    )
    for axis in axes[len(measures) :]:
        axis.set_visible(False)
    return View(figure, title=f"{score} against geometry", caption=caption)


def score_panels(
    split: ScoreSplit, rows: Sequence[int], *, labels: Sequence[str], title: str
) -> View:
    """The four terms, their sum and the pattern of a few heads on the first context (Song & Zhong
    2023, Fig. 6 d, e and 51 to 56).

    ``rows`` are places in ``split.heads``. Each term is centred over the keys that a query may see
    (a constant per row does nothing), and a head's terms share one colour scale.
    """
    names = [("pos", "pos"), ("pos", "cvec"), ("cvec", "pos"), ("cvec", "cvec")]
    figure, axes = canvas(6, len(rows), size=(1.75, 1.9))
    for i, row in enumerate(rows):
        allowed = split.allowed[row]

        def centred(x: Tensor, allowed: Tensor = allowed) -> Tensor:
            mean = torch.where(allowed, x, 0).sum(-1, keepdim=True) / allowed.sum(
                -1, keepdim=True
            ).clamp(min=1)
            return torch.where(allowed, x - mean, torch.nan)

        panels = [centred(split.terms[name][0, row]) for name in names] + [
            centred(split.total()[0, row])
        ]
        limit = max(float(p.nan_to_num().abs().amax()) for p in panels) or 1.0
        for axis, values, name in zip(
            axes[6 * i :], panels, [*("-".join(n) for n in names), "score"], strict=False
        ):
            axis.imshow(
                values.numpy(), cmap=DIVERGING, vmin=-limit, vmax=limit, interpolation="nearest"
            )
            axis.set_title(name, fontsize=8)
        axes[6 * i + 5].imshow(
            split.pattern()[0, row].numpy(),
            cmap=SEQUENTIAL,
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )
        axes[6 * i + 5].set_title("pattern", fontsize=8)
        axes[6 * i].set_ylabel("L{}H{}".format(*split.heads[row]), fontsize=9)
        for axis in axes[6 * i : 6 * i + 6]:
            axis.set_xticks(range(len(labels)), labels, fontsize=5)
            axis.set_yticks(range(len(labels)), labels, fontsize=5)
    caption = (
        f"terms centred over allowed keys, one colour scale per head; {split.provenance.line()}"
    )
    return View(figure, title=title, caption=caption)


def state_cosines(
    basis: PositionContext, *, labels: Sequence[str] = (), title: str = "Cosines of position"
) -> View:
    """Cosines between positional vectors, a panel per state; ``labels`` name the positions from the
    first on."""
    figure, axes = canvas(len(basis.states), size=(1.9, 2.0))
    image = None
    for axis, state, pos in zip(axes, basis.states, basis.pos, strict=True):
        image = axis.imshow(
            positional.normalized_gram(pos).gram.numpy(),
            cmap=DIVERGING,
            vmin=-1,
            vmax=1,
            interpolation="nearest",
        )
        axis.set_title(f"state {state}", fontsize=8)
        if labels:
            shown = labels[slice(*basis.window)]
            axis.set_xticks(range(len(shown)), shown, fontsize=5)
            axis.set_yticks(range(len(shown)), shown, fontsize=5)
    figure.colorbar(image, ax=axes, shrink=0.7)  # type: ignore[arg-type]
    return View(
        figure,
        title=title,
        caption=f"tokens of one context name the positions; {basis.provenance.line()}",
    )
