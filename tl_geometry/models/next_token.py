"""For which models measures of the output mean something, and how many rows of logits one pass
takes; measures of an edit's effect on the output call these."""

from __future__ import annotations

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.batches import default_batch
from tl_geometry.models.model_view import ModelView

ELEMENTS = 2**27
"""Logits of one forward pass, at most (0.5 GiB in float32)."""


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
