"""What token ids are in what a user gives as tokens (texts, ids, windows, batches, data sets,
files)? :func:`token_rows` answers for prompts, :class:`TokenSource` for a corpus. Every public
function that takes tokens calls one of the two.

Token ids are never edited. Rows that are ragged or padded are refused, with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import GeometryError, fail, require
from tl_geometry.corpus.token_windows import (
    TokensLike,
    TokenWindows,
    begins_with_bos,
    double_bos,
)
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.states import state_of

REPACK = (
    "tl_geometry.windows(model, texts, length) for windows of one length, "
    "or only the rows without padding"
)
"""What error messages advise for padded input."""
MANY_ROWS = 16
"""In at least this many rows, a single padding token at an end of one row may be chance."""
CERTAIN_RUN = 3
"""Length of a run of padding tokens at an end of a row that cannot be chance."""


def token_rows(
    view: ModelView, tokens: TokensLike, *, prepend_bos: bool | None = None
) -> TokenWindows:
    """Tokens of a prompt set as windows: a string, strings of equal token length, ids
    ``[position]`` or ``[batch position]``, or windows.

    Strings need an explicit ``prepend_bos``; a text that begins with the BOS string gets no second
    one (a note says so). Token ids are never edited, so that ``prepend_bos`` must be left out with
    them.

    >>> from tl_geometry import zoo
    >>> from tl_geometry.models.reader import as_view
    >>> view = as_view(zoo.embedded())
    >>> rows = token_rows(view, "def f(x):", prepend_bos=True)
    >>> rows.has_bos, rows.corpus, token_rows(view, [5, 7]).tokens.tolist()
    (True, 'prompt', [[5, 7]])
    """
    if _is_text(tokens):
        return _rows_of_texts(
            view, [tokens] if isinstance(tokens, str) else list(tokens), prepend_bos
        )
    _refuse_bos_for_ids(prepend_bos)
    if isinstance(tokens, TokenWindows):
        refuse_padding(view, tokens.tokens)
        texts = tokens.str_tokens or tuple(view.decode(tokens.tokens[0].tolist()))
        return dataclasses.replace(tokens, str_tokens=texts)
    ids = _ids(_of_item(_mapped(tokens)))
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    fits = ids.dim() == 2 and ids.numel() > 0
    require(fits, "tokens", expected="integer ids [batch position]", got=describe(ids))
    refuse_padding(view, ids)
    return TokenWindows(
        tokens=ids.cpu(),
        has_bos=begins_with_bos(ids, view.bos_id),
        str_tokens=tuple(view.decode(ids[0].tolist())),
        corpus="tokens",
    )


def _rows_of_texts(view: ModelView, texts: Sequence[str], prepend_bos: bool | None) -> TokenWindows:
    refuse_file_names(texts)
    if not isinstance(prepend_bos, bool):
        explicit = "prepend_bos=True or prepend_bos=False"
        expected = "True or False with text"
        fail("prepend_bos", expected=expected, got=prepend_bos, instead=explicit)
    bos = bos_to_prepend(view.bos_id, prepend_bos)
    encoded, notes = without_bos([view.encode(text) for text in texts], bos)
    rows = encoded if bos is None else [[bos, *row] for row in encoded]
    lengths = sorted({len(r) for r in rows})
    got, instead = f"lengths {lengths[:8]}", "tl_geometry.windows(...)"
    require(len(lengths) == 1, "texts", expected="equal token lengths", got=got, instead=instead)
    expected, got = "at least one token", "an empty text"
    require(lengths[0] > 0, "texts", expected=expected, got=got, instead="a longer text")
    ids = torch.tensor(rows, dtype=torch.int64)
    shown = tuple(view.decode(rows[0]))
    return TokenWindows(
        tokens=ids, has_bos=prepend_bos, str_tokens=shown, corpus="prompt", notes=notes
    )


def _refuse_bos_for_ids(prepend_bos: bool | None) -> None:
    expected = "None with token ids (they are never edited)"
    require(prepend_bos is None, "prepend_bos", expected=expected, got=prepend_bos)


def bos_to_prepend(bos_id: int | None, prepend_bos: bool) -> int | None:
    """The BOS id that goes before a text, or ``None`` for ``prepend_bos=False``; refuses
    ``prepend_bos=True`` for a tokenizer without BOS."""
    if prepend_bos and bos_id is None:
        expected, instead = "a tokenizer with a BOS token", "prepend_bos=False"
        fail("prepend_bos", expected=expected, got="none", instead=instead)
    return bos_id if prepend_bos else None


def without_bos(
    rows: Sequence[list[int]], bos_id: int | None
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Ids of texts without the BOS ids that they begin with, and a note that counts these texts.
    With ``bos_id=None`` no BOS will be prepended, and all ids stay."""
    if bos_id is None:
        return list(rows), ()
    bare = [list(itertools.dropwhile(lambda i: i == bos_id, row)) for row in rows]
    doubled = sum(len(a) != len(b) for a, b in zip(bare, rows, strict=True))
    note = f"{doubled} of {len(rows)} texts begin with the BOS string: not doubled"
    return bare, (note,) if doubled else ()


def refuse_file_names(texts: Iterable[str]) -> None:
    """Refuse a string that is the name of an existing file where a text is meant."""
    for text in texts:
        # decides for most texts without a look at the disk; 4096 is the longest path on Linux
        may_be_name = 0 < len(text) < 4096 and text.isprintable() and re.search(r"[./\\]", text)
        # Path.is_file raises where a part of the text is too long for a name
        if may_be_name and os.path.isfile(text):  # noqa: PTH113, TID251
            instead = "pathlib.Path(...) of it, with tl_geometry.windows"
            fail("texts", expected="text", got=f"the name of a file, {text!r}", instead=instead)


def refuse_padding(view: ModelView, ids: Int[Tensor, "batch position"]) -> None:
    """Refuse rows that begin or end with padding: their positions are not those that the model
    should see, and every mean would include padding."""
    if view.pad_id is not None:
        padded = padded_rows(ids, view.pad_id)
        got = f"{padded} of {len(ids)} that begin or end with the padding token (id {view.pad_id})"
        require(padded == 0, "tokens", expected="rows without padding", got=got, instead=REPACK)


def padded_rows(ids: Int[Tensor, "batch position"], pad: int) -> int:
    """How many rows begin or end with padding; 0 where the ids do not decide it.

    If the padding token also occurs inside rows, the ids are random or the text itself uses it; a
    single one at an end of one row among many may be chance. Both count as no padding, unless some
    row has a run of three or more at an end.

    >>> padded_rows(torch.tensor([[5, 6, 7], [5, 6, 0]]), 0)
    1
    >>> padded_rows(torch.tensor([[5, 0, 7], [5, 6, 0]]), 0)
    0
    """
    is_pad = ids == pad
    if not bool(is_pad.any()):
        return 0
    # a cumulative product is 1 along the run at that end, and 0 after it
    left, right = is_pad.long().cumprod(1), is_pad.flip(1).long().cumprod(1)
    run_length = torch.maximum(left.sum(1), right.sum(1))
    inside = int(is_pad.sum() - (left.bool() | right.flip(1).bool()).sum())
    n_padded, longest = int((run_length > 0).sum()), int(run_length.max())
    chance = inside > 0 or (longest == 1 and n_padded == 1 and len(ids) >= MANY_ROWS)
    return 0 if chance and longest < CERTAIN_RUN else n_padded


@dataclass(eq=False)
class TokenSource:
    """Tokens of a corpus, in memory or not, as :meth:`batches` of ids.

    ``tokens`` holds them (a tensor, an array, a data set, or an iterator), ``length`` is the number
    of positions of each context, ``contexts`` the number of contexts (``None`` for an iterable,
    whose length is not known). ``labels``, ``names`` and ``notes`` are as in :class:`TokenWindows`.
    While batches are taken, ``seen`` counts contexts, and ``doubled`` those that begin with BOS
    twice.
    """

    view: ModelView
    tokens: Any
    length: int
    contexts: int | None
    corpus: str = "tokens"
    labels: Int[Tensor, " context"] | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen: int = 0
    doubled: int = 0

    @staticmethod
    def of(
        view: ModelView, tokens: TokensLike, labels: Any = None, prepend_bos: bool | None = None
    ) -> TokenSource:
        """The source behind any form of tokens that :func:`tl_geometry.decompose` takes."""
        given: Any = _opened(_mapped(tokens))
        if _is_text(given):
            given = token_rows(view, given, prepend_bos=prepend_bos)
        else:
            _refuse_bos_for_ids(prepend_bos)
        fields: dict[str, Any] = {}
        names: tuple[str, ...] = ()
        if isinstance(given, TokenWindows):
            if labels is None:
                labels, names = given.labels, given.names
            fields = {"corpus": given.corpus, "notes": given.notes}
            given = given.tokens
        if isinstance(given, list | tuple) and not _is_sequence_of_items(given):
            given = _ids(given)
        if isinstance(given, Tensor) and not checks.is_plain(given):
            fail("tokens", expected="integer ids", got=describe(given), instead=REPACK)
        if isinstance(given, Tensor | np.ndarray):
            got = f"{type(given).__name__} of shape {tuple(given.shape)}"
            expected = "integer ids [context position], at least one context"
            fits = given.ndim == 2 and given.shape[0] > 0 and given.shape[1] > 0
            instead = "tl_geometry.windows, or .reshape(-1, length) of a flat file of ids"
            require(fits, "tokens", expected=expected, got=got, instead=instead)
            # checks the dtype on one row, so that an array on disk is not read whole
            _ids(given[:1])
        if isinstance(given, Tensor):
            given = given.cpu()
        if isinstance(given, Tensor | np.ndarray) or (
            hasattr(given, "column_names") and hasattr(given, "__len__")
        ):
            require(len(given) > 0, "tokens", expected="at least one context", got="none")
            contexts, length = len(given), _rows(given, 0, 1).shape[1]
        else:
            given, length = _stream(given)
            contexts = None
        numbers, fields["names"] = label_ids(labels, contexts, names)
        return TokenSource(view, given, length, contexts, labels=numbers, **fields)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for a result made from the batches taken so far: the notes, and how many contexts
        begin with BOS twice."""
        double = (double_bos(self.doubled, self.seen),) if self.doubled else ()
        return (*self.notes, *double)

    def batches(self, size: int) -> Iterator[Int[Tensor, "batch position"]]:
        """Batches of at most ``size`` contexts, in order."""
        self.seen = self.doubled = 0
        if self.contexts is not None:
            for start in range(0, self.contexts, size):
                yield self._checked(_rows(self.tokens, start, min(start + size, self.contexts)))
            return
        pending: list[Tensor] = []
        for item in self.tokens:
            rows = _ids(_of_item(item))
            if rows.dim() == 2:
                yield from (self._checked(part) for part in rows.split(size))
                continue
            pending.append(rows)
            if len(pending) == size:
                yield self._checked(_ids(pending))
                pending = []
        if pending:
            yield self._checked(_ids(pending))

    def _checked(self, rows: Tensor) -> Tensor:
        width = rows.shape[-1]
        # what is not a batch of rows is shown by its description, which equals no length
        got = width if rows.dim() == 2 else describe(rows)
        fits = got == self.length
        expected = f"{self.length} positions, as in the first row"
        require(fits, "tokens", expected=expected, got=got, instead="tl_geometry.windows")
        refuse_padding(self.view, rows)
        if self.view.bos_id is not None and width > 1:
            self.doubled += int((rows[:, :2] == self.view.bos_id).all(1).sum())
        self.seen += len(rows)
        return rows


def _is_text(tokens: Any) -> TypeGuard[str | Sequence[str]]:
    return isinstance(tokens, str) or (
        isinstance(tokens, list | tuple)
        and len(tokens) > 0
        and all(isinstance(t, str) for t in tokens)
    )


def _is_sequence_of_items(given: Sequence[Any]) -> bool:
    """Whether a list holds tensors, arrays or items of a data set; otherwise it holds ids or rows
    of ids."""
    first = given[0] if given else None
    return isinstance(first, Mapping) or isinstance(_of_item(first), Tensor | np.ndarray)


def token_file(path: str | Path, what: str = "tokens") -> np.ndarray:
    """The ids ``[context position]`` in a ``.npy`` file, left on the disk; ``what`` names the
    argument that gave it."""
    expected, instead = "an existing .npy file of ids [context position]", "numpy.save"
    require(Path(path).is_file(), what, expected=expected, got=str(path))
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        got = f"{path} ({' '.join(str(error).split())[:120]})"
        fail(what, expected="a .npy file of token ids", got=got, instead=instead)


def _opened(tokens: Any) -> Any:
    """The array in a ``.npy`` file; any other path is refused, with advice; anything else is
    returned as it is."""
    if isinstance(tokens, str | Path) and str(tokens).endswith(".npy"):
        return token_file(tokens)
    if isinstance(tokens, Path):
        instead = f"tl_geometry.windows(model, {tokens!r}, length, prepend_bos=...)"
        expected, got = "token ids, windows or a .npy file", f"the file {str(tokens)!r}"
        fail("tokens", expected=expected, got=got, instead=instead)
    return tokens


def _stream(tokens: Any) -> tuple[Iterator[Any], int]:
    """An iterator over all rows or batches, and the length of a row, taken from the first item."""
    indexed = hasattr(tokens, "__getitem__") and hasattr(tokens, "__len__")
    if indexed and not hasattr(tokens, "__iter__"):  # a torch data set
        tokens = map(tokens.__getitem__, range(len(tokens)))
    try:
        stream = iter(tokens)
    except TypeError:
        instead = "tl_geometry.windows(model, texts, length)"
        fail("tokens", expected="ids, windows or texts", got=describe(tokens), instead=instead)
    first = next(stream, None)
    require(first is not None, "tokens", expected="at least one batch", got="an empty iterable")
    rows = _ids(_of_item(first))
    fits = rows.dim() in (1, 2) and rows.numel() > 0
    require(
        fits, "tokens", expected="rows [position] or batches [batch position]", got=describe(rows)
    )
    # the first item was taken from the stream, and goes back to its front
    return itertools.chain([first], stream), rows.shape[-1]


def _rows(tokens: Any, start: int, stop: int) -> Int[Tensor, "batch position"]:
    """Some rows of a tensor, an array or a ``datasets.Dataset``."""
    return _ids(_of_item(tokens[start:stop]))


def _mapped(tokens: Any) -> Any:
    """The ids in the mapping that a tokenizer returns; anything else as it is. An activation cache
    is refused."""
    if is_cache(tokens):
        expected, got = "ids, windows or texts", type(tokens).__name__
        instead = "decompose_activations(cache), or cache= beside the tokens"
        fail("tokens", expected=expected, got=got, instead=instead)
    return _of_item(tokens) if isinstance(tokens, Mapping) else tokens


def is_cache(source: Any) -> bool:
    """Whether something is an activation cache: the object, or the plain dictionary that
    TransformerLens can return instead."""
    if hasattr(source, "cache_dict"):
        return True
    names = source if isinstance(source, Mapping) else ()
    return any(isinstance(name, str) and re.search(r"(^|\.)hook_", name) for name in names)


def _of_item(item: Any) -> Any:
    """Ids of one item of a data set; an item whose attention mask has zeros is refused."""
    if isinstance(item, list | tuple) and len(item) == 1:  # an item of a TensorDataset
        entry = item[0]
        return entry if isinstance(entry, Tensor | np.ndarray) and entry.ndim > 0 else item
    if not isinstance(item, Mapping):
        return item
    name = next((n for n in ("tokens", "input_ids") if n in item), None)
    expected = "a column named 'tokens' or 'input_ids'"
    require(name is not None, "dataset", expected=expected, got=f"columns {list(item)}")
    mask = item.get("attention_mask")
    if mask is not None:
        several = isinstance(mask, list | tuple) and len(mask) > 0 and hasattr(mask[0], "__len__")
        rows = mask if several else [mask]
        zeros = sum(int((torch.as_tensor(r) == 0).sum()) for r in rows)
        expected, got = "ones everywhere (no padding)", f"{zeros} zeros"
        require(zeros == 0, "attention_mask", expected=expected, got=got, instead=REPACK)
    return item[name]


def _ids(rows: Any) -> Int[Tensor, "..."]:
    """Token ids of any integer type as int64, copied: a caller may reuse its buffer."""
    if isinstance(rows, np.ma.MaskedArray) and np.ma.is_masked(rows):
        got = f"{int(np.ma.getmaskarray(rows).sum())} masked ids"
        fail("tokens", expected="ids without a mask", got=got, instead=REPACK)
    try:
        if isinstance(rows, list | tuple):
            lengths = sorted({len(r) if hasattr(r, "__len__") else 0 for r in rows})
            got, equal = f"lengths {lengths[:8]}", len(lengths) == 1
            instead = "tl_geometry.windows(...)"
            require(equal, "tokens", expected="rows of equal length", got=got, instead=instead)
            flat = lengths == [0]
            rows = torch.tensor(rows) if flat else torch.stack([torch.as_tensor(r) for r in rows])
        # np.array copies: torch warns of read-only arrays, such as memory maps
        ids = torch.as_tensor(np.array(rows) if isinstance(rows, np.ndarray) else rows)
    except GeometryError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError):
        instead = "tl_geometry.windows(model, texts, length) for text"
        fail("tokens", expected="integer ids", got=describe(rows), instead=instead)
    require(checks.holds_integers(ids), "tokens", expected="integer ids", got=describe(ids))
    return ids.to("cpu", torch.int64, copy=True)


def label_ids(
    labels: Any, contexts: int | None, names: tuple[str, ...] = ()
) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """The label of each context as one of the numbers 0, 1, ..., with no number unused, and what
    each number stands for (empty where the labels given are these numbers already).

    Labels are strings, or whole numbers; with ``names``, the label ``i`` stands for ``names[i]``.

    >>> label_ids([7, 10**9, 7], 3)
    (tensor([0, 1, 0]), ('7', '1000000000'))
    """
    if labels is None:
        return None, ()
    if isinstance(labels, Sequence) and len(labels) > 0 and all(isinstance(v, str) for v in labels):
        numbers = {name: i for i, name in enumerate(dict.fromkeys(labels))}
        names, labels = tuple(numbers), [numbers[v] for v in labels]
    if contexts is None:
        expected = "none with an iterable of unknown length"
        fail("labels", expected=expected, got=describe(labels), instead="a tensor or a data set")
    value_range = f"0 to {len(names) - 1}" if names else "0 or more"
    expected = f"one integer label ({value_range}) for each of {contexts} contexts"
    try:
        given = torch.as_tensor(labels)
        fits = checks.holds_integers(given) and given.shape == (contexts,)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        fail("labels", expected=expected, got=describe(labels))
    require(fits, "labels", expected=expected, got=describe(given))
    values, dense = given.cpu().to(torch.int64).unique(return_inverse=True)
    inside = int(values[0]) >= 0 and (not names or int(values[-1]) < len(names))
    got = f"labels from {int(values[0])} to {int(values[-1])}"
    require(inside, "labels", expected=expected, got=got)
    if names:
        return dense, tuple(names[v] for v in values.tolist())
    are_their_numbers = torch.equal(values, torch.arange(len(values)))
    return dense, () if are_their_numbers else tuple(map(str, values.tolist()))


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
