"""Views of results. Each function takes a result and returns an object that shows itself in Jupyter
and saves itself as HTML, PNG, SVG or PDF.

- ``split``, ``heads``, ``logit_page``, ``graph_page``, ``bands_page`` and ``bundle_3d`` are
  interactive pages (self-contained, offline, in a sandboxed frame), each with an image for paper.
- The others are matplotlib figures. Those of a single axes take ``ax=``.
- :mod:`tl_geometry.render.circuitsvis` draws attention heads as circuitsvis does.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
