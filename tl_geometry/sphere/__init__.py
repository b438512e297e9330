"""Where does a norm layer put the states, and how do tokens move on its sphere from layer to layer
(Molina 2023)? A norm as a projection onto a sphere, and the paths of tokens along it.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
