"""Figures of a basis: the curve of positions, shares beside a control, the order of cosines, and
the names of the largest tokens, by plain loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.render import basis as views
from tl_geometry.render.figure import View


def made(states: int = 3, seed: int = 0, *, labels: list[int] | None = None) -> PositionContext:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(states, 8, 12, 6, generator=generator, dtype=torch.float64)
    h += 2 * torch.randn(states, 1, 12, 6, generator=generator, dtype=torch.float64)
    return tlg.decompose_activations(h, labels=labels)


def panels(view: View) -> list[Any]:
    return [axis for axis in view.figure.axes if axis.get_label() != "<colorbar>"]


def test_a_curve_is_that_of_its_state_and_its_model() -> None:
    basis, control = made(2, seed=1), made(2, seed=2)
    view = views.spirals(basis, control=control)
    drawn = panels(view)
    assert len(drawn) == 4
    assert "(2 of 2 states" in view.caption
    assert view.null == "The lower row is the untrained control."
    assert views.spirals(basis).null.startswith("No null is drawn")
    for at, axis in enumerate(drawn):
        row, state = divmod(at, 2)
        pos = (basis, control)[row].pos[state].double()
        _, S, V = torch.linalg.svd(pos, full_matrices=False)
        (points,) = axis.collections
        found = np.asarray(points.get_offsets())
        assert np.allclose(np.abs(found), (pos @ V[:2].T).abs().numpy(), atol=1e-6)
        assert points.get_array().tolist() == list(range(*basis.window)), "coloured by position"
        share = float((S[:2] ** 2).sum() / (S**2).sum())
        assert axis.get_title() == f"state {state}: {share:.0%}"
        low, high = found.min(0), found.max(0)
        for side, (first, last) in enumerate((axis.get_xlim(), axis.get_ylim())):
            assert first == pytest.approx(low[side] - 0.06 * (high - low)[side])
            assert last == pytest.approx(high[side] + 0.06 * (high - low)[side])
        words = ("trained: u2", "untrained control: u2")[row] if state == 0 else ""
        assert axis.get_ylabel() == words
        assert axis.get_xlabel() == ("u1" if row else "")
    assert panels(views.spirals(basis))[0].get_ylabel() == "u2"


def test_at_most_five_states_have_a_curve() -> None:
    titles = [axis.get_title() for axis in panels(views.spirals(made(6)))]
    assert [title.split(":")[0] for title in titles] == [f"state {i}" for i in (0, 1, 2, 4, 5)]


def test_points_far_from_all_others_are_counted_and_lie_off_the_frame() -> None:
    """More than six interquartile ranges from the median, in either direction."""
    line = torch.linspace(-2, 2, 9, dtype=torch.float64)  # quartiles at -1 and 1
    for far, off in ((11.9, 0), (12.2, 1), (-12.2, 1)):
        points = torch.stack([line, line.roll(3)], 1)
        points[8 if far > 0 else 0, 0] = far
        axis = views.canvas()[1][0]
        assert views._fit_axes(axis, points) == off
        assert (far < axis.get_xlim()[1] and far > axis.get_xlim()[0]) == (off == 0)
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 1, 12, 6, generator=generator, dtype=torch.float64).repeat(1, 8, 1, 1)
    h[:, :, 3, 1] = 99
    titles = [a.get_title() for a in panels(views.spirals(tlg.decompose_activations(h)))]
    assert all(title.endswith(", 1 off") for title in titles)


def test_points_in_one_place_have_a_frame() -> None:
    axis = views.canvas()[1][0]
    assert views._fit_axes(axis, torch.full((5, 2), 3.0).double()) == 0
    assert axis.get_xlim() == axis.get_ylim() == pytest.approx((2.94, 3.06))


def test_shares_of_the_control_stand_in_the_second_panel() -> None:
    table, control = made(seed=1).anova(), made(seed=2).anova()
    null = dataclasses.replace(control, ctx_null=control.shares["ctx"] / 2)
    view = views.variance_shares(table, control=null)
    assert [axis.get_title() for axis in panels(view)] == ["trained", "untrained control"]
    for axis, current in zip(panels(view), (table, null), strict=True):
        lines = {str(line.get_label()): line for line in axis.lines}
        assert set(lines) - {"null: context of spliced windows"} == set(views.WORDS.values())
        for part, word in views.WORDS.items():
            assert np.asarray(lines[word].get_xdata()).tolist() == list(current.states)
            assert np.allclose(np.asarray(lines[word].get_ydata()), current.shares[part])
    assert len(panels(view)[0].lines) == 3
    assert len(panels(view)[1].lines) == 4
    first, last = (100 * float(table.shares["pos"][i]) for i in (0, -1))
    assert f"position {first:.2g}% to {last:.2g}%, context " in view.title
    assert panels(views.variance_shares(table))[0].get_title() == ""
    last_unknown = torch.tensor([1.0, 1.0, torch.nan]).double()
    unknown = dataclasses.replace(
        table, pos=table.pos * last_unknown, ctx=table.ctx * last_unknown.flip(0)
    )
    title = views.variance_shares(unknown).title
    assert title == "Shares of variance: position not told apart, context not told apart"


def test_positions_and_contexts_are_told_apart_by_a_line_and_named_in_their_middle() -> None:
    basis = made()
    axis: Any = views.gram(basis, 1).figure.axes[0]
    assert [float(np.asarray(line.get_ydata())[0]) for line in axis.lines[:1]] == [11.5]
    assert [float(np.asarray(line.get_xdata())[0]) for line in axis.lines[1:]] == [11.5]
    for ticks, labels in (
        (axis.get_xticks(), axis.get_xticklabels()),
        (axis.get_yticks(), axis.get_yticklabels()),
    ):
        assert ticks.tolist() == [6, (12 + 20) / 2]
        assert [t.get_text() for t in labels] == ["positions", "contexts"]
    alone = views.gram(dataclasses.replace(basis, context_means=None), 1)
    assert [t.get_text() for t in alone.figure.axes[0].get_xticklabels()] == ["positions"]
    assert "a cosine of 0 ± 0.41." in alone.null, "of six dimensions"


def test_many_contexts_are_chosen_evenly() -> None:
    for count in (127, 128, 255):
        basis = tlg.decompose_activations(torch.randn(2, count, 4, 6, dtype=torch.float64))
        image: Any = views.gram(basis, 1).figure.axes[0].images[0].get_array()
        assert len(image) == 4 + min(count, 128)
        assert basis.ctx is not None
        every = 2 if count == 255 else 1
        cosines = torch.cosine_similarity(basis.pos[1, :, None], basis.ctx[1, ::every], dim=-1)
        assert np.allclose(np.asarray(image)[:4, 4:], cosines)


def norms(marked: list[tuple[int, float, str]], values: torch.Tensor | None = None) -> Any:
    """The axes of norms of 1 at the positions 2 to 9, but for those given."""
    values = torch.ones(3, 8) if values is None else values
    view = views.token_norms(
        values, (2, 10), marked, state=1, title="Norms", provenance=Provenance()
    )
    return view.figure.axes[0]


def named(marked: list[tuple[int, float, str]]) -> list[tuple[str, str]]:
    """The names that are written, and on which side of its point each begins."""
    return [(text.get_text(), text.get_ha()) for text in norms(marked).texts]


def test_the_line_of_norms_is_the_median_of_each_position() -> None:
    values = torch.rand(5, 8, generator=torch.Generator().manual_seed(0)) + 1
    axis = norms([(4, 9.0, "a"), (3, 5.0, "b")], values)
    (line,) = axis.lines
    assert np.asarray(line.get_xdata()).tolist() == list(range(2, 10))
    assert np.allclose(np.asarray(line.get_ydata()), np.median(values.numpy(), 0))
    cloud, largest = axis.collections
    drawn = sorted(map(tuple, np.asarray(cloud.get_offsets()).tolist()))
    assert drawn == sorted((p + 2.0, float(values[c, p])) for c in range(5) for p in range(8))
    assert np.asarray(largest.get_offsets()).tolist() == [[4, 9], [3, 5]]
    assert cloud.get_rasterized(), "an SVG stays small"
    assert axis.get_yscale() == "log"
    assert axis.get_ylabel().startswith("norm in state 1")


def test_tokens_above_three_times_the_median_have_their_name() -> None:
    """Each token of a position once, beside its point, towards the middle of the window."""
    assert named([(5, 9.0, "a"), (5, 8.0, "a")]) == [("a at 5", "left")]
    assert named([(6, 9.0, "a")]) == [("a at 6", "right")], "the middle of 2 to 10"
    assert named([(2, 9.0, "a"), (3, 3.0, "b")]) == [("a at 2", "left")]
    assert named([(2, 9.0, "a"), (3, 3.1, "b")])[1:] == [("b at 3", "left")]
    close = named([(2, 10.0, "a"), (3, 8.1, "b"), (4, 8.0, "c"), (5, 6.3, "d")])
    assert [name for name, _ in close] == ["a at 2", "c at 4", "d at 5"], "no name on another"
    texts = ["w" * 16, "w" * 17]
    cut = named([(2 + i, 50.0 / 2**i, text) for i, text in enumerate(texts)])
    assert [name for name, _ in cut] == [f"{'w' * 16} at 2", f"{'w' * 15}… at 3"]
    many = named([(2 + i % 8, 5000.0 / 2**i, str(i)) for i in range(9)])
    assert [name.split()[0] for name, _ in many] == [str(i) for i in range(8)]
