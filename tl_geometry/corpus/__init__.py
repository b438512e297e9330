"""Tokens in every form that they come in: windows of text, streams, chunks, spliced and random null
corpora."""

from __future__ import annotations

from tl_geometry.corpus.nulls import gibberish, pseudo_sentences
from tl_geometry.corpus.texts import splice, windows
from tl_geometry.corpus.token_windows import TokenWindows

__all__ = ["TokenWindows", "gibberish", "pseudo_sentences", "splice", "windows"]
