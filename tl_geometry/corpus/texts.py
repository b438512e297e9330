"""How does text become token windows of equal length (:func:`tl_geometry.windows`), and how large
would the context share be without a common context? :func:`splice` makes the windows of that
null."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, whole
from tl_geometry.base.errors import require
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.pieces import Pieces, joint
from tl_geometry.corpus.sources import bos_to_prepend
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.corpus.window_sampler import Cutter
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view

SEPARATOR = "\n\n"
"""What is put between joined documents by default: a blank line. Not the tokenizer's end-of-text
token, because in many models it is also BOS or padding."""


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
    field: str | None = None,
    pack: bool | str = False,
    corpus: str = "text",
    at_most: bool = False,
) -> TokenWindows:
    """Cut texts into windows of ``length`` tokens, non-overlapping and each used once.

    ``texts`` is a text, several texts, ``pathlib.Path`` s of text files in UTF-8, or a data set
    with a ``text`` column; ``field`` names another column, or the field that holds the text in each
    line of a ``.jsonl`` file. Files are read and tokenised in pieces, which end where a word does.
    Every text is cut from its beginning; a rest shorter than a window is left out. With
    ``prepend_bos`` each window is the BOS id and ``length - 1`` tokens; where the text itself has
    the BOS string at the beginning of a window, the string or the window is left out, and a note
    says so.

    ``labels`` names the document of each text (by default its index, or file and line);
    with ``field`` it names each file.

    ``n`` draws that many windows without replacement (seeded, in corpus order), or all with
    ``at_most`` where there are fewer; ``None`` takes all. There are two ways to draw:

    - Texts of up to 4 million characters in all are tokenised whole, and every window is equally
      likely.
    - In larger texts, if ``n`` windows are a small part of them, characters are drawn, each equally
      likely. Only the text around each is tokenised, and gives the window at the place of the
      character. A note says so. Text with long words is then drawn a little more often, and the
      windows need not be among those of ``n=None``.

    ``replace=True`` draws ``n`` starts instead, with replacement and from every token, so that
    windows overlap and are not independent: the published sampling (Song & Zhong 2023). In a large
    text each start lies near a character that is drawn.

    A text shorter than a window is left out, unless ``pack=True`` joins all texts with a blank line
    between them (``pack="..."``: with that string). A window belongs to the document where it
    starts.

    Raises ``GeometryError`` when no text is long enough, when ``n`` exceeds the windows there are,
    or when a file is no text or changes while it is read.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> cut = tlg.windows(model, "def f(x): return x " * 20, 16, prepend_bos=True)
    >>> cut.tokens.shape[1], cut.has_bos
    (16, True)
    """
    pack_fits, expected = isinstance(pack, bool | str), "True, False or the text between documents"
    require(pack_fits, "pack", expected=expected, got=describe(pack))
    bos_fits = isinstance(prepend_bos, bool)
    require(bos_fits, "prepend_bos", expected="True or False", got=describe(prepend_bos))
    seed_number, expected = whole(seed), "a whole number from 0 to 2**64 - 1"
    seed_fits = seed_number is not None and 0 <= seed_number < 2**64
    require(seed_fits, "seed", expected=expected, got=seed)
    labels_fit = labels is None or isinstance(labels, Collection)
    require(labels_fit, "labels", expected="one for each text", got=describe(labels))
    count = None if n is None else whole(n)
    require(count == n, "n", expected="a number of windows, or None for all", got=n)
    n_fits = not replace or (count is not None and count >= 1)
    view, documents = as_view(model), Documents.of(texts, field)
    size = whole(length)
    length_fits, expected = size is not None and size >= 2, "a whole number, at least 2 tokens"
    require(length_fits, "length", expected=expected, got=length)
    require(n_fits, "n", expected="a number of windows with replace=True", got=n)
    expected = f"one for each of {documents.given} texts"
    one_each = labels is None or len(labels) == documents.given
    require(one_each, "labels", expected=expected, got=len(labels or ()))
    bos = bos_to_prepend(view.bos_id, prepend_bos)
    # BOS counts in the length of a window
    body = length - int(prepend_bos)
    between = SEPARATOR if pack is True else pack
    cutter = Cutter(
        pieces=Pieces(view, documents, bos),
        length=body,
        step=1 if replace else body,
        separator=None if between is False else joint(view, between),
    )
    cut = cutter.drawn(n, seed) if n is not None and cutter.by_place(n) else None
    rows, document_ids, notes = cut or cutter.chosen(n, seed, at_most=at_most)
    if bos is not None:
        rows = torch.cat([torch.full((len(rows), 1), bos), rows], dim=1)
    document_ids, names = _labelled(documents, document_ids, labels)
    return TokenWindows(
        tokens=rows,
        has_bos=prepend_bos,
        labels=document_ids,
        names=names,
        corpus=corpus,
        str_tokens=tuple(view.decode(rows[0].tolist())),
        notes=notes,
    )


def _labelled(
    documents: Documents, document_ids: Int[Tensor, " context"], labels: Sequence[Any] | None
) -> tuple[Int[Tensor, " context"], tuple[str, ...]]:
    """The document of each window as a number, and the names that the numbers stand for. Lines of
    files may be many: only those with a window get a number and a name."""
    if labels is None and documents.named_by_line:
        present, document_ids = document_ids.unique(return_inverse=True)
        return document_ids, tuple(map(documents.name, present.tolist()))
    named = [str(v) for v in (range(documents.given) if labels is None else labels)]
    # texts with equal labels are one document
    numbers = {name: i for i, name in enumerate(dict.fromkeys(named))}
    origin = documents.origin(document_ids)
    return torch.tensor([numbers[name] for name in named])[origin], tuple(numbers)


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
