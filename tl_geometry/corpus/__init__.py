"""How does text become the token windows that every other package takes? Windows, streams, prompts
and chunks, and null corpora of spliced windows or random tokens.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
