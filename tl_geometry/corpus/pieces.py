"""How are documents of any length tokenised without holding them whole? For
:func:`tl_geometry.windows`, a text is read in pieces that end where a word does, so that their
tokens are those of the whole text.

1. A piece ends before a space (else before a punctuation mark) that follows a word, if the
   tokenizer begins a new token there: the tokens of the left side must be the first tokens of left
   and right side together (:meth:`Pieces.border`).
2. Every piece but the first is tokenised together with the last characters of the piece before it,
   whose tokens are then removed. So a tokenizer that adds a space before each text adds it only
   once.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import fail
from tl_geometry.corpus.documents import Documents
from tl_geometry.models.model_view import ModelView

PIECE = 2**16
"""Characters that are tokenised at a time; shorter documents are tokenised whole. Longer pieces
cost more time and memory per character (5.6 MB at once: twice as much as in pieces)."""
REACH, BESIDE = 1024, 64
"""Characters within which an end of a piece is searched, and characters on either side of a place
whose tokens decide whether a token begins there."""
ENDS = tuple(re.compile(p) for p in (r"(?<=\w)(?= \w)", r"(?<=\S)(?=\s)", r"(?<=\w)(?=[^\w\s])"))
"""Where a piece may end, best first: between a word and a space, before any whitespace, between a
word and a punctuation mark."""
TRIED = 8
"""Places of each kind of :data:`ENDS` that are tried: each costs two calls of the tokenizer."""


class Pieces:
    """Tokenises documents in pieces. Where ``bos`` is given, BOS tokens at the beginning of a
    document are left out, because windows get their own.

    ``cut_words`` counts pieces that end inside a word because no better end was near, ``begun``
    holds the documents that began with the BOS string, and ``started`` counts the beginnings of
    documents that were read.
    """

    def __init__(self, view: ModelView, documents: Documents, bos: int | None) -> None:
        self.view, self.documents, self.bos = view, documents, bos
        self.begun: set[int] = set()
        self.started = self.cut_words = 0

    def _encode(self, text: str) -> list[int]:
        try:
            return self.view.encode(text)
        except (TypeError, UnicodeError):  # what tokenizers raise for a lone surrogate
            lone = re.search("[\ud800-\udfff]", text)
            if lone is None:
                raise
            got = f"the lone surrogate U+{ord(lone[0]):04X} in {text[:20]!r}"
            fail("texts", expected="text that UTF-8 can hold", got=got)

    def border(self, document: int, at: int) -> int:
        """The first place of the best kind of :data:`ENDS` within ``REACH`` characters from ``at``
        on. Without one, the end of the document if that is within reach, else ``at`` itself, inside
        a word."""
        size = int(self.documents.sizes[document])
        if at <= 0 or at >= size:
            return min(max(at, 0), size)
        text = self.documents.read(document, max(0, at - BESIDE), min(size, at + REACH))
        before = min(at, BESIDE)
        for pattern in ENDS:
            for match in itertools.islice(pattern.finditer(text, before), TRIED):
                if self._begins_a_token(text, match.start()):
                    return at - before + match.start()
        if at + REACH >= size:
            return size
        self.cut_words += 1
        return at

    def _begins_a_token(self, text: str, place: int) -> bool:
        """Whether the tokens left of a place stay the same with the text right of it."""
        left = text[max(0, place - BESIDE) : place]
        ids = self._encode(left)
        return self._encode(left + text[place : place + BESIDE])[: len(ids)] == ids

    def ids(self, document: int, start: int, stop: int) -> list[int]:
        """Tokens of a document between two characters, which must be borders."""
        before = min(start, BESIDE)
        text = self.documents.read(document, start - before, stop)
        ids = self._encode(text)
        if before:
            left = self._encode(text[:before])
            # false where the piece before ends inside a word: then this piece is tokenised alone
            begins_with_left = ids[: len(left)] == left
            return ids[len(left) :] if begins_with_left else self._encode(text[before:])
        self.started += 1
        bare = ids if self.bos is None else itertools.dropwhile(lambda i: i == self.bos, ids)
        bare = list(bare)
        if len(bare) < len(ids):
            self.begun.add(document)
        return bare

    def all_ids(self, document: int) -> Iterator[list[int]]:
        """Tokens of a document, piece by piece."""
        size, start = int(self.documents.sizes[document]), 0
        # max(size, 1): an empty document is one empty piece
        for place in range(PIECE, max(size, 1) + PIECE, PIECE):
            stop = self.border(document, place)
            yield self.ids(document, start, stop)
            start = stop

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on these tokens, for the notes of windows."""
        notes = []
        if self.begun:
            share = f"{len(self.begun)} of {self.started} texts"
            notes.append(f"{share} begin with the BOS string: not doubled")
        if self.cut_words:
            notes.append(f"{self.cut_words} pieces of text end inside a word")
        return tuple(notes)


def joint(view: ModelView, separator: str) -> list[int]:
    """Tokens of a separator after a word, where they may differ from those of the separator alone.

    >>> from tl_geometry import zoo
    >>> from tl_geometry.models.reader import as_view
    >>> len(joint(as_view(zoo.embedded()), ""))
    0
    """
    word = view.encode("a")
    ids = view.encode(f"a{separator}")
    return ids[len(word) :] if ids[: len(word)] == word else view.encode(separator)


class Ids:
    """The tokens of documents, concatenated, four bytes each: the ``i``-th document added is
    document ``numbers[i]`` and ends at token ``ends[i]``."""

    def __init__(self) -> None:
        self._ids, self.ends, self.numbers = array("i"), array("q"), array("q")

    def add(self, document: int, parts: Iterable[list[int]], separator: Sequence[int] = ()) -> None:
        """Append the tokens of one more document, after ``separator`` unless it is the first."""
        if self._ids:
            self._ids.extend(separator)
        for ids in parts:
            self._ids.fromlist(ids)
        self.ends.append(len(self._ids))
        self.numbers.append(document)

    def __len__(self) -> int:
        return len(self._ids)

    def starts(self, length: int, *, joined: bool, step: int) -> Int[Tensor, " context"]:
        """Where windows begin: every ``step`` tokens from the beginning of each document, or of all
        documents ``joined``, as long as a whole window fits."""
        ends = _tensor(self.ends[-1:] if joined else self.ends)
        firsts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
        counts = ((ends - firsts - length) // step + 1).clamp(min=0)
        past = counts.cumsum(0) - counts  # number of windows of all earlier documents
        return torch.repeat_interleave(firsts - step * past, counts) + step * torch.arange(
            int(counts.sum())
        )

    def first_ids(self, starts: Int[Tensor, " context"]) -> Int[Tensor, " context"]:
        """The token at each start."""
        return self._tensor()[starts].long()

    def rows(self, starts: Int[Tensor, " context"], length: int) -> Int[Tensor, "context position"]:
        """The windows that begin at these starts."""
        return self._tensor().unfold(0, length, 1)[starts].long()

    def documents(self, starts: Int[Tensor, " context"]) -> Int[Tensor, " context"]:
        """The document that each start belongs to."""
        index = torch.searchsorted(_tensor(self.ends), starts, right=True)
        return _tensor(self.numbers)[index]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(np.diff(self.ends, prepend=0).tolist(), default=0)

    def _tensor(self) -> Int[Tensor, " token"]:
        # shares the memory of the array: no copy of all tokens
        return torch.frombuffer(self._ids, dtype=torch.int32)


def _tensor(numbers: Sequence[int]) -> Int[Tensor, " context"]:
    return torch.from_numpy(np.array(numbers))
