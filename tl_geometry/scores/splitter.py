"""What a split is made of: views of the layers from a forward pass or a cache, queries, keys and
values of the parts of their inputs, and the comparison of sums with the model's own numbers. Splits
call all of it; sweeps and edits by term judge rounding here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import (
    Check,
    head_spreads,
    judge_rounding,
    pattern_error,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.softmax import soft_cap
from tl_geometry.models.writers import Written, run_written
from tl_geometry.scores.families import Family
from tl_geometry.scores.terms import BIAS

CELLS = 2**22
"""Cells of scores that are compared or drawn at a time (16 MiB in float32)."""
ALL = slice(None)
CACHE_TOLERANCE = 0.02
"""Relative difference of a token's state (in Euclidean norm) beyond which a cache is taken for one
of other tokens: five times the unit roundoff of bfloat16, 2^-8."""


def part_names(family: Family) -> tuple[str, ...]:
    """Names of the part axis: the constants of norm and projection come first."""
    return (BIAS, *family.names)


def reading(family: Family, layer: LayerView) -> LayerView:
    """The layer as a function of what is split: its input, or with a normalised basis the normed
    input."""
    return layer.normalized() if family.normalized else layer


def project(
    family: Family, layer: LayerView, which: str, written: Written | None = None
) -> Float[Tensor, "part batch position head d_head"]:
    """Queries (without the score scale), keys or values of each part of a :func:`reading`, the
    constants with ``bias``. No part is the remainder of the others, so that their sum is a real
    check."""
    parts = torch.stack(list(family.parts(layer, written).values()))
    projected = getattr(layer, f"{which}_map")(parts)
    projected = projected * getattr(layer, f"{which}_scale").unsqueeze(-1)
    constant = getattr(layer, f"{which}_constant").unsqueeze(0)
    if family.mean_in_bias:
        return torch.cat([constant + projected[:1], projected[1:]])
    return torch.cat([constant, projected])


def row_blocks(length: int, cells_per_row: int) -> Iterator[slice]:
    """Query rows, as many at a time as have about :data:`CELLS` cells."""
    step = max(1, CELLS // cells_per_row)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


Compare = Callable[[slice, Bool[Tensor, "row key"], Tensor], None]
"""Receives query rows, the keys that they may attend to, and the sums of all terms there."""


def sizes_and_spreads(
    layer: LayerView,
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    heads: Sequence[int] | slice = ALL,
    compare: Compare | None = None,
) -> tuple[float, Float[Tensor, " head"]]:
    """A of the bounds, the largest ``sum_e (sum_a |q_a,e|) (sum_b |k_b,e|) + |bias|`` over allowed
    cells (``q`` after the scale), and how far scores spread in a row of
    each head. Scores are formed a few rows at a time, and handed to ``compare``."""
    sizes: list[Tensor] = []
    extremes: list[Tensor] = []
    several: list[Tensor] = []
    rows_of = heads if isinstance(heads, slice) else list(heads)
    bias = None if layer.bias is None else layer.bias[rows_of]
    cells = q.shape[1] * q.shape[3] * k.shape[2]
    sums = [(q.sum(0), k.sum(0)), (q.abs().sum(0), k.abs().sum(0))]
    for rows in row_blocks(q.shape[2], cells):
        total, size = (
            einsum(a[:, rows], b, "batch query head e, batch key head e -> batch head query key")
            for a, b in sums
        )
        if bias is not None:
            of_rows = bias[:, rows if bias.shape[1] > 1 else ALL]
            total, size = total + of_rows, size + of_rows.abs()
        allowed = layer.allowed[rows]
        if compare is not None:
            compare(rows, allowed, total)
        sizes.append(torch.where(allowed, size, 0.0).max())
        lowest = torch.where(allowed, total, torch.inf).amin(-1)
        highest = torch.where(allowed, total, -torch.inf).amax(-1)
        # a row of two "keys", lowest and highest: head_spreads needs no others
        extremes.append(torch.stack([lowest, highest], -1))
        several.append((allowed.sum(-1) > 1).unsqueeze(-1).expand(-1, 2))
    spreads = head_spreads(torch.cat(extremes, 2), torch.cat(several))
    return float(torch.stack(sizes).max()), spreads.cpu()


def compare_scores(
    layer: LayerView, q: Tensor, k: Tensor, heads: Sequence[int]
) -> tuple[list[Check], float, tuple[str, ...]]:
    """The sum of all terms of some heads (``q`` after the scale) beside the model's own queries,
    keys, scores and pattern: the checks, A of their bounds, and remarks on rounding. What does not
    add up is refused."""
    checks: list[Check] = [
        (layer.layer, name, *pair) for name, pair in layer.reconstruction.checks.items()
    ]
    for name, parts, model in (("q parts", q / layer.scale, layer.q), ("k parts", k, layer.k)):
        size = float(parts.abs().sum(0).max())
        size = max(size, layer.reconstruction.sizes.get(name[0], 0.0))
        error = float((parts.sum(0) - model[:, :, heads]).abs().max())
        checks.append((layer.layer, name, error, reconstruction_bound(layer.roundoff, size)))
    pattern_errors: list[Tensor] = []
    score_errors: list[Tensor] = []

    def compare(rows: slice, allowed: Tensor, total: Tensor) -> None:
        capped = soft_cap(total, layer.softcap)
        if layer.scores is not None:
            error = torch.where(allowed, capped - layer.scores[:, heads, rows], 0.0)
            score_errors.append(error.abs().max())
        if layer.pattern is not None:
            pattern = layer.pattern[:, heads, rows]
            pattern_errors.append(pattern_error(capped, pattern, allowed, layer.roundoff))

    scale, spreads = sizes_and_spreads(layer, q, k, heads, compare=compare)
    # softmax rounds by a few units however small the scores
    for name, errors, bound in (
        ("sum pattern", pattern_errors, reconstruction_bound(layer.roundoff, max(scale, 1.0))),
        ("sum scores", score_errors, reconstruction_bound(layer.roundoff, scale)),
    ):
        if errors:
            checks.append((layer.layer, name, float(torch.stack(errors).max()), bound))
    require_reconstruction(checks, f"split of layer {layer.layer}")
    scales = (layer.reconstruction.scale, scale)
    return checks, scale, judge_rounding(layer.roundoff, scales, spreads, f"layer {layer.layer}")


def rounding_flags(
    layer: LayerView,
    q: Float[Tensor, "part batch position head d_head"],
    k: Float[Tensor, "part batch position head d_head"],
) -> tuple[str, ...]:
    """:func:`judge_rounding` for the parts of the queries (after the scale) and keys of all
    heads."""
    # a view that was not verified has no A: the largest |q| |k| bounds its scores instead
    unsplit = layer.reconstruction.scale or float(
        q.sum(0).norm(dim=-1).max() * k.sum(0).norm(dim=-1).max()
    )
    scale, spreads = sizes_and_spreads(layer, q, k)
    return judge_rounding(layer.roundoff, (unsplit, scale), spreads, f"layer {layer.layer}")


def is_relative(layer: LayerView) -> bool:
    """Whether all frozen scales are one (a normalised basis and no QK-norm), so that products of
    constant queries and keys depend on the rotation alone."""
    return bool(((layer.q_scale == 1) & (layer.k_scale == 1)).all())


# ---- before and after the layers


def check_basis(view: ModelView, rows: TokenWindows, basis: PositionContext | None) -> None:
    """Raise unless the basis, if there is one, is of this model and has seen these positions."""
    if basis is None:
        return
    require_basis(basis)
    basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
    require_positions(basis, rows.tokens.shape[1])


def require_positions(basis: PositionContext, length: int) -> None:
    """Raise where prompts are longer than what the basis has seen."""
    expected = f"at most {basis.length} positions, as the basis has seen"
    instead = "decompose(...) on windows of this length"
    require(length <= basis.length, "tokens", expected=expected, got=length, instead=instead)


def each_layer(
    view: ModelView,
    rows: TokenWindows,
    cache: Any,
    layers: Sequence[int],
    on_layer: Callable[[LayerView, Written | None], None],
    *,
    writers: bool = False,
) -> None:
    """Call ``on_layer`` with the view of each layer, and with what was written into its input where
    ``writers`` are asked for, from one forward pass or from a cache of these tokens."""
    if cache is not None:
        _check_cache(view, rows, cache)
    if writers:
        run_written(view, rows.tokens, layers, on_layer, cache=cache)
    elif cache is None:
        view.run_layers(rows.tokens, layers, lambda layer: on_layer(layer, None))
    else:
        for number in layers:
            on_layer(view.layer(number, cache), None)


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
    flags: Sequence[str] = (),
    *,
    normalized: bool = False,
    after_bos: bool = False,
) -> Provenance:
    """What a split was computed from. The window starts where the basis's does; without a basis at
    0, or with ``after_bos`` at 1 where the prompts begin with BOS."""
    start = int(after_bos and rows.has_bos) if basis is None else basis.window[0]
    # a prompt that ends before the window keeps its last position
    start = min(start, rows.tokens.shape[1] - 1)
    window, remarks = (start, rows.tokens.shape[1]), () if basis is None else basis.remarks(view)
    flags = tuple(dict.fromkeys([*flags, *remarks]))
    return view.provenance(rows, window=window, flags=flags, normalized=normalized)
