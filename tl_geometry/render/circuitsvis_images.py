"""Images of the circuitsvis views, for paper and for where no script runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tl_geometry.render.figure import NEGATIVE, POSITIVE, View, canvas


def _colours() -> Any:
    """The colours of the pages: circuitsvis mixes the two ends with white."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("circuitsvis", [NEGATIVE, "white", POSITIVE])


def maps(
    values: Tensor,
    names: Sequence[str],
    tokens: Sequence[str],
    top: float,
    causal: bool,
    title: str,
    caption: str,
) -> View:
    """The heads as images."""
    columns = min(4, len(values))
    side = 4.4 if len(values) == 1 else 2.3
    figure, axes = canvas(columns, math.ceil(len(values) / columns), size=(side, side))
    for axis in axes[len(values) :]:
        axis.axis("off")
    hidden = torch.ones(values.shape[1:], dtype=torch.bool).triu(1) & causal
    image = None
    for axis, head, name in zip(axes, values, names, strict=False):
        image = axis.imshow(
            head.masked_fill(hidden, torch.nan).numpy(),
            cmap=_colours(),
            vmin=-top,
            vmax=top,
            interpolation="nearest",
        )
        axis.set_facecolor("#ddd")
        axis.set_title(name.replace("$", r"\$"), fontsize=8)
        _ticks(axis, tokens if len(tokens) <= 24 and len(values) == 1 else [])
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.6)
    return View(figure, title=title, caption=caption)


def _ticks(axis: Any, tokens: Sequence[str]) -> None:
    texts = [t.replace("$", r"\$") for t in tokens]
    axis.set_xticks(range(len(texts)), texts, rotation=90, fontsize=6)
    axis.set_yticks(range(len(texts)), texts, fontsize=6)
