"""Views of results. Each function takes a result (or its table) and returns an object that shows
itself in Jupyter and saves itself; :func:`plot` finds the one that belongs to a result.

- ``split``, ``heads``, ``graph_page``, ``token_attribution``, ``attention_heads``, ``induction``
  and ``bundle_3d`` are interactive pages: self-contained, offline, in a sandboxed frame, light and
  dark.
- The others are matplotlib figures, saved as HTML, PNG, SVG or PDF. Most of a single panel
  take ``ax=``.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
