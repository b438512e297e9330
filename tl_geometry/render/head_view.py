"""How do heads differ, in any number? The page of a table with one row per layer and head, and the
figures of a sweep: which heads attend by position, which by content, which are previous-token or
induction heads, and which rotary wavelengths carry them. The report and notebooks show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from tl_geometry.base import checks
from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw
from tl_geometry.render import parts
from tl_geometry.render.page import Page
from tl_geometry.scores.planes import PlaneTable
from tl_geometry.scores.relative import OffsetProfile
from tl_geometry.scores.share_table import SweepTable
from tl_geometry.scores.terms import GROUPS, group_of, key_of

FIRST = ("cs_position", "lift")
"""The column shown first is the first of these that the table has."""
MOST = 40
"""Most heads whose bars have their names; of more, the layers are named."""
TYPES = {"previous": "previous token", "induction": "induction", "duplicate": "duplicate token"}
"""Head types that the figure names, in words."""
NAMED = 0.4
"""A head-type score or an attention to dropped positions above which it is written out."""
ONE_BY_ONE, REACH = 6, 32
"""Most heads whose planes are drawn by default, and offsets (in tokens) below which a profile is
shown."""


def heads(sweep: Result | pd.DataFrame, value: str | None = None, *, title: str = "") -> Page:
    """Map of layers and heads: choose the number that it shows, click a head for its whole row.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads`, or any table with one row per layer and head,
            such as weight geometry.
        value: column shown first, by default the share of position in a sweep. Full colour is the
            largest absolute value of a column (at most 1 for shares); heads that the table lacks
            are blank.
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
    if "feature" in table:  # of a readout: the leading feature of each head
        table = table.drop_duplicates(["layer", "head"])
    once = len(table) and not table[["layer", "head"]].duplicated().any()
    got = f"{len(table)} rows of {', '.join(map(str, table.columns[:4]))}, ..."
    require(once, "table", expected="one row per head", got=got, instead="the rows of one part")
    numeric = [c for c in table.select_dtypes("number") if c not in ("layer", "head")]
    require(len(numeric) > 0, "table", expected="a column of numbers", got=got)
    first = next((n for n in FIRST if n in numeric), numeric[0])
    chosen = first if value is None else choice(key_of(value), numeric, "value")
    layers = sorted(set(table["layer"]))
    grids = np.stack([grid_of(table, name).to_numpy(float) for name in numeric])
    largest = np.nan_to_num(abs(grids)).max((1, 2))
    largest[largest == 0] = 1.0
    # shares of a gain near 0 are huge in single heads, and would pale all others
    shares = [name.startswith(("cs_", "gs_")) for name in numeric]
    readable = sweep.readable if isinstance(sweep, Result) else str
    names = [in_words(str(readable(name))) for name in numeric]
    groups = [i for i, name in enumerate(numeric) if name in [f"cs_{g}" for g in GROUPS]]
    others = [i for i in range(len(names)) if i not in groups]
    texts = [name for name in table.columns if name not in (*numeric, "layer", "head")]
    cells = [grid_of(table, name).astype(object).fillna("").astype(str) for name in texts]
    words = [(in_words(n), grid.values.tolist()) for n, grid in zip(texts, cells, strict=True)]
    return Page(
        title=title or "Every number of every head",
        caption=f"Each cell is one of {len(table)} heads. Choose the number that is shown; click a "
        "head to keep its row below.",
        parts=[
            parts.maps(
                grids[None],
                names=names,
                rows=[""],
                axes=("layer", "head"),
                labels=[[str(l) for l in layers], [str(h) for h in range(grids.shape[-1])]],
                limits=np.where(shares, largest.clip(max=1.0), largest),
                colours=[draw.PARTS.get(n.removeprefix("cs_"), "") for n in numeric],
                together=False,
            ),
            parts.bars("The chosen head", groups, numbers=others, words=words),
        ],
        begin={"map": numeric.index(chosen)},
        height=min(1000, 480 + 22 * len(layers)),
        source=draw.source_of(sweep),
        null=getattr(sweep, "chance", "")
        or "Nulls, where there are any, are numbers of their own.",
    )


def grid_of(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column by layers and heads, NaN where the table has no head."""
    grid = table.pivot(index="layer", columns="head", values=column)
    return grid.reindex(columns=range(1 + max(grid.columns)))


def in_words(column: str) -> str:
    """The name of a column in words.

    >>> in_words("cs_pos-pos"), in_words("dropped_mass")
    ('share of pos-pos', 'dropped mass')
    """
    return column.replace("cs_", "share of ").replace("gs_", "gain of ").replace("_", " ")


def head_shares(sweep: SweepTable, *, share: str = "cs") -> draw.View:
    """Which heads attend by position, which by content? A bar for each head: the shares of its
    position, content, token and mixed terms, which add up to one, and (of at most 40 heads) the
    type of head that repeated random tokens show.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads`.
        share: ``"cs"`` (of the covariance over all cells) or ``"gs"`` (gain: of where attention
            goes).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> head_shares(sweep).title[:14]
    'What is first:'
    """
    what = {"cs": "variance of its scores", "gs": "gain of its pattern"}
    said = what[choice(share, tuple(what), "share")]
    columns = {group: f"{share}_{group}" for group in GROUPS}
    table = draw.frame(sweep, "layer", "head", *columns.values())
    leading = table[[*columns.values()]].dropna().to_numpy().argmax(1)
    counts = [f"{group} in {(leading == i).sum()}" for i, group in enumerate(GROUPS)]
    caption = f"Each bar is a head: what holds the {said}, terms without content (position), with "
    caption += "content alone, beside a constant (token) and beside position (mixed)."
    null = "No null of shares is drawn: that of cs is measured with intervals=True."
    if f"{share}_position_null_95" in table:
        largest = table[f"{share}_position_null_95"].max()
        null = f"With position destroyed, its share is at most {largest:.2f} in 95% of draws."
    if len(table) <= MOST and table[[*TYPES]].max(axis=None) > NAMED:  # some have their type drawn
        caption += f" Beside it stands a head type over {NAMED}: the attention, on repeated random "
        caption += "tokens, to where a head of the type looks."
        chance = [f"{TYPES[name]} {table[f'{name}_uniform'].max():.2f}" for name in TYPES]
        null += f" Uniform attention would score {', '.join(chance)}."
    if len(table) <= MOST and table[["dropped_mass"]].max(axis=None) > NAMED:
        caption += " Left-out keys are those before the window, such as BOS."
    return draw.view(
        _bars(table, columns, said),
        sweep,
        title=f"What is first: {', '.join(counts)} of {len(table)} heads",
        caption=caption,
        null=null,
    )


def _bars(table: pd.DataFrame, columns: Mapping[str, str], said: str) -> draw.Figure:
    """A stacked bar for each head: positive shares to the right of 0, negative ones to the left."""
    thick = min(0.22, 8 / len(table))  # inches; at most a page in all
    figure, (axis,) = draw.panels(None, size=(draw.WIDTH, thick * len(table) + 1.0))
    places, right, left = np.arange(len(table)), np.zeros(len(table)), np.zeros(len(table))
    for group, column in columns.items():
        values = table[column].fillna(0.0).to_numpy()
        start = np.where(values >= 0, right, left)
        axis.barh(places, values, 0.78, start, color=draw.PARTS[group], label=group)
        right, left = right + values.clip(0), left + values.clip(None, 0)
    rows, few = table.to_dict("records"), len(table) <= MOST
    named = places if few else places[table["layer"].diff().ne(0)]
    names = [checks.head_name((rows[i]["layer"], rows[i]["head"])) for i in named]
    axis.set_yticks(named, names)
    low, high = min(0.0, left.min()), max(1.0, right.max())
    for y, row in enumerate(rows if few else ()):
        score, kind = max((row[name], words) for name, words in TYPES.items())
        notes = [f"{kind} {score:.2f}"] if score > NAMED else []
        if row["dropped_mass"] > NAMED:
            notes.append(f"{row['dropped_mass']:.0%} on left-out keys")
        axis.text(high + 0.02, y, ", ".join(notes), va="center", fontsize=8, color=draw.INK)
    axis.set(xlim=(low, high + (0.6 if few else 0.0)), xlabel=f"share of the {said}")
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axis.axvline(0, color=draw.NULL, lw=0.6)
    axis.tick_params(length=0)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    draw.legend(figure, [axis])
    return figure


def head_planes(
    planes: PlaneTable, profile: OffsetProfile | None = None, *, heads: Any = None
) -> draw.View:
    """Which rotary planes carry heads? One row for each head: the share of each plane by its
    wavelength, position and content stacked; and, with ``profile``, the mean score at each offset
    with its interval. The page ``heads(planes.by_band())`` maps the bands of all heads.

    Args:
        planes: from a split's or a sweep's ``.planes()``.
        profile: from ``offset_profile(split)`` of the same heads, for the second column.
        heads: some of the heads of ``planes``; by default those of ``profile``, or the six in which
            a single plane has the largest share.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    >>> head_planes(split.planes(), tlg.scores.offset_profile(split)).title
    'Which wavelengths carry L1H0?'
    """
    largest = planes.total_cs.nan_to_num().amax(1).argsort(descending=True, stable=True)
    chosen = [planes.heads[i] for i in largest[:ONE_BY_ONE]] if profile is None else profile.heads
    # any layer and head passes here; those that the tables lack are refused by name below
    chosen = chosen if heads is None else checks.heads(heads, 10**6, 10**6)
    known = planes.heads if profile is None else profile.heads
    missing = [h for h in chosen if h not in known or h not in planes.heads]
    require(not missing, "heads", expected="heads of the table and the profile", got=missing)
    columns = 1 if profile is None else 2
    figure, axes = draw.panels(None, columns * len(chosen), columns=columns, size=(4.2, 1.9))
    for row, head in enumerate(chosen):
        _draw_shares(axes[row * columns], planes, planes.heads.index(head))
        if profile is not None:
            _draw_profile(axes[row * columns + 1], profile, profile.heads.index(head))
    axes[-columns].set_xlabel("wavelength of the plane (tokens)")
    caption = "Each bar is the share of a plane in the covariance of scores (none: not rotated)."
    if profile is not None:
        axes[-1].set_xlabel("offset, query minus key (tokens)")
        caption += f" The curve is the mean of {profile.term} at offsets below {REACH}, with its "
        caption += "95% interval over prompts (none below 10)."
    draw.legend(figure, axes[:columns])
    return draw.view(
        figure,
        planes,
        title=f"Which wavelengths carry {', '.join(map(checks.head_name, chosen))}?",
        caption=caption,
        null="The planes of a head share all of its score: no null is drawn.",
    )


def _draw_shares(axis: draw.Axes, planes: PlaneTable, at: int) -> None:
    """Draw a bar for each plane of one head, from fast to slow, stacked by group of terms where
    terms have groups: positive shares upwards from 0, negative ones downwards."""
    waves = planes.wavelength[at]
    # planes that this head lacks are NaN at the end, behind any that is not rotated (infinite)
    last = waves.nan_to_num(nan=torch.inf, posinf=torch.inf).argsort(stable=True)
    order = last[: int((~waves.isnan()).sum())]
    up, down = np.zeros(len(order)), np.zeros(len(order))
    groups = [group_of(term) or "all terms" for term in planes.terms]
    for name in (group for group in (*GROUPS, "all terms") if group in groups):
        member = torch.tensor([group == name for group in groups])
        share = planes.cs[at][order][:, member].nan_to_num().sum(-1).double().numpy()
        colour = draw.PARTS.get(name, draw.INK)
        axis.bar(range(len(order)), share, 0.8, np.where(share >= 0, up, down), color=colour)
        axis.plot([], [], "s", color=colour, label=name)  # an entry of the legend
        up, down = up + share.clip(0), down + share.clip(None, 0)
    ticks = draw.some(range(len(order)), 7)
    axis.set_xticks(ticks, [_length(float(waves[i])) for i in order[ticks]])
    axis.axhline(0, color="0.3", lw=0.6)
    axis.set(title=checks.head_name(planes.heads[at]), ylabel="share")


def _length(wave: float) -> str:
    """A wavelength in few characters: seven stand below a panel."""
    if math.isinf(wave):
        return "none"
    return f"{wave:.3g}" if wave < 1000 else f"{wave / 1000:.3g}k"


def _draw_profile(axis: draw.Axes, profile: OffsetProfile, at: int) -> None:
    """Draw the mean score of one head at each offset, with its interval."""
    shown = profile.offsets.abs() < REACH
    x = profile.offsets[shown]
    mean, low, high = (row[at][shown] for row in (profile.mean, profile.low, profile.high))
    axis.fill_between(x, low, high, color=draw.LINES[0], alpha=0.25, lw=0)
    axis.plot(x, mean, ".-", ms=3, lw=0.9, color=draw.LINES[0], label="mean score")
    axis.axhline(0, color="0.3", lw=0.6)
    axis.axvline(1, color=draw.CONTROL, lw=0.8, label="the token before")
    axis.set_ylabel("score\n(before softmax)")
