"""Views of a sweep over heads: layer x head maps of shares and head types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tl_geometry.render.figure import DIVERGING, SEQUENTIAL, View, canvas
from tl_geometry.verbs.sweep import SweepTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor


def _grid(sweep: SweepTable, values: Tensor) -> tuple[Tensor, list[int]]:
    """Values on a layer x head grid (NaN where a head was not swept), and the layers of its rows."""
    layers = sorted({layer for layer, _ in sweep.heads})
    grid = torch.full((len(layers), 1 + max(head for _, head in sweep.heads)), torch.nan, dtype=torch.float64)
    for value, (layer, head) in zip(values.tolist(), sweep.heads, strict=True):
        grid[layers.index(layer), head] = value
    return grid, layers


def _map(axis: Axes, sweep: SweepTable, values: Tensor, title: str, *, signed: bool) -> None:
    grid, layers = _grid(sweep, values)
    low = -1.0 if signed else 0.0
    image = axis.imshow(grid.numpy(), cmap=DIVERGING if signed else SEQUENTIAL, vmin=low, vmax=1, aspect="auto")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("head")
    axis.set_xticks(range(grid.shape[1]) if grid.shape[1] <= 16 else range(0, grid.shape[1], 4))
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    if grid.numel() <= 64:
        for row in range(grid.shape[0]):
            for column in range(grid.shape[1]):
                value = float(grid[row, column])
                dark = abs(value) > 0.6 if signed else value < 0.5
                if value == value:
                    axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.figure.colorbar(image, ax=axis, shrink=0.8)


def head_shares(sweep: SweepTable) -> View:
    """Covariance shares of position, content and mixed terms for every head; each triple adds up to one."""
    figure, axes = canvas(len(sweep.groups), size=(3.4, 2.6))
    for column, (axis, group) in enumerate(zip(axes, sweep.groups, strict=True)):
        _map(axis, sweep, sweep.group_cs[:, column], f"share of {group}", signed=True)
    axes[0].set_ylabel("layer")
    return View(
        figure, title="Shares of the score", caption=f"covariance shares, summing to one over the panels; {sweep.provenance.line()}"
    )


def head_types(sweep: SweepTable) -> View:
    """Head-type scores on repeated random tokens for every head; uniform attention's score stands in each title."""
    names = [n for n in ("previous", "induction", "duplicate") if n in sweep.types]
    figure, axes = canvas(len(names), size=(3.4, 2.6))
    for axis, name in zip(axes, names, strict=True):
        _map(axis, sweep, sweep.types[name], f"{name} (uniform {sweep.baselines[name]:.2f})", signed=False)
    axes[0].set_ylabel("layer")
    return View(figure, title="Head types", caption=f"mean attention paid on repeated random tokens; {sweep.provenance.line()}")
