"""The text around a drawn character, by hand: documents of known sizes, whose pieces may end
anywhere."""

from __future__ import annotations

import dataclasses

import pytest

import tl_geometry as tlg
from tests.tiny import tiny
from tests.views import with_methods
from tl_geometry.corpus import pieces, window_sampler
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.pieces import Pieces
from tl_geometry.corpus.window_sampler import Cutter

TEXTS = ["abcde", "fghijklmn", "opq"]


def cutter(monkeypatch: pytest.MonkeyPatch, *, joined: bool, length: int = 2) -> Cutter:
    """Places hold four characters, or twice the length of a window."""
    monkeypatch.setattr(window_sampler, "PLACE", 4)
    monkeypatch.setattr(window_sampler, "PER_TOKEN", 2)
    monkeypatch.setattr(pieces, "REACH", 0)
    view = with_methods(
        dataclasses.replace(tlg.view(tiny("bridge", "gpt2")), bos_id=None),
        encode=lambda text: [ord(c) for c in text],
    )
    found = Pieces(view, Documents.of(TEXTS), None)
    separator = [ord("+")] if joined else None
    return Cutter(pieces=found, length=length, step=length, separator=separator)


@pytest.mark.parametrize(
    ("place", "spans", "share"),
    [
        (0, [(0, 0, 4)], 0),
        (3, [(0, 0, 4)], 0.75),
        (4, [(0, 4, 5), (1, 0, 3)], 0),
        (7, [(0, 4, 5), (1, 0, 3)], 0.75),
        (13, [(1, 7, 9), (2, 0, 2)], 0.25),
        (16, [(2, 2, 3)], 0),
    ],
)
def test_a_place_in_joined_documents_is_one_of_equal_parts(
    place: int, spans: list[tuple[int, int, int]], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four characters each, over the borders of documents; the last one ends with the text."""
    assert cutter(monkeypatch, joined=True)._around(place) == (spans, share)


@pytest.mark.parametrize(
    ("place", "span", "share"),
    [
        (0, (0, 0, 4), 0),
        (4, (0, 4, 5), 0),
        (5, (1, 0, 4), 0),
        (10, (1, 4, 8), 0.25),
        (13, (1, 8, 9), 0),
        (14, (2, 0, 3), 0),
        (16, (2, 0, 3), 2 / 3),
    ],
)
def test_a_place_in_a_document_ends_with_it(
    place: int, span: tuple[int, int, int], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short document is one place; a long one has equal parts, counted from its beginning."""
    assert cutter(monkeypatch, joined=False)._around(place) == ([span], pytest.approx(share))


def test_the_window_of_a_place_is_at_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two windows of two characters, the first for the first half of a place, the second for the
    rest; a document shorter than a window has none."""
    found = cutter(monkeypatch, joined=False)
    for place, key, row in ((5, (1, 0, 0), "fg"), (6, (1, 0, 0), "fg"), (7, (1, 0, 2), "hi")):
        window = found._window_at(place)
        assert window is not None
        assert (window[0], window[1], "".join(map(chr, window[2].tolist()))) == (key, 1, row)
    assert found._window_at(13) is None
    long = cutter(monkeypatch, joined=False, length=6)
    assert long._window_at(0) is None
    window = long._window_at(13)
    assert window is not None
    assert "".join(map(chr, window[2].tolist())) == "fghijk"
    packed = cutter(monkeypatch, joined=True)
    window = packed._window_at(6)  # of "e+fgh", the second of two
    assert window is not None
    assert (window[0], window[1]) == ((0, 4, 2), 1)
    assert "".join(map(chr, window[2].tolist())) == "fg"


@pytest.mark.parametrize(
    ("whole", "n", "drawn"),
    [(16, 4, True), (17, 4, False), (16, 5, False), (16, 0, False), (16, None, False)],
)
def test_windows_are_drawn_by_place_in_a_large_text(
    whole: int, n: int | None, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of seventeen characters: more than the limit, and at least the places of all windows."""
    monkeypatch.setattr(window_sampler, "WHOLE", whole)
    assert cutter(monkeypatch, joined=False).by_place(n) is drawn
