"""What is a set of prompts of any lengths? :func:`prompts` makes :class:`Prompts` of texts: rows of
ids with what belongs to each of them (a counterfactual of the same length, an answer and another
one, named positions). Passes run :meth:`Prompts.groups`, whose rows have one length: nothing is
padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import hash_tokens
from tl_geometry.corpus.sources import Notes, copies_of, encoded, read_ids, unusual
from tl_geometry.corpus.token_windows import TokenWindows, begins_with_bos
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import known_view

Rows = tuple[Int[Tensor, " _"], ...]
"""Ids of prompts, each of its own length."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Prompts:
    """Prompts, as :func:`tl_geometry.corpus.prompts` makes them.

    ``ids`` and ``counterfactual_ids`` are a row of tokens for each prompt, ``answers`` and
    ``others`` token ids ``[prompt]``, ``positions`` maps names to positions ``[prompt]``, ``rows``
    are the numbers of these prompts in the set that they were chosen from. ``has_bos`` says whether
    all prompts begin with BOS.

    >>> ids = (torch.tensor([5, 6]), torch.tensor([7]))
    >>> prompts = Prompts(ids=ids, rows=torch.arange(2), has_bos=False)
    >>> [(group.rows.tolist(), group.tokens.tolist()) for group in prompts.groups()]
    [([1], [[7]]), ([0], [[5, 6]])]
    """

    ids: Rows
    rows: Int[Tensor, " prompt"]
    has_bos: bool
    counterfactual_ids: Rows | None = None
    answers: Int[Tensor, " prompt"] | None = None
    others: Int[Tensor, " prompt"] | None = None
    positions: Mapping[str, Int[Tensor, " prompt"]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        sizes = sorted(set(self.lengths)) or [0]
        tokens = " to ".join(map(str, sorted({sizes[0], sizes[-1]})))
        return f"Prompts({'; '.join([f'{len(self)} prompts of {tokens} tokens', *self.flags])})"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(map(len, self.ids))

    @property
    def corpus(self) -> str:
        """What results call these prompts."""
        return "prompts" if self.counterfactual_ids is None else "pairs of prompts"

    @property
    def token_hash(self) -> str:
        """Hash of the tokens in their order."""
        tokens = ""
        for row in (*self.ids, *(self.counterfactual_ids or ())):
            tokens = hash_tokens(row.unsqueeze(0), tokens)
        return tokens

    @property
    def tokens(self) -> Int[Tensor, "prompt position"]:
        """The ids of prompts of one length."""
        lengths, instead = sorted(set(self.lengths)), "prompts.groups(), each of one length"
        fits, expected = len(lengths) == 1, "prompts of one length"
        require(fits, "prompts", expected=expected, got=lengths[:8], instead=instead)
        return torch.stack(self.ids)

    @property
    def counterfactuals(self) -> Int[Tensor, "prompt position"] | None:
        """The ids of the counterfactuals of prompts of one length."""
        others = self.counterfactual_ids
        return None if others is None else dataclasses.replace(self, ids=others).tokens

    def __getitem__(self, chosen: Any) -> Prompts:
        """The chosen prompts (a number, a slice, numbers), with all that belongs to them."""
        pick = torch.arange(len(self))[chosen].reshape(-1)

        def of(value: Any) -> Any:
            return value[pick] if isinstance(value, Tensor) else tuple(value[i] for i in pick)

        names = ("ids", "rows", "counterfactual_ids", "answers", "others")
        changed = {n: of(getattr(self, n)) for n in names if getattr(self, n) is not None}
        positions = {name: at[pick] for name, at in self.positions.items()}
        return dataclasses.replace(self, positions=positions, **changed)

    def groups(self) -> Iterator[Prompts]:
        """The prompts of each length, the shortest first."""
        for length in sorted(set(self.lengths)):
            yield self[[i for i, of_row in enumerate(self.lengths) if of_row == length]]

    def at(self, position: int | str) -> Int[Tensor, " prompt"]:
        """The position of each prompt that a name or a number stands for (-1 is the last)."""
        if isinstance(position, str):
            return self.positions[choice(position, tuple(self.positions), "position")]
        return torch.tensor([checks.position(position, len(row)) for row in self.ids])

    def as_windows(self) -> TokenWindows:
        """The same rows as windows, for what takes prompts of one length; names stay that stand for
        one position in all prompts."""
        shared = {n: int(at[0]) for n, at in self.positions.items() if len(at.unique()) == 1}
        about: dict[str, Any] = {"corpus": "prompts", "notes": self.flags, "positions": shared}
        return TokenWindows(tokens=self.tokens, has_bos=self.has_bos, **about)


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
        answers: a token (an id, or a text that is one token), a pair ``(answer, other)``, or a list
            with one of these for each prompt.
        others: the other answer, where ``answers`` are no pairs.
        positions: names of positions: a number (-1 is the last), a piece of text that occurs once
            and ends where a token does (that token), or a list with one of these for each prompt.
        prepend_bos: whether texts begin with BOS; ``None`` takes the model's own default. A text
            that begins with the BOS string, as chat templates give it, gets no second one.

    ``flags`` of the result count copies, BOS tokens after position 0 (of prompts that all begin
    with one), and single padding tokens at the ends of prompts. Raises ``GeometryError`` with the
    number of the prompt at fault: an answer of several tokens (it says which), a counterfactual of
    another length, a position that is not there; and for prompts that begin or end with two or more
    padding tokens.

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
    view = known_view(model)
    ids, spoken, has_bos, flags = _read(view, texts, prepend_bos)
    other_ids = None
    if counterfactuals is not None:
        other_ids = _read(view, counterfactuals, prepend_bos)[0]
        lengths, got = list(map(len, ids)), list(map(len, other_ids))
        wrong = [i for i, pair in enumerate(zip(lengths, got)) if pair[0] != pair[1]]
        expected = f"{lengths[:8]} tokens, as many as the prompts"
        got = f"{got[:8]}{f' (prompt {wrong[0]})' if wrong else ''}"
        fits = not wrong and len(ids) == len(other_ids)
        require(fits, "counterfactuals", expected=expected, got=got)
    asked = answers is not None or others is not None
    tokens = answer_ids(view, answers, others, len(ids)) if asked else []
    names = {n: _positions(view, n, v, spoken, ids) for n, v in (positions or {}).items()}
    return Prompts(
        ids=ids,
        rows=torch.arange(len(ids)),
        has_bos=has_bos,
        counterfactual_ids=other_ids,
        answers=tokens[0] if tokens else None,
        others=tokens[1] if len(tokens) > 1 else None,
        positions=names,
        flags=(*copies_of(list(map(torch.cat, zip(ids, other_ids or ids)))), *flags),
    )


def as_prompts(model: ModelLike, given: Any, **options: Any) -> Prompts:
    """Prompts as they are, or those that :func:`prompts` makes of texts or ids."""
    if not isinstance(given, Prompts):
        return prompts(model, given, **options)
    said = ", ".join(name for name, value in options.items() if value is not None)
    expected, instead = "Prompts that hold all that belongs to them", "corpus.prompts(...)"
    require(not said, "prompts", expected=expected, got=f"{said} beside them", instead=instead)
    return given


def _read(
    view: ModelView, given: Any, prepend_bos: bool | None
) -> tuple[Rows, Sequence[str] | None, bool, Notes]:
    """The ids of each prompt, the texts that they are of (``None`` of ids), whether all begin with
    BOS, and notes."""
    rows = list(given.ids) if isinstance(given, Prompts) else given
    ids, texts, notes = read_ids(view, rows, prepend_bos)
    has_bos = begins_with_bos(torch.stack([row[:1] for row in ids]), view.bos_id)
    groups = [torch.stack([r for r in ids if len(r) == n]) for n in sorted(set(map(len, ids)))]
    return tuple(ids), texts, has_bos, (*notes, *unusual(view, groups, has_bos))


def _each(given: Any, count: int, what: str) -> list[Any]:
    """One value for each of ``count`` prompts, from a list or one for all."""
    given = given.tolist() if isinstance(given, Tensor) else given
    values = given if isinstance(given, list) else [given] * count
    expected = f"one for each of {count} prompts, or one for all"
    require(len(values) == count, what, expected=expected, got=len(values))
    return values


def answer_ids(
    view: ModelView, answers: Any, others: Any, count: int
) -> list[Int[Tensor, " prompt"]]:
    """The tokens that are compared after each of ``count`` prompts, one or two: answers (and
    others), one for all or one for each, or pairs of both."""
    if others is None:
        pairs = _each(answers, count, "answers")
    else:
        sides = {"answers": answers, "others": others}
        each = (_each([*x] if isinstance(x, tuple) else x, count, n) for n, x in sides.items())
        pairs = list(zip(*each, strict=True))
    given = [tuple(pair) if isinstance(pair, tuple | list) else (pair,) for pair in pairs]
    sizes, expected = sorted(set(map(len, given))), "one token for each prompt, or two"
    require(sizes in ([1], [2]), "answers", expected=expected, got=f"{sizes} tokens")
    numbered = [[_token(view, token, i) for token in tokens] for i, tokens in enumerate(given)]
    return list(torch.tensor(numbered).unbind(1))


def _token(view: ModelView, value: Any, prompt: int) -> int:
    """The id of a token, given as an id or as a text that is one token."""
    what = f"answers of prompt {prompt}"
    if not isinstance(value, str):
        return checks.index(value, view.d_vocab, what)
    ids = encoded(view, value)
    pieces = view.decode(ids) if ids else ["no token"]
    # the text itself, not the token that stands for unknown words
    known = len(ids) == 1 and pieces[0].strip().casefold() == value.strip().casefold()
    got = f"{value!r}, which is {', '.join(map(repr, pieces))}"
    instead = "another text, or a token id"
    require(known, what, expected="a text that is one token", got=got, instead=instead)
    return ids[0]


def _positions(
    view: ModelView, name: str, given: Any, texts: Sequence[str] | None, ids: Rows
) -> Int[Tensor, " prompt"]:
    """A named position of every prompt: a number, or the token in which a piece of its text
    ends."""
    found = []
    for i, (value, row) in enumerate(zip(_each(given, len(ids), name), ids)):
        what = f"position {name!r} of prompt {i}"
        if isinstance(value, str):
            text = "" if texts is None else texts[i]
            before = encoded(view, text[: text.find(value) + len(value)])
            after = encoded(view, text)
            fits = text.count(value) == 1 and after[: len(before)] == before
            expected = "a piece of text that occurs once and ends with a token"
            require(fits, what, expected=expected, got=repr(value), instead="a number")
            # BOS tokens that were added, or that the text began with and lost
            value = len(before) - 1 + len(row) - len(after)
        found.append(checks.position(value, len(row), what))
    return torch.tensor(found)
