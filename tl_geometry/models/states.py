"""Which hook of TransformerLens holds which state of the residual stream, and which states a cache
holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.models.runner import brief

BEFORE, AFTER = "hook_resid_pre", "hook_resid_post"
"""Hooks of a block's input and output."""


def state_hooks(n_layers: int) -> tuple[str, ...]:
    """Hooks of states 0 to n_layers."""
    inputs = [f"blocks.{layer}.{BEFORE}" for layer in range(n_layers)]
    return (*inputs, f"blocks.{n_layers - 1}.{AFTER}")


def other_states(setting: Callable[[str], Any], state: int) -> list[str]:
    """Hooks that an autoencoder's settings name (``hook_name``, ``hook_name_out`` of SAELens) and
    that hold something else than ``state``.

    >>> other_states({"hook_name": "blocks.2.hook_resid_pre"}.get, 2)
    []
    >>> other_states({"hook_name": "blocks.2.hook_mlp_out"}.get, 2)
    ['hook_name=blocks.2.hook_mlp_out']
    """
    of_state = (f"blocks.{state}.{BEFORE}", f"blocks.{state - 1}.{AFTER}")
    named = {name: setting(name) for name in ("hook_name", "hook_name_out")}
    return [f"{name}={hook}" for name, hook in named.items() if hook not in (None, *of_state)]


def entries_of(cache: Any, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The activations that a cache (a TransformerLens ``ActivationCache``, which is no mapping, or
    any mapping) holds by hook name.

    Raises ``GeometryError`` where one of ``names`` was not cached (``names_filter``), or the batch
    dimension was removed: the first name is of the stream and shows it.
    """
    entries = getattr(cache, "cache_dict", cache if isinstance(cache, Mapping) else {})
    got, instead = brief([n for n in names if n not in entries]), "model.run_with_cache(tokens)"
    expected = "the activations of all hooks that are read"
    require(not got, "cache", expected=expected, got=f"no {got}", instead=instead)
    h, expected = entries[names[0]], "a batch dimension"
    fits, instead = h.dim() == 3 and getattr(cache, "has_batch_dim", True), "remove_batch_dim=False"
    require(fits, "cache", expected=expected, got=describe(h), instead=instead)
    return entries


def states_from_cache(cache: Any) -> Float[Tensor, "state batch position d_model"]:
    """All residual stream states of a TransformerLens ``ActivationCache``, 0 to n_layers.

    Raises ``GeometryError`` as :func:`entries_of` does.
    """
    entries, model = getattr(cache, "cache_dict", cache), getattr(cache, "model", None)
    found = (re.fullmatch(rf"blocks\.(\d+)\.{BEFORE}", name) for name in entries)
    cached = [int(match[1]) for match in found if match]
    names = state_hooks(len(model.blocks) if model is not None else 1 + max(cached, default=0))
    checked = entries_of(cache, names)
    states = [checked[h] for h in names]
    return torch.stack([s.to(states[0].device) for s in states])
