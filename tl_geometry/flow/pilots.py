"""What does a model predict after a token whose states are edited, in many ways at once? For
:func:`tl_geometry.truncation_kl` and :func:`tl_geometry.skip_costs`.

1. Only the last token of a chunk, the pilot, is edited. By causality all before it is the same in
   every variant: it runs once for a batch of chunks, and its keys and values are kept.
2. One pass over the pilots of a few chunks takes all their variants as rows: chunk c of variant v
   is row v * chunks + c. Variant 0 is the model's own.
3. A variant that begins at state s may become rows there, so that blocks before s do not run for
   it. This needs a pass over one chunk: its masks and rotary tables have one row, which serves any
   number of rows; two rows serve two.
4. Not every class keeps keys, or lets rows begin late. The first chunks decide: the fastest way
   whose unedited output is that of a whole pass is taken. Without kept keys each pass has one
   chunk.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.models.batches import batch_of
from tl_geometry.models.key_cache import empty_key_cache
from tl_geometry.models.model_view import ModelView

Edit = Callable[[Tensor], Tensor]
"""From the pilots' states ``[variant chunk d_model]`` to those that the model goes on with; what
is more than before are new variants."""
BATCH = 16
"""Chunks whose keys and values are kept at a time: 50 tokens of each are one efficient pass, and
fill 0.4 GiB in half precision with seven billion parameters."""
ROWS = 64
"""Chunks go through one pass together while their variants are at most so many rows: to read all
weights takes as long as to multiply them with some twenty rows."""
HOOKED = "past_kv_cache"
"""What HookedTransformer calls the argument of forward() that takes kept keys."""


def kept_keys(view: ModelView, before: Int[Tensor, "batch position"], name: str) -> Any:
    """Keys and values of what stands before the pilots of some chunks, run once, in a cache of the
    model's own library that the argument ``name`` of its forward() takes."""
    cache = empty_key_cache(view, len(before))
    # a hook that does nothing at the last state: nothing is unembedded
    last = {view.state_hooks[-1]: lambda h: None}
    view.run(before, last, forward=_arguments(view, before, name, cache))
    return cache


def _arguments(view: ModelView, tokens: Tensor, name: str, cache: Any) -> dict[str, Any]:
    """What a pass over the next ``tokens`` is given; nothing without a cache."""
    if name != HOOKED:
        return {name: cache, "use_cache": True} if name else {}
    # without a mask HookedTransformer asks its tokenizer for one, and may have none
    return {name: cache, "attention_mask": torch.ones_like(tokens, device=view.device)}


def _repeat(cache: Any, rows: slice, copies: int, first: int = 0) -> None:
    """Put ``copies`` of some rows in the place of all rows of a cache, from layer ``first`` on."""
    for layer in (cache.entries if hasattr(cache, "entries") else cache.layers)[first:]:
        hooked = hasattr(layer, "past_keys")
        for name in ("past_keys", "past_values") if hooked else ("keys", "values"):
            kept = getattr(layer, name)[rows]
            # of one chunk no copy: the pass makes one, where it adds the pilot's own
            setattr(layer, name, kept.expand(copies, *kept.shape).flatten(0, 1))


def _copies(cache: Any, rows: slice, copies: int) -> Any:
    """``copies`` of some rows of a cache; what a pass adds to them leaves the original alone."""
    new, parts = copy.copy(cache), "entries" if hasattr(cache, "entries") else "layers"
    setattr(new, parts, [copy.copy(layer) for layer in getattr(cache, parts)])
    if hasattr(cache, "previous_attention_mask"):
        new.previous_attention_mask = cache.previous_attention_mask[rows].repeat(copies, 1)
    _repeat(new, rows, copies)
    return new


@dataclass(eq=False)
class Pilots:
    """The last tokens of some chunks ``tokens``, which are ``rows`` of the kept keys in ``cache``
    (see :func:`kept_keys`); ``late`` variants begin at the state that makes them."""

    view: ModelView
    tokens: Int[Tensor, "chunk position"]
    name: str = ""
    cache: Any = None
    rows: slice = field(default_factory=lambda: slice(None))
    late: bool = False

    def __call__(
        self, edits: Mapping[int, Edit], variants: int
    ) -> Float[Tensor, "variant chunk d_vocab"]:
        """Log-probabilities (float64) of the token after each pilot: of the model's own run, and of
        the variants that ``edits`` of its states add to it, ``variants`` in all."""
        view, chunks, alive = self.view, len(self.tokens), 1
        started = 1 if self.late else variants
        tokens = (self.tokens[:, -1:] if self.name else self.tokens).repeat(started, 1)
        cache = _copies(self.cache, self.rows, started) if self.name else None

        def put(h: Tensor, state: int, edit: Edit) -> Tensor:
            nonlocal alive
            edited = edit(rearrange(h[: alive * chunks, -1], "(v c) d -> v c d", c=chunks))
            alive = len(edited)
            # rows that begin late stand behind the same tokens as the first ones
            h = torch.cat([h, h[:chunks].repeat(max(0, alive - len(h) // chunks), 1, 1)])
            if self.late:
                _repeat(cache, slice(chunks), alive, first=state)
            h[: alive * chunks, -1] = edited.flatten(0, 1).to(h)
            return h

        hooks = {view.state_hooks[s]: partial(put, state=s, edit=e) for s, e in edits.items()}
        forward = _arguments(view, tokens, self.name, cache)
        logits = view.logits(tokens, hooks, -1, forward=forward)[:, 0].double()
        return rearrange(logits.log_softmax(-1), "(v c) t -> v c t", c=chunks)


def pilots(
    view: ModelView,
    chunks: Int[Tensor, "sample position"],
    variants: int,
    batch_size: int | None = None,
) -> Iterator[Pilots]:
    """The pilots of all chunks, in order, as many together as have ``variants`` that fill a pass;
    keys and values of ``batch_size`` chunks are kept at a time."""
    size = BATCH if batch_size is None else batch_of(batch_size, chunks.shape[1], view.device)
    step = max(1, min(size, ROWS // variants))
    name, late = _fastest(view, chunks[: min(step, 2)])
    step = step if name else 1
    for part in chunks.split(size):
        cache = kept_keys(view, part[:, :-1], name) if name else None
        for at in (slice(i, i + step) for i in range(0, len(part), step)):
            yield Pilots(view, part[at], name, cache, at, late)


def _fastest(view: ModelView, chunks: Int[Tensor, "chunk position"]) -> tuple[str, bool]:
    """The argument that takes kept keys (empty: whole chunks are run), and whether rows begin late:
    the fastest way that gives the model's own output of chunks in every row, to a relative 1e-4
    (0.05 in half precision), as kept keys come from products of other shapes, which round in
    another order. Under user hooks whole chunks are run."""
    # transformers 5.24 has given the argument another name
    hooked = view.class_name == "HookedTransformer"
    names = (HOOKED,) if hooked else ("past_key_values", "cache")
    own = Pilots(view, chunks)({}, 1)
    relative = 0.05 if torch.finfo(view.dtype).bits < 32 else 1e-4
    bound = relative * max(1.0, float(own.abs().max()))
    doubled = dict.fromkeys({1, view.n_layers}, lambda h: torch.cat([h, h[-1:]]))
    ways = (True, False) if len(chunks) == 1 else (False,)
    for name, late in itertools.product(() if view.hooked() else names, ways):
        with suppress(Exception):  # a class may refuse kept keys, or late rows, in any words
            cache = kept_keys(view, chunks[:, :-1], name)
            found = Pilots(view, chunks, name, cache, late=late)(doubled, 1 + len(doubled))
            if float((found - own).abs().max()) <= bound:
                return name, late
    return "", False
