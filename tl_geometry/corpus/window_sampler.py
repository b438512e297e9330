"""Which windows does :func:`tl_geometry.windows` cut? All, a uniform choice of all, or, in a text
too long to be tokenised for a few windows, those at random places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.corpus.pieces import Ids, Pieces

WHOLE = 2**22
"""Characters up to which a corpus is always tokenised whole, which takes seconds."""
PLACE, PER_TOKEN = 2048, 16
"""The text around a drawn character has ``PER_TOKEN`` characters for each token of a window, and at
least ``PLACE``. In most texts that holds three or four windows, so that one is nearly always
found."""
TRIES, MORE = 4, 64
"""For n windows ``TRIES * n + MORE`` places are drawn, because some hold no window, or one that was
drawn before."""
Cut = tuple[Int[Tensor, "context position"], Int[Tensor, " context"], tuple[str, ...]]
"""Windows without BOS, the document in which each begins, and notes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cutter:
    """Windows of ``length`` tokens (without BOS), one every ``step`` tokens of each document, or of
    all documents joined with the ids ``separator``; none begins with the BOS id of ``pieces``. A
    ``step`` below ``length`` means sampling with replacement."""

    pieces: Pieces
    length: int
    step: int
    separator: Sequence[int] | None

    @property
    def _joined(self) -> bool:
        return self.separator is not None

    @property
    def _replace(self) -> bool:
        return self.step < self.length

    @property
    def _place(self) -> int:
        """Characters of the text in which one window is drawn."""
        return max(PLACE, PER_TOKEN * self.length)

    def by_place(self, n: int | None) -> bool:
        """Whether ``n`` windows are drawn without tokenising everything."""
        total = self.pieces.documents.characters
        return n is not None and n > 0 and total > WHOLE and n * self._place <= total

    # ---- everything

    def chosen(self, n: int | None, seed: int, *, at_most: bool) -> Cut:
        """A uniform choice of ``n`` windows, in their order (``None``: all). ``at_most`` takes all
        where there are fewer."""
        ids = Ids()
        for document, size in enumerate(self.pieces.documents.sizes.tolist()):
            # among joined documents an empty one would only add a second separator
            if size or not self._joined:
                ids.add(document, self.pieces.all_ids(document), self.separator or ())
        longest = len(ids) if self._joined else ids.longest
        self._require_length(longest >= self.length, longest)
        starts = self._starts(ids)
        left_out = len(starts)
        starts = self._without_bos(ids, starts)
        left_out -= len(starts)
        instead = "prepend_bos=False"
        require(
            len(starts), "texts", expected="text between BOS strings", got="none", instead=instead
        )
        generator = torch.Generator().manual_seed(seed)
        if self._replace and n is not None:
            draws = torch.randint(len(starts), (n,), generator=generator)
            starts = starts[draws.sort().values]
        elif n is not None:
            expected, instead = f"1 to {len(starts)} windows", "n=None for all, or more text"
            n_fits = n >= 1 and (at_most or n <= len(starts))
            require(n_fits, "n", expected=expected, got=n, instead=instead)
            starts = starts[torch.randperm(len(starts), generator=generator)[:n].sort().values]
        # no note with replacement: windows overlap, so that the text is in other windows
        note = f"{left_out} windows that begin with the BOS string left out"
        notes = (note,) if left_out and not self._replace else ()
        rows, documents = ids.rows(starts, self.length), ids.documents(starts)
        return rows, documents, (*self.pieces.notes, *notes)

    def _starts(self, ids: Ids) -> Int[Tensor, " context"]:
        return ids.starts(self.length, joined=self._joined, step=self.step)

    def _without_bos(self, ids: Ids, starts: Int[Tensor, " context"]) -> Int[Tensor, " batch"]:
        bos = self.pieces.bos
        return starts if bos is None else starts[ids.first_ids(starts) != bos]

    def _require_length(self, enough: bool, longest: int) -> None:
        instead = "a shorter length=" + (
            "" if self._joined else ", or pack=True (--pack) to join them"
        )
        expected, got = f"a text of at least {self.length} tokens", f"at most {longest}"
        require(enough, "texts", expected=expected, got=got, instead=instead)

    # ---- a few places

    def drawn(self, n: int, seed: int) -> Cut | None:
        """``n`` windows at places drawn among all characters; ``None`` where fewer are found,
        because most texts are too short."""
        documents = self.pieces.documents
        generator = torch.Generator().manual_seed(seed)
        total = documents.characters
        places = torch.randint(total, (TRIES * n + MORE,), generator=generator).tolist()
        windows: dict[tuple[int, ...], tuple[int, Int[Tensor, " position"]]] = {}
        for place in places:
            window = self._window_at(place)
            if window is not None:
                key, document, row = window
                # with replacement a window may be drawn again: the number of the draw makes its key
                # unique
                draw = (len(windows),) if self._replace else ()
                windows.setdefault((*key, *draw), (document, row))
            if len(windows) == n:
                document_ids, cut = zip(*(windows[key] for key in sorted(windows)), strict=True)
                note = "windows drawn by place: each character of the text is as likely as another"
                return torch.stack(cut), torch.tensor(document_ids), (*self.pieces.notes, note)
        if not windows and not self._joined:
            longest = sum(map(len, self.pieces.all_ids(int(documents.sizes.argmax()))))
            self._require_length(longest >= self.length, longest)
        return None

    def _window_at(
        self, place: int
    ) -> tuple[tuple[int, int, int], int, Int[Tensor, " position"]] | None:
        """The window for a drawn place: among the windows of the text around it, the one at the
        same relative position as the place. Returns a key that orders windows (first document and
        first character of that text, start token), the document of the window, and its tokens."""
        spans, share = self._around(place)
        ids = Ids()
        for document, start, stop in spans:
            tokens = self.pieces.ids(document, start, stop)
            ids.add(document, [tokens], self.separator or ())
        if not len(ids):
            return None
        starts = self._without_bos(ids, self._starts(ids))
        if not len(starts):
            return None
        # the share is below one, so that the index is in range
        start = starts[int(share * len(starts))][None]
        (document, begin, _), row = spans[0], ids.rows(start, self.length)[0]
        return (document, begin, int(start)), int(ids.documents(start)), row

    def _around(self, place: int) -> tuple[list[tuple[int, int, int]], float]:
        """The text around a place, as parts of documents (document, start, stop), and the relative
        position of the place in it, from 0 to below 1. The text is a short document, a part of a
        long one, or, where documents are joined, a part of their concatenation."""
        documents = self.pieces.documents
        ends, size = documents.ends, self._place
        first = last = int(torch.searchsorted(ends, place, right=True))
        begin = int(ends[first] - documents.sizes[first])
        low, high = begin, int(ends[first])
        # a long text is divided into parts of equal size, of which one holds the place
        if self._joined or high - low > size:
            low = place - (place - (0 if self._joined else low)) % size
            high = min(low + size, documents.characters if self._joined else high)
        if self._joined:
            first = int(torch.searchsorted(ends, low, right=True))
            last = int(torch.searchsorted(ends, high - 1, right=True))
        spans = []
        for document in range(first, last + 1):
            stop = int(ends[document])
            begin = stop - int(documents.sizes[document])
            span = [self.pieces.border(document, edge - begin) for edge in (low, high)]
            spans += [(document, *span)] if span[0] < span[1] else []
        return spans, (place - low) / (high - low)
