"""Activations as mean + position + context + residual: sums that merge, one streaming loop, and the
basis they make."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
