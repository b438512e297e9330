"""Gibberish and repeated random tokens, by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tl_geometry as tlg
from tests.lib.models import CTX, VOCAB, tiny
from tl_geometry.corpus.nulls import gibberish, repeated_random_tokens

pytestmark = pytest.mark.once

# ---- templates


# ---- pieces


# ---- documents


# ---- rows of tokens and labels


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
