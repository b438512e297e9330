"""Tokens in every form that they come in: windows of text, streams, chunks, spliced and random null
corpora."""

from __future__ import annotations

from tl_geometry.corpus.nulls import gibberish, pseudo_sentences, repeated_random_tokens
from tl_geometry.corpus.texts import splice, windows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows

__all__ = [
    "TokenWindows",
    "TokensLike",
    "gibberish",
    "pseudo_sentences",
    "repeated_random_tokens",
    "splice",
    "windows",
]
