"""What makes a head attend where it does? Attention scores as an exact sum of terms, and the share
of each term in them."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
