"""Prompts of templates, pieces of texts, documents and random tokens, by hand: a token for each
character, except where a test gives a tokenizer of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.refusals import refused
from tests.tiny import CTX, VOCAB, tiny
from tests.views import with_methods
from tl_geometry.corpus import aligned_prompts, pieces
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.nulls import gibberish, pseudo_sentences, repeated_random_tokens
from tl_geometry.corpus.pieces import Ids, Pieces, joint
from tl_geometry.corpus.sources import (
    TokenSource,
    bos_to_prepend,
    label_ids,
    token_rows,
    without_bos,
)
from tl_geometry.models.model_view import ModelView

BOS = ord("#")


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def pairs(text: str) -> list[int]:
    """Two characters a token, from the beginning on: tokens depend on what stands before."""
    parts = [text[at : at + 2] for at in range(0, len(text), 2)]
    return [sum(ord(c) << (8 * i) for i, c in enumerate(part)) for part in parts]


def encoder(encode: Callable[[str], list[int]], bos: int | None = BOS) -> ModelView:
    return with_methods(
        dataclasses.replace(tlg.view(tiny("bridge", "gpt2")), bos_id=bos, pad_id=None),
        encode=encode,
        decode=lambda ids: [chr(i) for i in ids],
    )


@pytest.fixture(scope="module")
def view() -> ModelView:
    return encoder(letters)


# ---- templates


@pytest.mark.parametrize("bos", [False, True])
def test_slots_end_where_their_text_ends(view: ModelView, bos: bool) -> None:
    """A slot that comes three times has three names, in the order of their places; positions count
    BOS."""
    rows = [{"a": "xy", "b": "z"}, {"a": "uv", "b": "w"}]
    found = aligned_prompts(view, "{a}-{b}{a}, {a}!", rows, prepend_bos=bos)
    first = int(bos)
    places = {"a": 1, "b": 3, "a2": 5, "a3": 9, "end": 10}
    assert list(found.positions.items()) == [(n, at + first) for n, at in places.items()]
    texts = ["xy-zxy, xy!", "uv-wuv, uv!"]
    assert found.tokens.tolist() == [[BOS] * first + letters(text) for text in texts]
    assert found.names == ("{a}-{b}{a}, {a}!",)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0]


def test_rows_and_templates_that_do_not_fit_are_named(view: ModelView) -> None:
    """In whole sentences."""
    rows = [{"a": "x"}]
    none = "template, rows: expected at least one of each, got none."
    assert refused(lambda: aligned_prompts(view, [], rows, prepend_bos=True)) == none
    assert refused(lambda: aligned_prompts(view, "{a}", [], prepend_bos=True)) == none
    assert refused(lambda: aligned_prompts(view, "{a}{b}", rows, prepend_bos=True)) == (
        "rows: expected texts of the slots ['a', 'b'], got those of ['a']."
    )
    assert refused(lambda: aligned_prompts(view, "{end}", [{"end": "x"}], prepend_bos=True)) == (
        "template: expected other names, got end."
    )
    odd = "{" + "x" * 70
    text = refused(lambda: aligned_prompts(view, odd, rows, prepend_bos=True))
    assert text.startswith(f"template: expected text with slots such as {{S}}, got {odd[:60]!r} (")
    unequal = [{"a": "xy", "b": "z"}, {"a": "x", "b": "yz"}]
    assert refused(lambda: aligned_prompts(view, "{a}{b}", unequal, prepend_bos=True)) == (
        "rows: expected each slot at one position, got several positions. "
        "Use texts of as many tokens in each slot."
    )


def test_slots_that_end_inside_a_token_are_refused() -> None:
    """With tokens of two characters each."""
    two = encoder(pairs)
    fits = aligned_prompts(two, "{a}bc", [{"a": "xy"}], prepend_bos=False)
    assert fits.positions == {"a": 0, "end": 1}
    assert refused(lambda: aligned_prompts(two, "{a}bc", [{"a": "x"}], prepend_bos=False)) == (
        "template: expected slots that end with a token, got 'x' and 'bc' in one. "
        "Use slots of whole words."
    )


def test_several_templates_are_labels_in_their_order(view: ModelView) -> None:
    """All rows in the first, then all in the second; places that differ have no name."""
    rows = [{"a": "x"}, {"a": "y"}, {"a": "z"}]
    found = aligned_prompts(view, ["{a}..{a}", "{a}.{a}."], rows, prepend_bos=False)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.positions == {"a": 0, "end": 3}
    assert ["".join(map(chr, row)) for row in found.tokens.tolist()] == [
        *("x..x", "y..y", "z..z"),
        *("x.x.", "y.y.", "z.z."),
    ]


# ---- pieces


@pytest.mark.parametrize(
    ("text", "at", "border"),
    [
        ("ab cd", 0, 0),
        ("ab cd", -3, 0),
        ("ab cd", 9, 5),
        ("ab cd", 1, 2),
        ("ab cd", 2, 2),
        ("ab cd", 3, 5),  # no more space: the end of the document is near
        ("ab.cd\nef", 1, 5),  # a line end before a punctuation mark
        ("ab.cd", 1, 2),
        ("ab\n\ncd ef", 1, 6),  # a space after a word before a line end
        ("a" * 40, 3, 3),
        ("a" * 12, 3, 3),
        ("a" * 11, 3, 11),
    ],
)
def test_a_piece_ends_at_the_best_place_within_reach(
    text: str, at: int, border: int, view: ModelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight characters; before a space after a word, else before any white space, else before a
    mark; inside a word where there is none, which is counted."""
    monkeypatch.setattr(pieces, "REACH", 8)
    found = Pieces(view, Documents.of([text]), None)
    assert found.border(0, at) == border
    assert found.cut_words == int(border == at and 0 < at < len(text) and text[at] == "a")


def test_tokens_of_pieces_are_counted_and_cut_of_bos(
    view: ModelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that begin with the BOS string are counted once, whatever comes later in them."""
    monkeypatch.setattr(pieces, "PIECE", 4)
    documents = Documents.of(["##ab cd #ef", "ab", "", "#"])
    found = Pieces(view, documents, BOS)
    texts = ["".join(map(chr, chain.from_iterable(found.all_ids(d)))) for d in range(4)]
    assert texts == ["ab cd #ef", "ab", "", ""]
    assert (found.begun, found.started) == ({0, 3}, 4)
    assert found.notes == ("2 of 4 texts begin with the BOS string: not doubled",)
    kept = Pieces(view, documents, None)
    assert "".join(map(chr, chain.from_iterable(kept.all_ids(0)))) == "##ab cd #ef"
    assert kept.notes == ()
    kept.cut_words = 3
    assert kept.notes == ("3 pieces of text end inside a word",)


def test_a_piece_begins_where_a_token_does() -> None:
    """With tokens of two characters a piece may end after an even number of them only, and what is
    cut elsewhere is tokenised alone."""
    two = encoder(pairs)
    found = Pieces(two, Documents.of(["abc de fg hi"]), None)
    assert found.border(0, 1) == 6
    assert found.ids(0, 6, 12) == pairs("abc de fg hi")[3:]
    assert found.ids(0, 3, 7) == pairs(" de ")
    assert found.started == 0


def test_the_tokens_between_documents_are_those_after_a_word() -> None:
    """Unless the word itself changes; then those of the text alone."""
    assert joint(encoder(letters), "\n\n") == [10, 10]
    assert joint(encoder(letters), "") == []
    assert joint(encoder(pairs), "xyz") == pairs("xyz")
    assert joint(encoder(lambda text: [len(text)]), "xy") == [2]


def test_ids_of_documents_by_hand() -> None:
    """Ends, numbers, the longest one, and a separator between two but not before the first."""
    ids = Ids()
    assert (len(ids), ids.longest) == (0, 0)
    for number, parts in ((4, [[1, 2], [3]]), (7, [[5]]), (9, [])):
        ids.add(number, parts, [0, 0])
    assert (len(ids), ids.longest) == (8, 3)
    assert ids.rows(torch.tensor([0, 4]), 4).tolist() == [[1, 2, 3, 0], [0, 5, 0, 0]]
    assert ids.first_ids(torch.tensor([2, 5])).tolist() == [3, 5]
    assert ids.documents(torch.tensor([0, 2, 3, 5, 6])).tolist() == [4, 4, 7, 7, 9]


def test_lone_surrogates_are_named() -> None:
    """Other errors of a tokenizer stay what they are."""

    def strict(text: str) -> list[int]:
        return list(text.encode())

    found = Pieces(encoder(strict), Documents.of(["ab\udc80" + "c" * 30]), None)
    assert refused(lambda: found.ids(0, 0, 30)) == (
        f"texts: expected text that UTF-8 can hold, got the lone surrogate U+DC80 in "
        f"{'ab' + chr(0xDC80) + 'c' * 17!r}."
    )

    def broken(text: str) -> list[int]:
        raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        Pieces(encoder(broken), Documents.of(["ab"]), None).ids(0, 0, 2)


# ---- documents


def test_documents_have_names_and_places(tmp_path: Path) -> None:
    """Texts by their number, lines by file and line; each belongs to what was given."""
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"t": "one"}\n\n{"t": "three"}\n')
    more = tmp_path / "b.jsonl"
    more.write_text('{"t": "x"}\n')
    found = Documents.of([lines, more], "t")
    assert (len(found), found.given, found.characters, found.named_by_line) == (3, 2, 9, True)
    assert [found.name(d) for d in range(3)] == ["a.jsonl:1", "a.jsonl:3", "b.jsonl:1"]
    assert found.origin(torch.arange(3)).tolist() == [0, 0, 1]
    assert found.read(1, 1, 4) == "hre"
    plain = Documents.of(["ab", "c"])
    assert (len(plain), plain.given, plain.named_by_line) == (2, 2, False)
    assert [plain.name(d) for d in range(2)] == ["0", "1"]
    assert plain.origin(torch.tensor([1, 0])).tolist() == [1, 0]
    assert Documents.of(plain) is plain
    assert Documents.of("ab").ends.tolist() == [2]
    assert Documents.of({"text": ["a", "bc"]}).ends.tolist() == [1, 3]
    assert Documents.of({"t": ["a", "bc"]}, "t").ends.tolist() == [1, 3]
    assert Documents.of(iter(["a", "bc"])).ends.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("texts", "field", "text"),
    [
        (
            {"t": ["a"]},
            None,
            "texts: expected a column named 'text', got columns ['t']. "
            "Use field= for another column, or a list of strings.",
        ),
        (["a"], "t", "field: expected None, but for files, got 't'. Use the texts themselves."),
        (
            [],
            None,
            "texts: expected a string or a list of strings, got []. "
            "Use decompose(model, tokens) for token ids.",
        ),
    ],
)
def test_what_is_no_document_is_refused(texts: Any, field: str | None, text: str) -> None:
    """In whole sentences."""
    assert refused(lambda: Documents.of(texts, field)) == text


# ---- rows of tokens and labels


def test_texts_become_rows_with_or_without_bos(view: ModelView) -> None:
    """A BOS string is not doubled, which a note says; without BOS it stays."""
    found = token_rows(view, ["#ab", "xyz"[:2]], prepend_bos=True)
    assert found.tokens.tolist() == [[BOS, *letters("ab")], [BOS, *letters("xy")]]
    assert (found.has_bos, found.corpus) == (True, "prompt")
    assert found.notes == ("1 of 2 texts begin with the BOS string: not doubled",)
    assert found.str_tokens == ("#", "a", "b")
    bare = token_rows(view, "#a", prepend_bos=False)
    assert (bare.tokens.tolist(), bare.has_bos, bare.notes) == ([letters("#a")], False, ())
    ids = token_rows(view, torch.tensor([BOS, 5]))
    assert (ids.tokens.tolist(), ids.has_bos, ids.corpus) == ([[BOS, 5]], True, "tokens")
    assert without_bos([[1, 1, 2], [2, 1]], 1) == (
        [[2], [2, 1]],
        ("1 of 2 texts begin with the BOS string: not doubled",),
    )
    assert without_bos([[1, 2]], None) == ([[1, 2]], ())
    assert without_bos([[2]], 1) == ([[2]], ())
    assert (bos_to_prepend(7, True), bos_to_prepend(7, False)) == (7, None)
    assert bos_to_prepend(None, False) is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda view: token_rows(view, "ab"),
            "prepend_bos: expected True or False with text, got None. "
            "Use prepend_bos=True or prepend_bos=False.",
        ),
        (
            lambda view: token_rows(view, [5], prepend_bos=True),
            "prepend_bos: expected None with token ids (they are never edited), got True.",
        ),
        (
            lambda view: token_rows(view, ["ab", "abc", "d"], prepend_bos=True),
            "texts: expected equal token lengths, got lengths [2, 3, 4]. "
            "Use tl_geometry.windows(...).",
        ),
        (
            lambda view: token_rows(view, "", prepend_bos=False),
            "texts: expected at least one token, got an empty text. Use a longer text.",
        ),
        (
            lambda view: bos_to_prepend(None, True),
            "prepend_bos: expected a tokenizer with a BOS token, got none. Use prepend_bos=False.",
        ),
        (
            lambda view: TokenSource.of(view, [[1, 2], [3]]),
            "tokens: expected rows of equal length, got lengths [1, 2]. "
            "Use tl_geometry.windows(...).",
        ),
        (
            lambda view: list(TokenSource.of(view, iter([[1, 2], [3]])).batches(2)),
            "tokens: expected rows of equal length, got lengths [1, 2]. "
            "Use tl_geometry.windows(...).",
        ),
        (
            lambda view: label_ids([0, 1], 3),
            "labels: expected one integer label (0 or more) for each of 3 contexts, "
            "got int64 tensor of shape (2,).",
        ),
        (
            lambda view: label_ids([0, 2], 2, ("a", "b")),
            "labels: expected one integer label (0 to 1) for each of 2 contexts, "
            "got labels from 0 to 2.",
        ),
        (
            lambda view: label_ids([0, -1], 2),
            "labels: expected one integer label (0 or more) for each of 2 contexts, "
            "got labels from -1 to 0.",
        ),
        (
            lambda view: label_ids([0, 1], None),
            "labels: expected none with an iterable of unknown length, got [0, 1]. "
            "Use a tensor or a data set.",
        ),
    ],
)
def test_rows_and_labels_are_refused_in_whole_sentences(
    call: Callable[[ModelView], object], text: str, view: ModelView
) -> None:
    """What was expected, what came, and what to do."""
    assert refused(lambda: call(view)) == text


# ---- random tokens


def test_gibberish_is_of_the_vocabulary_or_of_a_corpus() -> None:
    """Fifty tokens of seed 0 by default; BOS only where it is asked for, and never drawn from the
    windows of a corpus."""
    model = tlg.view(tiny("bridge", "gpt2"))
    plain = gibberish(model, 40)
    assert plain.tokens.shape == (40, 50)
    assert (plain.has_bos, plain.corpus) == (False, "gibberish, uniform")
    assert set(plain.tokens.flatten().tolist()) == set(range(VOCAB))
    assert torch.equal(plain.tokens, gibberish(model, 40, seed=0, length=50).tokens)
    assert not torch.equal(plain.tokens, gibberish(model, 40, seed=1).tokens)
    ids = torch.tensor([[0, 5, 6], [0, 7, 6]])
    for like, pool in (
        (tlg.TokenWindows(tokens=ids, has_bos=True), {5, 6, 7}),
        (tlg.TokenWindows(tokens=ids, has_bos=False), {0, 5, 6, 7}),
        (ids, {0, 5, 6, 7}),
    ):
        found = gibberish(model, 20, 9, like=like)
        assert set(found.tokens.flatten().tolist()) == pool
        assert found.corpus == "gibberish, corpus frequencies"
    begun = gibberish(dataclasses.replace(model, bos_id=3), 20, 9, like=ids, prepend_bos=True)
    assert begun.tokens[:, 0].tolist() == [3] * 20
    assert begun.has_bos
    assert 3 not in begun.tokens[:, 1:]
    assert begun.tokens.shape[1] <= CTX


def test_sentences_are_chunks_without_line_ends(view: ModelView) -> None:
    """Of fifty tokens by default, without BOS; some of them, or all."""
    text = "ab\ncd " * 30
    plain = pseudo_sentences(view, text)
    assert plain.tokens.shape == (3, 50)
    assert 10 not in plain.tokens
    assert (plain.has_bos, plain.corpus) == (False, "text")
    assert "".join(map(chr, plain.tokens[0].tolist())) == text.replace("\n", " ")[:50]
    two = pseudo_sentences(view, text, n=2, prepend_bos=True, corpus="mine")
    assert two.tokens.shape == (2, 50)
    assert two.tokens[:, 0].tolist() == [BOS] * 2
    assert two.corpus == "mine"
    assert len(pseudo_sentences(view, text, n=3)) == 3
    for n in (0, 4):
        assert refused(lambda n=n: pseudo_sentences(view, text, n=n)) == (
            f"n: expected 1 to 3 chunks, got {n}. Use n=None for all."
        )


def test_repeated_tokens_are_three_copies_of_eight() -> None:
    """In one row of ids from 1,000 to 9,999, without BOS, by default."""
    plain = repeated_random_tokens()
    assert plain.shape == (1, 24)
    assert plain[0, :8].tolist() == [6775, 4171, 8806, 7365, 8316, 2564, 7432, 3625]
    assert torch.equal(plain[:, :8], plain[:, 16:])
    many = repeated_random_tokens(8, 1, 20_000, distinct=False)
    assert (int(many.min()), int(many.max())) == (1000, 9999)
    drawn_again = repeated_random_tokens(8, 1, 500, low=10, high=266).sort(1).values
    assert bool((drawn_again.diff(dim=1) > 0).all())
    assert (int(drawn_again.min()), int(drawn_again.max())) == (10, 265)
    begun = repeated_random_tokens(2, 2, 3, bos_id=7)
    assert begun.shape == (3, 5)
    assert begun[:, 0].tolist() == [7] * 3
    assert refused(lambda: repeated_random_tokens(0)) == (
        "sizes: expected at least 1 each, got (0, 3, 1)."
    )
    assert refused(lambda: repeated_random_tokens(4, low=3, high=6)) == (
        "low, high: expected at least 4 ids, got 3 from 3 to 5. Use a wider range."
    )
