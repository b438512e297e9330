"""Prompts of a template have the texts of their slots at the positions that they name."""

from __future__ import annotations

from typing import Any

import pytest

import tl_geometry as tlg
from tl_geometry.base.errors import GeometryError
from tl_geometry.corpus import aligned_prompts

pytestmark = pytest.mark.once

ROWS = [{"f": "get", "x": "y"}, {"f": "set", "x": "z"}]
FORMS = ["def {f}({x}): return {x}", "for {x} in {f}({x}): pass"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


def text_at(model: Any, prompts: tlg.TokenWindows, row: int, name: str) -> str:
    token = int(prompts.tokens[row, prompts.position(name)])
    return tlg.view(model).decode([token])[0].strip()


def test_named_positions_hold_what_was_filled_in(model: Any) -> None:
    for form in FORMS:
        for bos in (False, True):
            prompts = aligned_prompts(model, form, ROWS, prepend_bos=bos)
            assert set(prompts.positions) == {"f", "x", "x2", "end"}
            for row, slots in enumerate(ROWS):
                for name in ("f", "x", "x2"):
                    assert slots[name[0]] == text_at(model, prompts, row, name)
            assert prompts.position("end") == prompts.tokens.shape[1] - 1
            assert prompts.position("x") < prompts.position("x2")
            assert prompts[1:].position("f") == prompts.position("f")


def test_the_rows_are_those_of_the_filled_text(model: Any) -> None:
    prompts = aligned_prompts(model, FORMS[0], ROWS, prepend_bos=True)
    for row, slots in enumerate(ROWS):
        text = f"def {slots['f']}({slots['x']}): return {slots['x']}"
        assert prompts.tokens[row, 1:].tolist() == tlg.view(model).encode(text)
    assert prompts.has_bos


def test_several_templates_keep_the_positions_that_they_share(model: Any) -> None:
    swapped = [FORMS[0], "def {x}({f}): return {x}"]
    rows = [{"f": "a", "x": "b"}, {"f": "c", "x": "d"}]
    prompts = aligned_prompts(model, swapped, rows, prepend_bos=True)
    assert set(prompts.positions) == {"x2", "end"}
    assert prompts.labels is not None
    assert prompts.labels.tolist() == [0, 0, 1, 1]
    assert prompts.names == tuple(swapped)
    one = aligned_prompts(model, swapped[1], rows, prepend_bos=True)
    assert prompts.tokens[2:].equal(one.tokens)


def test_what_does_not_align_is_refused(model: Any) -> None:
    with pytest.raises(GeometryError, match=r"slots .'f', 'x'.*those of .'f'"):
        aligned_prompts(model, FORMS[0], [{"f": "get"}], prepend_bos=True)
    with pytest.raises(GeometryError, match=r"those of .'f', 'x', 'z'"):
        aligned_prompts(model, FORMS[0], [ROWS[0] | {"z": ""}], prepend_bos=True)
    with pytest.raises(GeometryError, match="length"):
        aligned_prompts(
            model, FORMS[0], [ROWS[0], {"f": "get", "x": "y, other_name, more"}], prepend_bos=True
        )
    with pytest.raises(GeometryError, match="several positions"):
        rows = [{"a": "y, z", "b": "y"}, {"a": "y", "b": "y, z"}]
        aligned_prompts(model, "f({a}) + g({b})", rows, prepend_bos=True)
    with pytest.raises(GeometryError, match="text with slots"):
        aligned_prompts(model, "f({a)", [{"a": "b"}], prepend_bos=True)
    with pytest.raises(GeometryError, match="at least one"):
        aligned_prompts(model, FORMS[0], [], prepend_bos=True)
    with pytest.raises(GeometryError, match="'f', 'x', 'x2', 'end'"):
        aligned_prompts(model, FORMS[0], ROWS, prepend_bos=True).position("y")
