"""Tokens in every form that they come in: windows of text, streams, chunks, spliced and random null
corpora."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
