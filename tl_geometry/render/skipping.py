"""A figure of skipped layers: what each skip costs, by the map that stands in for the blocks. The
report, the gallery and a notebook draw it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tl_geometry.flow.skipping import SkipMap
from tl_geometry.render.figure import (
    WIDTH,
    View,
    canvas,
    draw_matrix,
    legend_outside,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 8
"""States up to which each cell has its number written in it."""


def skip_figure(
    skips: SkipMap,
    map_types: Sequence[str] | None = None,
    *,
    metric: str = "loss_increase",
    place: str = "pilot",
) -> View:
    """How many layers can be skipped for how much loss: rows the first skipped block, columns the
    block that goes on; one panel per map.

    One colour scale for all panels, up to what forgetting the state costs (the map ``"mean"``),
    where it was measured. Of deep models with few of their pairs measured, a line for each map
    instead, one panel per number of blocks skipped.

    Args:
        skips: from :func:`tl_geometry.skip_map`.
        map_types: some of its maps, in this order; all by default.
        metric: what it costs, a column of the table of ``skips``.
        place: which tokens count: ``"pilot"``, or ``"all"`` positions.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=16)
    >>> skips = tlg.flow.skip_map(model, windows, progress=False)
    >>> skip_figure(skips).title
    'How many blocks can be skipped for how much loss?'
    """
    shown = list(map_types or skips.map_types)
    tables = [skips.table(name, metric, place=place) for name in shown]
    lengths = {b - a for a, b in skips.pairs()}
    if len(tables[0]) > 9 and len(lengths) <= 4:
        return _skip_lines(skips, shown, metric, place)
    forgotten = "mean" in skips.map_types
    reference = skips.table("mean", metric, place=place) if forgotten else torch.stack(tables)
    high = 1.0 if _is_share(metric) else float(reference.nan_to_num().max())
    figure, axes = canvas(len(shown), size=(WIDTH / max(len(shown), 3), 2.2), sharey=True)
    for axis, map_type, table in zip(axes, shown, tables, strict=True):
        last = len(table) - 1
        draw_matrix(axis, table[:-1, 1:], 0.0, high, extent=(0.5, last + 0.5, last - 0.5, -0.5))
        axis.set_title(map_type, fontsize=9)
        axis.set_xlabel("goes on at block")
        whole_numbers(axis.xaxis, axis.yaxis)
        for a, b in skips.pairs() if len(table) <= FEW else ():
            cost = float(table[a, b])
            text = f"{cost:.2f}" if cost < 10 else f"{cost:.3g}"
            look = {"fontsize": 6, "color": "white" if cost < high / 2 else "black"}
            axis.text(b, a, text, ha="center", va="center", **look)
    axes[0].set_ylabel("first block skipped")
    figure.colorbar(axes[-1].images[0], ax=axes, label=_with_unit(metric), shrink=0.8)
    how = "Each cell replaces the blocks from its row to its column by a map, a panel for each map"
    return _view(figure, skips, place, how)


def _is_share(metric: str) -> bool:
    """Whether a metric is a share of tokens (the same first choice) and no loss."""
    return metric.startswith("top")


def _with_unit(metric: str) -> str:
    return metric.replace("_", " ") + ("" if _is_share(metric) else " (nats)")


def _view(figure: Figure, skips: SkipMap, place: str, how: str) -> View:
    where = "the last token" if place == "pilot" else "all tokens"
    return View(
        figure,
        title="How many blocks can be skipped for how much loss?",
        caption=f"{how}, at {where} of {skips.test} held-out chunks.",
        null="The map 'mean' forgets the state: what every other must beat."
        if "mean" in skips.map_types
        else "",
        source=skips.provenance.line(),
    )


def _skip_lines(skips: SkipMap, map_types: Sequence[str], metric: str, place: str) -> View:
    """The cost of skipping as lines over the first skipped block."""
    lengths = sorted({b - a for a, b in skips.pairs()})
    figure, axes = canvas(len(lengths), size=(WIDTH / max(len(lengths), 2), 2.6), sharey=True)
    for axis, length in zip(axes, lengths, strict=True):
        for map_type in map_types:
            costs = skips.table(map_type, metric, place=place).diagonal(length)
            width = 2 if map_type == "flow" else 1
            axis.plot(range(len(costs)), costs, "o-", ms=2, lw=width, label=map_type)
        if "mean" in map_types and not _is_share(metric):
            forgotten = skips.table("mean", metric, place=place).diagonal(length)
            axis.set_ylim(None, 1.2 * float(forgotten.nan_to_num().max()))
        axis.set_title(f"{length} block{'s' if length > 1 else ''} skipped", fontsize=9)
        axis.set_xlabel("first block skipped")
    axes[0].set_ylabel(_with_unit(metric))
    legend_outside(figure, axes)
    return _view(figure, skips, place, "Each line is a map in the place of so many blocks")
