"""Which wavelengths carry the scores of a head in a rotary model, and how does the head score each
offset of query and key? The figure of rotary planes. The report, the gallery and a notebook draw
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, head_name
from tl_geometry.base.errors import require
from tl_geometry.render import figure as draw
from tl_geometry.render.head_view import draw_heads
from tl_geometry.scores.planes import NEAR, PASS, PlaneTable, default_bands
from tl_geometry.scores.relative import OffsetProfile
from tl_geometry.scores.terms import GROUPS, group_of

MOST = 12
"""Most heads that are drawn one by one; of more, maps of the bands are drawn."""
REACH = 32
"""A profile shows the offsets smaller than this, in tokens."""
NULL = "The planes of a head share all of its score: no null is drawn."


def head_planes(
    planes: PlaneTable,
    profile: OffsetProfile | None = None,
    *,
    heads: Sequence[Head] | Head | None = None,
) -> draw.View:
    """Which rotary planes carry heads. One row for each head: the share of each plane by its
    wavelength, position and content stacked; and, with ``profile``, the mean score at each offset
    with its interval. For more than 12 heads, a map of layers and heads for each band of
    wavelengths.

    Args:
        planes: from a split's or a sweep's ``.planes()``.
        profile: from ``offset_profile(split)`` of the same heads, for the second column.
        heads: some of the heads of ``planes``; by default all, or those of ``profile``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    >>> head_planes(split.planes(), tlg.scores.offset_profile(split)).title
    'Which wavelengths carry L1H0?'
    """
    available = planes.heads if profile is None else profile.heads
    # any layer and head passes here; those that the tables lack are refused by name below
    chosen = available if heads is None else checks.heads(heads, 10**6, 10**6)
    missing = [h for h in chosen if h not in planes.heads or h not in available]
    require(not missing, "heads", expected="heads of the table and the profile", got=missing)
    if len(chosen) > MOST:
        require(profile is None, "heads", expected="at most 12 with a profile", got=len(chosen))
        return _bands(planes)
    columns = 1 if profile is None else 2
    figure, axes = draw.canvas(columns, len(chosen), size=(4.2, 1.9))
    for row, head in enumerate(chosen):
        _draw_shares(axes[row * columns], planes, planes.heads.index(head), head)
        if profile is not None:
            _draw_profile(axes[row * columns + 1], profile, profile.heads.index(head))
    axes[-columns].set_xlabel("wavelength of the plane (tokens)")
    caption = (
        "Each bar is the share of one plane in the covariance of scores, from fast to slow (none: "
        "not rotated)."
    )
    if profile is not None:
        axes[-1].set_xlabel("offset, query minus key (tokens)")
        caption += f" The curve is the mean of {profile.term} at each offset"
        # a few prompts have no interval
        has_interval = bool(profile.low.isfinite().any())
        caption += ", with its 95% interval over prompts." if has_interval else "."
    draw.legend(figure, axes[:columns])
    title = f"Which wavelengths carry {', '.join(map(head_name, chosen))}?"
    return draw.View(
        figure, title=title, caption=caption, null=NULL, source=planes.provenance.line()
    )


def _bands(planes: PlaneTable) -> draw.View:
    """A map of layers and heads for each band of wavelengths that has planes."""
    table, (low, high) = planes.by_band().to_dataframe(), default_bands(planes.length)["middle"]
    words = {
        "near": f"up to {NEAR} tokens",
        "middle": f"{low:g} to {high:g}",
        "far": f"over {high:g}",
        PASS: "not rotated",
    }
    used = [band for band in words if table[f"cs_{band}"].fillna(0.0).any()]
    height = max(2.4, 0.12 * table["layer"].nunique() + 1.0)
    figure, axes = draw.canvas(len(used), size=(7.2 / max(len(used), 2), height), sharey=True)
    for axis, band in zip(axes, used, strict=True):
        draw_heads(axis, table, f"cs_{band}", f"{band}: {words[band]}", low=-1.0)
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.8, label="share of the covariance")
    first = table[[f"cs_{band}" for band in used]].fillna(0.0).to_numpy().argmax(1)
    said = [f"{band} in {int((first == i).sum())}" for i, band in enumerate(used)]
    return draw.view(
        figure,
        planes,
        title=f"The band of wavelengths first by share: {', '.join(said)} of {len(table)} heads",
        caption="Each cell is a head: the share of the covariance of its scores that rotary planes "
        "of these wavelengths carry. The panels add up to one.",
        null=NULL,
    )


def _draw_shares(axis: draw.Axes, planes: PlaneTable, at: int, head: tuple[int, int]) -> None:
    """Draw a bar for each plane of one head, from fast to slow, stacked by group of terms where
    terms have groups: positive shares upwards from 0, negative ones downwards."""
    waves = planes.wavelength[at]
    order = waves.nan_to_num(posinf=torch.inf).argsort()[: int((~waves.isnan()).sum())]
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
    labels = ["none" if waves[i].isinf() else f"{float(waves[i]):.3g}" for i in order[ticks]]
    axis.set_xticks(ticks, labels)
    axis.axhline(0, color="0.3", lw=0.6)
    axis.set(title=head_name(head), ylabel="share")


def _draw_profile(axis: draw.Axes, profile: OffsetProfile, at: int) -> None:
    """Draw the mean score of one head at each offset, with its interval."""
    shown = profile.offsets.abs() < REACH
    rows: list[Any] = [profile.mean, profile.low, profile.high]
    x, (mean, low, high) = profile.offsets[shown], (row[at][shown] for row in rows)
    axis.fill_between(x, low, high, color=draw.POSITION, alpha=0.25, lw=0)
    axis.plot(x, mean, ".-", ms=3, lw=0.9, color=draw.POSITION, label="mean score")
    axis.axhline(0, color="0.3", lw=0.6)
    axis.axvline(1, color=draw.RESIDUAL, lw=0.8, label="the token before")
    axis.set_ylabel("score\n(before softmax)")
