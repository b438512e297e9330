"""What a split shows, by plain loops: the numbers of some of its heads, where the image paints
which panel, its labels, and where the colour scale ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps

from tests.browser import payload
from tests.render.test_split import unpacked
from tests.splits import synthetic
from tl_geometry import render
from tl_geometry.base.errors import GeometryError
from tl_geometry.render import split_view
from tl_geometry.render.figure import DIVERGING, SEQUENTIAL
from tl_geometry.scores.split import ScoreSplit


def uneven(heads: int = 3, tokens: int = 9) -> ScoreSplit:
    """Heads that differ in all that a split holds of each: bias, mask, soft cap and sink."""
    split = synthetic(heads, tokens)
    mask = split.allowed.clone()
    for head in range(heads):
        mask[head] &= torch.ones(tokens, tokens, dtype=torch.bool).triu(-2 - head)
    return dataclasses.replace(
        split,
        bias=torch.randn(heads, tokens, tokens),
        mask=mask,
        softcap=torch.arange(1.0, heads + 1),
        sinks=torch.linspace(-1, 1, heads),
    )


@pytest.mark.parametrize("own_scores", [False, True])
def test_some_heads_of_a_prompt_have_the_numbers_that_they_have_among_all(
    own_scores: bool,
) -> None:
    """Also where the total is the model's own (the preset "reference")."""
    one, other = uneven(), synthetic(3, 9, seed=5)
    scores = torch.randn(2, 3, 9, 9) if own_scores else None
    both = {name: torch.cat([getattr(one, name), getattr(other, name)], 1) for name in "qk"}
    split = dataclasses.replace(one, **both, scores=scores)
    for context in (0, 1):
        view = render.split(split, [(0, 2), (0, 0)], context=context, panels="terms")
        data = payload(view)
        shown = unpacked(data)
        assert data["heads"] == ["L0H2", "L0H0"]
        drawn = [split.terms[t][context] for t in split.terms]
        drawn += [split.total()[context], split.pattern()[context]]
        for row, head in enumerate((2, 0)):
            allowed = split.allowed[head]
            assert np.array_equal(~np.isnan(shown[row, 0]), allowed.numpy())
            want = torch.stack(drawn, 1).double()[head][:, allowed].numpy()
            assert np.allclose(shown[row][:, allowed.numpy()], want, rtol=1e-3, atol=3e-3)
        assert data["query"] == 8, "the last token is shown first"


def test_panels_stand_in_their_grid() -> None:
    split = synthetic(1, 6)
    several = ["pos-pos", "content", "cvec-pos", "bias-bias", "position"]
    for panels, wanted in (
        (None, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]),
        ("terms", [*(divmod(i, 3) for i in range(9)), (0, 3), (1, 3)]),
        (several[:1], [(0, 0), (0, 1), (1, 1)]),
        (several[:2], [(0, 0), (0, 1), (0, 2), (1, 2)]),
        (several[:3], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]),
        (several, [*((0, i) for i in range(3)), (1, 0), (1, 1), (0, 3), (1, 3)]),
    ):
        view = render.split(split, panels=panels)
        assert [tuple(place) for place in payload(view)["places"]] == wanted
        assert ("do not sum to the total" in view.caption) == isinstance(panels, list)


def largest(values: list[float]) -> tuple[float, float]:
    """The end of the scale and the largest of some values."""
    sizes = sorted(abs(v) for v in values)
    return min(sizes[-1], 2 * sizes[math.ceil(0.99 * len(sizes)) - 1]), sizes[-1]


@pytest.mark.parametrize("factor", [1.0, 60.0])
def test_the_scale_ends_at_the_largest_or_at_twice_the_99th_percentile(factor: float) -> None:
    """Of all that is drawn of scores; the second where a few are far larger."""
    split = synthetic(2, 21)
    q = split.q.clone()
    q[1, 0, 20, 1] *= factor
    split = dataclasses.replace(split, q=q)
    terms = [split.terms[t][0] for t in split.terms]
    scores = torch.stack([*terms, split.total()[0]])[:, split.allowed]
    limit, high = largest(scores.flatten().tolist())
    data = payload(render.split(split, panels="terms"))
    assert (data["limit"], data["high"]) == pytest.approx((limit, high), rel=1e-4)
    assert (limit < high) == (factor > 1)


def test_scores_of_zero_have_a_scale() -> None:
    split = synthetic(1, 5)
    zero = dataclasses.replace(split, q=torch.zeros_like(split.q))
    data = payload(render.split(zero))
    assert (data["limit"], data["high"]) == (1, 1)


@pytest.mark.parametrize("tokens", [20, 70])
def test_the_caption_bounds_the_rounding(tokens: int) -> None:
    split = synthetic(1, tokens)
    view = render.split(split, panels="terms")
    bound = view.caption.split("rounded by at most ")[1].split(";")[0]
    shown = unpacked(payload(view))[0]
    true = torch.stack([*(split.terms[t][0, 0] for t in split.terms), split.total()[0, 0]])
    error = np.nanmax(np.abs(shown[:-1] - true.numpy()))
    assert error <= float(bound) <= 2.1 * error, "one digit, rounded up"
    steps = view.caption.split("; ")[3]
    levels = payload(view)["levels"]
    assert steps.startswith("float16" if tokens == 20 else f"int8 in {2 * levels + 1} steps")
    assert view.caption.startswith("Raw scores")
    assert render.split(split, centered=True).caption.startswith("Row-centred scores")


def painted(view: Any) -> tuple[np.ndarray, dict[str, tuple[int, int]], Any]:
    """The sheet of an image, the corner of each panel by its name, and the axes."""
    axis = view.figure.axes[0]
    corners = {t.get_text(): t.get_position() for t in axis.texts}
    places = {name: (math.ceil(y), round(x)) for name, (x, y) in corners.items()}
    return np.asarray(axis.images[0].get_array()), places, axis


def colours(values: torch.Tensor, allowed: torch.Tensor, top: float, *, paid: bool) -> np.ndarray:
    """Colours of a panel, cell by cell."""
    drawn = np.zeros((*values.shape, 4))
    for q, k in np.ndindex(*values.shape):
        v = float(values[q, k])
        shade = colormaps[SEQUENTIAL](v) if paid else colormaps[DIVERGING](0.5 + v / top / 2)
        drawn[q, k] = [255 * c for c in shade] if allowed[q, k] else (237, 237, 240, 255)
    return drawn


def test_the_image_of_one_head_paints_each_panel_below_its_name() -> None:
    split = synthetic(2, 7)
    view = render.split(split, (0, 1))
    sheet, places, axis = painted(view.image())
    top, allowed = payload(view)["limit"], split.allowed[1]
    panels = {
        name: sum(split.terms[t][0, 1] for t in members)
        for name, members in split_view.panels_of(split, None).items()
    }
    panels |= {"total": split.total()[0, 1], "pattern": split.pattern()[0, 1]}
    assert list(places) == list(panels)
    for name, values in panels.items():
        r, c = places[name]
        want = colours(torch.as_tensor(values), allowed, top, paid=name == "pattern")
        assert np.abs(sheet[r : r + 7, c : c + 7] - want).max() <= 4, name
    assert not sheet[:, 7].any(), "nothing is painted between panels"
    columns = sorted({c for name, (_, c) in places.items() if name != "total"})
    texts = [f"␣t{i}" for i in range(7)]
    assert [t.get_text() for t in axis.get_xticklabels()] == 3 * texts
    assert axis.get_xticks().tolist() == [c + i for c in columns for i in range(7)]
    rows = sorted({r for r, _ in places.values()})
    assert [t.get_text() for t in axis.get_yticklabels()] == 2 * texts
    assert axis.get_yticks().tolist() == [r + i for r in rows for i in range(7)]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("key", "query")


def test_many_tokens_have_every_second_name_at_its_cell() -> None:
    for tokens, every in ((24, 1), (25, 2), (48, 2), (49, 3)):
        _, _, axis = painted(render.split(synthetic(1, tokens)).image())
        ticks = axis.get_xticks()
        first = ticks[: len(range(0, tokens, every))].tolist()
        assert first == list(range(0, tokens, every))
        names = [t.get_text() for t in axis.get_xticklabels()]
        assert names[: len(first)] == [f"␣t{i}" for i in first]


def test_the_image_of_several_heads_has_a_row_for_each() -> None:
    split = uneven()
    view = render.split(split)
    sheet, places, axis = painted(view.image())
    names = [t.get_text() for t in axis.get_yticklabels()]
    assert names == ["L0H0", "L0H1", "L0H2"]
    assert axis.get_ylabel() == "head"
    middles = axis.get_yticks()
    assert {r for r, _ in places.values()} == {0}
    for head, middle in enumerate(middles):
        start = round(middle - 9 / 2)
        for name, values in (("total", split.total()), ("pattern", split.pattern())):
            paid, c = name == "pattern", places[name][1]
            want = colours(values[0, head], split.allowed[head], payload(view)["limit"], paid=paid)
            inside = np.abs(values[0, head].numpy()) <= payload(view)["limit"]
            got = sheet[start : start + 9, c : c + 9]
            assert np.abs(got - want)[inside].max() <= 4, (head, name)


def test_a_cell_that_is_not_a_number_is_chequered() -> None:
    split = synthetic(1, 6)
    q = split.q.clone()
    q[:, 0, 4] = torch.nan
    sheet, places, _ = painted(render.split(dataclasses.replace(split, q=q)).image())
    r, c = places["total"]
    row = sheet[r + 4, c : c + 6, 0].tolist()
    assert row[:5] == [190, 50, 190, 50, 190]
    assert row[5] == 237, "no key is allowed there"


def test_blocks_double_while_eight_are_left() -> None:
    blocks = lambda tokens: list(split_view._blocks(tokens))
    assert blocks(15) == [1]
    assert blocks(64) == [1, 2, 4, 8]
    assert blocks(256)[0] == 1
    assert blocks(257) == [2, 4, 8, 16, 32]


def test_only_a_page_of_more_than_four_panels_may_take_the_larger_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["pos-pos", "pos-cvec", "cvec-pos", "cvec-cvec", "bias-bias"]
    monkeypatch.setattr(split_view, "SIZES", (1000, 4_000_000))
    assert len(payload(render.split(synthetic(1, 5), panels=names))["planes"]) == 7
    with pytest.raises(GeometryError, match="a page of 1000 bytes holds, got 1 heads x 6"):
        render.split(synthetic(1, 5), panels=names[:4])
