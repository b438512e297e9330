"""Views of skipped layers: what each skip costs, by the map that stands in for the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tl_geometry.flow.skipping import SkipMap
from tl_geometry.render.figure import SEQUENTIAL, WIDTH, View, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def skip_figure(
    skips: SkipMap,
    map_types: Sequence[str] | None = None,
    *,
    metric: str = "loss_increase",
    place: str = "pilot",
    ax: Axes | None = None,
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
        ax: axes to draw the first map into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=16)
    >>> skips = tlg.flow.skip_map(model, windows, progress=False)
    >>> skip_figure(skips).title
    'How many blocks can be skipped for how much loss?'
    """
    from matplotlib.ticker import MaxNLocator

    shown = list(map_types or skips.map_types)
    lengths = {b - a for a, b in skips.pairs()}
    deep = len(skips.table(shown[0], metric, place=place)) > 9
    if ax is None and deep and len(lengths) <= 4:
        return _skip_lines(skips, shown, metric, place)
    figure, axes = canvas(len(shown), ax=ax, size=(WIDTH / max(len(shown), 3), 2.2), sharey=True)
    tables = [skips.table(name, metric, place=place) for name in shown[: len(axes)]]
    forgotten = "mean" in skips.map_types
    reference = skips.table("mean", metric, place=place) if forgotten else torch.stack(tables)
    high = float(reference.nan_to_num().max())
    image = None
    for axis, map_type, table in zip(axes, shown, tables, strict=False):
        image = axis.imshow(
            table[:-1, 1:].numpy(),
            cmap=SEQUENTIAL,
            vmin=0.0,
            vmax=1.0 if _is_share(metric) else high,
            extent=(0.5, len(table) - 0.5, len(table) - 1.5, -0.5),
        )
        axis.set_title(map_type, fontsize=9)
        axis.set_xlabel("goes on at block")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        if len(table) <= 8:
            for a, b in skips.pairs():
                axis.text(
                    b,
                    a,
                    f"{float(table[a, b]):.2f}" if table[a, b] < 10 else f"{table[a, b]:.3g}",
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if float(table[a, b]) < high / 2 else "black",
                )
    axes[0].set_ylabel("first block skipped")
    if image is not None:
        figure.colorbar(image, ax=axes, label=_with_unit(metric), shrink=0.8)
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
            line = skips.table(map_type, metric, place=place).diagonal(length)
            axis.plot(
                range(len(line)),
                line,
                "o-",
                ms=2,
                lw=2 if map_type == "flow" else 1,
                label=map_type,
            )
        if "mean" in map_types and not _is_share(metric):
            forgotten = skips.table("mean", metric, place=place).diagonal(length)
            axis.set_ylim(None, 1.2 * float(forgotten.nan_to_num().max()))
        axis.set_title(f"{length} block{'s' if length > 1 else ''} skipped", fontsize=9)
        axis.set_xlabel("first block skipped")
    axes[0].set_ylabel(_with_unit(metric))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=len(labels), fontsize=8, frameon=False
    )
    return _view(figure, skips, place, "Each line is a map in the place of so many blocks")
