"""What do heads read and write, as seen from their weights? W_QK and W_OV in the geometry of a
basis, singular value decompositions of their factors, token readouts, probes.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
