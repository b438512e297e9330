"""Which documents are windows cut from, and what stands at a given character? One view of strings,
files, lines of files and columns of data sets: :func:`tl_geometry.windows` makes one
:class:`Documents` of whatever it is given.

The lengths of all documents are known from the start; their text is read when needed, from any
place. Sizes and places are counted in characters.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.corpus.sources import refuse_file_names
from tl_geometry.corpus.text_files import JsonLines, TextFile, text_file

HASHED = 2**20
"""Characters that are hashed at a time: a long document is never held whole."""


class _Strings:
    """Texts in a list, or in a column of a data set that can be indexed."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self.sizes = texts, array("q")
        for text in texts:
            _require_text(isinstance(text, str), texts)
            refuse_file_names([text])
            self.sizes.append(len(text))

    def read(self, document: int, start: int, stop: int) -> str:
        return self._texts[document][start:stop]


Origin = TextFile | JsonLines | _Strings
"""What holds documents: their ``sizes`` in characters, and a method ``read`` for a part of one."""


class Documents:
    """All documents in their order: document ``d`` has ``sizes[d]`` characters, and ends at
    character ``ends[d]`` of the concatenation of all documents.

    >>> documents = Documents.of(["one", "two three"])
    >>> documents.ends.tolist(), documents.read(1, 4, 9)
    ([3, 12], 'three')
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        self.origins = tuple(origins)
        # documents up to the end of each origin
        counts = torch.tensor([len(origin.sizes) for origin in origins])
        self._ends = counts.cumsum(0)
        sizes = [np.array(origin.sizes, dtype=np.int64) for origin in origins]
        self.sizes = torch.from_numpy(np.concatenate(sizes))
        self.ends = self.sizes.cumsum(0)

    @staticmethod
    def of(texts: Any, field: str | None = None) -> Documents:
        """The documents in anything that :func:`tl_geometry.windows` takes."""
        if isinstance(texts, Documents):
            return texts
        if isinstance(texts, Mapping) or hasattr(texts, "column_names"):
            texts, field = _column(texts, field or "text"), None
        given: Any = texts
        if isinstance(texts, str | Path) or not isinstance(texts, Iterable):
            given = [texts]
        if not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
            # an iterator is held as a list, because texts are read more than once
            given = list(given)
        _require_text(len(given) > 0, given)
        files = isinstance(given, list | tuple) and any(isinstance(t, Path) for t in given)
        field_fits = field is None or (files and all(isinstance(t, Path) for t in given))
        instead = "the texts themselves"
        require(
            field_fits, "field", expected="None, but for files", got=repr(field), instead=instead
        )
        if not files:
            return Documents([_Strings(given)])
        origins = [
            text_file(t, field=field) if isinstance(t, Path) else _Strings([t]) for t in given
        ]
        return Documents(origins)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def characters(self) -> int:
        """Characters of all documents together."""
        return int(self.sizes.sum())

    def read(self, document: int, start: int, stop: int) -> str:
        """Characters ``start`` to ``stop`` of a document."""
        origin, number = self._place(document)
        return origin.read(number, start, stop)

    @property
    def named_by_line(self) -> bool:
        """Whether any document is a line of a file: then documents are named by file and line."""
        return any(isinstance(origin, JsonLines) for origin in self.origins)

    def name(self, document: int) -> str:
        """Default name of a document: its file and line, else its number."""
        origin, number = self._place(document)
        return origin.label(number) if isinstance(origin, JsonLines) else str(document)

    def origin(self, documents: Int[Tensor, " context"]) -> Int[Tensor, " context"]:
        """For each of these documents, the index of the text or file that was given for it."""
        if not self.named_by_line:
            return documents
        return torch.searchsorted(self._ends, documents, right=True)

    @property
    def given(self) -> int:
        """How many texts and files were given."""
        return len(self.origins) if self.named_by_line else len(self)

    def digest(self) -> str:
        """Hash of all texts and of the places where they end."""
        digest = hashlib.sha256()
        for document, size in enumerate(self.sizes.tolist()):
            for start in range(0, size, HASHED):
                text = self.read(document, start, min(size, start + HASHED))
                # "replace", because UTF-8 cannot encode a lone surrogate
                digest.update(text.encode(errors="replace"))
            # marks where a document ends
            digest.update(b"\0")
        return digest.hexdigest()[:16]

    def _place(self, document: int) -> tuple[Origin, int]:
        """The origin that holds a document, and the document's number within it."""
        index = int(torch.searchsorted(self._ends, document, right=True))
        return self.origins[index], document - (int(self._ends[index - 1]) if index else 0)


def _column(texts: Any, field: str) -> Any:
    """One column of a data set."""
    columns = list(texts) if isinstance(texts, Mapping) else list(texts.column_names or ())
    expected = f"a column named {field!r}"
    instead = "field= for another column, or a list of strings"
    require(field in columns, "texts", expected=expected, got=f"columns {columns}", instead=instead)
    whole_column = isinstance(texts, Mapping) or hasattr(texts, "__len__")
    return texts[field] if whole_column else (row[field] for row in texts)


def _require_text(fits: bool, texts: Any) -> None:
    expected, instead = "a string or a list of strings", "decompose(model, tokens) for token ids"
    require(fits, "texts", expected=expected, got=describe(texts), instead=instead)
