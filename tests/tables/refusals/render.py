"""Views: what they are given, their options, and the files that they are saved to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import tl_geometry as tlg
from tests.lib.subjects.views import faithful
from tests.tables.refusals.row import NOT_A_BASIS, Group, Options, Scene, Wrong, calls
from tl_geometry import render

VIEWS = (
    *("sphere_paths", "weight_blocks", "faithfulness_curve", "fourier", "noise_figure"),
    *("baseline_figure", "skip_figure", "truncation_figure", "variance_shares"),
    *("composition_figure", "effect_bars", "token_attribution", "head_shares", "split"),
    *("graph_page", "heads", "spirals"),
)
"""Every view that takes one result."""
OTHERS: Options = {
    "a basis": lambda s: s.w.basis,
    "a split": lambda s: s.w.split,
    "a path": NOT_A_BASIS,
    "None": None,
}
ITS_OWN = "^(?!terms)"
"""What a refusal is about: not what the view looked for in the wrong thing."""
PLOT: Any = render.plot
VARIANCE: Any = lambda s: render.variance_shares(s.w.basis.anova())
CURVES: Any = lambda s, *names: render.measure_curves(
    tlg.positional_report(s.w.basis, jackknife=False, nulls=False), names, ax=Figure().subplots()
)
RANKED: Any = lambda s, ranked: render.faithfulness_curve(
    dataclasses.replace(faithful(s.w), chosen=not ranked)
)
EDGES: Any = lambda s, n: render.composition_figure(
    tlg.composition(s.model, s.ids, layers=1, draws=1, progress=False), n=n
)
TEXT: Any = lambda s, x: render.token_attribution(pd.DataFrame({"token": ["a"], "value": [x]}))
RIGHT = {"split": "a split"} | dict.fromkeys(("spirals", "fourier", "variance_shares"), "a basis")


def drawn(s: Scene, view: str, result: Any) -> Any:
    return getattr(render, view)(result)


def wrong_results(view: str) -> dict[str, Wrong]:
    """Each result that a view cannot draw, as its argument."""
    others = {name: result for name, result in OTHERS.items() if RIGHT.get(view) != name}
    return {name: ({"result": result}, ITS_OWN) for name, result in others.items()}


GROUPS = (
    *(
        Group(
            name=f"render.{view}",
            call=drawn,
            base={"view": view},
            right={},
            wrong=wrong_results(view),
            twin="tests/tables/test_views.py draws each from its own result",
        )
        for view in VIEWS
    ),
    calls(
        "pages and figures",
        right={
            "a page": lambda s: render.split(s.w.split),
            "a page of one head": lambda s: render.split(s.w.split, heads="L1H2"),
            "a page of a context": lambda s: render.split(s.w.split, context=1),
            "heads by a column": lambda s: render.heads(s.w.sweep, "induction"),
            "a Gram matrix": lambda s: render.gram(s.w.basis, 1),
            "shares of covariance": lambda s: render.head_shares(s.w.sweep, share="cs"),
            "the view of a sweep": lambda s: render.plot(s.w.sweep),
            "a curve into axes": lambda s: CURVES(s, "rank"),
            "a curve of edges": lambda s: RANKED(s, True),
            "tokens with numbers": lambda s: TEXT(s, 1.0),
            "one edge": lambda s: EDGES(s, 1),
            "PNG": lambda s: VARIANCE(s).save(s.folder / "a.png"),
        },
        wrong={
            "a context beyond": (lambda s: render.split(s.w.split, context=99), "context"),
            "heads that it lacks": (lambda s: render.split(s.w.split, heads="L0H0"), "heads"),
            "panels of no name": (lambda s: render.split(s.w.split, panels=["x"]), "panels"),
            "fewer tokens": (lambda s: render.split(s.w.split, tokens=["a"]), "tokens"),
            "a label": (lambda s: render.heads(s.w.sweep, "head"), "value"),
            "a state beyond": (lambda s: render.gram(s.w.basis, 99), "state"),
            "shares of no name": (lambda s: render.head_shares(s.w.sweep, share="x"), "share"),
            "tokens without numbers": (lambda s: TEXT(s, float("nan")), "table"),
            "no edges": (lambda s: EDGES(s, 0), "^n$"),
            "a file of no kind": (lambda s: VARIANCE(s).save(s.folder / "a.docx"), "path"),
            "below a file": (lambda s: VARIANCE(s).save(s.path("plain") / "a.html"), "."),
            "curves into one axes": (lambda s: CURVES(s, "rank", "smoothness"), "ax"),
            "a curve of a chosen set": (lambda s: RANKED(s, False), "results"),
            "a head beyond": (lambda s: render.induction(s.w.graph, "L9H9"), "head"),
            "the view of a path": (lambda s: PLOT(NOT_A_BASIS), "result"),
            "a text of heads": (lambda s: PLOT(s.w.graph.direct()), "table"),
        },
    ),
)
