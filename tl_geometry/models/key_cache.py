"""What does a forward pass keep keys and values in? :func:`empty_key_cache` makes the cache of the
model's own library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tl_geometry.models.model_view import ModelView


def empty_key_cache(view: ModelView, contexts: int) -> Any:
    """An empty cache for ``contexts`` rows: TransformerLens's for a HookedTransformer, that of
    transformers for a bridge."""
    if view.class_name == "HookedTransformer":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        sizes: Any = SimpleNamespace(n_layers=view.n_layers, d_head=view.d_head, dtype=view.dtype)
        sizes.n_key_value_heads = view.key_heads(0)
        return TransformerLensKeyValueCache.init_cache(sizes, view.device, contexts)
    from transformers import DynamicCache

    return DynamicCache()
