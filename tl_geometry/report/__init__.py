"""What can be said about a model on a corpus? :func:`build` computes the tables, draws their
figures and writes a page that begins with what was found. ``tl-geometry report`` calls it."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
