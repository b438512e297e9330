"""Views of results. Each function takes a result and returns an object that shows itself in Jupyter
and saves itself as HTML, PNG, SVG or PDF.

``split``, ``heads``, ``logit_page``, ``graph_page``, ``bands_page`` and ``bundle_3d`` are
interactive pages (self-contained, offline, in a sandboxed frame), with an image for paper; the
others are matplotlib figures, and take ``ax=`` where they consist of one axes.
:mod:`tl_geometry.render.circuitsvis` draws attention heads as circuitsvis does.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
