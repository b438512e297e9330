"""Tokens in every form that they come in: windows of text, streams, chunks, spliced and random null
corpora."""
