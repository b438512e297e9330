"""Who wrote what a head reads: writers of the residual stream, composition, dictionary
features, and one logit by both paths."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
