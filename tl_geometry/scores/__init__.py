"""Attention scores as a sum of terms, and the share of each term in what a head attends to."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
