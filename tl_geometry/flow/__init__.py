"""Do the layers move tokens like a stochastic flow of rotation, stretch and noise (Sarfati et al.
2025)? Trajectories of tokens and everything that is computed from them.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
