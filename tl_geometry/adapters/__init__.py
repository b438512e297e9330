"""The only room that knows TransformerLens: model objects of every class become one :class:`tl_geometry.records.ModelView`."""

from __future__ import annotations

from tl_geometry.adapters.loading import from_hf, load
from tl_geometry.adapters.transformer_lens import states_from_cache, view

__all__ = ["from_hf", "load", "states_from_cache", "view"]
