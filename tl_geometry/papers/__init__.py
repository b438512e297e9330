"""Published results run again: settings and tables of three works with our numbers beside them, and
small models trained on other formats of data. No other analysis needs this package."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
