"""Every way in which tokens come in: texts, ids, windows, batches, data sets, files; and what is
refused because it would be wrong.

Token ids are never edited. What is not a set of whole windows of one length (ragged or padded rows)
is refused by name.
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
from tl_geometry.corpus import cutting as token_math
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows, double_bos
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.states import state_of

REPACK = (
    "tl_geometry.windows(model, texts, length) for windows of one length, "
    "or only the rows without padding"
)
"""What to do about padded input."""


def token_rows(
    view: ModelView, tokens: TokensLike, *, prepend_bos: bool | None = None
) -> TokenWindows:
    """Tokens of a prompt set as windows: a string, strings of equal token length, ids
    ``[position]`` or ``[batch position]``, or windows.

    Strings need ``prepend_bos`` said explicitly; a text that begins with the BOS string gets no
    second one (and a note). Token ids are never edited, so that ``prepend_bos`` must be left out
    for them.
    """
    if _is_text(tokens):
        return _rows_of_texts(
            view, [tokens] if isinstance(tokens, str) else list(tokens), prepend_bos
        )
    require(
        prepend_bos is None,
        "prepend_bos",
        expected="None with token ids (they are never edited)",
        got=prepend_bos,
    )
    if isinstance(tokens, TokenWindows):
        refuse_padding(view, tokens.tokens)
        texts = tokens.str_tokens or tuple(view.decode(tokens.tokens[0].tolist()))
        return dataclasses.replace(tokens, str_tokens=texts)
    ids = _ids(_of_item(_mapped(tokens)))
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    ok = ids.dim() == 2 and ids.numel() > 0
    require(ok, "tokens", expected="integer ids [batch position]", got=describe(ids))
    refuse_padding(view, ids)
    return TokenWindows(
        tokens=ids.cpu(),
        has_bos=view.bos_id is not None and bool((ids[:, 0] == view.bos_id).all()),
        str_tokens=tuple(view.decode(ids[0].tolist())),
        corpus="tokens",
    )


def _rows_of_texts(view: ModelView, texts: Sequence[str], prepend_bos: bool | None) -> TokenWindows:
    refuse_file_names(texts)
    explicit = "prepend_bos=True or prepend_bos=False"
    require(
        isinstance(prepend_bos, bool),
        "prepend_bos",
        expected="True or False with text",
        got=prepend_bos,
        instead=explicit,
    )
    require(
        not prepend_bos or view.bos_id is not None,
        "prepend_bos",
        expected="a tokenizer with a BOS token",
        got="none",
    )
    encoded, notes = without_bos(
        [view.encode(text) for text in texts], view.bos_id if prepend_bos else None
    )
    rows = [[*([view.bos_id] if prepend_bos else []), *row] for row in encoded]
    lengths = sorted({len(r) for r in rows})
    require(
        len(lengths) == 1,
        "texts",
        expected="equal token lengths",
        got=f"lengths {lengths[:8]}",
        instead="tl_geometry.windows(...)",
    )
    require(
        lengths[0] > 0,
        "texts",
        expected="at least one token",
        got="an empty text",
        instead="a longer text",
    )
    ids = torch.tensor(rows, dtype=torch.int64)
    shown = tuple(view.decode(rows[0]))
    return TokenWindows(
        tokens=ids, has_bos=bool(prepend_bos), str_tokens=shown, corpus="prompt", notes=notes
    )


def without_bos(
    rows: Sequence[list[int]], bos_id: int | None
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Ids of texts without the BOS that they begin with themselves, where ``bos_id`` is put in
    front of them anyway; and a note."""
    if bos_id is None:
        return list(rows), ()
    bare = [list(itertools.dropwhile(lambda i: i == bos_id, row)) for row in rows]
    cut = sum(len(a) != len(b) for a, b in zip(bare, rows, strict=True))
    note = f"{cut} of {len(rows)} texts begin with the BOS string: not doubled"
    return bare, (note,) if cut else ()


def refuse_file_names(texts: Iterable[str]) -> None:
    """Refuse a string that is the name of a file where a text is meant."""
    for text in texts:
        short = 0 < len(text) < 4096 and text.isprintable() and re.search(r"[./\\]", text)
        # Path.is_file raises where a part of the text is too long for a name
        if short and os.path.isfile(text):  # noqa: PTH113, TID251
            fail(
                "texts",
                expected="text",
                got=f"the name of a file, {text!r}",
                instead="pathlib.Path(...) of it, with tl_geometry.windows",
            )


def refuse_padding(view: ModelView, ids: Int[Tensor, "batch position"]) -> None:
    """Refuse rows that begin or end with padding: their positions are not those of the model, and
    every mean would hold padding."""
    if view.pad_id is not None:
        padded = token_math.padded_rows(ids, view.pad_id)
        got = f"{padded} of {len(ids)} that begin or end with the padding token (id {view.pad_id})"
        require(padded == 0, "tokens", expected="rows without padding", got=got, instead=REPACK)


@dataclass(eq=False)
class TokenSource:
    """Tokens of a corpus, in memory or not: ``contexts`` is ``None`` for an iterable of unknown
    length."""

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
            given, prepend_bos = token_rows(view, given, prepend_bos=prepend_bos), None
        require(
            prepend_bos is None,
            "prepend_bos",
            expected="None with token ids (they are never edited)",
            got=prepend_bos,
        )
        about: dict[str, Any] = {}
        if isinstance(given, TokenWindows):
            labels = given.labels if labels is None else labels
            about = {"corpus": given.corpus, "names": given.names, "notes": given.notes}
            given = given.tokens
        if isinstance(given, list | tuple) and not (
            given and isinstance(given[0], Tensor | np.ndarray | Mapping | list | tuple)
        ):
            given = _ids(given)
        if (
            isinstance(given, list | tuple)
            and isinstance(given[0], list | tuple)
            and not isinstance(_of_item(given[0]), Tensor)
        ):
            given = _ids(given)
        if isinstance(given, Tensor | np.ndarray):
            got = f"{type(given).__name__} of shape {tuple(given.shape)}"
            expected = "integer ids [context position], at least one context"
            ok = given.ndim == 2 and given.shape[0] > 0 and given.shape[1] > 0
            instead = "tl_geometry.windows, or .reshape(-1, length) of a flat file of ids"
            require(ok, "tokens", expected=expected, got=got, instead=instead)
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
        marks, found = label_ids(labels, contexts)
        about |= {"names": found} if found else {}
        return TokenSource(view, given, length, contexts, labels=marks, **about)

    @property
    def flags(self) -> tuple[str, ...]:
        """What a result made from the batches so far should say."""
        return (*self.notes, *([double_bos(self.doubled, self.seen)] if self.doubled else []))

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
        require(
            rows.dim() == 2 and width == self.length,
            "tokens",
            expected=f"{self.length} positions, as in the first row",
            got=width if rows.dim() == 2 else describe(rows),
            instead="tl_geometry.windows",
        )
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


def _opened(tokens: Any) -> Any:
    """The array in a ``.npy`` file; other files are refused with what to do."""
    if isinstance(tokens, str | Path) and str(tokens).endswith(".npy"):
        require(
            Path(tokens).is_file(),
            "tokens",
            expected="an existing .npy file of ids [context position]",
            got=str(tokens),
        )
        try:
            return np.load(tokens, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            fail(
                "tokens",
                expected="a .npy file of ids [context position]",
                got=f"{tokens}: {error}",
                instead="numpy.save",
            )
    if isinstance(tokens, Path):
        instead = f"tl_geometry.windows(model, {tokens!r}, length, prepend_bos=...)"
        fail(
            "tokens",
            expected="token ids, windows or a .npy file",
            got=f"the file {str(tokens)!r}",
            instead=instead,
        )
    return tokens


def _stream(tokens: Any) -> tuple[Iterator[Any], int]:
    """An iterable of rows or batches with its first item put back, and the length of a row."""
    if (
        hasattr(tokens, "__getitem__")
        and hasattr(tokens, "__len__")
        and not hasattr(tokens, "__iter__")
    ):
        tokens = map(tokens.__getitem__, range(len(tokens)))  # a torch data set
    try:
        stream = iter(tokens)
    except TypeError:
        fail(
            "tokens",
            expected="ids, windows or texts",
            got=describe(tokens),
            instead="tl_geometry.windows(model, texts, length)",
        )
    first = next(stream, None)
    require(first is not None, "tokens", expected="at least one batch", got="an empty iterable")
    rows = _ids(_of_item(first))
    ok = rows.dim() in (1, 2) and rows.numel() > 0
    require(
        ok, "tokens", expected="rows [position] or batches [batch position]", got=describe(rows)
    )
    return itertools.chain([first], stream), rows.shape[-1]


def _rows(tokens: Any, start: int, stop: int) -> Int[Tensor, "batch position"]:
    if hasattr(tokens, "column_names"):  # a datasets.Dataset
        return _ids(_of_item(tokens[start:stop]))
    return _ids(tokens[start:stop])


def _mapped(tokens: Any) -> Any:
    """The ids of what a tokenizer returns; a cache is refused."""
    cached = hasattr(tokens, "cache_dict") or is_cache(tokens)
    instead = "decompose_activations(cache), or cache= beside the tokens"
    require(
        not cached,
        "tokens",
        expected="ids, windows or texts",
        got=type(tokens).__name__,
        instead=instead,
    )
    return _of_item(tokens) if isinstance(tokens, Mapping) else tokens


def is_cache(source: Any) -> bool:
    """Whether something is a cache, as an object or as the plain dictionary that TransformerLens
    can return."""
    hooks = isinstance(source, Mapping) and any(
        isinstance(k, str) and re.search(r"(^|\.)hook_", k) for k in source
    )
    return hooks or hasattr(source, "cache_dict")


def _of_item(item: Any) -> Any:
    """Ids of one item of a data set; one that says it is padded is refused."""
    if (
        isinstance(item, list | tuple)
        and len(item) == 1
        and isinstance(item[0], Tensor | np.ndarray)
        and item[0].ndim > 0
    ):
        return item[0]  # of a TensorDataset
    if not isinstance(item, Mapping):
        return item
    name = next((n for n in ("tokens", "input_ids") if n in item), None)
    require(
        name is not None,
        "dataset",
        expected="a column named 'tokens' or 'input_ids'",
        got=f"columns {list(item)}",
    )
    mask = item.get("attention_mask")
    if mask is not None:
        rows = (
            mask
            if isinstance(mask, list | tuple) and mask and hasattr(mask[0], "__len__")
            else [mask]
        )
        zeros = sum(int((np.asarray(r) == 0).sum()) for r in rows)
        require(
            zeros == 0,
            "attention_mask",
            expected="ones everywhere (no padding)",
            got=f"{zeros} zeros",
            instead=REPACK,
        )
    return item[name]


def _ids(rows: Any) -> Tensor:
    """Token ids as int64, whatever integers they are."""
    try:
        if isinstance(rows, list | tuple):
            lengths = sorted({len(r) if hasattr(r, "__len__") else 0 for r in rows})
            got = f"lengths {lengths[:8]}"
            require(
                len(lengths) == 1,
                "tokens",
                expected="rows of equal length",
                got=got,
                instead="tl_geometry.windows(...)",
            )
            rows = (
                torch.stack([torch.as_tensor(r) for r in rows])
                if lengths != [0]
                else torch.tensor(rows)
            )
        ids = torch.as_tensor(np.array(rows) if isinstance(rows, np.ndarray) else rows)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, GeometryError):
            raise
        fail(
            "tokens",
            expected="integer ids",
            got=describe(rows),
            instead="tl_geometry.windows(model, texts, length) for text",
        )
    wrong = (
        ids.is_floating_point()
        or ids.is_complex()
        or ids.dtype == torch.bool
        or ids.is_meta
        or ids.layout != torch.strided
    )
    require(
        not wrong,
        "tokens",
        expected="integer ids",
        got=f"{'meta ' if ids.is_meta else ''}{describe(ids)}",
    )
    return ids.long()


def label_ids(
    labels: Any, contexts: int | None
) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """One label for each context as numbers from 0, and their names where they are strings."""
    if labels is None:
        return None, ()
    if isinstance(labels, Sequence) and len(labels) > 0 and all(isinstance(v, str) for v in labels):
        names = tuple(dict.fromkeys(labels))
        labels, found = [names.index(v) for v in labels], names
    else:
        found = ()
    expected = f"one integer label (0 or more) for each of {contexts} contexts"
    if contexts is None:
        fail(
            "labels",
            expected="none with an iterable of unknown length",
            got=describe(labels),
            instead="a tensor or a data set",
        )
    try:
        given = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        fail("labels", expected=expected, got=describe(labels))
    ok = (
        given.dim() == 1
        and len(given) == contexts
        and not given.is_floating_point()
        and given.dtype != torch.bool
    )
    ok = ok and not given.is_complex() and bool((given >= 0).all())
    require(ok, "labels", expected=expected, got=describe(given))
    return given.long(), found


def state_indices(values: Any, count: int, hooks: Sequence[str] = ()) -> tuple[int, ...]:
    """States as numbers; a hook that holds one (``"blocks.1.hook_resid_pre"``) is taken for its
    number.

    >>> state_indices(["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", 0], 4)
    (1, 2, 0)
    """
    given = [values] if isinstance(values, str) else values
    if given is None or not isinstance(given, Iterable) or isinstance(given, Tensor | np.ndarray):
        return checks.indices(given, count, "states")
    return checks.indices(
        [state_of(v, count, hooks) if isinstance(v, str) else v for v in given], count, "states"
    )
