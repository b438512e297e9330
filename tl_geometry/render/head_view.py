"""How do heads differ, in any number? The page of a table with one row per layer and head, and the
figure of a sweep: which heads attend by position, which by content, and which are previous-token or
induction heads. The report and notebooks show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from tl_geometry.base import checks
from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw
from tl_geometry.render import parts
from tl_geometry.render.page import Page
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.scores.terms import GROUPS, key_of

FIRST = ("cs_position", "lift")
"""The column shown first is the first of these that the table has."""
PREFIXES = {"cs_": "share of ", "gs_": "gain of "}
"""Prefix of a column -> its meaning in words."""
MOST_BARS = 40
"""Most heads that have a bar each; more are drawn as maps."""
TYPES = {"previous": "previous token", "induction": "induction", "duplicate": "duplicate token"}
"""Head types that the figure names, in words."""
NAMED = 0.4
"""A head-type score or an attention to dropped positions above which it is written out."""
NUMBERED = 160
"""Most cells of a map that have their number written in them."""


def heads(sweep: Result | pd.DataFrame, value: str | None = None, *, title: str = "") -> Page:
    """Map of layers and heads: choose the number that it shows, click a head for its whole row.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads`, or any table with one row per layer and head,
            such as weight geometry.
        value: column shown first, by default the share of position. Full colour is the largest
            absolute value of a column (1 for shares); heads that the table lacks are blank.
        title: title of the page.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> heads(sweep, "induction").title
    'Every number of every head'
    """
    table = draw.frame(sweep, "layer", "head")
    once = len(table) and not table[["layer", "head"]].duplicated().any()
    got = f"{len(table)} rows of {', '.join(map(str, table.columns[:4]))}, ..."
    require(once, "table", expected="one row per layer and head", got=got)
    numeric = [c for c in table.select_dtypes("number") if c not in ("layer", "head")]
    require(len(numeric) > 0, "table", expected="a column of numbers", got=got)
    first = next((n for n in FIRST if n in numeric), numeric[0])
    chosen = first if value is None else checks.choice(key_of(value), numeric, "value")
    layers = sorted(set(table["layer"]))
    grids = np.stack([grid_of(table, name) for name in numeric])
    readable = sweep.readable if isinstance(sweep, Result) else str
    names = [in_words(str(readable(name))) for name in numeric]
    groups = [i for i, name in enumerate(numeric) if name in [f"cs_{g}" for g in GROUPS]]
    words = [
        (in_words(name), grid_of(table, name, "").tolist())
        for name in table.columns
        if name not in (*numeric, "layer", "head")
    ]
    return Page(
        title=title or "Every number of every head",
        caption=f"Each cell is one of {len(table)} heads. Choose the number that is shown; click a "
        "head to keep its row below.",
        parts=[
            parts.maps(
                grids[None],
                names,
                axes=("layer", "head"),
                labels=(list(map(str, layers)), list(map(str, range(grids.shape[-1])))),
                limits=[limit_of(n, g) for n, g in zip(numeric, grids, strict=True)],
                signed=[bool((np.nan_to_num(g) < 0).any()) for g in grids],
                colours=[draw.PARTS.get(n.removeprefix("cs_"), "") for n in numeric],
                together=False,
            ),
            parts.bars(
                "The chosen head",
                groups,
                numbers=[i for i in range(len(names)) if i not in groups],
                words=words,
            ),
        ],
        begin={"map": numeric.index(chosen)},
        height=min(1000, 480 + 22 * len(layers)),
        source=draw.source_of(sweep),
        null="Nulls are numbers of their own: position destroyed, uniform attention, random "
        "subspaces.",
    )


def grid_of(table: pd.DataFrame, column: str, empty: Any = np.nan) -> np.ndarray:
    """A column as ``[layer head]``, empty where the table has no head."""
    layers = sorted(set(table["layer"]))
    kind = float if isinstance(empty, float) else object
    grid = np.full((len(layers), 1 + int(table["head"].max())), empty, dtype=kind)
    for layer, head, value in zip(table["layer"], table["head"], table[column], strict=True):
        grid[layers.index(layer), head] = value if kind is float else str(value)
    return grid


def limit_of(column: str, values: Float[np.ndarray, "..."]) -> float:
    """The value of full colour: the largest absolute value; at most 1 for shares, as those of a
    gain near 0 are huge in single heads."""
    largest = float(np.nan_to_num(abs(values)).max()) or 1.0
    return min(largest, 1.0) if column.startswith(("cs_", "gs_")) else largest


def in_words(column: str) -> str:
    """The name of a column in words.

    >>> in_words("cs_pos-pos"), in_words("dropped_mass")
    ('share of pos-pos', 'dropped mass')
    """
    for start, words in PREFIXES.items():
        if column.startswith(start):
            column = words + column.removeprefix(start)
    return column.replace("_", " ")


def head_shares(sweep: SweepTable, *, share: str = "cs") -> draw.View:
    """Which heads attend by position, which by content? The shares of position, content, token and
    mixed terms of every head, which add up to one, and the type of head that repeated random tokens
    show: a bar for each of at most 40 heads, else maps of layers and heads.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads`.
        share: ``"cs"`` (of the covariance over all cells) or ``"gs"`` (gain: of where attention
            goes).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> head_shares(sweep).title[:20]
    'Position is first in'
    """
    choice(share, ("cs", "gs"), "share")
    columns = {group: f"{share}_{group}" for group in GROUPS}
    table = draw.frame(sweep, "layer", "head", *columns.values())
    bar = len(table) <= MOST_BARS
    figure = _bars(table, columns, share) if bar else _maps(table, columns)
    leading = table[[*columns.values()]].fillna(0.0).to_numpy().argmax(1)
    counts = {group: int((leading == i).sum()) for i, group in enumerate(GROUPS)}
    title = f"Position is first in {counts['position']} of {len(table)} heads, content in "
    title += f"{counts['content']}, token in {counts['token']}, mixed in {counts['mixed']}"
    what = "the variance of its scores" if share == "cs" else "where its attention goes (gain)"
    how = "Each bar is a head, split by" if bar else "Each cell is a head; the draw.panels are"
    uniform = {name: table[f"{name}_uniform"].max() for name in TYPES if name in table}
    chance = [f"{TYPES[name]} {value:.2f}" for name, value in uniform.items()]
    said = f"Uniform attention would score {', '.join(chance)}." if chance else ""
    null = f"{share}_position_null"
    if null in table and table[null].notna().any():
        said += f" With position destroyed, its share is at most {table[null].max():.2f}."
    return draw.view(
        figure,
        sweep,
        title=title,
        caption=f"{how} what holds {what}: terms without content, with content alone, with content "
        "beside a constant (token), and beside position (mixed). Head types are the attention, on "
        "repeated random tokens, to where a head of the type looks.",
        null=said or "No null is drawn: sweep with intervals for the share of destroyed position.",
    )


def _bars(table: pd.DataFrame, columns: Mapping[str, str], share: str) -> Any:
    """A stacked bar for each head: positive shares to the right of 0, negative ones to the left."""
    figure, (axis,) = draw.canvas(size=(draw.WIDTH, 0.22 * len(table) + 1.0))
    names = [head_name(pair) for pair in zip(table["layer"], table["head"], strict=True)]
    right, left = np.zeros(len(table)), np.zeros(len(table))
    for group, column in columns.items():
        values = table[column].fillna(0.0).to_numpy()
        start = np.where(values >= 0, right, left)
        axis.barh(names, values, 0.78, start, color=draw.PARTS[group], label=group)
        right, left = right + values.clip(0), left + values.clip(None, 0)
    low, high = min(0.0, left.min()), max(1.0, right.max())
    text: dict[str, Any] = {"va": "center", "fontsize": 8, "color": draw.INK}
    for y, row in enumerate(table.to_dict("records")):
        score, kind = max((row.get(name, 0.0), words) for name, words in TYPES.items())
        paid = row.get("dropped_mass", 0.0)
        said = [f"{kind} {score:.2f}"] if score > NAMED else []
        said += [f"{paid:.0%} on left-out keys"] if paid > NAMED else []
        axis.text(high + 0.02, y, ", ".join(said), **text)
    what = "variance of the head's scores" if share == "cs" else "head's gain"
    axis.set(xlim=(low, high + 0.6), xlabel=f"share of the {what}")  # room for the words
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axis.spines["left"].set_visible(False)
    axis.axvline(0, color=draw.NULL, lw=0.6)
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.margins(y=0.01)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    return figure


def _maps(table: pd.DataFrame, columns: Mapping[str, str]) -> Any:
    """A map of layers and heads for each group, and for each head type."""
    shown = {**columns, **{words: name for name, words in TYPES.items() if name in table}}
    layers = table["layer"].nunique()
    figure, axes = draw.panels(
        None, len(shown), columns=4, size=(draw.WIDTH / 4, max(2.0, 0.1 * layers))
    )
    for axis, (title, column) in zip(axes, shown.items(), strict=True):
        draw_heads(axis, table, column, title, low=-1.0 if column in columns.values() else 0.0)
    for row in (axes[:4], axes[4:]):
        if row:
            label = "share" if row is axes[:4] else "attention"
            figure.colorbar(row[0].images[0], ax=row, shrink=0.8, label=label)
    return figure


def draw_heads(
    axis: draw.Axes, table: pd.DataFrame, column: str, title: str, *, low: float
) -> None:
    """A map of layers and heads from ``low`` to 1, with numbers where there are few heads."""
    grid = grid_of(table, column)
    draw.image(axis, grid, low, 1.0, aspect="auto")
    axis.set_title(title)
    layers, rows = sorted(set(table["layer"])), draw.whole_ticks(range(len(grid)), 17)
    axis.set(xlabel="head", ylabel="layer", xticks=draw.whole_ticks(range(grid.shape[1]), 9))
    axis.set_yticks(rows, [str(layers[row]) for row in rows])
    if grid.size <= NUMBERED:
        for (row, head), value in np.ndenumerate(grid):
            look = {"fontsize": 6.5, "color": "black" if abs(value) < 0.6 else "white"}
            axis.text(head, row, f"{value:.2f}", ha="center", va="center", **look)
