"""What do the positional and the context basis of a decomposition look like? Do two bases agree?
Measures with their errors and nulls, a row per state.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
