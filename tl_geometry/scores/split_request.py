"""What a split is asked for: parts that are possible, a basis that fits, memory that suffices, and
layers from a forward pass or a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import BudgetError, require
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import LayerHook, ModelView
from tl_geometry.models.writers import GRAINS, Written, run_written, writer_names
from tl_geometry.scores.terms import ALIBI

BIAS = "bias"
"""Name of the part that holds the constants, and the mean where it is not apart."""
STREAM_PARTS = (
    ("pos", "cvec"),
    ("pos", "ctx", "resid"),
    ("mean", "pos", "cvec"),
    ("mean", "pos", "ctx", "resid"),
)
"""Named splits of the stream; without ``mean`` the mean belongs to ``bias``."""
CACHE_TOLERANCE = 0.02
"""Relative difference of a state beyond which a cache is one of other tokens: above the rounding of
half precision."""
UserParts = Mapping[
    str, Float[Tensor, "batch position d_model"] | Float[Tensor, "layer batch position d_model"]
]


def part_names(
    parts: Sequence[str] | UserParts, preset: str, view: ModelView, layers: Sequence[int]
) -> tuple[str, ...]:
    """Names of the parts in the order of the part axis, or an error that lists what is possible;
    writers are those of the last of ``layers``."""
    if isinstance(parts, str):
        require(parts in GRAINS, "parts", expected=f"one of {STREAM_PARTS + GRAINS}", got=parts)
        expected, got = "'exact' with writers", repr(preset)
        require(preset == "exact", "preset", expected=expected, got=got)
        return (BIAS, *(writer.name for writer in writer_names(view, max(layers), parts)))
    if isinstance(parts, Mapping):
        require(
            preset == "exact", "preset", expected="'exact' with parts of your own", got=repr(preset)
        )
        bad = [n for n in parts if n in (BIAS, ALIBI) or "-" in n]
        require(
            len(parts) > 0 and not bad,
            "parts",
            expected="names other than bias and alibi, without '-'",
            got=bad or "none",
        )
        return (BIAS, *parts)
    given = tuple(parts)
    require(
        given in STREAM_PARTS,
        "parts",
        expected=f"one of {STREAM_PARTS + GRAINS}, or a mapping from names to tensors",
        got=repr(given),
    )
    if preset == "exact":
        return (BIAS, *given)
    require(
        given == ("pos", "cvec"),
        "parts",
        expected=f"('pos', 'cvec') with preset={preset!r}",
        got=repr(given),
    )
    return ("mean", *given) if preset == "paper" else given


def check_request(
    view: ModelView,
    rows: TokenWindows,
    basis: PositionContext | None,
    size: int,
    budget: int,
    heads: int,
) -> None:
    """Raise unless the basis is of this model, has seen these positions, and ``size`` bytes fit the
    budget."""
    length = rows.tokens.shape[1]
    if basis is not None:
        require_basis(basis)
        basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
        require(
            length <= basis.length,
            "tokens",
            expected=f"at most {basis.length} positions, as the basis has seen",
            got=length,
            instead="decompose(model, longer windows)",
        )
    require(
        size <= budget,
        "split",
        expected=f"at most memory_budget={budget} bytes",
        got=f"{size} bytes for {heads} heads",
        instead="heads= to choose some, or sweep_heads for all",
        error=BudgetError,
    )


def each_layer(
    view: ModelView,
    rows: TokenWindows,
    cache: Any,
    layers: Sequence[int],
    on_layer: LayerHook,
    on_written: Callable[[Written], None] | None = None,
) -> None:
    """Views of the layers, from one forward pass or from a cache of these tokens; where it is asked
    for, each after the writers of its input."""
    if on_written is not None:

        def both(layer: LayerView, written: Written) -> None:
            on_written(written)
            on_layer(layer)

        if cache is not None:
            _check_cache(view, rows, cache)
        run_written(view, rows.tokens, layers, both, cache=cache)
        return
    if cache is None:
        view.run_layers(rows.tokens, layers, on_layer)
        return
    _check_cache(view, rows, cache)
    for layer in layers:
        found = view.layer(layer, cache)
        shape = tuple(found.h.shape[:2])
        require(
            shape == tuple(rows.tokens.shape),
            "cache",
            expected=f"activations of tokens {tuple(rows.tokens.shape)}",
            got=shape,
        )
        on_layer(found)


def _check_cache(view: ModelView, rows: TokenWindows, cache: Any) -> None:
    """Refuse a cache whose first state is not what the model makes of these tokens (far beyond
    rounding, at any of them)."""
    shape = tuple(rows.tokens.shape)
    mapping = hasattr(cache, "cache_dict") or isinstance(cache, Mapping)
    require(
        mapping,
        "cache",
        expected="an ActivationCache, or a mapping from hook names",
        got=describe(cache),
        instead="cache=None",
    )
    name = next((name for name in view.state_hooks if name in cache), None)
    if name is None or tuple(cache[name].shape[:2]) != shape:
        return  # refused with the layer
    own = view.activations(rows.tokens, [name])[name].float()
    theirs = cache[name].to(own.device).float()
    far = torch.linalg.vector_norm(
        own - theirs, dim=-1
    ) > CACHE_TOLERANCE * torch.linalg.vector_norm(own, dim=-1)
    require(
        not bool(far.any()),
        "cache",
        expected="activations of these tokens",
        got=f"others at {int(far.sum())} tokens",
        instead="cache=None",
    )


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
    """What a split was computed from; without a basis the window starts at 0, or ``after_bos``."""
    start = int(after_bos and rows.has_bos) if basis is None else basis.window[0]
    start = min(start, rows.tokens.shape[1] - 1)
    window, about = (start, rows.tokens.shape[1]), () if basis is None else basis.remarks(view)
    return view.provenance(
        rows, window=window, preset=preset, flags=(*flags, *about), normalized=normalized
    )
