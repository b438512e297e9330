"""How do heads differ in a number? A map of layers and heads for any column of a table with one row
per head: the interactive page, its image, and the colour scale. The report and notebooks show the
page; :mod:`tl_geometry.render.sweeps` draws several maps side by side."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Result
from tl_geometry.render.figure import View, draw_matrix, drawable, one_axes, whole_ticks
from tl_geometry.render.page import PageView, caption_height, rounded
from tl_geometry.scores.terms import key_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST = ("cs_position", "lift")
"""The column shown first is the first of these that the table has."""
NULL = "Nulls are numbers of their own: position destroyed, uniform attention, random subspaces."
PARTS = {"cs_": "share of ", "gs_": "gain of ", "es_": "energy of "}
"""Prefix of a column -> its meaning in words."""
READ = 24
"""How many numbers of a head the page shows unfolded: four rows of six."""
NUMBERED = 160
"""Most cells of a map that have their number written in them."""
ENDS = (10, 12, 16, 20, 24, 30, 40, 50, 60, 80, 100)
"""Two digits of the ends of a colour scale. Most have a quarter that is a round number too."""


def heads(sweep: Result, value: str | None = None, *, title: str | None = None) -> PageView:
    """Map of layers and heads: choose the number that it shows, click a head for its whole row.
    A line of code gives the number of the head under the mouse; ``table`` in it is ``sweep``.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads`, or any result with one row per layer and head,
            such as weight geometry.
        value: column shown first, by default the share of position. The colour scale of a column
            ends at its largest absolute value, rounded up (:func:`scale`). NaN is hatched; heads
            that the table lacks are blank.
        title: title of the page.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> heads(sweep, "induction").title
    'Every number of every head'
    """
    pairs, columns = numbers(sweep)
    chosen = _chosen(value, columns)
    readable = {name: str(sweep.readable(name)) for name in columns}
    # columns of text: shown in the row of a head, but not on the map
    words = {
        name: [str(sweep.readable(row[i])) for row in sweep.rows()]
        for i, name in enumerate(sweep.columns())
        if name not in ("layer", "head", *columns)
    }
    layers, count = sorted({l for l, _ in pairs}), 1 + max(h for _, h in pairs)
    # pixels, as heads.js draws: a cell is wide enough for a click, a map no wider than a page of
    # text; rows are 22 high; the rest is room for the labels of layers and heads
    cell = min(46, max(14, 640 // count))
    width, height = max(560, 60 + count * cell + 20), len(layers) * 22 + 42
    caption = (
        f"Each cell is one of {len(pairs)} heads. Choose the number that is shown; click a head "
        "for its whole row, nulls among it."
    )
    data = {
        "heads": [[layers.index(l), h] for l, h in pairs],
        "layers": layers,
        "count": count,
        "cell": cell,
        "canvas": [width, height],
        "columns": {
            readable[name]: {
                "at": list(sweep.columns()).index(name),
                "values": [rounded(v) for v in values.tolist()],
                "scale": scale(name, values),
            }
            for name, values in columns.items()
        },
        "words": words,
        "said": {name: in_words(name) for name in (*words, *readable.values())},
        "read": READ,
        "value": readable[chosen],
    }
    # 708 is the width of a page of text, 24 its padding; numbers stand in rows of six, 34 high,
    # below a line of code
    return PageView(
        "heads",
        data,
        title=title or "Every number of every head",
        caption=caption,
        width=max(width, 708) + 24,
        height=172 + height + 34 * READ // 6 + caption_height(f"{caption} {NULL}"),
        image=functools.partial(head_grid, sweep, chosen),
        source=sweep.provenance.line(),
        null=NULL,
    )


def head_grid(sweep: Result, value: str | None = None) -> View:
    """The image of :func:`heads`, with the number in each cell of a small map."""
    pairs, columns = numbers(sweep)
    name = _chosen(value, columns)
    rows, count = len({l for l, _ in pairs}), 1 + max(h for _, h in pairs)
    # inches: cells with a number in them are larger; above 16 heads the width stays that of a page
    tall = 0.34 if rows * count <= NUMBERED else 0.2
    wide = 0.5 * count + 1.8 if count <= 16 else 9.0
    figure, axis = one_axes(None, (wide, tall * rows + 1.2))
    shown = in_words(str(sweep.readable(name)))
    draw_map(axis, pairs, columns[name], "", *scale(name, columns[name]))
    axis.set_ylabel("layer")
    map_bar([axis])
    return View(
        figure,
        title=f"Every head: {shown}",
        caption=f"Each cell is a head: its {shown}.",
        null=NULL,
        source=sweep.provenance.line(),
    )


def in_words(column: str) -> str:
    """The name of a column in words.

    >>> in_words("cs_pos-pos"), in_words("dropped_mass")
    ('share of pos-pos', 'dropped mass')
    """
    for start, words in PARTS.items():
        if column.startswith(start):
            column = words + column.removeprefix(start)
    return column.replace("_", " ")


def numbers(table: Result) -> tuple[list[tuple[int, int]], dict[str, Float[Tensor, " head"]]]:
    """The heads of a table with one row for each, and its numeric columns."""
    names = list(table.columns()) if isinstance(table, Result) else []
    if not {"layer", "head"} <= set(names):
        fail(
            "heads",
            expected="a table with a row for each layer and head",
            got=type(table).__name__,
            instead="sweep_heads(model, tokens, basis) or weight_geometry(model, basis)",
        )
    columns = dict(zip(names, zip(*table.rows(), strict=True), strict=False))
    pairs = list(zip(columns.pop("layer", ()), columns.pop("head", ()), strict=True))
    got = f"{type(table).__name__} of {', '.join(names[:4])}, ..."
    single = len(set(pairs)) == len(pairs) > 0
    require(single, "table", expected="one row per layer and head", got=got)
    numeric = {
        name: torch.tensor(values, dtype=torch.float64)
        for name, values in columns.items()
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    }
    require(len(numeric) > 0, "table", expected="a column of numbers", got=got)
    return [(int(str(layer)), int(str(head))) for layer, head in pairs], numeric


def scale(name: str, values: Float[Tensor, "..."]) -> tuple[float, float]:
    """Ends of the colour scale: the largest absolute value, rounded up, and 0; or its negative, for
    columns with a negative value and for covariance and gain shares. Shares beyond -1 and 1 are
    beyond the scale.

    >>> values = torch.tensor([0.05, 0.23])
    >>> scale("induction", values), scale("cs_pos-pos", values), scale("loss_change", -values)
    ((0.0, 0.24), (-0.24, 0.24), (-0.24, 0.24))
    >>> scale("gs_pos-pos", 10 * values)
    (-1.0, 1.0)
    """
    finite = torch.where(torch.isfinite(values), values, 0.0)
    high = float(finite.abs().max()) or 1.0
    unit = 10.0 ** (math.floor(math.log10(high)) - 1)
    # three digits: 12 * 0.1 is 1.2000000000000002
    ends = (float(f"{digits * unit:.3g}") for digits in ENDS)
    high = next(end for end in ends if high <= end * (1 + 1e-9))
    share = name.startswith(("cs_", "gs_"))
    if share:
        # shares of a gain near 0 are huge in single heads, and would pale all others
        high = min(high, 1.0)
    return (-high if share or bool((finite < 0).any()) else 0.0, high)


def draw_map(
    axis: Axes,
    heads: Sequence[tuple[int, int]],
    values: Tensor,
    title: str,
    low: float,
    high: float,
) -> None:
    """Draw a map on one axes: signed colours where ``low`` is negative, blank where there is no
    head or no number."""
    layers = sorted({l for l, _ in heads})
    grid = torch.full((len(layers), 1 + max(h for _, h in heads)), torch.nan, dtype=torch.float64)
    for value, (layer, head) in zip(values.tolist(), heads, strict=True):
        grid[layers.index(layer), head] = value
    draw_matrix(axis, grid, low, high, aspect="auto")
    axis.set_title(drawable(title), fontsize=9)
    name_heads(axis, layers, grid.shape[1])
    for row, column in torch.isfinite(grid).nonzero().tolist() if grid.numel() <= NUMBERED else ():
        value = float(grid[row, column])
        # black on bright cells: the middle of the diverging map, the upper half of the other
        bright = abs(value) < 0.6 * high if low < 0 else value > (low + high) / 2
        # + 0.0 turns a negative zero into zero
        text = f"{round(value, 2) + 0.0:.2f}" if abs(value) < 10 else f"{value:.3g}"
        look = {"fontsize": 6.5, "color": "black" if bright else "white"}
        axis.text(column, row, text, ha="center", va="center", **look)


def map_bar(axes: Sequence[Axes], label: str = "") -> None:
    """The colour bar of maps of one scale: its ends have their numbers, and are pointed where a
    value lies beyond them."""
    images = [axis.images[0] for axis in axes]
    low, high = images[0].get_clim()
    values = np.abs([np.asarray(image.get_array()) for image in images])
    beyond = bool((values > high * (1 + 1e-9)).any())
    ticks = [low + quarter * (high - low) / 4 for quarter in range(5)]
    bar = {"ticks": ticks, "extend": "both" if beyond else "neither"}
    axes[0].figure.colorbar(images[0], ax=axes, shrink=0.8, label=label, **bar)


def name_heads(axis: Axes, layers: Sequence[int], count: int) -> None:
    """Write the numbers of heads below a map and those of layers beside it, at most 17 of each, so
    that they do not overlap."""
    axis.set_xlabel("head")
    axis.set_xticks(whole_ticks(range(count), 17))
    rows = whole_ticks(range(len(layers)), 17)
    axis.set_yticks(rows, [str(layers[row]) for row in rows])


def _chosen(value: str | None, columns: dict[str, Tensor]) -> str:
    first = next((n for n in FIRST if n in columns), next(iter(columns)))
    return first if value is None else checks.choice(key_of(value), list(columns), "value")
