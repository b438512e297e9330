"""The only package that knows TransformerLens: model objects of every class become one
:class:`tl_geometry.models.model_view.ModelView`."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
