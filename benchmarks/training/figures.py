"""What do the experiments on training formats draw? Grids of bases over training and inference
formats, curves over training, cosines of positions, and maps of one head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from typing import Any

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

import tl_geometry as tlg
from tl_geometry.base import linalg

COLOURS = ("tab:blue", "tab:red", "tab:green", "tab:pink", "tab:orange", "tab:grey")
"""One colour per line, in order of appearance. Lines of one colour differ by their seed alone."""
Bases = Mapping[tuple[str, str], Float[Tensor, "state position d_model"]]
"""``bases[trained, measured]`` is the basis of a model trained on one format, measured on
another."""


def canvas(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    """A figure, and its axes row by row; it needs no display."""
    figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def format_planes(bases: Bases, state: int, *, half: int, start: int = 0) -> Figure:
    """Positional bases on their two leading directions, a row per training format and a column per
    inference format (Song & Zhong 2023, Fig. 6 a to c and 42 to 50). Crosses mark positions from
    ``half`` on; ``start`` is the position of the first row of a basis."""
    formats = list(dict.fromkeys(trained for trained, _ in bases))
    figure, axes = canvas(len(formats), len(formats), (2.3, 2.2))
    for axis, (trained, measured) in zip(axes, product(formats, formats), strict=True):
        pos = bases[trained, measured][state]
        x, y = (pos @ linalg.svd(pos).V[:, :2]).T.numpy()
        positions = range(start, start + len(pos))
        # one colour scale for both halves, so that a colour means the same position everywhere
        limits: dict[str, Any] = {"cmap": "viridis", "vmin": start, "vmax": positions[-1], "s": 9}
        for marker, part in (("o", slice(0, half - start)), ("x", slice(half - start, None))):
            axis.scatter(x[part], y[part], c=positions[part], marker=marker, **limits)
        axis.set_title(f"trained on {trained},\nmeasured on {measured}", fontsize=7)
        axis.set_xticks([])
        axis.set_yticks([])
    return figure


def training_curves(rows: Sequence[dict[str, Any]], measures: Sequence[str], by: str) -> Figure:
    """Measures against steps of training: a panel per measure, a line per seed, and a colour per
    value of the column ``by``. Rows have ``"seed"`` and ``"step"`` too."""
    columns = min(4, len(measures))
    figure, axes = canvas(-(-len(measures) // columns), columns, (2.7, 2.3))
    colours = dict(zip(dict.fromkeys(row[by] for row in rows), cycle(COLOURS), strict=False))
    lines = list(dict.fromkeys((row[by], row["seed"]) for row in rows))
    for axis, measure in zip(axes, measures, strict=False):  # the last row may have empty panels
        for group, seed in lines:
            points = [row for row in rows if (row[by], row["seed"]) == (group, seed)]
            steps, values = [row["step"] for row in points], [row[measure] for row in points]
            axis.plot(steps, values, ".-", color=colours[group], label=str(group))
        axis.set_title(measure.replace("_", " "), fontsize=9)
        axis.set_xlabel("steps")
    axes[0].legend(fontsize=7)
    return figure


def state_cosines(basis: tlg.PositionContext, labels: Sequence[str] = ()) -> Figure:
    """Cosines between positional vectors, a panel per state; ``labels`` name all positions from 0
    on, and those outside the window are left out."""
    figure, axes = canvas(1, len(basis.states), (2.2, 2.2))
    for axis, state, pos in zip(axes, basis.states, basis.pos, strict=True):
        unit = normalize(pos, dim=-1)
        axis.imshow((unit @ unit.T).numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
        axis.set_title(f"state {state}", fontsize=8)
        names = labels[slice(*basis.window)]
        if names:
            axis.set_xticks(range(len(names)), names, fontsize=5)
            axis.set_yticks(range(len(names)), names, fontsize=5)
    return figure


def head_maps(terms: Mapping[str, Float[Tensor, "query key"]], title: str) -> Figure:
    """Terms of the scores of one head on one row, a panel each, on one scale."""
    figure, axes = canvas(1, len(terms), (2.4, 2.4))
    most = max(float(scores.abs().max()) for scores in terms.values())
    for axis, (name, scores) in zip(axes, terms.items(), strict=True):
        axis.imshow(scores.tril().numpy(), cmap="RdBu_r", vmin=-most, vmax=most)
        axis.set_title(name, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure
