"""How does text become token windows of equal length (:func:`tl_geometry.windows`), and how large
would the context share be without a common context? :func:`splice` makes the windows of that
null."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, whole
from tl_geometry.base.errors import require
from tl_geometry.corpus.sources import bos_to_prepend, encoded, label_ids, without
from tl_geometry.corpus.text_files import read_piece, require_files
from tl_geometry.corpus.token_windows import TokenWindows, begins_with_bos
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

WHOLE = 2**22
"""Characters up to which a corpus is always tokenised whole, which takes seconds."""
SHORTEST, PER_TOKEN = 2048, 16
"""A piece of a longer corpus has ``PER_TOKEN`` characters for each token of a window, and at least
``SHORTEST``: in most texts that holds three or four windows."""
TRIES, MORE = 16, 256
"""For n windows at most ``TRIES * n + MORE`` pieces are read, because some hold no window."""
PIECES = "windows of random pieces of the text, cut at white space"
"""Note of windows of a corpus that was not read whole."""
RowsOf = Callable[[str], Int[Tensor, "context position"]]
"""Cuts a text into windows, without their BOS."""
Cut = tuple[Int[Tensor, "context position"], Int[Tensor, " context"]]
"""Windows without BOS, and the document of each."""


def windows(
    model: ModelLike,
    texts: Any,
    length: int,
    *,
    n: int | None = None,
    prepend_bos: bool | None = None,
    labels: Sequence[int] | Sequence[str] | None = None,
    seed: int = 0,
    corpus: str = "text",
) -> TokenWindows:
    """Cut texts into windows of ``length`` tokens, non-overlapping and each used once.

    ``texts`` is a text, the ``pathlib.Path`` of a text file in UTF-8, or several of these (a column
    of a data set). Each is cut from its beginning; a rest shorter than a window is left out. With
    ``prepend_bos`` (``None``: the model's own default) each window is the BOS id and ``length - 1``
    tokens; BOS tokens with which a text begins are then left out, and so is a window of the text
    that would begin with one. ``labels`` names the document of each text.

    ``n`` draws that many windows without replacement (seeded, in corpus order); ``None`` takes all.
    Texts of up to 4 million characters in all are tokenised whole, and every window is equally
    likely. Of more text, if ``n`` windows are a small part of it, random pieces are read, cut at
    white space, and one window is taken from each, so that memory does not grow with the text (a
    note says so; the first or last token of a piece may differ from that of the whole text). Of an
    iterator, which may have no end, only as many texts are read as hold ``n`` windows.

    Raises ``GeometryError`` when no text is long enough, when ``n`` exceeds the windows there are,
    or when a file is no text.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> cut = tlg.windows(model, "def f(x): return x " * 20, 16)
    >>> cut.tokens.shape[1], cut.has_bos
    (16, True)
    """
    view = as_view(model)
    given = {"length": (length, 2), "n": (1 if n is None else n, 1), "seed": (seed, 0)}
    for name, (value, low) in given.items():
        number = whole(value)
        fits = number is not None and low <= number < 2**64
        require(fits, name, expected=f"a whole number, {low} or more", got=repr(value))
    bos = bos_to_prepend(view, prepend_bos)
    rows_of = partial(_rows, view, body=length - int(bos is not None), bos=bos)
    documents, notes = _documents(rows_of, texts, n)
    label_of, names = label_ids(labels, len(documents))
    sizes = [len(d) if isinstance(d, str) else d.stat().st_size for d in documents]
    piece, cut = max(SHORTEST, PER_TOKEN * length), None
    if n is not None and max(WHOLE, n * piece) < sum(sizes):
        cut = _drawn(rows_of, documents, sizes, piece, n, seed)
        notes = (*notes, PIECES) if cut else notes
    rows, of = cut or _chosen(rows_of, documents, n, seed)
    if bos is not None:
        rows = torch.cat([torch.full((len(rows), 1), bos), rows], dim=1)
    return TokenWindows(
        tokens=rows,
        has_bos=begins_with_bos(rows, view.bos_id),
        labels=of if label_of is None else label_of[of],
        label_names=names,
        corpus=corpus,
        str_tokens=tuple(view.decode(rows[0].tolist())),
        notes=notes,
    )


def _documents(
    rows_of: RowsOf, texts: Any, n: int | None
) -> tuple[list[str | Path], tuple[str, ...]]:
    """Texts and files; of an iterator as many as hold ``n`` windows, with a note."""
    table = isinstance(texts, Mapping) or hasattr(texts, "columns")
    given: Any = [texts] if isinstance(texts, str | Path) or table else texts
    stream, found, documents = n is not None and not hasattr(given, "__len__"), 0, []
    for text in given if isinstance(given, Iterable) else [given]:
        expected, instead = "texts, or a pathlib.Path of each", 'data["text"] of a data set'
        fits = isinstance(text, str | Path)
        require(fits, "texts", expected=expected, got=describe(text), instead=instead)
        documents.append(text)
        found += len(rows_of(_read(text))) if stream else 0
        if n is not None and found >= n:
            break
    require(documents, "texts", expected="at least one text", got="none")
    require_files([d for d in documents if isinstance(d, Path)])
    note = f"the first {len(documents)} texts of a stream, which hold {n} windows"
    return documents, (note,) if stream else ()


def _read(document: str | Path, start: int = 0, stop: int | None = None) -> str:
    """A part of a document, in characters of a text or bytes of a file."""
    if isinstance(document, str):
        return document[start:stop]
    require_files([document])
    return read_piece(document, start, document.stat().st_size if stop is None else stop)


def _rows(
    view: ModelView, text: str, *, body: int, bos: int | None
) -> Int[Tensor, "context position"]:
    """Consecutive windows of a text, without those that begin with BOS where windows get their
    own."""
    ids = encoded(view, text)
    ids = ids if bos is None else without(ids, bos)
    count = len(ids) // body
    rows = torch.tensor(ids[: count * body], dtype=torch.int64).view(count, body)
    return rows if bos is None else rows[rows[:, 0] != bos]


def _chosen(rows_of: RowsOf, documents: Sequence[str | Path], n: int | None, seed: int) -> Cut:
    """A uniform choice of ``n`` windows of all texts, in their order (``None``: all)."""
    parts = [rows_of(_read(document)) for document in documents]
    rows, of = torch.cat(parts), torch.repeat_interleave(torch.tensor(list(map(len, parts))))
    expected, instead = "a text of at least one window", "a shorter length="
    require(len(rows), "texts", expected=expected, got="none", instead=instead)
    if n is None:
        return rows, of
    expected, instead = f"1 to {len(rows)} windows", "n=None for all, or more text"
    require(n <= len(rows), "n", expected=expected, got=n, instead=instead)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randperm(len(rows), generator=generator)[:n].sort().values
    return rows[pick], of[pick]


def _drawn(
    rows_of: RowsOf,
    documents: Sequence[str | Path],
    sizes: Sequence[int],
    piece: int,
    n: int,
    seed: int,
) -> Cut | None:
    """One window from each of ``n`` random pieces of about ``piece`` characters, in their order;
    ``None`` where too few hold a window."""
    draws, found = random.Random(seed), dict[int, tuple[Tensor, int]]()
    starts = [0, *itertools.accumulate(max(1, size // piece) for size in sizes)]
    for cell in draws.sample(range(starts[-1]), min(starts[-1], TRIES * n + MORE)):
        of = bisect.bisect_right(starts, cell) - 1
        low = (cell - starts[of]) * piece
        high = sizes[of] if cell + 1 == starts[of + 1] else low + piece
        text = _read(documents[of], low, high)
        # from the first to the last place where white space follows a word
        text = re.sub(r"(?s)\A.*?(?<=\S)(?=\s)", "", text, count=1) if low else text
        inside = re.match(r"(?s).*(?<=\S)(?=\s)", text) if high < sizes[of] else None
        rows = rows_of(text if inside is None else inside[0])
        if len(rows):
            found[cell] = rows[draws.randrange(len(rows))], of
        if len(found) == n:
            cut, owners = zip(*(found[key] for key in sorted(found)))
            return torch.stack(cut), torch.tensor(owners)
    return None


def splice(source: TokenWindows, *, piece: int | None = None, seed: int = 0) -> TokenWindows:
    """Windows spliced from pieces of random windows of the same corpus: the null for the context
    share.

    Each piece of ``piece`` tokens (by default an eighth of the window) comes from a random window,
    drawn anew for each piece, and keeps its positions; a BOS at position 0 stays. Over the corpus
    the tokens at each position stay the same, so that any context share of the spliced windows
    comes from slow variation within a piece, not from a common context.

    >>> import tl_geometry as tlg
    >>> windows = TokenWindows(tokens=torch.tensor([[0, 1, 2, 3], [0, 5, 6, 7]]), has_bos=True)
    >>> tlg.corpus.splice(windows, piece=1).tokens.sort(0).values.equal(windows.tokens)
    True
    """
    tokens, first = source.tokens, int(source.has_bos)
    contexts, length = tokens.shape
    size = max(1, length // 8) if piece is None else piece
    require(1 <= size <= length, "piece", expected=f"1 to {length} tokens", got=piece)
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        part[torch.randperm(contexts, generator=generator)]
        for part in tokens[:, first:].split(size, dim=1)
    ]
    return TokenWindows(
        tokens=torch.cat([tokens[:, :first], *pieces], dim=1),
        has_bos=source.has_bos,
        corpus=f"{source.corpus}, spliced",
        notes=source.notes,
    )
