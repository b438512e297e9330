"""Models whose circuit is known, to test what a measure finds (:func:`known`). ``python -m
benchmarks --only known`` and the tests run them; the library does not ship them."""

from __future__ import annotations

from benchmarks.known_models import trained
from benchmarks.known_models.known import POSITIONS, KnownModel, TokenPairs, known

__all__ = ["POSITIONS", "KnownModel", "TokenPairs", "known", "trained"]
