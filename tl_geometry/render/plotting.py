"""Which view belongs to a result? :func:`plot` finds it, so that nobody must know them all."""

from __future__ import annotations

import importlib
from typing import Any

import pandas as pd

from tl_geometry.base.errors import fail
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw
from tl_geometry.render.page import Page

BY_CLASS = {
    "ScoreSplit": "split_view.split",
    "SweepTable": "head_view.head_shares",
    "LogitGraph": "graph_view.graph_page",
    "PositionContext": "basis.spirals",
    "Trajectories": "space.bundle_3d",
    "PlaneTable": "planes.head_planes",
    "TokenPaths": "weights.sphere_paths",
    "WeightGeometry": "weights.weight_blocks",
    "Composition": "circuits.composition_figure",
    "Faithfulness": "circuits.faithfulness_curve",
}
"""The view of a result that is known by its class."""
BY_COLUMNS = {
    ("state", "pos", "ctx", "resid"): "basis.variance_shares",
    ("edit", "change", "change_low"): "weights.effect_bars",
    ("K", "kl", "baseline_mean"): "flow.truncation_figure",
    ("map_type", "from_layer", "to_layer", "loss_increase"): "flow.skip_figure",
    ("start", "end", "relative_error_out"): "flow.baseline_figure",
    ("state", "rank", "relative_norm"): "measures.measure_curves",
    ("state", "incoherence_avg"): "measures.measure_curves",
    ("position", "token", "value"): "token_view.token_attribution",
    ("layer", "head"): "head_view.heads",
}
"""The view of a table that is known by its columns; the first that fits."""


def plot(result: Result | pd.DataFrame) -> draw.View | Page:
    """The one view that belongs to a result: a page of a split or a graph, a figure of most tables.

    Args:
        result: what a function of the library returned, or a table with the same columns.

    Raises ``GeometryError`` for a result that has no view.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> plot(basis.anova()).title[:14]
    'Position goes '
    """
    for kind in type(result).__mro__:
        if kind.__name__ in BY_CLASS:
            return _view(BY_CLASS[kind.__name__])(result)
    is_table = isinstance(result, Result | pd.DataFrame)
    columns = set(draw.frame(result).columns) if is_table else set()
    for needed, view in BY_COLUMNS.items():
        if columns.issuperset(needed):
            return _view(view)(result)
    instead = "a function of tl_geometry.render, or its table itself"
    got = type(result).__name__
    return fail("result", expected="a result that has a view", got=got, instead=instead)


def _view(path: str) -> Any:
    module, name = path.split(".")
    return getattr(importlib.import_module(f"tl_geometry.render.{module}"), name)
