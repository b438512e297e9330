"""What does a model predict after a token whose states are edited, in many ways at once? For
:func:`tl_geometry.truncation_kl` and :func:`tl_geometry.skip_costs`.

1. Only the last token of a chunk, the pilot, is edited. By causality all before it is the same in
   every variant: it runs once for a batch of chunks, and its keys and values are kept.
2. One pass over the pilot alone then takes all variants of a chunk as rows; row 0 is the model's
   own. A variant that begins at state s becomes a row there: blocks before s do not run for it.
3. Not every class keeps keys, or lets rows begin late (an ALiBi bias may have the batch's size).
   The first chunk decides: the fastest way whose unedited output is that of a whole pass is taken.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_view import ModelView

Edit = Callable[[Tensor], Tensor]
"""From the pilot's states ``[row d_model]`` to those that the model goes on with; rows more than
before are new variants."""
BATCH = 16
"""Chunks whose keys and values are kept at a time: 50 tokens of each are one efficient pass, and
fill 0.4 GiB in half precision with seven billion parameters."""
HOOKED = "past_kv_cache"
"""What HookedTransformer calls the argument of forward() that takes kept keys."""


@dataclass(eq=False)
class KeptKeys:
    """Keys and values of what stands before the pilots of some chunks, in a cache of the model's
    own library, which the argument ``name`` of its forward() takes."""

    view: ModelView
    name: str
    cache: Any

    @classmethod
    def of(cls, view: ModelView, before: Int[Tensor, "batch position"], name: str) -> KeptKeys:
        """Run the tokens before the pilots once."""
        if name == HOOKED:
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

            sizes: Any = SimpleNamespace(n_layers=view.n_layers, d_head=view.d_head)
            sizes.n_key_value_heads, sizes.dtype = view.key_heads(0), view.dtype
            cache = TransformerLensKeyValueCache.init_cache(sizes, view.device, len(before))
        else:
            from transformers import DynamicCache

            cache = DynamicCache()
        kept = cls(view, name, cache)
        # a hook that does nothing at the last state: nothing is unembedded
        last = {view.state_hooks[-1]: lambda h: None}
        view.run(before, last, forward=kept.arguments(before))
        return kept

    def arguments(self, tokens: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """What a pass over the next ``tokens`` is given."""
        given = {self.name: self.cache}
        # without a mask HookedTransformer asks its tokenizer for one, and may have none
        more = {"attention_mask": torch.ones_like(tokens, device=self.view.device)}
        return given | (more if self.name == HOOKED else {"use_cache": True})

    def row(self, row: int, copies: int) -> KeptKeys:
        """``copies`` of one row; what a pass adds to them leaves the original alone."""
        cache, (parts, *_), at = copy.copy(self.cache), self._parts, slice(row, row + 1)
        setattr(cache, parts, [copy.copy(layer) for layer in getattr(cache, parts)])
        if self.name == HOOKED:
            cache.previous_attention_mask = cache.previous_attention_mask[at].repeat(copies, 1)
        kept = KeptKeys(self.view, self.name, cache)
        kept.repeat(row, copies)
        return kept

    def repeat(self, row: int, copies: int, first: int = 0) -> None:
        """Put ``copies`` of one row in the place of all, from layer ``first`` on."""
        parts, *names = self._parts
        for layer in getattr(self.cache, parts)[first:]:
            for name in names:
                setattr(layer, name, getattr(layer, name)[[row] * copies])

    @property
    def _parts(self) -> tuple[str, str, str]:
        """Names of a cache's layers, and of the keys and values of one."""
        if self.name == HOOKED:
            return "entries", "past_keys", "past_values"
        return "layers", "keys", "values"


@dataclass(eq=False)
class Pilot:
    """The last token of one chunk ``tokens [1 position]``, which is row ``row`` of ``kept``."""

    view: ModelView
    tokens: Int[Tensor, "batch position"]
    late: bool = False
    kept: KeptKeys | None = None
    row: int = 0

    def __call__(
        self, edits: Mapping[int, Edit], rows: int, at: int | slice = -1
    ) -> Float[Tensor, "row d_vocab"]:
        """Log-probabilities (float64) of the token after the pilot: of the model's own run, and of
        the variants that ``edits`` of its states add to it, ``rows`` in all. With
        ``at=slice(None)`` edits see every position of a whole chunk."""
        started, alive = 1 if self.late else rows, 1
        tokens = self.tokens if self.kept is None else self.tokens[:, -1:]
        tokens = tokens.repeat(started, 1)
        kept = None if self.kept is None else self.kept.row(self.row, started)

        def put(h: Tensor, state: int, edit: Edit) -> Tensor:
            nonlocal alive
            edited = edit(h[:alive, at])
            alive = len(edited)
            # rows that begin late stand behind the same tokens as the first one
            h = torch.cat([h, h[:1].repeat(max(0, alive - len(h)), 1, 1)])
            if self.late and kept is not None:
                kept.repeat(0, len(h), first=state)
            h[:alive, at] = edited.to(h)
            return h

        hooks = {self.view.state_hooks[s]: partial(put, state=s, edit=e) for s, e in edits.items()}
        forward = {} if kept is None else kept.arguments(tokens)
        logits = self.view.logits(tokens, hooks, -1, forward=forward)
        return logits[:, 0].double().log_softmax(-1)


def pilots(
    view: ModelView, chunks: Int[Tensor, "sample position"], batch_size: int | None = None
) -> Iterator[Pilot]:
    """The pilot of each chunk, in order; keys and values of ``batch_size`` chunks are kept at a
    time."""
    size = BATCH if batch_size is None else batch_of(batch_size, chunks.shape[1], view.device)
    name, late = _fastest(view, chunks[:1])
    for part in chunks.split(size):
        kept = KeptKeys.of(view, part[:, :-1], name) if name else None
        for row in range(len(part)):
            yield Pilot(view, part[row : row + 1], late, kept, row)


def _fastest(view: ModelView, chunk: Int[Tensor, "batch position"]) -> tuple[str, bool]:
    """The argument that takes kept keys (empty: whole chunks are run), and whether rows begin late:
    the fastest way that gives the model's own output of a chunk in every row, to a relative 1e-4
    (0.05 in half precision), as kept keys come from products of other shapes, which round in
    another order. Under user hooks whole chunks are run."""
    # transformers 5.24 has given the argument another name
    hooked = view.class_name == "HookedTransformer"
    names = (HOOKED,) if hooked else ("past_key_values", "cache")
    own = Pilot(view, chunk)({}, 1)
    relative = 0.05 if torch.finfo(view.dtype).bits < 32 else 1e-4
    bound = relative * max(1.0, float(own.abs().max()))
    doubled = dict.fromkeys({1, view.n_layers}, lambda h: torch.cat([h, h[-1:]]))
    for name, late in itertools.product(() if view.hooked() else names, (True, False)):
        with suppress(Exception):  # a class may refuse kept keys, or late rows, in any words
            kept = KeptKeys.of(view, chunk[:, :-1], name)
            found = Pilot(view, chunk, late, kept)(doubled, 1 + len(doubled))
            if float((found - own).abs().max()) <= bound:
                return name, late
    return "", False
