"""Which windows are cut, drawn and named, by hand: a token for each character, so that every window
is a slice of its text."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.tiny import tiny
from tests.views import with_methods
from tl_geometry.base.errors import GeometryError
from tl_geometry.corpus import documents as document_module
from tl_geometry.corpus import repeated_random_tokens, window_sampler
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.pieces import Ids, Pieces
from tl_geometry.corpus.sources import TokenSource, label_ids, padded_rows
from tl_geometry.corpus.window_sampler import Cutter
from tl_geometry.models.model_view import ModelView

BOS = ord("#")
LETTERS = "".join(chr(0x4E00 + i) if i % 8 else " " for i in range(20_000))
"""No letter occurs twice."""


@pytest.fixture(scope="module")
def view() -> ModelView:
    return with_methods(
        dataclasses.replace(tlg.view(tiny("bridge", "gpt2")), bos_id=BOS),
        encode=lambda text: [ord(c) for c in text],
        decode=lambda ids: [chr(i) for i in ids],
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts above 18,000 characters windows are drawn by place, in parts of at least 256."""
    monkeypatch.setattr(window_sampler, "WHOLE", 18_000)
    monkeypatch.setattr(window_sampler, "PLACE", 256)


def texts_of(windows: tlg.TokenWindows) -> list[str]:
    return ["".join(map(chr, row)) for row in windows.tokens.tolist()]


# --- By place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("pack", [False, "+"])
def test_windows_drawn_by_place_are_slices_from_everywhere(
    pack: bool | str, replace: bool, view: ModelView, small: None
) -> None:
    """In the order of the text, labelled by where they start, and as often from the second half of
    a part of 256 characters as from the first."""
    ends = [3000, 3010, 3500, 9000, 9000, 20_000]
    parts = [LETTERS[a:b] for a, b in pairwise([0, *ends])]
    whole = "+".join(filter(None, parts)) if pack else LETTERS
    late, at = 0, list[int]()
    for seed in range(4):
        options: dict[str, Any] = {"pack": pack, "replace": replace, "seed": seed}
        cut = tlg.windows(view, parts, 16, n=70, prepend_bos=False, **options)
        assert cut.notes[-1].startswith("windows drawn by place")
        texts = texts_of(cut)
        letters = [text.strip(" +")[0] for text in texts]
        starts = [whole.index(x) - t.index(x) for x, t in zip(letters, texts, strict=True)]
        assert [whole[start : start + 16] for start in starts] == texts
        assert starts == sorted(starts)
        if not replace:
            assert all(b - a >= 16 for a, b in pairwise(starts))
        places = [LETTERS.index(x) for x in letters]
        owners = [sum(place >= end for end in ends) for place in places]
        assert cut.labels is not None
        assert cut.labels.tolist() == owners  # a separator is counted to the text after it
        firsts = [0 if pack else [0, *ends][owner] for owner in owners]
        late += sum((p - f) % 256 >= 128 for p, f in zip(places, firsts, strict=True))
        at += places
    assert 0.36 < late / 280 < 0.58
    quarters = torch.tensor(at).div(5000, rounding_mode="floor").bincount(minlength=4) / 280
    assert float((quarters - 0.25).abs().max()) < 0.08


def test_windows_are_drawn_by_place_where_they_are_a_small_part_of_a_large_text(
    view: ModelView, small: None
) -> None:
    def by_place(characters: int, n: int | None, length: int = 16) -> bool:
        pieces = Pieces(view, Documents.of("x" * characters), None)
        return Cutter(pieces=pieces, length=length, step=length, separator=None).by_place(n)

    assert not by_place(18_000, 1)
    assert by_place(18_001, 1)
    assert by_place(80 * 256, 80)
    assert not by_place(80 * 256, 81)
    assert by_place(80 * 256, 40, 32)  # 16 characters for each token
    assert not by_place(80 * 256, 41, 32)
    assert by_place(80 * 256, 80, 8)
    assert not by_place(80 * 256, 81, 8)  # but no part below 256
    assert not by_place(80 * 256, None)
    assert not by_place(80 * 256, 0)


# --- Of everything --------------------------------------------------------------------------------


def test_a_window_fits_exactly_or_is_refused(view: ModelView) -> None:
    options: dict[str, Any] = {"prepend_bos": False}
    assert texts_of(tlg.windows(view, "abcdefgh", 8, **options)) == ["abcdefgh"]
    assert texts_of(tlg.windows(view, ["abcd", "efg"], 8, pack="-", **options)) == ["abcd-efg"]
    for texts, pack in ((["abcdefg", "abc"], False), (["abcd", "ef"], "-")):
        with pytest.raises(GeometryError, match="a text of at least 8 tokens, got at most 7"):
            tlg.windows(view, texts, 8, pack=pack, **options)
    four = ["abcd", "efgh", "ijkl", "mnop"]
    for n, at_most in ((4, False), (4, True), (9, True), (None, False)):
        found = tlg.windows(view, "".join(four), 4, n=n, at_most=at_most, **options)
        assert texts_of(found) == four
    for n, at_most in ((5, False), (0, False), (0, True), (-1, True)):
        with pytest.raises(GeometryError, match=f"n: expected 1 to 4 windows, got {n}"):
            tlg.windows(view, "".join(four), 4, n=n, at_most=at_most, **options)
    one = tlg.windows(view, "".join(four), 4, n=1, at_most=True, **options)
    assert len(one) == 1


def test_windows_that_begin_with_bos_are_left_out_and_said(view: ModelView) -> None:
    cut = tlg.windows(view, ["##abcd#efgijkl#mno", "pqrs"], 5, prepend_bos=True)
    assert texts_of(cut) == ["#abcd", "#ijkl", "#pqrs"]
    assert cut.labels is not None
    assert cut.labels.tolist() == [0, 0, 1]
    assert cut.notes == (
        "1 of 2 texts begin with the BOS string: not doubled",
        "2 windows that begin with the BOS string left out",
    )
    assert cut.str_tokens == tuple("#abcd")
    again = tlg.windows(view, "##abcd#efgijkl", 5, prepend_bos=True, replace=True, n=40)
    assert again.notes == ("1 of 1 texts begin with the BOS string: not doubled",)
    assert not (again.tokens[:, 1] == BOS).any()


def test_draws_with_replacement_begin_at_every_token(view: ModelView) -> None:
    text = "abcdefghijklmnopqrst"
    cut = tlg.windows(view, text, 4, n=3000, replace=True, prepend_bos=False)
    starts = [text.index(window[0]) for window in texts_of(cut)]
    assert [text[start : start + 4] for start in starts] == texts_of(cut)
    assert starts == sorted(starts)
    counts = torch.tensor(starts).bincount(minlength=17)
    assert len(counts) == 17
    assert 110 < int(counts.min()) < int(counts.max()) < 250  # 176 each


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_starts_of_windows_by_loops(joined: bool, step: int) -> None:
    sizes, ids = (5, 0, 3, 9, 2), Ids()
    for document, size in enumerate(sizes):
        ids.add(10 + document, [list(range(size))])
    ends = [sum(sizes[: i + 1]) for i in range(5)]
    spans = [(0, ends[-1])] if joined else list(zip([0, *ends], ends, strict=False))
    wanted = [s for a, b in spans for s in range(a, b, step) if s + 3 <= b]
    found = ids.starts(3, joined=joined, step=step)
    assert found.tolist() == wanted
    owners = [10 + sum(start >= end for end in ends) for start in wanted]
    assert ids.documents(found).tolist() == owners
    assert ids.longest == 9


# --- Names and digests ----------------------------------------------------------------------------


def test_texts_of_one_label_are_one_document(view: ModelView) -> None:
    texts = ["abcd", "efgh", "ijklmnop"]
    cut = tlg.windows(view, texts, 4, prepend_bos=False, labels=["b", "a", "b"], corpus="mine")
    assert cut.labels is not None
    assert (cut.labels.tolist(), cut.names, cut.corpus) == ([0, 1, 0, 0], ("b", "a"), "mine")
    with pytest.raises(GeometryError, match="labels: expected one for each of 3 texts, got 2"):
        tlg.windows(view, texts, 4, prepend_bos=False, labels=["b", "a"])
    for seed, fits in ((0, True), (2**64 - 1, True), (2**64, False), (-1, False)):
        if fits:
            assert len(tlg.windows(view, texts, 4, n=2, prepend_bos=False, seed=seed)) == 2
        else:
            with pytest.raises(GeometryError, match="seed: expected a whole number from 0 to"):
                tlg.windows(view, texts, 4, n=2, prepend_bos=False, seed=seed)


def test_a_digest_is_of_texts_and_their_ends_whatever_is_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["abcdefg", "", "hij"]
    digests = [Documents.of(x).digest() for x in (texts, ["abcdefgh", "", "ij"], texts[::-1])]
    digests += [Documents.of(["abcdefg", "hij"]).digest()]
    assert len(set(digests)) == 4
    for hashed in (1, 3, 7):
        monkeypatch.setattr(document_module, "HASHED", hashed)
        assert Documents.of(texts).digest() == digests[0]


def test_labels_become_numbers_without_gaps() -> None:
    cases: list[tuple[Any, tuple[str, ...], list[int], tuple[str, ...]]] = [
        ([2, 0, 2], ("a", "b", "c"), [1, 0, 1], ("a", "c")),
        ([1, 2, 1], (), [0, 1, 0], ("1", "2")),
        ([1, 0, 2], (), [1, 0, 2], ()),
        (["y", "x", "y"], (), [0, 1, 0], ("y", "x")),
    ]
    for labels, names, numbers, left in cases:
        dense, found = label_ids(labels, 3, names)
        assert dense is not None
        assert (dense.tolist(), found) == (numbers, left)
    for labels in ([0, 1, 3], [-1, 0, 1]):
        low, high = min(labels), max(labels)
        with pytest.raises(GeometryError, match=rf"\(0 to 2\) .* got labels from {low} to {high}"):
            label_ids(labels, 3, ("a", "b", "c"))


# --- Ids ------------------------------------------------------------------------------------------


def test_one_padding_token_may_be_chance_among_sixteen_rows_and_three_in_a_run_never() -> None:
    rows = torch.arange(100, 100 + 16 * 8).view(16, 8)
    one = rows.clone()
    one[3, 7] = 5
    assert padded_rows(one, 5) == 0
    assert padded_rows(one[:15], 5) == 1
    for run, padded in ((2, 0), (3, 2)):
        ids = rows.clone()
        ids[2, 4] = 5  # inside: the text has it too
        ids[0, :run] = ids[1, -run:] = 5
        assert padded_rows(ids, 5) == padded, run


def test_batches_have_the_size_asked_for_and_count_anew(view: ModelView) -> None:
    ids = torch.arange(40, 80).view(8, 5)
    ids[[1, 6], :2] = BOS
    ids[2, 0] = BOS
    flag = "2 of 8 contexts begin with BOS twice"
    forms: list[tuple[Any, list[int]]] = [
        (ids, [3, 3, 2]),
        (iter(list(ids)), [3, 3, 2]),
        (iter(ids.split(4)), [3, 1, 3, 1]),
    ]
    for form, wanted in forms:
        source = TokenSource.of(view, form)
        assert (source.length, source.contexts) == (5, 8 if form is ids else None)
        batches = list(source.batches(3))
        assert [len(batch) for batch in batches] == wanted
        assert torch.equal(torch.cat(batches), ids)
        assert source.flags == (flag,)
    source = TokenSource.of(view, ids)
    for _ in range(2):
        assert len(list(source.batches(8))) == 1
    assert (source.seen, source.doubled) == (8, 2)
    alone = TokenSource.of(view, torch.full((3, 1), BOS))
    assert len(list(alone.batches(2))) == 2
    assert alone.flags == ()


def test_random_tokens_need_as_many_ids_as_a_period() -> None:
    rows = repeated_random_tokens(4, 1, 200, low=3, high=7)
    assert rows.sort(1).values.tolist() == [[3, 4, 5, 6]] * 200
    assert len({tuple(row) for row in rows.tolist()}) == 24
    with pytest.raises(GeometryError, match=r"at least 5 ids, got 4 from 3 to 6\. Use a wider"):
        repeated_random_tokens(5, 1, low=3, high=7)
    few = repeated_random_tokens(4, 1, 200, low=3, high=5, distinct=False)
    assert set(few.flatten().tolist()) == {3, 4}
    assert repeated_random_tokens(2, 2, low=3, high=4, distinct=False).tolist() == [[3] * 4]
    with pytest.raises(GeometryError, match="at least 1 ids, got 0 from 3 to 2"):
        repeated_random_tokens(4, 1, low=3, high=3, distinct=False)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(GeometryError, match="sizes: expected at least 1 each"):
            repeated_random_tokens(*sizes)
        assert repeated_random_tokens(1, 1, 1, low=3, high=4).tolist() == [[3]]


def test_spliced_windows_have_pieces_of_an_eighth() -> None:
    ids = torch.arange(60)[:, None] * 100 + torch.arange(17)
    windows = tlg.TokenWindows(tokens=ids, has_bos=False, corpus="code", notes=("a note",))
    cut = tlg.corpus.splice(windows)
    source = cut.tokens // 100
    same = (source[:, 1:] == source[:, :-1]).float().mean(0)
    assert [at + 1 for at, share in enumerate(same.tolist()) if share < 0.5] == [*range(2, 17, 2)]
    assert (cut.has_bos, cut.corpus, cut.notes) == (False, "code, spliced", ("a note",))
    assert torch.equal(cut.tokens, tlg.corpus.splice(windows, piece=2, seed=0).tokens)
    assert not torch.equal(cut.tokens, tlg.corpus.splice(windows, seed=1).tokens)
    short = tlg.TokenWindows(tokens=ids[:, :5], has_bos=False)
    assert torch.equal(tlg.corpus.splice(short).tokens, tlg.corpus.splice(short, piece=1).tokens)
    whole = tlg.corpus.splice(short, piece=5).tokens
    assert torch.equal(whole.sort(0).values, short.tokens)
    with pytest.raises(GeometryError, match="piece: expected 1 to 5 tokens, got 0"):
        tlg.corpus.splice(short, piece=0)


def test_a_record_of_windows_says_what_they_are() -> None:
    ids = torch.arange(20).view(2, 10)
    bare = tlg.TokenWindows(tokens=ids, has_bos=False)
    shown = "2 contexts of 10 tokens; no BOS; [0, 1, 2, 3, 4, 5, 6, 7]"
    assert repr(bare) == f"TokenWindows({shown})"
    twice = tlg.TokenWindows(
        tokens=torch.tensor([[0, 0], [0, 1]]),
        has_bos=True,
        labels=torch.tensor([0, 1]),
        names=("a", "b"),
        corpus="c" * 70,
        str_tokens=("d" * 50, "e" * 50),
        notes=("a note",),
    )
    shown = f"with BOS; corpus '{'c' * 60}'; 2 documents; '{'d' * 50}{'e' * 10}'"
    flags = "a note; 1 of 2 contexts begin with BOS twice"
    assert repr(twice) == f"TokenWindows(2 contexts of 2 tokens; {shown}; {flags})"
    assert tlg.TokenWindows(tokens=ids[:, :1] * 0, has_bos=True).flags == ()
    for value, wanted in ((0, 0), (9, 9), (-1, 9), (-10, 0)):
        assert bare.position(value) == wanted
    for value in (10, -11):
        with pytest.raises(GeometryError, match="position: expected an index from 0 to 9"):
            bare.position(value)
