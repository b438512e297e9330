"""What restates publications and nothing else needs: published settings and tables with our numbers
beside them, and small models trained on other formats of data."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
