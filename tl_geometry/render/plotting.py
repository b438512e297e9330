"""Which view belongs to a result? :func:`plot` finds it, so that nobody must know them all."""

from __future__ import annotations

import pandas as pd

from tl_geometry import render
from tl_geometry.base.errors import fail
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw
from tl_geometry.render.page import Page

BY_CLASS = {
    "ScoreSplit": "split",
    "SweepTable": "head_shares",
    "LogitGraph": "graph_page",
    "PositionContext": "spirals",
    "Trajectories": "bundle_3d",
    "PlaneTable": "head_planes",
    "TokenPaths": "sphere_paths",
    "WeightGeometry": "weight_blocks",
    "Composition": "composition_figure",
    "Faithfulness": "faithfulness_curve",
}
"""The view of a result that is known by its class."""
BY_COLUMNS = {
    ("state", "pos", "ctx", "resid"): "variance_shares",
    ("edit", "change", "change_low"): "effect_bars",
    ("K", "kl", "baseline_mean"): "truncation_figure",
    ("map_type", "from_layer", "to_layer", "loss_increase"): "skip_figure",
    ("start", "end", "relative_error_out"): "baseline_figure",
    ("state", "rank", "relative_norm"): "measure_curves",
    ("state", "incoherence_avg"): "measure_curves",
    ("position", "token", "value"): "token_attribution",
    ("layer", "head"): "heads",
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
            return getattr(render, BY_CLASS[kind.__name__])(result)
    is_table = isinstance(result, Result | pd.DataFrame)
    columns = set(draw.frame(result).columns) if is_table else set()
    for needed, view in BY_COLUMNS.items():
        if columns.issuperset(needed):
            return getattr(render, view)(result)
    got, instead = type(result).__name__, "a function of tl_geometry.render, or its table itself"
    return fail("result", expected="a result that has a view", got=got, instead=instead)
