"""How does the last token of some chunks run many times, while the tokens before it run once? Their
keys and values are cached. :func:`tl_geometry.models.next_token.pilot_runs` calls this.

Where only the last position is edited, the earlier ones are the same in every run (causality). A
bridge keeps keys and values in a cache of transformers, HookedTransformer in one of
TransformerLens. Whether a class and an architecture do so rightly is for the caller to verify.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_geometry.models.model_view import ModelView
from tl_geometry.models.runner import Hook


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixCache:
    """Keys and values of all but the last token of some chunks; ``size`` is their memory in
    bytes."""

    view: ModelView
    cache: Any
    size: int

    def times(self, copies: int) -> ModelView:
        """A view that runs one token for each row of ``copies`` copies of the chunks, behind the
        tokens before it."""
        hooked = self.view.class_name == "HookedTransformer"
        repeat = _hooked_copies if hooked else batch_copies
        repeated = repeat(self.cache, copies)

        def run(tokens: Tensor, hooks: Mapping[str, Hook], **options: Any) -> Tensor | None:
            # a cache of transformers grows with each pass, a frozen one of TransformerLens does not
            cache = repeated if hooked else batch_copies(repeated, 1)
            return self.view._layers.runner.behind(cache, tokens)(tokens, hooks, **options)

        return dataclasses.replace(self.view, _run=run)


def behind(view: ModelView, tokens: Int[Tensor, "batch position"]) -> PrefixCache | None:
    """The keys and values of all but the last token of the chunks, run once; ``None`` where the
    class has no cache of them."""
    runner, hooked = view._layers.runner, view.class_name == "HookedTransformer"
    if not (view.causal and tokens.shape[1] >= 2):
        return None
    if not hooked and "use_cache" not in runner.kwargs:
        return None
    config = None if hooked else view._model.original_model.config
    cache, prefix = runner.empty_cache(len(tokens), config), tokens[:, :-1].to(view.device)
    # a hook that does nothing at the last state: without any the runner would stop at the first
    runner.behind(cache, prefix)(prefix, {view.state_hooks[-1]: lambda h: None})
    tensors = _tensors(cache, hooked)
    if not all(isinstance(t, Tensor) and t.shape[0] == len(tokens) for t in tensors):
        return None  # a class that ignores its cache
    return PrefixCache(view, cache, sum(t.numel() * t.element_size() for t in tensors))


def _tensors(cache: Any, hooked: bool) -> list[Any]:
    """Keys and values in a cache; ``[None]`` for a cache of transformers that was never filled,
    which the caller refuses."""
    if hooked:
        return [t for entry in cache.entries for t in (entry.past_keys, entry.past_values)]
    return [t for layer in cache.layers for t in (layer.keys, layer.values)] or [None]


def batch_copies(cache: Any, copies: int) -> Any:
    """A cache of transformers with its rows repeated; appending to the new one leaves the old one
    alone."""
    out = copy.copy(cache)
    out.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in out.layers if copies > 1 else ():
        layer.keys, layer.values = (
            t.repeat(copies, *[1] * (t.dim() - 1)) for t in (layer.keys, layer.values)
        )
    return out


def _hooked_copies(cache: Any, copies: int) -> Any:
    """The same for a cache of TransformerLens, frozen, so that runs add nothing to it."""
    out = copy.copy(cache)
    out.entries = [copy.copy(entry) for entry in cache.entries]
    for entry in out.entries:
        entry.past_keys, entry.past_values = (
            t.repeat(copies, 1, 1, 1) for t in (entry.past_keys, entry.past_values)
        )
    out.previous_attention_mask = cache.previous_attention_mask.repeat(copies, 1)
    out.freeze()
    return out
