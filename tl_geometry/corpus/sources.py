"""What token ids are in what a user gives as tokens? :func:`as_tokens` answers for texts, ids,
windows, prompts of one length, batches and data sets, and says or refuses what is wrong with them.
Every public function that takes tokens calls it. Token ids are never edited."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, holds_integers, whole
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows, begins_with_bos
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import known_view

UNEQUAL = "windows(model, texts, length), or each of corpus.prompts(model, texts).groups()"
"""What errors advise in place of ragged or padded rows."""
Notes = tuple[str, ...]
"""Sentences for the flags of results."""


def as_tokens(
    model: ModelLike, tokens: TokensLike, *, labels: Any = None, prepend_bos: bool | None = None
) -> TokenWindows:
    """Tokens in any accepted form (:data:`TokensLike`) as windows of one length.

    ``prepend_bos`` is for texts alone: ``None`` takes the model's own default, and a text that
    begins with the BOS string gets no second one; the [SEP] of an encoder is not put at the end.
    ``labels`` are numbers or names of the contexts' documents. ``remarks`` of the result count
    copies, BOS tokens after position 0 (of rows that all begin with one), and single padding tokens
    at the ends of rows.

    Raises ``GeometryError`` for ragged rows, and for rows that begin or end with two or more
    padding tokens.

    >>> from tl_geometry import zoo
    >>> rows = as_tokens(zoo.embedded(), "def f(x):", prepend_bos=True)
    >>> rows.has_bos, as_tokens(zoo.embedded(), [5, 7]).tokens.tolist()
    (True, [[5, 7]])
    """
    view, about = known_view(model), dict[str, Any]()
    rows: Any = tokens.as_windows() if hasattr(tokens, "as_windows") else tokens
    ids, texts, notes = read_ids(view, rows, prepend_bos)
    if not isinstance(rows, TokenWindows):
        lengths, expected = sorted({len(row) for row in ids}), "rows of one length"
        got = f"rows of {lengths[:8]} tokens"
        require(len(lengths) == 1, "tokens", expected=expected, got=got, instead=UNEQUAL)
        corpus = "tokens" if texts is None else "prompt"
        rows = TokenWindows(tokens=torch.stack(ids), has_bos=False, corpus=corpus, notes=notes)
    has_bos = begins_with_bos(rows.tokens, view.bos_id)
    about["remarks"] = (*copies_of(rows.tokens), *unusual(view, [rows.tokens], has_bos))
    if view.bos_id is not None:
        about["has_bos"] = has_bos
    if labels is not None:
        about["labels"], about["label_names"] = label_ids(labels, len(rows))
    about["str_tokens"] = rows.str_tokens or tuple(view.decode(rows.tokens[0].tolist()))
    return dataclasses.replace(rows, **about)


def copies_of(rows: Sequence[Int[Tensor, " _"]] | Int[Tensor, "context position"]) -> Notes:
    """How many rows are copies of others, if any are."""
    copies = len(rows) - len({row.numpy().tobytes() for row in rows})
    return (f"{copies} of {len(rows)} contexts are copies of others",) if copies else ()


def unusual(
    view: ModelView, groups: Sequence[Int[Tensor, "context position"]], has_bos: bool
) -> Notes:
    """What is unusual about rows, in groups of one length, each with its number; ids beyond the
    vocabulary and padded rows are refused."""
    counted, pad, of = Counter[str](), view.pad_id, f"of {sum(map(len, groups))} contexts"
    for ids in groups:
        low, high = (int(end) for end in ids.aminmax())
        expected, fits = f"ids from 0 to {view.d_vocab - 1}", 0 <= low <= high < view.d_vocab
        require(fits, "tokens", expected=expected, got=f"{low} to {high}")
        if has_bos:
            counted["have BOS after position 0"] += int((ids[:, 1:] == view.bos_id).any(1).sum())
        if pad is not None:
            # where padding is BOS too, the first token of every row is no padding
            is_pad = (ids[:, int(has_bos and pad == view.bos_id) :] == pad).long()
            # a cumulative product is 1 along the run at that end, and 0 after it
            run = torch.maximum(is_pad.cumprod(1).sum(1), is_pad.flip(1).cumprod(1).sum(1))
            padded = int((run > 1).sum())
            got = f"{padded} {of} that begin or end with two or more padding tokens (id {pad})"
            require(not padded, "tokens", expected="rows without padding", got=got, instead=UNEQUAL)
            counted["begin or end with a padding token"] += int((run == 1).sum())
    return tuple(f"{count} {of} {remark}" for remark, count in counted.items() if count)


# ---- text and ids


def read_ids(
    view: ModelView, tokens: Any, prepend_bos: bool | None
) -> tuple[list[Int[Tensor, " _"]], Sequence[str] | None, Notes]:
    """The ids of each row, of any lengths, the texts that they are of (``None`` of ids), and notes.
    Texts get BOS where it was asked for, and never twice."""
    if not is_text(tokens):
        expected, got = "no BOS to prepend to token ids (they are never edited)", repr(prepend_bos)
        require(not prepend_bos, "prepend_bos", expected=expected, got=got)
        known = isinstance(tokens, TokenWindows)
        rows = list(tokens.tokens) if known else id_rows(tokens)
        return rows, None, tokens.notes if known else ()
    texts = [tokens] if isinstance(tokens, str) else list(tokens)
    bos = bos_to_prepend(view, prepend_bos)
    spoken, begun = [encoded(view, text) for text in texts], 0
    if bos is not None:
        begun = sum(ids[:1] == [bos] for ids in spoken)
        spoken = [[bos, *without(ids, bos)] for ids in spoken]
    empty = [i for i, ids in enumerate(spoken) if not ids]
    require(not empty, "texts", expected="tokens in each text", got=f"none in {empty[:8]}")
    note = f"{begun} of {len(texts)} texts begin with the BOS string: not doubled"
    return list(map(torch.tensor, spoken)), texts, (note,) if begun else ()


def is_text(tokens: Any) -> TypeGuard[str | Sequence[str]]:
    """Whether tokens are a text, or a list of texts and nothing else."""
    several = isinstance(tokens, list | tuple) and len(tokens) > 0
    return isinstance(tokens, str) or (several and all(isinstance(t, str) for t in tokens))


def without(row: list[int], bos: int) -> list[int]:
    """The ids of a text without the BOS tokens that it begins with."""
    return list(itertools.dropwhile(lambda i: i == bos, row))


def bos_to_prepend(view: ModelView, prepend_bos: bool | None) -> int | None:
    """The BOS id that goes before a text, or ``None``; without a wish, as TransformerLens does for
    this model."""
    prepend_bos = view.prepends_bos if prepend_bos is None else prepend_bos
    fits = isinstance(prepend_bos, bool) and not (prepend_bos and view.bos_id is None)
    expected, got = "True or False, with a tokenizer that has BOS", repr(prepend_bos)
    require(fits, "prepend_bos", expected=expected, got=got, instead="prepend_bos=False")
    return view.bos_id if prepend_bos else None


def encoded(view: ModelView, text: str) -> list[int]:
    """Token ids of a text; one that UTF-8 cannot hold is refused."""
    lone = re.search("[\ud800-\udfff]", text)
    got = "" if lone is None else f"the lone surrogate U+{ord(lone[0]):04X}"
    require(lone is None, "texts", expected="text that UTF-8 can hold", got=got)
    return view.encode(text)


def id_rows(tokens: Any) -> list[Int[Tensor, " _"]]:
    """Rows of ids in any form but text, copied: a tensor, an array, lists, or an iterable of
    these."""
    given, rows = tokens, list[Tensor]()
    row = isinstance(given, list | tuple) and len(given) > 0 and whole(given[0]) is not None
    if row or isinstance(given, np.ndarray):
        array = np.asarray(given)
        plain = array.dtype.kind in "iu" and not isinstance(given, np.ma.MaskedArray)
        given = torch.from_numpy(array.astype(np.int64)) if plain else torch.empty(0)
    if isinstance(given, Tensor):
        if holds_integers(given) and given.dim() in (1, 2) and given.numel() > 0:
            rows = list(torch.atleast_2d(given).to("cpu", torch.int64, copy=True))
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        rows = [row for item in given for row in id_rows(item)]
    if not rows:
        expected, got = "integer ids in rows, or texts", describe(tokens)
        fail("tokens", expected=expected, got=got, instead=UNEQUAL)
    return rows


def corpus_of(names: Sequence[str]) -> str:
    """What a corpus of several texts is called."""
    return ", ".join(names) if len(names) < 4 else f"{len(names)} texts ({names[0]}, ...)"


def label_ids(labels: Any, contexts: int) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """The label of each context (a name, or a whole number) as one of the numbers 0, 1, ...,
    and what each number stands for (empty where the labels are these numbers
    already).

    >>> label_ids([7, 10**9, 7], 3), label_ids(["b", "a"], 2)
    ((tensor([0, 1, 0]), ('7', '1000000000')), (tensor([0, 1]), ('b', 'a')))
    """
    if labels is None:
        return None, ()
    values = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    fits = isinstance(values, list | tuple) and len(values) == contexts
    named = fits and all(isinstance(value, str) for value in values)
    fits = named or (fits and all(whole(v) is not None and v >= 0 for v in values))
    expected = f"a name or a number, 0 or more, for each of {contexts} contexts"
    require(fits, "labels", expected=expected, got=describe(labels))
    order = list(dict.fromkeys(values)) if named else sorted(set(map(int, values)))
    number, dense = {value: i for i, value in enumerate(order)}, order == list(range(len(order)))
    return torch.tensor([number[v if named else int(v)] for v in values]), () if dense else tuple(
        map(str, order)
    )
