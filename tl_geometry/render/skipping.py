"""How many blocks can be skipped for how much loss? A figure of what each skip costs, for each map
that replaces the blocks. The report, the gallery and a notebook draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
"""Most states for which each cell has its number written in it."""
DEEP, MOST_LENGTHS = 9, 4
"""A model with more than ``DEEP`` states, measured for at most ``MOST_LENGTHS`` lengths of skips,
is drawn as lines: its matrix would be nearly empty."""
COST = "loss increase (nats)"
"""Label of the cost of a skip."""


def skip_figure(skips: SkipMap) -> View:
    """How many blocks can be skipped for how much loss, at the last token of the chunks. Each map
    has a panel: rows are the first skipped block, columns the block where the model goes on.

    All panels have one colour scale. It ends at the cost of forgetting the state (the map
    ``"mean"``) where that was measured. A deep model of which few pairs were measured has a line
    for each map instead, and one panel for each number of skipped blocks.

    Args:
        skips: from :func:`tl_geometry.skip_map`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=16)
    >>> skips = tlg.flow.skip_map(model, windows, progress=False)
    >>> skip_figure(skips).title
    'How many blocks can be skipped for how much loss?'
    """
    tables = {name: skips.table(name, "loss_increase") for name in skips.map_types}
    lengths = sorted({end - start for start, end in skips.pairs()})
    states = len(next(iter(tables.values())))
    if states > DEEP and len(lengths) <= MOST_LENGTHS:
        figure = _lines(tables, lengths)
        how = "Each line is a map in the place of the skipped blocks"
    else:
        figure = _matrices(tables, skips.pairs() if states <= FEW else ())
        how = "Each cell replaces the blocks from its row to its column by a map, a panel per map"
    return View(
        figure,
        title="How many blocks can be skipped for how much loss?",
        caption=f"{how}, at the last token of {skips.test} held-out chunks.",
        null="The map 'mean' forgets the state: what every other must beat."
        if "mean" in tables
        else "",
        source=skips.provenance.line(),
    )


def _matrices(tables: Mapping[str, Tensor], numbered: Sequence[tuple[int, int]]) -> Figure:
    """One panel for each map: the cost of every pair of states, written out for the pairs in
    ``numbered``."""
    reference = tables.get("mean", torch.stack([*tables.values()]))
    high = float(reference.nan_to_num().max())
    figure, axes = canvas(len(tables), size=(WIDTH / max(len(tables), 3), 2.2), sharey=True)
    for axis, (map_type, table) in zip(axes, tables.items(), strict=True):
        last = len(table) - 1
        # rows are the first skipped blocks, from 0; columns the blocks that go on, from 1
        draw_matrix(axis, table[:-1, 1:], 0.0, high, extent=(0.5, last + 0.5, last - 0.5, -0.5))
        axis.set_title(map_type, fontsize=9)
        axis.set_xlabel("goes on at block")
        whole_numbers(axis.xaxis, axis.yaxis)
        for start, end in numbered:
            cost = float(table[start, end])
            text = f"{cost:.2f}" if cost < 10 else f"{cost:.3g}"
            look = {"fontsize": 6, "color": "white" if cost < high / 2 else "black"}
            axis.text(end, start, text, ha="center", va="center", **look)
    axes[0].set_ylabel("first block skipped")
    figure.colorbar(axes[-1].images[0], ax=axes, label=COST, shrink=0.8)
    return figure


def _lines(tables: Mapping[str, Tensor], lengths: Sequence[int]) -> Figure:
    """One panel for each number of skipped blocks: the cost over the first skipped block."""
    figure, axes = canvas(len(lengths), size=(WIDTH / max(len(lengths), 2), 2.6), sharey=True)
    for axis, length in zip(axes, lengths, strict=True):
        for map_type, table in tables.items():
            costs = table.diagonal(length)
            width = 2 if map_type == "flow" else 1
            axis.plot(range(len(costs)), costs, "o-", ms=2, lw=width, label=map_type)
        if "mean" in tables:
            # a map that costs much more than forgetting may leave the panel
            axis.set_ylim(None, 1.2 * float(tables["mean"].diagonal(length).nan_to_num().max()))
        axis.set_title(f"{length} block{'s' if length > 1 else ''} skipped", fontsize=9)
        axis.set_xlabel("first block skipped")
    axes[0].set_ylabel(COST)
    legend_outside(figure, axes)
    return figure
