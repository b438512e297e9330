"""Two ways in which published code ran models: the last state after the final norm, and an encoder
with a causal mask. :mod:`tl_geometry.papers` compares its numbers under them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.model_view import ModelView


def with_final_norm(view: ModelView) -> ModelView:
    """The same model with its last state taken after the final norm."""
    hook = "ln_final.hook_out"
    has, got = hook in view._model.hook_dict and view.causal, f"{view.class_name} {view.name}"
    expected = "a decoder loaded as TransformerBridge"
    require(has, "final_norm", expected=expected, got=got, error=UnsupportedModelError)
    return replace(view, state_hooks=(*view.state_hooks[:-1], hook), _found={})


@contextmanager
def attending_left(view: ModelView) -> Iterator[None]:
    """Inside the block an encoder (BERT) attends causally, as in the published runs; its states are
    not those of the model as it was trained. Nothing happens to a causal model."""
    if view.causal:
        yield
        return
    config = view._model.original_model.config
    before, config.is_decoder = config.is_decoder, True
    try:
        yield
    finally:
        config.is_decoder = before
