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

        def run(tokens: Tensor, hooks: Mapping[str, Hook], **options: Any) -> Tensor | None:
            # a cache grows with each pass
            cache = batch_copies(self.cache, copies)
            return self.view._runner.behind(cache, tokens)(tokens, hooks, **options)

        return dataclasses.replace(self.view, _run=run)


def behind(view: ModelView, tokens: Int[Tensor, "batch position"]) -> PrefixCache | None:
    """The keys and values of all but the last token of the chunks, run once; ``None`` where the
    class has no cache of them."""
    runner = view._runner
    if not (view.causal and tokens.shape[1] >= 2):
        return None
    if view.class_name == "TransformerBridge" and "use_cache" not in runner.kwargs:
        return None
    cache, prefix = runner.empty_cache(len(tokens)), tokens[:, :-1].to(view.device)
    # a hook that does nothing at the last state: without any the runner would stop at the first
    runner.behind(cache, prefix)(prefix, {view.state_hooks[-1]: lambda h: None})
    tensors = [value for entry in _entries(cache) for value in _of(entry).values()]
    if not tensors or any(getattr(t, "shape", [0])[0] != len(tokens) for t in tensors):
        return None  # a class that ignores its cache
    return PrefixCache(view, cache, sum(t.nbytes for t in tensors))


def _entries(cache: Any) -> list[Any]:
    """What a cache of TransformerLens, or of transformers, holds for each layer."""
    return cache.entries if hasattr(cache, "entries") else cache.layers


def _of(entry: Any) -> dict[str, Any]:
    """Keys and values of a layer by the names of their attributes."""
    names = ("past_keys", "past_values") if hasattr(entry, "past_keys") else ("keys", "values")
    return {name: getattr(entry, name) for name in names}


def batch_copies(cache: Any, copies: int) -> Any:
    """A cache with its rows repeated; appending to the new one leaves the old one alone."""
    out, entries = copy.copy(cache), [copy.copy(entry) for entry in _entries(cache)]
    setattr(out, "entries" if hasattr(cache, "entries") else "layers", entries)
    for entry in entries:
        for name, value in _of(entry).items():
            setattr(entry, name, value.repeat(copies, *[1] * (value.dim() - 1)))
    if hasattr(cache, "previous_attention_mask"):
        out.previous_attention_mask = cache.previous_attention_mask.repeat(copies, 1)
    return out
