"""Windows of tokens from texts, and spliced ones as a null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, whole
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus import cutting
from tl_geometry.corpus.sources import bos_to_prepend, refuse_file_names, without_bos
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.describing import as_view
from tl_geometry.models.model_like import ModelLike


def windows(
    model: ModelLike,
    texts: Any,
    length: int,
    *,
    n: int | None = None,
    prepend_bos: bool,
    labels: Sequence[int] | Sequence[str] | None = None,
    seed: int = 0,
    replace: bool = False,
    corpus: str = "text",
) -> TokenWindows:
    """Cut texts into windows of ``length`` tokens, non-overlapping and each used once.

    ``texts`` is a text, several, ``pathlib.Path`` s of text files, or a data set with a ``text``
    column. Every text is tokenised whole, then cut; its last, shorter piece is left out. With
    ``prepend_bos`` each window is the BOS id and ``length - 1`` tokens; a BOS string that the text
    itself has at the beginning of a window is not doubled (it, or the window, is left out, and
    noted). ``n`` draws that many windows without replacement (seeded, in corpus order); ``None``
    takes all. ``labels`` names the document of each text (by default its index). ``replace=True``
    draws ``n`` places where a window can start instead, each of all texts as likely as another,
    with replacement, so that windows overlap: the published sampling (Song & Zhong 2023), whose
    windows are not independent. A text shorter than a window is left out.

    Raises ``GeometryError`` when no text is long enough, or when ``n`` exceeds the windows there
    are.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> cut = tlg.windows(model, "def f(x): return x " * 20, 16, prepend_bos=True)
    >>> cut.tokens.shape[1], cut.has_bos
    (16, True)
    """
    view = as_view(model)
    documents = _documents(texts)
    size = whole(length)
    ok, expected = size is not None and size >= 2, "a whole number, at least 2 tokens"
    require(ok, "length", expected=expected, got=length)
    bos = bos_to_prepend(view.bos_id, prepend_bos)
    named = [str(v) for v in (range(len(documents)) if labels is None else labels)]
    one_each, expected = len(named) == len(documents), f"one for each of {len(documents)} texts"
    require(one_each, "labels", expected=expected, got=len(named))
    body = length - int(prepend_bos)
    ids, notes = without_bos([view.encode(text) for text in documents], bos)
    longest = max(len(row) for row in ids)
    expected, got = f"a text of at least {body} tokens", f"at most {longest}"
    require(longest >= body, "texts", expected=expected, got=got, instead="a shorter length=")
    if replace:
        some = n is not None and n >= 1
        require(some, "n", expected="a number of windows with replace=True", got=n)
        cut, more = _anywhere(ids, body, n or 1, seed, bos), ()
    else:
        cut, more = _in_order(ids, body, bos)
    names = tuple(dict.fromkeys(named))
    rows = torch.cat(cut)
    which = torch.cat([torch.full((len(c),), names.index(named[i])) for i, c in enumerate(cut)])
    if n is not None:
        expected, instead = f"1 to {len(rows)} windows", "n=None for all, or more text"
        require(1 <= n <= len(rows), "n", expected=expected, got=n, instead=instead)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        kept = order[:n].sort().values
        rows, which = rows[kept], which[kept]
    if bos is not None:
        rows = torch.cat([torch.full((len(rows), 1), bos), rows], dim=1)
    return TokenWindows(
        tokens=rows,
        has_bos=prepend_bos,
        labels=which,
        names=names,
        corpus=corpus,
        str_tokens=tuple(view.decode(rows[0].tolist())),
        notes=(*notes, *more),
    )


def _in_order(
    ids: Sequence[Sequence[int]], length: int, bos: int | None
) -> tuple[list[Int[Tensor, "context position"]], tuple[str, ...]]:
    """All non-overlapping windows, by text, without those that begin with ``bos``; and a note of
    how many these were."""
    cut = [cutting.cut(row, length) for row in ids]
    if bos is None:
        return cut, ()
    kept = [c[c[:, 0] != bos] for c in cut]
    doubled = sum(map(len, cut)) - sum(map(len, kept))
    instead, some = "prepend_bos=False", any(len(c) for c in kept)
    require(some, "texts", expected="text between BOS strings", got="none", instead=instead)
    note = f"{doubled} windows that begin with the BOS string left out"
    return kept, (note,) if doubled else ()


def _documents(texts: Any) -> list[str]:
    """Texts as strings: files are read, a data set gives its column ``text``."""
    if isinstance(texts, Mapping) or hasattr(texts, "column_names"):
        columns = list(texts) if isinstance(texts, Mapping) else list(texts.column_names or ())
        require(
            "text" in columns,
            "texts",
            expected="a column named 'text'",
            got=f"columns {columns}",
            instead="a list of strings",
        )
        whole_column = isinstance(texts, Mapping) or hasattr(texts, "__len__")
        texts = texts["text"] if whole_column else (row["text"] for row in texts)
    given: Any = texts
    if isinstance(texts, str | Path) or not isinstance(texts, Iterable):
        given = [texts]
    documents = [_read(t) if isinstance(t, Path) else t for t in given]
    ok = documents and all(isinstance(t, str) for t in documents)
    require(
        ok,
        "texts",
        expected="a string or a list of strings",
        got=describe(texts),
        instead="decompose(model, tokens) for token ids",
    )
    refuse_file_names(documents)
    return documents


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(
            "texts",
            expected="text files in UTF-8",
            got=f"{path}: {type(error).__name__}",
            instead="a string",
        )


def _anywhere(
    ids: Sequence[Sequence[int]], length: int, n: int, seed: int, bos: int | None
) -> list[Int[Tensor, "context position"]]:
    """``n`` windows, by text: their starts are drawn with replacement from all places where one
    fits (and none begins with ``bos``)."""
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in ids]
    firsts = [row[: max(0, len(row) - length + 1)] for row in rows]
    starts = [(first != (-1 if bos is None else bos)).nonzero().flatten() for first in firsts]
    ends = torch.tensor([len(s) for s in starts]).cumsum(0)
    require(
        int(ends[-1]) > 0,
        "texts",
        expected="text between BOS strings",
        got="none",
        instead="prepend_bos=False",
    )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(int(ends[-1]), (n,), generator=generator).sort().values
    sizes = torch.bincount(torch.bucketize(drawn, ends, right=True), minlength=len(ids)).tolist()
    at = torch.cat(starts)[drawn].split(sizes)
    return [row[place[:, None] + torch.arange(length)] for row, place in zip(rows, at, strict=True)]


def splice(source: TokenWindows, *, piece: int | None = None, seed: int = 0) -> TokenWindows:
    """Windows spliced from pieces of random windows of the same corpus: the null for the context
    share.

    ``piece`` tokens (by default an eighth of the window) come from one place; a BOS at position 0
    stays. Whatever context share the spliced windows show comes from slow variation within a piece,
    not from a common context.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> tlg.corpus.splice(windows).tokens.shape
    torch.Size([8, 16])
    """
    length = source.tokens.shape[1]
    rows = cutting.splice(
        source.tokens, piece or max(1, length // 8), seed=seed, keep_first=source.has_bos
    )
    return TokenWindows(
        tokens=rows, has_bos=source.has_bos, corpus=f"{source.corpus}, spliced", notes=source.notes
    )
