"""Do published results come out again? Settings and tables of three works with our numbers beside
them (:func:`reproduce`), and small models trained on other formats of data (:func:`experiment`).

The command line and notebooks call these functions. No other analysis needs this package, except
that ``split_scores`` takes its published presets from here.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
