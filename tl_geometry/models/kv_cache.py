"""The last token of some chunks run again and again behind the keys and values of the tokens before
it, which are run once.

Where only the last position is edited, the earlier ones are the same in every run (causality).
Every class keeps their keys and values in a cache of its own: a bridge in that of transformers,
HookedTransformer in one of TransformerLens. Whether a class and an architecture do so rightly is
for the caller to verify: :class:`tl_geometry.models.next_token.PilotRuns` does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.models.forward import Hook, Runner
from tl_geometry.models.model_view import ModelView


@dataclasses.dataclass(frozen=True, eq=False)
class Behind:
    """Keys and values of all but the last token of ``rows`` chunks; ``size`` is their memory in
    bytes."""

    view: ModelView
    cache: Any
    rows: int
    size: int

    def times(self, copies: int) -> ModelView:
        """A view that runs one token for each row of ``copies`` copies of the chunks, behind the
        tokens before it."""
        runner, hooked = self.view._run, self.view.class_name == "HookedTransformer"
        assert isinstance(runner, Runner)
        repeated = (
            _hooked_copies(self.cache, copies) if hooked else batch_copies(self.cache, copies)
        )

        def run(tokens: Tensor, hooks: Mapping[str, Hook], **options: Any) -> Tensor | None:
            one = copy.copy(runner)
            one.kwargs = _arguments(
                hooked, repeated if hooked else batch_copies(repeated, 1), tokens
            )
            return one(tokens, hooks, **options)

        return dataclasses.replace(self.view, _run=run)


def behind(view: ModelView, tokens: Int[Tensor, "batch position"]) -> Behind | None:
    """All but the last token of the chunks, run once; ``None`` where the class has no cache of keys
    and values."""
    runner = view._run
    if not (
        view.causal
        and tokens.shape[1] >= 2
        and isinstance(runner, Runner)
        and view.class_name != "HookedEncoder"
    ):
        return None
    hooked = view.class_name == "HookedTransformer"
    if not hooked and "use_cache" not in runner.kwargs:
        return None
    cache = _empty(view, len(tokens))
    one = copy.copy(runner)
    before = tokens[:, :-1].to(view.device)
    one.kwargs = _arguments(hooked, cache, before)
    one(before, {view.state_hooks[-1]: lambda h: None})
    kept = _held(cache, hooked)
    if not all(isinstance(t, Tensor) and t.shape[0] == len(tokens) for t in kept):
        return None  # a class that ignores its cache
    return Behind(view, cache, len(tokens), sum(t.numel() * t.element_size() for t in kept))


def _empty(view: ModelView, batch: int) -> Any:
    if view.class_name == "HookedTransformer":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        return TransformerLensKeyValueCache.init_cache(view._model.cfg, view.device, batch)
    from transformers import DynamicCache

    return DynamicCache(config=view._model.original_model.config)


def _arguments(hooked: bool, cache: Any, tokens: Tensor) -> dict[str, Any]:
    if hooked:  # without a mask it asks its tokenizer for one, which it may not have
        return {"past_kv_cache": cache, "attention_mask": torch.ones_like(tokens)}
    return {"use_cache": True, "past_key_values": cache}


def _held(cache: Any, hooked: bool) -> list[Any]:
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
