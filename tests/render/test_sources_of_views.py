"""Every view says what it was made from and what chance gives, in the words of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.render import test_basis_and_measures_by_hand as tables
from tests.render import test_maps_by_hand as maps
from tests.render import test_planes_by_hand as planes
from tests.render import test_weights_by_hand as weights
from tests.render import test_writers_by_hand as writers
from tests.render.test_basis import made
from tests.render.test_by_hand import curve, flow_table
from tests.render.test_flow import paths, skips
from tests.render.test_graph_and_split_by_hand import graph
from tests.render.test_writers import explained
from tests.splits import synthetic
from tl_geometry import render
from tl_geometry.interventions.causal import Dominance
from tl_geometry.render import basis as basis_views
from tl_geometry.render import flow, graph_view, head_view, measures, rotary, space
from tl_geometry.render import weights as weight_views
from tl_geometry.render import writers as writer_views

SPLIT = synthetic(1, 4)
EXACT = "What was written adds up to the logit exactly: it has no null."
PATHS = "No null is drawn: gibberish and the untrained model are rows of a table."
PLANES = "The planes of a head share all of its score: no null is drawn."
HEADS = "Nulls are numbers of their own: position destroyed, uniform attention, random subspaces."


def of_mine(result: Any) -> Any:
    """The same result, made from the model m on the corpus c."""
    return dataclasses.replace(result, provenance=tables.SOURCE)


VIEWS: dict[str, tuple[Callable[[], Any], str]] = {
    "spirals": (
        lambda: basis_views.spirals(of_mine(made())),
        "No null is drawn: the measures of position have theirs.",
    ),
    "gram": (
        lambda: basis_views.gram(of_mine(made()), 0),
        "Random directions of as many dimensions have a cosine of 0 ± 0.41.",
    ),
    "fourier": (lambda: measures.fourier(tables.positional()), ""),
    "incoherence": (
        lambda: measures.incoherence(tables.contextual()),
        "On a dashed line it is chance: random directions, coordinates with flipped signs, windows "
        "whose positions were exchanged (no context).",
    ),
    "learning_curve": (
        lambda: measures.learning_curve(tables.positional(), "rank"),
        "A line that is flat at its right end would not change with more text.",
    ),
    "sphere_paths": (
        lambda: weight_views.sphere_paths(weights.paths()),
        "No null is drawn: the paths are the model's own, exactly.",
    ),
    "surrogate_bars": (
        lambda: weight_views.surrogate_bars(weights.surrogate(("low_rank", "whole"))),
        "Grey bars are controls: W_QK itself, which changes nothing.",
    ),
    "effect_bars": (
        lambda: weight_views.effect_bars(weights.effects(Dominance)),
        "Grey bars are controls: a random term, only constants, uniform attention.",
    ),
    "composition_figure": (
        lambda: writer_views.composition_figure(writers.composition()),
        "Randomly turned writers have a covariance share of 0.250 (root mean square, mean over "
        "edges).",
    ),
    "logit_figure": (lambda: writer_views.logit_figure(of_mine(explained())), EXACT),
    "logit_page": (lambda: render.logit_page(of_mine(explained())), EXACT),
    "head_grid": (lambda: head_view.head_grid(maps.FEW), HEADS),
    "bands_page": (lambda: rotary.bands_page(planes.planes()), PLANES),
    "head_planes": (lambda: rotary.head_planes(planes.planes()), PLANES),
    "token_attribution": (
        lambda: render.token_attribution(planes.tokens([1.0], ("a",))),
        "All parts and the constants add up to the logit exactly: they have no null.",
    ),
    "truncation_figure": (
        lambda: flow.truncation_figure(of_mine(curve(held_out=True))),
        "The black lines are the KL between the model's own outputs on consecutive chunks.",
    ),
    "residual_figure": (
        lambda: flow.residual_figure(of_mine(flow_table())),
        "A relative error of 1 is that of putting zero in the state's place.",
    ),
    "baseline_figure": (
        lambda: flow.baseline_figure(of_mine(flow_table())),
        "Above the dashed line a map is worse than putting zero in the state's place.",
    ),
    "noise_figure": (
        lambda: flow.noise_figure(of_mine(flow_table())),
        "No null is drawn: the law of independent increments was not fitted.",
    ),
    "skip_figure": (
        lambda: flow.skip_figure(of_mine(skips(4, (1,), ("mean", "flow")))),
        "The map 'mean' forgets the state: what every other must beat.",
    ),
    "bundle_figure": (lambda: flow.bundle_figure(of_mine(paths(3))), PATHS),
    "bundle_3d": (lambda: space.bundle_3d(of_mine(paths(3))), PATHS),
    "graph_figure": (
        lambda: graph_view.graph_figure(graph(source=tables.LINE)),
        "Value edges and what is left out add up to the logit exactly: they have no null.",
    ),
    "split": (lambda: render.split(of_mine(SPLIT)), "Terms are exact: they have no null."),
    "image of a split": (
        lambda: render.split(of_mine(SPLIT)).image(),
        "Terms are exact: they have no null.",
    ),
}


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_view_says_its_source_and_its_null(name: str) -> None:
    """The line of what its table was computed from, and a whole sentence about chance."""
    make, null = VIEWS[name]
    view = make()
    assert (view.source, view.null) == (tables.LINE, null)


def test_images_of_pages_are_those_of_their_tables() -> None:
    """With the head, the title and the sentences of the page."""
    image = rotary.bands_page(planes.planes()).image()
    assert image.title == rotary.band_atlas(planes.planes()).title
    assert image.source == tables.LINE
    page = render.logit_page(of_mine(explained()))
    assert page.image().title == page.title
    split = render.split(SPLIT, title="Mine")
    assert (split.image().title, split.image().caption) == ("Mine", split.caption)
    default = render.split(SPLIT)
    assert default.title == "Split of the scores of L0H0"
    heads = render.heads(maps.FEW, "n").image()
    assert (heads.title, heads.caption) == ("Every head: n", "Each cell is a head: its n.")
