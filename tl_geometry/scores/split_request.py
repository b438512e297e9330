"""Can this split be made, and on which activations? Checks that basis and memory suffice, the views
of the layers from a forward pass or a cache, and the provenance of the result. Called by
``split_scores`` and ``split_values``; ``explain_logit`` and ``trace_logit`` use the checks and the
provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require, within_budget
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import LayerHook, ModelView
from tl_geometry.models.row_pass import OnRows
from tl_geometry.models.writers import Written, run_written
from tl_geometry.scores.families import Family, Writers

CACHE_TOLERANCE = 0.02
"""Relative difference of a token's state (in Euclidean norm) beyond which a cache is taken for one
of other tokens: five times the unit roundoff of bfloat16, 2^-8."""


def check_basis(view: ModelView, rows: TokenWindows, basis: PositionContext | None) -> None:
    """Raise unless the basis, if there is one, is of this model and has seen these positions."""
    if basis is None:
        return
    require_basis(basis)
    basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
    length = rows.tokens.shape[1]
    expected = f"at most {basis.length} positions, as the basis has seen"
    instead = "decompose(model, longer windows)"
    require(length <= basis.length, "tokens", expected=expected, got=length, instead=instead)


def check_heads(size: int, budget: int, heads: int) -> None:
    """Raise unless the ``size`` bytes of some heads fit the budget."""
    instead = "heads= to choose some, or sweep_heads for all"
    within_budget(size, budget, "split", of=f"{heads} heads", instead=instead)


def each_layer(
    view: ModelView,
    rows: TokenWindows,
    cache: Any,
    layers: Sequence[int],
    on_layer: LayerHook,
    family: Family,
    on_rows: OnRows | None = None,
) -> None:
    """Call ``on_layer`` with the view of each layer, from one forward pass or from a cache of these
    tokens. A family of writers first receives what was written into the layer's input. With
    ``on_rows`` long prompts run in blocks of query rows."""
    if cache is not None:
        _check_cache(view, rows, cache)
    if isinstance(family, Writers):

        def on_written(layer: LayerView, written: Written) -> None:
            family.take(written)
            on_layer(layer)

        run_written(view, rows.tokens, layers, on_written, cache=cache, on_rows=on_rows)
    elif cache is None:
        view.run_layers(rows.tokens, layers, on_layer, on_rows=on_rows)
    else:
        for number in layers:
            on_layer(view.layer(number, cache))


def _check_cache(view: ModelView, prompts: TokenWindows, cache: Any) -> None:
    """Refuse a cache whose first state differs from what the model computes for these tokens, at
    any of them, by more than :data:`CACHE_TOLERANCE`."""
    shape = tuple(prompts.tokens.shape)
    mapping = hasattr(cache, "cache_dict") or isinstance(cache, Mapping)
    expected = "an ActivationCache, or a mapping from hook names"
    require(mapping, "cache", expected=expected, got=describe(cache), instead="cache=None")
    name = next((name for name in view.state_hooks if name in cache), None)
    if name is None:
        return  # what makes the layers refuses it, with an error of its own
    instead = "a cache of these tokens, with a batch dimension (remove_batch_dim=False)"
    expected, got = f"activations of tokens {shape}", tuple(cache[name].shape[:-1])
    require(got == shape, "cache", expected=expected, got=got, instead=instead)
    state = view.activations(prompts.tokens, [name])[name].float()
    error = torch.linalg.vector_norm(state - cache[name].to(state.device).float(), dim=-1)
    far = int((error > CACHE_TOLERANCE * torch.linalg.vector_norm(state, dim=-1)).sum())
    expected, got = "activations of these tokens", f"others at {far} tokens"
    require(far == 0, "cache", expected=expected, got=got, instead="cache=None")


def provenance_of(
    view: ModelView,
    rows: TokenWindows,
    basis: PositionContext | None,
    preset: str,
    flags: Sequence[str],
    normalized: bool,
    *,
    after_bos: bool = False,
) -> Provenance:
    """What a split was computed from. The window starts where the basis's does; without a basis at
    0, or with ``after_bos`` at 1 where the prompts begin with BOS."""
    start = int(after_bos and rows.has_bos) if basis is None else basis.window[0]
    # a prompt that ends before the window keeps its last position
    start = min(start, rows.tokens.shape[1] - 1)
    window, remarks = (start, rows.tokens.shape[1]), () if basis is None else basis.remarks(view)
    return view.provenance(
        rows, window=window, preset=preset, flags=(*flags, *remarks), normalized=normalized
    )
