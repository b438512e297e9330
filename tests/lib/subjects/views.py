"""Rows of ``render``: each view is made and says what it shows. How it looks is free, so that only
its having a title, a caption and something to show is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tl_geometry as tlg
from tests.lib.subjects.circuits import composition, faithfulness
from tests.lib.subjects.flow import skips
from tests.lib.subjects.row import Answers, Subject, rotary
from tests.lib.worlds import QUIET, World
from tl_geometry import interventions, render, sphere


def shown(view: Any) -> Answers:
    """Whether there is a title, a caption, and a figure or a page (drawn in the table of views)."""
    page = getattr(view, "page", "") or getattr(view, "figure", "") or view.html()
    said = {"title": view.title, "caption": view.caption, "page": page}
    return {f"has a {name}": str(bool(str(text).strip())) for name, text in said.items()}


def _flow(w: World) -> Any:
    return tlg.flow_report(w.all_states)


def _geometry(w: World) -> Any:
    return tlg.weight_geometry(w.model, w.basis, layers=[1], draws=4)


def _positional(w: World) -> Any:
    return tlg.positional_report(w.basis, draws=2)


def _truncation(w: World) -> Any:
    return tlg.truncation_kl(w.model, w.prompts, w.ensemble, K=(1, 4), **QUIET)


def _skips(w: World) -> Any:
    return skips(w, pairs=[(0, 1), (1, 2)])


def _planes(w: World) -> Any:
    return tlg.sweep_heads(w.model, w.fresh, w.basis, planes=True, **QUIET).planes()


def _effects(w: World) -> Any:
    edit = {"without content": interventions.term(w.model, w.basis, "content", w.head)}
    return interventions.effects(w.model, w.prompts, edit, control=["shrink", "terms"])


VIEWS: dict[str, Callable[[World], Any]] = {
    "spirals": lambda w: render.spirals(w.basis),
    "gram": lambda w: render.gram(w.basis, 1),
    "variance_shares": lambda w: render.variance_shares(w.basis.anova()),
    "fourier": lambda w: render.fourier(w.basis),
    "measure_curves": lambda w: render.measure_curves(_positional(w), ("rank", "smoothness")),
    "noise_figure": lambda w: render.noise_figure(_flow(w)),
    "baseline_figure": lambda w: render.baseline_figure(_flow(w)),
    "skip_figure": lambda w: render.skip_figure(_skips(w)),
    "truncation_figure": lambda w: render.truncation_figure(_truncation(w)),
    "bundle_3d": lambda w: render.bundle_3d(w.all_states),
    "head_shares": lambda w: render.head_shares(w.sweep),
    "head_planes": lambda w: render.head_planes(_planes(w)),
    "sphere_paths": lambda w: render.sphere_paths(sphere.token_paths(w.model, w.ids, w.basis)),
    "weight_blocks": lambda w: render.weight_blocks(_geometry(w)),
    "effect_bars": lambda w: render.effect_bars(_effects(w)),
    "composition_figure": lambda w: render.composition_figure(composition(w)),
    "faithfulness_curve": lambda w: render.faithfulness_curve(faithfulness(w)),
    "token_attribution": lambda w: render.token_attribution(w.graph.tokens()),
    "split": lambda w: render.split(w.split),
    "heads": lambda w: render.heads(w.sweep),
    "graph_page": lambda w: render.graph_page(w.graph),
    "attention_heads": lambda w: render.attention_heads(w.split),
    "induction": lambda w: render.induction(w.graph),
    "plot": lambda w: render.plot(w.sweep),
}
PLOTLY = "plotly adds filters of warnings when it is imported"
ROTARY = ("head_planes", "band_atlas")
SUBJECTS = tuple(
    Subject(
        name=f"view: {name}",
        covers=(f"render.{name}",),
        call=make,
        answers=shown,
        only={"*": rotary} if name in ROTARY else {},
        without=dict.fromkeys(
            ("again", "order", "loaded", "half"), "only whether it shows something is recorded"
        )
        | ({"disturbs:warning filters": PLOTLY} if name == "bundle_3d" else {}),
    )
    for name, make in VIEWS.items()
)
