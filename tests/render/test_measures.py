"""The figures of the measures show the numbers of the report, in the caller's axes too, and refuse
what they cannot draw."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tl_geometry import decompose_activations
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import (
    ContextualReport,
    PositionalReport,
    contextual_report,
    positional_report,
)
from tl_geometry.render import measures as views
from tl_geometry.render.basis import WORDS, gram, spirals, variance_shares
from tl_geometry.render.figure import some


@pytest.fixture(scope="module")
def basis() -> PositionContext:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 16, 20, 8, generator=generator) + torch.linspace(-3, 3, 20)[
        :, None
    ] * torch.randn(8, generator=generator)
    return decompose_activations(h, labels=[0, 1] * 8)


@pytest.fixture(scope="module")
def positional(basis: PositionContext) -> PositionalReport:
    return positional_report(basis)


@pytest.fixture(scope="module")
def contextual(basis: PositionContext) -> ContextualReport:
    return contextual_report(basis, rank=3)


def test_measures_draw_every_value_error_and_null(positional: PositionalReport) -> None:
    view = views.measure_curves(positional, ["stable_rank"])
    lines = view.figure.axes[0].get_lines()
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in lines]
    expected = [
        positional["stable_rank"],
        positional.nulls["stable_rank", "noise"],
        positional.nulls["stable_rank", "isotropic"],
    ]
    assert all(any(len(d) == 3 and np.allclose(d, e) for d in drawn) for e in expected)
    (legend,) = view.figure.legends
    named = {"measured", "null: noise", "null: isotropic"}
    assert {t.get_text() for t in legend.get_texts()} == named
    assert len(views.measure_curves(positional).figure.axes) == len(views.POSITIONAL)


def test_fourier_panels_share_their_limits(positional: PositionalReport) -> None:
    view = views.fourier(positional)
    images = [a.images[0] for a in view.figure.axes if a.images]
    limit = float(positional.fourier.abs().max())
    assert [i.get_clim() for i in images] == [(-limit, limit)] * 3
    assert np.allclose(np.asarray(images[2].get_array()), positional.fourier[2])


def test_other_views_and_the_callers_axes(
    positional: PositionalReport, contextual: ContextualReport
) -> None:
    curve = views.learning_curve(positional, "roughness")
    assert len(curve.figure.axes[0].get_lines()) == 3
    assert np.asarray(curve.figure.axes[0].get_lines()[0].get_xdata()).tolist() == [2, 4, 8, 16]
    assert len(views.incoherence(contextual).figure.axes) == 2
    mine = Figure().subplots()
    assert views.measure_curves(positional, ["rank"], ax=mine).figure is mine.figure
    assert mine.get_title() == "rank"
    assert mine.get_legend() is not None, "the null's line has its name"


def test_one_axes_is_not_given_several_panels(
    basis: PositionContext, positional: PositionalReport
) -> None:
    anova, mine = basis.anova(), Figure().subplots()
    with pytest.raises(GeometryError, match="one measure when drawing into ax, got 2 measures"):
        views.measure_curves(positional, ["rank", "roughness"], ax=mine)
    with pytest.raises(GeometryError, match="one table when drawing into ax, got 2 tables"):
        variance_shares(anova, control=anova, ax=mine)
    assert not mine.lines
    assert variance_shares(anova, ax=mine).figure is mine.figure  # one panel is drawn
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()) for line in mine.lines}
    for part, value in anova.shares.items():
        assert np.allclose(drawn[WORDS[part]], value.numpy(), equal_nan=True)
    null = dataclasses.replace(anova, ctx_null=anova.shares["ctx"] / 3)
    dashed = variance_shares(null).figure.axes[0].lines[-1]
    assert np.allclose(np.asarray(dashed.get_ydata()), (anova.shares["ctx"] / 3).numpy())
    assert variance_shares(null).null.startswith("Dashed: ")
    assert variance_shares(anova).null.startswith("No null is drawn: ")


def test_cosines_of_positions_and_contexts_have_one_scale(basis: PositionContext) -> None:
    image = gram(basis, 1).figure.axes[0].images[0]
    by_document = [*range(0, 16, 2), *range(1, 16, 2)]
    assert basis.ctx is not None
    vectors = torch.cat([basis.pos[1], basis.ctx[1, by_document]])
    cosines = torch.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    assert np.allclose(np.asarray(image.get_array()), cosines, atol=1e-6)
    alike, unlike, opposite = image.to_rgba(np.array([1.0, 0.0, -1.0]))
    assert alike[0] > 2 * alike[2]
    assert opposite[2] > 2 * opposite[0]
    assert min(unlike) > 0.95, "white"


def test_few_states_are_chosen_at_even_distances() -> None:
    assert some(range(31), 7) == [0, 5, 10, 15, 20, 25, 30]
    assert [len(some(range(9), most)) for most in (1, 2, 8, 9, 20)] == [1, 2, 8, 9, 9]


def test_panels_say_what_their_axes_are(
    basis: PositionContext, positional: PositionalReport, contextual: ContextualReport
) -> None:
    drawn = (
        views.fourier(positional),
        spirals(basis),
        views.measure_curves(positional),
        views.incoherence(contextual),
        views.learning_curve(positional, "roughness"),
    )
    for view in drawn:
        panels = [a for a in view.figure.axes if a.get_visible() and a.get_label() != "<colorbar>"]
        assert panels
        for panel in panels:
            words = [
                t.get_text()
                for t in panel.get_xticklabels()
                if any(c.isalpha() for c in t.get_text())
            ]
            assert panel.get_xlabel() or words, view.title
            assert panel.get_ylabel() or panel.get_title() or words, view.title


def test_views_save_and_refuse(positional: PositionalReport, tmp_path: Path) -> None:
    page = views.fourier(positional).save(tmp_path / "f.html").read_text()
    assert "data:image/svg+xml" in page
    with pytest.raises(GeometryError, match="one of rank"):
        views.learning_curve(positional, "nothing")
