"""What token ids are in what a user gives as tokens? :func:`as_tokens` answers for texts, ids,
windows, prompts of one length, batches and data sets, and says or refuses what is wrong with them.
Every public function that takes tokens calls it. Token ids are never edited."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.results import row_hashes
from tl_geometry.corpus.prompt_sets import Prompts
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows, begins_with_bos
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.states import state_of

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
    view = as_view(model)
    if is_text(tokens):
        ids, notes = text_ids(view, [tokens] if isinstance(tokens, str) else tokens, prepend_bos)
        rows = TokenWindows(tokens=id_rows(ids), has_bos=False, corpus="prompt", notes=notes)
    else:
        expected, got = "None with token ids (they are never edited)", repr(prepend_bos)
        require(prepend_bos is None, "prepend_bos", expected=expected, got=got)
        given: Any = tokens.as_windows() if isinstance(tokens, Prompts) else tokens
        known = isinstance(given, TokenWindows)
        rows = given if known else TokenWindows(tokens=id_rows(given), has_bos=False)
    low, high = (int(end) for end in rows.tokens.aminmax())
    expected, fits = f"ids from 0 to {view.d_vocab - 1}", 0 <= low <= high < view.d_vocab
    require(fits, "tokens", expected=expected, got=f"{low} to {high}")
    about: dict[str, Any] = {}
    if view.bos_id is not None:
        about["has_bos"] = begins_with_bos(rows.tokens, view.bos_id)
    if labels is not None:
        about["labels"], about["label_names"] = label_ids(labels, len(rows))
    about["str_tokens"] = rows.str_tokens or tuple(view.decode(rows.tokens[0].tolist()))
    rows = dataclasses.replace(rows, **about)
    return dataclasses.replace(rows, remarks=_remarks(view, rows))


def token_rows(
    view: ModelView, tokens: TokensLike, *, prepend_bos: bool | None = None
) -> TokenWindows:
    """:func:`as_tokens` of a prompt or prompts."""
    return as_tokens(view, tokens, prepend_bos=prepend_bos)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TokenSource(TokenWindows):
    """The tokens of a corpus: :func:`as_tokens`, under the name that passes over a corpus use."""

    @staticmethod
    def of(
        view: ModelView, tokens: TokensLike, labels: Any = None, prepend_bos: bool | None = None
    ) -> TokenSource:
        """The source behind any form of tokens."""
        rows = as_tokens(view, tokens, labels=labels, prepend_bos=prepend_bos)
        return TokenSource(**vars(rows))


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
    tokenizer returns, or an iterable of rows or batches."""
    given = _of_item(tokens)
    flat = isinstance(given, Tensor | np.ndarray)
    if isinstance(given, list | tuple) and given:
        flat = checks.whole(given[0]) is not None
    fits = flat or isinstance(given, Iterable) or hasattr(given, "__getitem__")
    expected, got = "ids in rows of one length, windows or texts", describe(given)
    require(fits, "tokens", expected=expected, got=got, instead=UNEQUAL)
    rows = [_ids(_of_item(item)) for item in ([given] if flat else iter(given))]
    batches = [r.unsqueeze(0) if r.dim() == 1 else r for r in rows]
    shapes = sorted({tuple(batch.shape[1:]) for batch in batches})
    fits = len(shapes) == 1 and len(shapes[0]) == 1 and sum(b.numel() for b in batches) > 0
    got = f"rows of shapes {shapes[:8]}" if shapes else "none"
    require(fits, "tokens", expected=expected, got=got, instead=UNEQUAL)
    return torch.cat(batches)


def is_cache(source: Any) -> bool:
    """Whether something is an activation cache: the object, or the plain dictionary that
    TransformerLens can return instead."""
    names = map(str, source if isinstance(source, Mapping) else ())
    return hasattr(source, "cache_dict") or any(re.search(r"(^|\.)hook_", n) for n in names)


def _of_item(item: Any) -> Any:
    """The ids of what a tokenizer or a data set returns; anything else as it is."""
    if isinstance(item, list | tuple) and len(item) == 1:  # an item of a TensorDataset
        return item[0] if isinstance(item[0], Tensor) and item[0].dim() > 0 else item
    if not isinstance(item, Mapping):
        return item
    ids = item.get("tokens", item.get("input_ids"))
    by_column = isinstance(ids, list | tuple) and len(ids) > 0 and isinstance(ids[0], Tensor)
    fits = not (ids is None or by_column or {"position_ids", "inputs_embeds"} & set(item))
    expected = "'tokens' or 'input_ids' as rows, and nothing that changes the pass"
    require(fits, "tokens", expected=expected, got=f"columns {list(map(str, item))}")
    for name, usual, what in (
        ("attention_mask", 1, "attention_mask"),
        ("token_type_ids", 0, "tokens"),
    ):
        others = sum(int((np.asarray(row) != usual).sum()) for row in item.get(name, ()))
        expected, got = f"{name} of {usual} everywhere", f"{others} others"
        require(not others, what, expected=expected, got=got, instead=UNEQUAL)
    return ids


def _ids(rows: Any) -> Int[Tensor, "..."]:
    """Ids of any integer type as int64, copied: a caller may reuse its buffer."""
    if isinstance(rows, Tensor):
        require(checks.holds_integers(rows), "tokens", expected="integer ids", got=describe(rows))
        return rows.to("cpu", torch.int64, copy=True)
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        array = np.empty(0)  # of floats: refused below
    fits = array.dtype.kind in "iu" and not np.ma.is_masked(rows)
    require(fits, "tokens", expected="integer ids", got=describe(rows), instead=UNEQUAL)
    return torch.from_numpy(array.astype(np.int64))


def label_ids(
    labels: Any, contexts: int, names: tuple[str, ...] = ()
) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """The label of each context as one of the numbers 0, 1, ..., with no number unused, and what
    each number stands for (empty where the labels given are these numbers already).

    Labels are strings, or whole numbers; with ``names``, the label ``i`` stands for ``names[i]``.

    >>> label_ids([7, 10**9, 7], 3)
    (tensor([0, 1, 0]), ('7', '1000000000'))
    """
    if labels is None:
        return None, ()
    if is_text(labels):
        names = tuple(dict.fromkeys(labels))
        labels = [names.index(name) for name in labels]
    try:
        given = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        given = torch.empty(0)  # of floats: refused below
    fits = checks.holds_integers(given) and given.shape == (contexts,) and int(given.min()) >= 0
    expected = f"a name or a number, 0 or more, for each of {contexts} contexts"
    require(fits, "labels", expected=expected, got=describe(labels))
    values, dense = given.long().unique(return_inverse=True)
    if names:
        return dense, tuple(names[v] for v in values.tolist())
    same = torch.equal(values, torch.arange(len(values)))
    return dense, () if same else tuple(map(str, values.tolist()))


def state_indices(values: Any, count: int, hooks: Sequence[str] = ()) -> tuple[int, ...]:
    """States as numbers below ``count`` (all for ``None``). The name of a hook that holds a state
    (``"blocks.1.hook_resid_pre"``) is taken as its number.

    >>> state_indices(["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", 0], 4)
    (1, 2, 0)
    """
    given = [values] if isinstance(values, str) else values
    if isinstance(given, Iterable) and not isinstance(given, Tensor | np.ndarray):
        given = [state_of(v, count, hooks) if isinstance(v, str) else v for v in given]
    return checks.indices(given, count, "states")


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
