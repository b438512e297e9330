"""How are prompts made whose words stand at the same positions? :func:`aligned_prompts` fills the
slots of a template, for every function that takes prompts. Token rows have one length; the names of
slots are names of positions there (``position="S2"``). The same template with other words in the
slots gives counterfactual prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from string import Formatter

import torch

from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

END = "end"
"""Name of the last position."""


def aligned_prompts(
    model: ModelLike,
    template: str | Sequence[str],
    rows: Sequence[Mapping[str, str]],
    *,
    prepend_bos: bool,
) -> TokenWindows:
    """Fill every row into the slots of a template: tokens with named positions.

    Args:
        template: a text with slots, ``"When {IO} and {S} went to the store, {S} gave a drink to"``,
            or several; then the result has all rows in the first template, then all rows in the
            second, and ``labels`` are the templates.
        rows: the text of each slot, ``[{"IO": "Mary", "S": "John"}, ...]``.

    ``positions`` of the result name the last token of the text in each slot: ``"S"`` where the slot
    occurs first, ``"S2"`` where it occurs again, and so on. ``"end"`` is the last position. A name
    at different positions in different templates is left out.

    Raises ``GeometryError`` for a row without the text of a slot or with more, and for prompts of
    unequal token length.

    >>> import tl_geometry as tlg
    >>> rows = [{"name": "get", "x": "y"}, {"name": "set", "x": "z"}]
    >>> prompts = tlg.corpus.aligned_prompts(
    ...     tlg.zoo.embedded(), "def {name}({x}): return {x}", rows, prepend_bos=True
    ... )
    >>> prompts.tokens.shape[0], prompts.position("x2") == prompts.position("end")
    (2, True)
    """
    view = as_view(model)
    templates = [template] if isinstance(template, str) else list(template)
    enough = len(templates) > 0 and len(rows) > 0
    require(enough, "template, rows", expected="at least one of each", got="none")
    used = {name for text in templates for _, name in _slots(text) if name is not None}
    for row in rows:
        expected, fits = f"texts of the slots {sorted(used)}", set(row) == used
        require(fits, "rows", expected=expected, got=f"those of {sorted(row)}")
    filled = [_filled(text, row) for text in templates for row in rows]
    prompts = token_rows(view, [text for text, _ in filled], prepend_bos=prepend_bos)
    length = prompts.tokens.shape[1]
    places_by_prompt = [
        {name: _position(view, text, end, int(prompts.has_bos)) for name, end in ends.items()}
        for text, ends in filled
    ]
    # only (name, position) pairs that all prompts share
    shared = set.intersection(*(set(places.items()) for places in places_by_prompt))
    for i in range(len(templates)):
        of_template = places_by_prompt[i * len(rows) : (i + 1) * len(rows)]
        agree, got = all(places == of_template[0] for places in of_template), "several positions"
        expected, instead = "each slot at one position", "texts of as many tokens in each slot"
        require(agree, "rows", expected=expected, got=got, instead=instead)
    return dataclasses.replace(
        prompts,
        labels=torch.arange(len(templates)).repeat_interleave(len(rows)),
        names=tuple(templates),
        positions=dict(sorted(shared, key=lambda place: place[1])) | {END: length - 1},
    )


def _slots(template: str) -> list[tuple[str, str | None]]:
    """The literal parts of a template, each with the name of the slot after it (``None`` at the
    end)."""
    try:
        parsed = [(text, name) for text, name, _, _ in Formatter().parse(template)]
    except ValueError as error:
        expected = "text with slots such as {S}"
        fail("template", expected=expected, got=f"{template[:60]!r} ({error})")
    require(END not in [name for _, name in parsed], "template", expected="other names", got=END)
    return parsed


def _filled(template: str, row: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    """The prompt, and where the text in each slot ends in it."""
    text, ends, count = "", {}, dict.fromkeys(row, 0)
    for literal, name in _slots(template):
        text += literal
        if name is not None:
            text += row[name]
            count[name] += 1
            ends[name if count[name] == 1 else f"{name}{count[name]}"] = len(text)
    return text, ends


def _position(view: ModelView, text: str, end: int, has_bos: int) -> int:
    """The position of the token that ends at character ``end`` of a prompt."""
    ids_before, ids = view.encode(text[:end]), view.encode(text)
    # refuses a token that goes on after the slot: no position ends with the slot
    if ids[: len(ids_before)] != ids_before:
        got, instead = f"{text[:end]!r} and {text[end:]!r} in one", "slots of whole words"
        fail("template", expected="slots that end with a token", got=got, instead=instead)
    return has_bos + len(ids_before) - 1
