"""Figures of weights: what they draw, that they save, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.interventions.causal import dominant_only, necessity_sufficiency
from tl_geometry.interventions.surrogates import surrogate_effect
from tl_geometry.render import weights as draw
from tl_geometry.render.figure import BLUE, GREY, View
from tl_geometry.render.head_view import head_grid
from tl_geometry.sphere.paths import token_paths
from tl_geometry.weights.heads import token_readout, weight_geometry


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("bridge", "gpt2")


@pytest.fixture(scope="module")
def basis(model: Any) -> tlg.PositionContext:
    return tlg.decompose(model, tokens(24, 16), progress=False)


def pixels(axis: Any) -> Tensor:
    """What an image on the axes holds."""
    return torch.as_tensor(np.asarray(axis.images[0].get_array()))


def test_blocks_show_the_diagonal_in_red_and_only_entries_above_the_threshold_in_blue(
    model: Any, basis: Any, tmp_path: Any
) -> None:
    g = weight_geometry(model, basis)
    view = draw.weight_blocks(g, ["L1H0", "L1H2"])
    ends = ("key direction", "query direction")
    assert [(a.get_xlabel(), a.get_ylabel()) for a in view.figure.axes] == [ends] * 2
    image = pixels(view.figure.axes[1])
    row = g.head("L1H2")
    blue = image[..., 0] < image[..., 2] - 1e-6
    above = g.block[row].abs() > g.threshold[row]
    off = ~torch.eye(len(above), dtype=torch.bool)
    assert torch.equal(blue & off, above & off)
    strongest = int(g.diagonal[row].abs().argmax())
    assert image[strongest, strongest, 0] > image[strongest, strongest, 2]  # red, also over blue
    assert view.save(tmp_path / "a.png").stat().st_size > 1000
    assert "random subspace" in view.null
    whole = draw.weight_blocks(g)
    assert len([a for a in whole.figure.axes if a.images]) == 4
    single = draw.weight_blocks(g, "L0H1", ax=view.figure.axes[0])
    assert single.figure is view.figure
    with pytest.raises(GeometryError, match="ax: expected one head"):
        draw.weight_blocks(g, ax=view.figure.axes[0])


def test_maps_curves_paths_and_bars(model: Any, basis: Any, tmp_path: Any) -> None:
    g = weight_geometry(model, basis, "OV")
    shown = pixels(head_grid(g, "lift").figure.axes[0])
    torch.testing.assert_close(shown, g.lift.double().reshape(2, 4))
    assert "r2 joint" in head_grid(g, "r2_joint").title
    with pytest.raises(GeometryError, match=r"value: expected one of .*'lowest'"):
        head_grid(g, "weight")
    r = token_readout(model, features=1)
    lines: Any = draw.coverage_curves(r).figure.axes[0].lines
    assert len(lines) == 8 + 1
    assert float(lines[0].get_ydata()[-1]) == pytest.approx(1)
    p = token_paths(model, tokens(2, 5))
    view = draw.sphere_paths(p, 1, [0, 3])
    assert len(view.figure.axes[0].lines) == 2
    assert view.figure.axes[0].get_xlabel() == "pca 1"
    assert view.save(tmp_path / "p.html").read_text().startswith("<!doctype html>")
    with pytest.raises(GeometryError, match="ax: expected axes with projection='3d'"):
        draw.sphere_paths(p, ax=head_grid(g).figure.axes[0])
    e = surrogate_effect(model, tokens(2), basis, layers=1, parts=("structured", "random"))
    bars: Any = draw.surrogate_bars(e).figure.axes[0].patches
    assert [float(b.get_height()) for b in bars] == pytest.approx((e.loss - e.clean_loss).tolist())
    assert draw.surrogate_bars(e).null == (
        "Grey bars are controls: a random subspace of the same rank."
    )
    none = dataclasses.replace(e, parts=("structured", "whole"))
    assert "W_QK itself" in draw.surrogate_bars(none).null
    assert "random" not in draw.surrogate_bars(none).null


def colours_of_bars(view: View) -> dict[str, str]:
    axis = view.figure.axes[0]
    names = [text.get_text() for text in axis.get_yticklabels()]
    colours: Any = [bar.get_facecolor() for bar in axis.patches]
    return dict(zip(names, map(to_hex, colours), strict=True))


def test_bars_of_effects_ask_their_own_question_and_name_their_controls(
    model: Any, basis: Any
) -> None:
    prompts, options = tokens(4, 16, seed=5), {"draws": 2, "progress": False}
    needed = necessity_sufficiency(model, prompts, basis, ["L0H1", "L1H2"], "pos-cvec", **options)
    view = draw.effect_bars(needed)
    assert view.title == "Does L0H1, L1H2 need pos-cvec?"
    colours = colours_of_bars(view)
    assert list(colours) == list(needed.conditions[1:])
    assert {name for name, colour in colours.items() if colour == BLUE.lower()} == {
        "keep",
        "remove",
    }
    # by their names "swap" and "remove pos-pos" are no controls, and "remove bias-pos" is one
    assert {colours[name] for name in ("swap", "shrink", "remove pos-pos", "remove bias-pos")} == {
        to_hex(GREY)
    }
    assert "another prompt" in view.null
    assert "uniform" not in view.null
    view = draw.effect_bars(dominant_only(model, prompts, basis, **options))
    colours = colours_of_bars(view)
    blue = {name for name, colour in colours.items() if colour == BLUE.lower()}
    assert blue == {"dominant term", "dominant group"}
    assert "uniform" in view.null
