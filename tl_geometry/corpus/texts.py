"""How does text become token windows of equal length (:func:`tl_geometry.windows`)? And which
input holds no text: :func:`splice` makes the null of the context share, :func:`gibberish` random
tokens to compare the :func:`pseudo_sentences` of trajectories with, :func:`repeated_random_tokens`
the input that shows head types."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import count, describe, seeded
from tl_geometry.base.errors import check_seed, fail, require
from tl_geometry.base.html import plain
from tl_geometry.corpus.sources import bos_to_prepend, corpus_of, encoded, label_ids, without
from tl_geometry.corpus.text_files import read_text, require_files
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
HIGH_TOKEN = 10_000
"""Random ids stay below this one, as published: in large vocabularies special tokens rarely have
lower ids."""
Cut = Callable[[str], list[list[int]]]
"""Cuts a text into windows, without their BOS."""
Row = tuple[list[int], int]
"""A window without BOS, and the number of its document."""


def windows(
    model: ModelLike,
    texts: Any,
    length: int,
    *,
    n: int | None = None,
    prepend_bos: bool | None = None,
    labels: Sequence[int] | Sequence[str] | None = None,
    seed: int = 0,
    corpus: str | None = None,
) -> TokenWindows:
    """Cut texts into windows of ``length`` tokens, non-overlapping and each used once.

    ``corpus`` names the source in every result, by default the names of files, or "text".

    ``texts`` is a text, the ``pathlib.Path`` of a text file in UTF-8, or several of these (a column
    of a data set). Each is cut from its beginning; a rest shorter than a window is left out. With
    ``prepend_bos`` (``None``: the model's own default) each window is the BOS id and ``length - 1``
    tokens; BOS tokens with which a text begins are then left out, and so is a window of the text
    that would begin with one. ``labels`` names the document of each text; where all texts are
    files, it is by default the path.

    ``n`` draws that many windows without replacement (seeded, in corpus order); ``None`` takes all.
    Texts of up to 4 million characters in all are tokenised whole, and every window is equally
    likely. Of more text, if ``n`` windows are a small part of it, random pieces are read, cut at
    white space, and one window is taken from each, so that memory does not grow with the text (a
    note says so; the first or last token of a piece may differ from that of the whole text).

    Raises ``GeometryError`` when no text is long enough, when ``n`` exceeds the windows there are,
    or when a file is no text.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> cut = tlg.windows(model, "def f(x): return x " * 20, 16)
    >>> cut.tokens.shape[1], cut.has_bos
    (16, True)
    """
    view = as_view(model)
    length, n = count(length, "length", 2), None if n is None else count(n, "n")
    seed = check_seed(seed, "seed")
    bos = bos_to_prepend(view, prepend_bos)
    given: Any = [texts] if isinstance(texts, str | Path) else texts
    # a DataFrame would give the names of its columns, a mapping its keys
    fits = hasattr(given, "__len__") and not hasattr(given, "columns")
    fits = fits and not isinstance(given, Mapping)
    fits = fits and all(isinstance(text, str | Path) for text in given)
    if not fits or not len(given):  # a repr of all texts takes as long as to read them
        expected, instead = "texts, or the Path of each", 'a list, or data["text"] of a data set'
        fail("texts", expected=expected, got=describe(texts), instead=instead)
    documents = list(given)
    first, is_name = documents[0], False
    # of the first alone, as to ask for each takes time; a path has less than 4,096 bytes, and for a
    # text that is too long to name a file this is an OSError
    with contextlib.suppress(OSError):
        is_name = isinstance(first, str) and len(first) < 4096 and Path(first).is_file()
    require(not is_name, "texts", expected="texts", got="the name of a file", instead="its Path")
    files = [document for document in documents if isinstance(document, Path)]
    require_files(files)
    paths = [plain(str(file)) for file in files] if len(files) == len(documents) else None
    label_of, names = label_ids(paths if labels is None else labels, len(documents))
    size = [len(d) if isinstance(d, str) else d.stat().st_size for d in documents]
    cut = partial(_rows, view, length - int(bos is not None), bos)
    piece, found, notes = max(SHORTEST, PER_TOKEN * length), list[Row](), (PIECES,)
    if n is not None and max(WHOLE, n * piece) < sum(size):
        found = _drawn(cut, documents, size, piece, n, seed)
    if not found:
        found, notes = _chosen(cut, documents, n, seed), ()
    rows = torch.tensor([[bos, *row] if bos is not None else row for row, _ in found])
    of = torch.tensor([document for _, document in found])
    return TokenWindows(
        tokens=rows,
        has_bos=begins_with_bos(rows, view.bos_id),
        labels=of if label_of is None else label_of[of],
        label_names=names,
        corpus=corpus or ("text" if paths is None else corpus_of([f.name for f in files])),
        str_tokens=tuple(view.decode(rows[0].tolist())),
        notes=notes,
    )


def _read(document: str | Path, start: int = 0, stop: int | None = None) -> str:
    """A part of a document, in characters of a text or bytes of a file."""
    return document[start:stop] if isinstance(document, str) else read_text(document, start, stop)


def _rows(view: ModelView, body: int, bos: int | None, text: str) -> list[list[int]]:
    """Consecutive windows of a text, without those that begin with BOS where windows get their
    own."""
    ids = encoded(view, text)
    ids = ids if bos is None else without(ids, bos)
    starts = range(0, len(ids) - body + 1, body)
    return [ids[i : i + body] for i in starts if bos is None or ids[i] != bos]


def _chosen(cut: Cut, documents: Sequence[str | Path], n: int | None, seed: int) -> list[Row]:
    """A uniform choice of ``n`` windows of all texts, in their order (``None``: all)."""
    rows = [(row, of) for of, document in enumerate(documents) for row in cut(_read(document))]
    expected, instead = "a text of at least one window", "a shorter length="
    require(rows, "texts", expected=expected, got="none", instead=instead)
    expected, instead = f"1 to {len(rows)} windows", "n=None for all, or more text"
    require(n is None or n <= len(rows), "n", expected=expected, got=n, instead=instead)
    order = torch.randperm(len(rows), generator=seeded(seed))
    return rows if n is None else [rows[i] for i in sorted(order[:n].tolist())]


def _drawn(
    cut: Cut,
    documents: Sequence[str | Path],
    sizes: Sequence[int],
    piece: int,
    n: int,
    seed: int,
) -> list[Row]:
    """One window from each of ``n`` random pieces of about ``piece`` characters, in their order;
    none where too few hold a window."""
    draws, found = random.Random(seed), dict[int, Row]()
    starts = [0, *itertools.accumulate(max(1, size // piece) for size in sizes)]
    for cell in draws.sample(range(starts[-1]), min(starts[-1], TRIES * n + MORE)):
        of = bisect.bisect_right(starts, cell) - 1
        low = (cell - starts[of]) * piece
        high = sizes[of] if cell + 1 == starts[of + 1] else low + piece
        text = _read(documents[of], low, high)
        # from the first to the last place where white space follows a word
        text = re.sub(r"(?s)\A.*?(?<=\S)(?=\s)", "", text, count=1) if low else text
        inside = re.match(r"(?s).*(?<=\S)(?=\s)", text) if high < sizes[of] else None
        rows = cut(text if inside is None else inside[0])
        if rows:
            found[cell] = rows[draws.randrange(len(rows))], of
        if len(found) == n:
            return [found[key] for key in sorted(found)]
    return []


def splice(source: TokenWindows, *, seed: int = 0) -> TokenWindows:
    """Windows spliced from pieces of random windows of the same corpus: the null for the context
    share.

    Each piece, an eighth of a window, comes from a random window, drawn anew for each piece, and
    keeps its positions; a BOS at position 0 stays. Over the corpus the tokens at each position stay
    the same, so that any context share of the spliced windows comes from slow variation within a
    piece, not from a common context.

    >>> windows = TokenWindows(tokens=torch.tensor([[0, 1, 2, 3], [0, 5, 6, 7]]), has_bos=True)
    >>> splice(windows).tokens.sort(0).values.equal(windows.tokens)
    True
    """
    first, generator = int(source.has_bos), seeded(seed)
    parts = source.tokens[:, first:].split(max(1, source.length // 8), dim=1)
    pieces = [part[torch.randperm(len(source), generator=generator)] for part in parts]
    return TokenWindows(
        tokens=torch.cat([source.tokens[:, :first], *pieces], dim=1),
        has_bos=source.has_bos,
        corpus=f"{source.corpus}, spliced",
        notes=source.notes,
    )


def pseudo_sentences(
    model: ModelLike,
    text: str,
    length: int = 50,
    *,
    n: int | None = None,
    prepend_bos: bool = False,
    corpus: str = "text",
) -> TokenWindows:
    """Consecutive non-overlapping chunks of ``length`` tokens of a text, newlines replaced by
    spaces, without BOS (as published).

    Sarfati et al. 2025, section 2; the published code keeps a short last chunk, which is left out
    here. ``n`` takes the first chunks, ``None`` all. A model whose training texts always began with
    BOS may predict badly without it: then set ``prepend_bos=True`` (BOS counts in ``length``).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.corpus.pseudo_sentences(model, "def f(x): return x " * 20, 10).tokens.shape[1]
    10
    """
    chunks = windows(model, text.replace("\n", " "), length, prepend_bos=prepend_bos, corpus=corpus)
    given = len(chunks) if n is None else n
    return chunks[: count(given, "n", most=len(chunks), instead="n=None for all")]


def gibberish(
    model: ModelLike, n: int, length: int = 50, *, prepend_bos: bool = False, seed: int = 0
) -> TokenWindows:
    """Chunks of random tokens, uniform over the vocabulary (as published).

    Set ``prepend_bos`` as in the chunks of text to compare with, or a missing BOS becomes part of
    the difference. BOS counts in ``length``.

    Raises ``GeometryError`` for ``prepend_bos`` with a tokenizer that has no BOS.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.corpus.gibberish(model, 4, 10, prepend_bos=True).tokens.shape
    torch.Size([4, 10])
    """
    view, generator = as_view(model), seeded(seed)
    n, length = count(n, "n"), count(length, "length")
    tokens = torch.randint(0, view.vocabulary_size, (n, length), generator=generator)
    bos = bos_to_prepend(view, prepend_bos)
    if bos is not None:
        tokens[:, 0] = bos
    return TokenWindows(tokens=tokens, has_bos=bos is not None, corpus="gibberish, uniform")


def repeated_random_tokens(
    period: int = 8,
    copies: int = 3,
    batch: int = 1,
    *,
    low: int = 1000,
    high: int = HIGH_TOKEN,
    seed: int = 1234,
    bos_id: int | None = None,
) -> Int[Tensor, "batch position"]:
    """``batch`` rows of ``period`` distinct random token ids from ``low`` to ``high - 1``, repeated
    ``copies`` times, after ``bos_id`` where one is given.

    The defaults, range and seed included, give the input of Song & Zhong 2023, Fig. 4: the text
    says "repeated twice", the published code makes three copies, 24 tokens, without BOS.

    >>> repeated_random_tokens()[0, :9].tolist()
    [6775, 4171, 8806, 7365, 8316, 2564, 7432, 3625, 6775]
    """
    sizes = {"period": period, "copies": copies, "batch": batch}
    period, copies, batch = (count(value, name) for name, value in sizes.items())
    expected, got = f"at least {period} ids", f"{max(0, high - low)} from {low} to {high - 1}"
    require(high - low >= period, "low, high", expected=expected, got=got, instead="a wider range")
    generator = seeded(seed)
    rows = torch.randint(low, high, (batch, period), generator=generator)
    if 4 * period**2 > high - low:
        # a row repeats a token with probability near period^2 / (2 (high - low)), here above 1 / 8:
        # not redrawn until distinct, but taken from a permutation of the range
        orders = [torch.randperm(high - low, generator=generator)[:period] for _ in range(batch)]
        rows = low + torch.stack(orders)
    # sorted, equal ids are neighbours
    while bool((twice := (rows.sort(-1).values.diff(dim=-1) == 0).any(-1)).any()):
        rows[twice] = torch.randint(low, high, (int(twice.sum()), period), generator=generator)
    tokens = rows.repeat(1, copies)
    return tokens if bos_id is None else torch.cat([torch.full((batch, 1), bos_id), tokens], dim=1)
