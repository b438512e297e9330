"""How much of an activation is position, and how much is context? Splits states into mean +
position + context + residual: one streaming pass over a corpus takes sums that merge, and the basis
follows from them."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
