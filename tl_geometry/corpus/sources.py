"""What token ids are in what a user gives as tokens? :func:`as_tokens` answers for texts, ids,
windows, prompts of one length, batches and data sets, and says or refuses what is wrong with them.
Every public function that takes tokens calls it. Token ids are never edited."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, holds_integers, whole
from tl_geometry.base.errors import require
from tl_geometry.base.results import row_hashes
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows, begins_with_bos
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

UNEQUAL = "tl_geometry.windows(model, texts, length), or corpus.prompts for texts of any length"
"""What errors advise in place of ragged or padded rows."""


def as_tokens(
    model: ModelLike, tokens: TokensLike, *, labels: Any = None, prepend_bos: bool | None = None
) -> TokenWindows:
    """Tokens in any accepted form (:data:`TokensLike`) as windows of one length.

    ``prepend_bos`` is for texts alone: ``None`` takes the model's own default, and a text that
    begins with the BOS string gets no second one. ``labels`` are numbers or names of the contexts'
    documents. ``remarks`` of the result count copies, BOS tokens after position 0, and single
    padding tokens at the ends of rows.

    Raises ``GeometryError`` for ragged rows, masks with zeros, and rows that begin or end with two
    or more padding tokens.

    >>> from tl_geometry import zoo
    >>> rows = as_tokens(zoo.embedded(), "def f(x):", prepend_bos=True)
    >>> rows.has_bos, as_tokens(zoo.embedded(), [5, 7]).tokens.tolist()
    (True, [[5, 7]])
    """
    view, about = as_view(model), dict[str, Any]()
    if is_text(tokens):
        ids, notes = text_ids(view, [tokens] if isinstance(tokens, str) else tokens, prepend_bos)
        rows = TokenWindows(tokens=id_rows(ids), has_bos=False, corpus="prompt", notes=notes)
    else:
        expected, got = "None with token ids (they are never edited)", repr(prepend_bos)
        require(prepend_bos is None, "prepend_bos", expected=expected, got=got)
        given: Any = tokens.as_windows() if hasattr(tokens, "as_windows") else tokens
        known = isinstance(given, TokenWindows)
        rows = given if known else TokenWindows(tokens=id_rows(given), has_bos=False)
    low, high = (int(end) for end in rows.tokens.aminmax())
    expected, fits = f"ids from 0 to {view.d_vocab - 1}", 0 <= low <= high < view.d_vocab
    require(fits, "tokens", expected=expected, got=f"{low} to {high}")
    if view.bos_id is not None:
        about["has_bos"] = begins_with_bos(rows.tokens, view.bos_id)
    if labels is not None:
        about["labels"], about["label_names"] = label_ids(labels, len(rows))
    about["str_tokens"] = rows.str_tokens or tuple(view.decode(rows.tokens[0].tolist()))
    rows = dataclasses.replace(rows, **about)
    return dataclasses.replace(rows, remarks=_remarks(view, rows))


def _remarks(view: ModelView, rows: TokenWindows) -> tuple[str, ...]:
    """What is unusual about these rows, each with its number; padded rows are refused."""
    ids, pad, bos, of = rows.tokens, view.pad_id, view.bos_id, f"of {len(rows)} contexts"
    copies = len(ids) - len(row_hashes(ids).unique())
    counted = {f"{copies} {of} are copies of others": copies}
    if rows.has_bos and bos is not None:
        later = int((ids[:, 1:] == bos).any(1).sum())
        counted[f"{later} {of} have BOS after position 0"] = later
    if pad is not None:
        # where padding is BOS too, the first token of every row is no padding
        is_pad = (ids[:, int(rows.has_bos and pad == bos) :] == pad).long()
        # a cumulative product is 1 along the run at that end, and 0 after it
        run = torch.maximum(is_pad.cumprod(1).sum(1), is_pad.flip(1).cumprod(1).sum(1))
        padded, single = int((run > 1).sum()), int((run == 1).sum())
        got = f"{padded} {of} that begin or end with two or more padding tokens (id {pad})"
        require(not padded, "tokens", expected="rows without padding", got=got, instead=UNEQUAL)
        counted[f"{single} {of} begin or end with a padding token"] = single
    return tuple(remark for remark, count in counted.items() if count)


# ---- text


def is_text(tokens: Any) -> TypeGuard[str | Sequence[str]]:
    """Whether tokens are a text, or a list of texts and nothing else."""
    several = isinstance(tokens, list | tuple) and len(tokens) > 0
    return isinstance(tokens, str) or (several and all(isinstance(t, str) for t in tokens))


def text_ids(
    view: ModelView, texts: Sequence[str], prepend_bos: bool | None
) -> tuple[list[list[int]], tuple[str, ...]]:
    """The ids of texts, with BOS where it was asked for and never twice, and a note."""
    bos = bos_to_prepend(view, prepend_bos)
    rows = [encoded(view, text) for text in texts]
    if bos is None:
        return rows, ()
    begun = sum(row[:1] == [bos] for row in rows)
    note = f"{begun} of {len(rows)} texts begin with the BOS string: not doubled"
    return [[bos, *without(row, bos)] for row in rows], (note,) if begun else ()


def without(row: list[int], bos: int) -> list[int]:
    """The ids of a text without the BOS tokens that it begins with."""
    return list(itertools.dropwhile(lambda i: i == bos, row))


def bos_to_prepend(view: ModelView, prepend_bos: bool | None) -> int | None:
    """The BOS id that goes before a text, or ``None``; without a wish, the model's own default."""
    if prepend_bos is None:
        # TransformerLens prepends BOS wherever there is one, unless the view knows better
        prepend_bos = bool(getattr(view, "default_bos", view.bos_id is not None))
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


# ---- ids


def id_rows(tokens: Any) -> Int[Tensor, "context position"]:
    """Ids in any form but text as rows of one length, copied: a tensor, an array, lists, what a
    tokenizer returns, or an iterable of these."""
    given = _unpacked(tokens) if isinstance(tokens, Mapping) else tokens
    expected, got = "integer ids in rows of one length, windows or texts", describe(tokens)
    row = isinstance(given, list | tuple) and len(given) > 0 and whole(given[0]) is not None
    if row or isinstance(given, Tensor | np.ndarray):
        ids = given if isinstance(given, Tensor) else np.asarray(given)
        if isinstance(ids, np.ndarray):
            plain = ids.dtype.kind in "iu" and not isinstance(given, np.ma.MaskedArray)
            ids = torch.from_numpy(ids.astype(np.int64)) if plain else torch.empty(0)
        fits = holds_integers(ids) and ids.dim() in (1, 2) and ids.numel() > 0
        require(fits, "tokens", expected=expected, got=got, instead=UNEQUAL)
        return torch.atleast_2d(ids).to("cpu", torch.int64, copy=True)
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    rows = [id_rows(item) for item in given] if several else []
    lengths = sorted({row.shape[1] for row in rows})
    got = f"rows of {lengths[:8]} tokens" if rows else got
    require(len(lengths) == 1, "tokens", expected=expected, got=got, instead=UNEQUAL)
    return torch.cat(rows)


def _unpacked(item: Mapping[str, Any]) -> Any:
    """The ids of what a tokenizer returns, if nothing stands beside them but a mask of ones."""
    beside = [str(name) for name in item if name not in ("input_ids", "attention_mask")]
    expected, instead = "ids alone, or with a mask of ones", 'rows["input_ids"]'
    alone = "input_ids" in item and not beside
    require(
        alone, ", ".join(beside[:4]) or "tokens", expected=expected, got="more", instead=instead
    )
    padding = sum(int((np.asarray(row) != 1).sum()) for row in item.get("attention_mask", ()))
    got = f"{padding} zeros"
    require(not padding, "attention_mask", expected=expected, got=got, instead=UNEQUAL)
    # the default collation of torch makes a tensor for each position of lists of ids
    by_column = isinstance(item["input_ids"], list) and isinstance(item["input_ids"][0], Tensor)
    require(not by_column, "tokens", expected="ids in rows", got="ids by position")
    return item["input_ids"]


def is_cache(source: Any) -> bool:
    """Whether something is an activation cache: the object, or the plain dictionary that
    TransformerLens can return instead."""
    values = source.items() if isinstance(source, Mapping) else ()
    names = [str(name) for name, value in values if isinstance(value, Tensor)]
    return hasattr(source, "cache_dict") or any(re.search(r"(^|\.)hook_", n) for n in names)


def label_ids(labels: Any, contexts: int) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """The label of each context (a name, or a whole number) as one of the numbers 0, 1, ..., with
    no number unused, and what each number stands for (empty where the labels are these numbers
    already).

    >>> label_ids([7, 10**9, 7], 3), label_ids(["b", "a"], 2)
    ((tensor([0, 1, 0]), ('7', '1000000000')), (tensor([0, 1]), ('b', 'a')))
    """
    if labels is None:
        return None, ()
    values = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    fits = isinstance(values, list | tuple) and len(values) == contexts
    named = fits and all(isinstance(value, str) for value in values)
    fits = named or (fits and all((whole(v) or 0) >= 0 and whole(v) is not None for v in values))
    expected = f"a name or a number, 0 or more, for each of {contexts} contexts"
    require(fits, "labels", expected=expected, got=describe(labels))
    order = list(dict.fromkeys(values)) if named else sorted(set(map(int, values)))
    number = {value: i for i, value in enumerate(order)}
    dense = order == list(range(len(order)))
    return torch.tensor([number[v] for v in values]), () if dense else tuple(map(str, order))


def batches(
    contexts: int,
    length: int,
    *,
    device: torch.device,
    batch_size: int | None = None,
    borders: Sequence[int] = (),
) -> Iterator[slice]:
    """Slices of at most ``batch_size`` contexts of ``length`` tokens (by default about 4,096 tokens
    on a CPU, 16,384 on a GPU) that cover all contexts in order and cross none of the ``borders``.

    >>> [(at.start, at.stop) for at in batches(5, 9, device=torch.device("cpu"), borders=[2])]
    [(0, 2), (2, 5)]
    """
    size = batch_of(batch_size, length, device)
    for low, high in pairwise([0, *borders, contexts]):
        for start in range(low, high, size):
            yield slice(start, min(start + size, high))
