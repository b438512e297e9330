"""What does a model predict next while hooks edit it? Next-token distributions from whole passes,
or from passes over the last token alone; measures of an edit's effect on the output call these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.batches import default_batch
from tl_geometry.models.kv_cache import PrefixCache, behind
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.runner import Hook

ELEMENTS = 2**27
"""Logits of one forward pass, at most (0.5 GiB in float32)."""
KEPT_BYTES, PILOTS = 2**28, 512
"""Limits of one pass over last tokens alone: bytes of cached keys and values of all copies, and
rows."""


def require_output(view: ModelView, what: str) -> None:
    """Refuse output-based measures where they would mean nothing: no causal language model, or a
    newly initialised head."""
    expected, got = "a causal language model", f"{view.name}, an encoder"
    if not view.head_trained:
        expected = "a model with a trained output head"
        got = f"{view.name}, whose head was newly initialised"
    fits, instead = view.head_trained and view.causal, "the measures of states"
    kind = UnsupportedModelError
    require(fits, what, expected=expected, got=got, instead=instead, error=kind)


def output_batch(view: ModelView, positions: int, *, all_positions: bool) -> int:
    """Rows of one forward pass whose logits are wanted, at all ``positions`` or at one."""
    fit = ELEMENTS // (view.d_vocab * (positions if all_positions else 1))
    return max(1, min(default_batch(positions, view.device), fit))


def log_probabilities(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    hooks: Mapping[str, Hook],
    *,
    position: int | None = -1,
) -> Float[Tensor, "*batch d_vocab"]:
    """Log-probabilities of the next token after ``position`` (after every position for ``None``),
    float64 for one position."""
    logits = view.logits(tokens, hooks, position)
    return (logits.float() if position is None else logits[:, 0].double()).log_softmax(-1)


class PilotRuns(NamedTuple):
    """Forward passes of some chunks that differ only at the last token, the pilot: the tokens
    before it are run once.

    From :func:`pilot_runs`, which verified that the output is the model's own; without ``kept``
    every pass runs all tokens.
    """

    view: ModelView
    tokens: Int[Tensor, "batch position"]
    kept: PrefixCache | None
    copies: int
    """Edited copies of the chunks that one pass can take."""

    @property
    def positions(self) -> int:
        """Positions that hooks see."""
        return self.tokens.shape[1] if self.kept is None else 1

    def log_probabilities(
        self, copies: int, hooks: Mapping[str, Hook]
    ) -> Float[Tensor, "*batch d_vocab"]:
        """Log-probabilities of the token after ``copies`` copies of the chunks, stacked along the
        batch. Hooks find the pilot at position -1, whether all positions are run or one."""
        view = self.view if self.kept is None else self.kept.times(copies)
        return log_probabilities(view, self.tokens[:, -self.positions :].repeat(copies, 1), hooks)


def pilot_runs(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    own: Float[Tensor, "batch d_vocab"],
    limit: int,
) -> PilotRuns:
    """Passes over ``tokens`` with an edited last token, ``own`` their log-probabilities without an
    edit.

    Only the last token is run where the model's class caches keys and values rightly: without an
    edit its output then is ``own``, to a relative 1e-4 (0.05 in half precision). Elsewhere, and
    under user hooks, all tokens are run. ``limit`` is the number of whole chunks of one pass.
    """
    uncached = PilotRuns(view, tokens, None, max(1, limit // len(tokens)))
    kept = None if view.hooked() else behind(view, tokens)
    if kept is None:
        return uncached
    copies = max(1, min(PILOTS // len(tokens), int(KEPT_BYTES / max(1, kept.size))))
    runs = PilotRuns(view, tokens, kept, copies)
    error = float((runs.log_probabilities(1, {}) - own).abs().max())
    # cached keys come from products of other shapes, which round in another order
    half = torch.finfo(view.dtype).bits < 32
    bound = (0.05 if half else 1e-4) * max(1.0, float(own.abs().max()))
    return runs if error <= bound else uncached
