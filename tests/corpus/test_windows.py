"""Random and spliced windows, and what a record of windows says."""

from __future__ import annotations

import pytest
import torch

import tl_geometry as tlg
from tl_geometry.base.errors import GeometryError
from tl_geometry.corpus import repeated_random_tokens

pytestmark = pytest.mark.once

# --- By place -------------------------------------------------------------------------------------


# --- Of everything --------------------------------------------------------------------------------


# --- Names and digests ----------------------------------------------------------------------------


# --- Ids ------------------------------------------------------------------------------------------


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
