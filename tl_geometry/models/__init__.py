"""The only package that knows TransformerLens: model objects of every class become one
:class:`tl_geometry.models.model_view.ModelView`."""

from __future__ import annotations

from tl_geometry.models.describing import states_from_cache, view
from tl_geometry.models.loading import from_hf, load

__all__ = ["from_hf", "load", "states_from_cache", "view"]
