"""A logit over its text: every token keeps its place, its colour and its number."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.html import signed
from tl_geometry.base.results import Provenance
from tl_geometry.circuits.logit_graph import TokenTable
from tl_geometry.render import token_attribution
from tl_geometry.render.token_view import BAR, lay_out

TOKENS = (" When", " Mary", "\n", "</script>$x$", "\u202eevil", *(f" w{i}" for i in range(40)))


def table(scale: float = 1.0) -> TokenTable:
    length = len(TOKENS)
    by_part = scale * torch.randn(length + 1, 2, generator=torch.Generator().manual_seed(0))
    by_part[1, 0] = -5 * scale  # the largest, and against the logit
    return TokenTable(
        provenance=Provenance(),
        positions=(*range(length), -1),
        tokens=(*TOKENS, "constants"),
        parts=("embed", "pos_embed"),
        value=by_part.sum(1),
        by_part=by_part,
    )


def test_tokens_keep_their_order_and_overlap_nothing() -> None:
    placed = lay_out(TOKENS, 30)
    assert [token.text[-1] for token in placed[:2]] == ["n", "y"]
    for before, after in itertools.pairwise(placed):
        assert (after.line, after.x) >= (before.line, before.x + len(before.text)) or (
            after.line > before.line and after.x == 0
        )
    assert placed[3].line == placed[2].line + 1  # a line break ends its line
    assert all(token.x + len(token.text) <= 30 for token in placed)


def test_the_colour_and_the_numbers_are_those_of_the_table(tmp_path: Path) -> None:
    given = table()
    view = token_attribution(given)
    axis = view.figure.axes[0]
    scale = view.figure.axes[1]._colorbar.mappable  # type: ignore[attr-defined]
    shown = [patch.get_facecolor() for patch in axis.patches]
    assert len(shown) == len(TOKENS)
    expected = torch.tensor(scale.to_rgba(given.value[:-1].numpy())).float()
    assert torch.tensor(shown).allclose(expected)
    numbers = [t.get_text() for t in axis.texts if t.get_fontsize() == 6.5]
    assert f"{float(given.value[:-1].abs().max()):.2f}" in {text[1:] for text in numbers}
    assert signed(float(given.value[1]), "+.2f") in numbers
    assert f"and the constants ({signed(float(given.value[-1]), '+.3g')}) sum to" in view.caption
    assert signed(float(given.value.sum()), ".4g") in view.caption
    red, blue = scale.to_rgba([5.0, -5.0])
    assert red[0] > red[2]  # positive is red
    assert blue[2] > blue[0]
    assert "</script>" not in token_attribution(given).save(tmp_path / "x.html").read_text()


@pytest.mark.parametrize("width", [20, 38, 76])
def test_text_is_no_wider_than_its_box(width: int) -> None:
    figure = token_attribution(table(), width=width).figure
    figure.draw_without_rendering()
    axis = figure.axes[0]
    words = [text for text in axis.texts if text.get_fontsize() == 8 and text.get_text().isascii()]
    per_character = axis.get_window_extent().width / width
    assert len(words) >= 40
    for word in words:
        assert word.get_window_extent().width <= per_character * len(word.get_text()), word


def test_nothing_contributed_is_drawn() -> None:
    assert token_attribution(table(0.0)).caption.endswith("sum to 0.")


def test_lines_are_as_wide_as_asked_for() -> None:
    wide, narrow = (token_attribution(table(), width=width).figure for width in (76, 38))
    text, half = (figure.get_size_inches()[0] - BAR for figure in (wide, narrow))
    assert half == pytest.approx(text / 2)
    for figure, width in ((wide, 76), (narrow, 38)):
        patches: Any = figure.axes[0].patches
        ends = [patch.get_x() + patch.get_width() for patch in patches]
        assert width - 10 < max(ends) <= width
    with pytest.raises(GeometryError, match="width: expected at least 20 characters, got 19"):
        token_attribution(table(), width=19)
