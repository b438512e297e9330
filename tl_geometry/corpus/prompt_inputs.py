"""How do texts become :class:`Prompts`? :func:`prompts` reads the texts, their counterfactuals,
answers of one token and named positions, and names the prompt at fault; :func:`as_prompts` takes
what a function on prompts was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import index, whole
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.prompt_sets import Prompts, Rows
from tl_geometry.corpus.sources import as_tokens, encoded, id_rows, is_text, text_ids
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view


def prompts(
    model: ModelLike,
    texts: Any,
    *,
    counterfactuals: Any = None,
    answers: Any = None,
    others: Any = None,
    positions: Mapping[str, Any] | None = None,
    prepend_bos: bool | None = None,
) -> Prompts:
    """Prompts of any lengths, with what belongs to each of them.

    Args:
        texts: a text, a list of texts, or ids: rows of any lengths.
        counterfactuals: for each prompt another of as many tokens (activation patching).
        answers: a token (an id, or a text that is one token) for all prompts, a list with one for
            each, a pair ``(answer, other)``, or a list of pairs.
        others: the other answer, where ``answers`` are no pairs.
        positions: names of positions: a number (-1 is the last), a piece of text that occurs once
            (the token in which it ends), or a list with one of these for each prompt.
        prepend_bos: whether texts begin with BOS; ``None`` takes the model's own default. A text
            that begins with the BOS string, as chat templates give it, gets no second one.

    Raises ``GeometryError`` with the number of the prompt at fault: an answer of several tokens
    (it says which), a counterfactual of another length, a position that is not there.

    >>> import tl_geometry as tlg
    >>> found = prompts(
    ...     tlg.zoo.embedded(),
    ...     ["def get(x): return", "def f(value, y): return"],
    ...     answers=[(" x", " y"), (" value", " y")],
    ...     positions={"name": ["get", "def f"]},
    ... )
    >>> len(found), found.at("name").tolist()
    (2, [2, 2])
    """
    view = as_view(model)
    spoken, ids, flags = _read(view, texts, prepend_bos, "texts")
    other_ids = None
    if counterfactuals is not None:
        other_ids = _read(view, counterfactuals, prepend_bos, "counterfactuals")[1]
        expected, got = f"one for each of {len(ids)} prompts", len(other_ids)
        require(got == len(ids), "counterfactuals", expected=expected, got=got)
        for i, (row, other) in enumerate(zip(ids, other_ids)):
            expected, got = f"{len(row)} tokens, as in prompt {i}", len(other)
            require(len(row) == got, "counterfactuals", expected=expected, got=got)
    first, second = _pairs(view, answers, others, len(ids))
    names = {n: _positions(view, n, v, spoken, ids) for n, v in (positions or {}).items()}
    keys = {tuple(r.tolist()) for r in map(torch.cat, zip(ids, other_ids or ids))}
    copies = len(ids) - len(keys)
    flags += (f"{copies} of {len(ids)} prompts are copies of others",) if copies else ()
    return Prompts(
        ids=ids,
        rows=torch.arange(len(ids)),
        has_bos=view.bos_id is not None and all(int(row[0]) == view.bos_id for row in ids),
        counterfactual_ids=other_ids,
        answers=first,
        others=second,
        positions=names,
        flags=flags,
    )


def as_prompts(model: ModelLike, given: Any, **options: Any) -> Prompts:
    """Prompts as they are, or those that :func:`prompts` makes of texts or ids."""
    if not isinstance(given, Prompts):
        return prompts(model, given, **options)
    said = sorted(name for name, value in options.items() if value is not None)
    expected, got = "Prompts that hold all that belongs to them", f"{', '.join(said)} beside them"
    require(not said, "prompts", expected=expected, got=got, instead="corpus.prompts(...)")
    return given


def _read(
    view: ModelView, given: Any, prepend_bos: bool | None, what: str
) -> tuple[Sequence[str] | None, Rows, tuple[str, ...]]:
    """The texts (``None`` of ids), the ids of each prompt, and notes."""
    texts = ([given] if isinstance(given, str) else list(given)) if is_text(given) else None
    if texts is not None:
        rows, notes = text_ids(view, texts, prepend_bos)
        empty = [i for i, row in enumerate(rows) if not row]
        require(not empty, what, expected="tokens in each prompt", got=f"none in {empty[:8]}")
        return texts, tuple(torch.tensor(row) for row in rows), notes
    several = isinstance(given, list | tuple) and len(given) > 0 and hasattr(given[0], "__len__")
    if several and prepend_bos is None:
        return None, tuple(row for part in given for row in id_rows(part)), ()
    windows = as_tokens(view, given, prepend_bos=prepend_bos)
    return None, tuple(windows.tokens), windows.notes


def _pairs(
    view: ModelView, answers: Any, others: Any, count: int
) -> tuple[Int[Tensor, " prompt"] | None, Int[Tensor, " prompt"] | None]:
    """The ids of the answer and of the other answer of each prompt."""
    answers = answers.tolist() if isinstance(answers, Tensor | np.ndarray) else answers
    pairs = answers if isinstance(answers, list) else [answers]
    if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        require(others is None, "others", expected="none with pairs of answers", got=others)
        first, others = (list(side) for side in zip(*pairs))
        if not isinstance(answers, list):
            first, others = first[0], others[0]
        answers = first
    found = []
    for what, given in (("answers", answers), ("others", others)):
        values = [] if given is None else _each(given, count, what)
        found.append(torch.tensor([_token(view, v, what) for v in values]) if values else None)
    return found[0], found[1]


def _each(given: Any, count: int, what: str) -> list[Any]:
    """One value for each of ``count`` prompts, from a list or one for all."""
    values = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    values = list(values) if isinstance(values, list | tuple) else [values] * count
    expected = f"one for each of {count} prompts, or one for all"
    require(len(values) == count, what, expected=expected, got=len(values))
    return values


def _token(view: ModelView, value: Any, what: str) -> int:
    """The id of a token, given as an id or as a text that is one token."""
    if isinstance(value, str):
        ids = encoded(view, value)
        pieces = view.decode(ids) if ids else ["no token"]
        # the text itself, not the token that stands for unknown words
        known = len(ids) == 1 and pieces[0].strip().casefold() == value.strip().casefold()
        got = f"{value!r}, which is {', '.join(map(repr, pieces))}"
        require(known, what, expected="a text that is one token", got=got, instead="a token id")
        return ids[0]
    return index(value, view.d_vocab, what)


def _positions(
    view: ModelView, name: str, given: Any, texts: Sequence[str] | None, ids: Rows
) -> Int[Tensor, " prompt"]:
    """A named position of every prompt: a number, or the token in which a piece of its text
    ends."""
    found = []
    for i, (value, row) in enumerate(zip(_each(given, len(ids), name), ids)):
        what, number = f"position {name!r} of prompt {i}", whole(value)
        if isinstance(value, str):
            text = "" if texts is None else texts[i]
            end = text.find(value) + len(value)
            before, after = encoded(view, text[:end]), encoded(view, text)
            once = bool(value) and text.count(value) == 1
            expected = "a piece of text that occurs once and ends with a token"
            fits, got = once and after[: len(before)] == before, f"{value!r} in {text[:80]!r}"
            require(fits, what, expected=expected, got=got, instead="a number")
            # BOS tokens that were added, or that the text began with and lost
            number = len(before) - 1 + len(row) - len(after)
        if number is None or not -len(row) <= number < len(row):
            fail(what, expected=f"a number below {len(row)}, or a text", got=repr(value))
        found.append(number % len(row))
    return torch.tensor(found)
