"""What splits of scores and of values share: the arguments, one pass over the layers (or a cache),
and the comparison of sums with the model's own numbers, which sweeps call as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.axes import axes_of
from tl_geometry.base.checks import Head, describe
from tl_geometry.base.errors import require
from tl_geometry.base.results import Provenance, Result
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.attention import scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import (
    Check,
    head_spreads,
    judge_rounding,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.writers import Written, run_written
from tl_geometry.scores.families import Family, UserParts, family_of
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.terms import common_label

R = TypeVar("R", bound=Result)
CELLS = 2**22
"""Cells of scores that are formed at a time, at least one head (16 MiB in float32)."""
CACHE_TOLERANCE = 0.02
"""Relative difference of a token's state (in Euclidean norm) beyond which a cache is taken for one
of other tokens: five times the unit roundoff of bfloat16, 2^-8."""


def compare_parts(
    layer: LayerView,
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    heads: list[int],
    rows: slice = slice(None),
) -> tuple[list[Check], float, tuple[str, ...]]:
    """The sums of parts of some heads (``q`` after the scale) beside the queries and keys of a
    verified layer, whose scores and patterns are the model's: the checks, A of the bound of the
    scores, and remarks on rounding. What does not add up is refused.

    A is the largest ``sum_e (sum_a |q_a,e|) (sum_b |k_b,e|) + |bias|`` over allowed cells of some
    query ``rows``. Scores are formed a few heads at a time.
    """
    compared: list[Check] = [
        (layer.layer, name, *pair) for name, pair in layer.reconstruction.checks.items()
    ]
    for name, parts, model in (("q parts", q / layer.scale, layer.q), ("k parts", k, layer.k)):
        size = float(parts.abs().sum(0).max())
        size = max(size, layer.reconstruction.sizes.get(name[0], 0.0))
        error = float((parts.sum(0) - model[:, :, heads]).abs().max())
        compared.append((layer.layer, name, error, reconstruction_bound(layer.roundoff, size)))
    require_reconstruction(compared, f"split of layer {layer.layer}")
    sizes, spreads = list[Tensor](), list[Tensor]()
    of_rows, allowed = q[:, :, rows], layer.allowed[rows]
    sums = [(of_rows.sum(0), k.sum(0)), (of_rows.abs().sum(0), k.abs().sum(0))]
    step = max(1, CELLS // (q.shape[1] * allowed.numel()))
    for at in range(0, len(heads), step):
        of_some = [(a[:, :, at : at + step], b[:, :, at : at + step]) for a, b in sums]
        total, size = (scores_of(a, b, 1.0) for a, b in of_some)
        if layer.bias is not None:
            bias = layer.bias[heads[at : at + step]][:, rows]
            total, size = total + bias, size + bias.abs()
        sizes.append(torch.where(allowed, size, 0.0).max())
        spreads.append(head_spreads(total, allowed))
    own, scale = layer.reconstruction.scale, float(torch.stack(sizes).max())
    flags = judge_rounding(
        layer.roundoff, (own, scale), torch.cat(spreads).cpu(), f"layer {layer.layer}"
    )
    return compared, scale, flags


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


@dataclass(frozen=True, eq=False)
class Asked:
    """What a split was asked for, checked at the door: prompts, heads, and the ``family`` of the
    parts."""

    view: ModelView
    prompts: TokenWindows
    heads: tuple[tuple[int, int], ...]
    family: Family
    basis: PositionContext | None

    @classmethod
    def of(
        cls,
        model: ModelLike,
        tokens: TokensLike,
        basis: PositionContext | None,
        parts: Sequence[str] | UserParts,
        layers: Sequence[int] | int | None,
        heads: Sequence[Head] | Head | None,
        prepend_bos: bool | None,
    ) -> Asked:
        """Read the arguments of :func:`tl_geometry.split_scores`."""
        view = as_view(model)
        prompts = as_tokens(view, tokens, prepend_bos=prepend_bos)
        chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
        check_basis(view, prompts, basis)
        family = family_of(view, parts, basis, sorted({layer for layer, _ in chosen}))
        return cls(view, prompts, chosen, family, basis)

    def split(self, cache: Any, of_layer: Callable[[LayerView, list[int], Written | None], R]) -> R:
        """The result for all heads, in their order: of each layer what ``of_layer`` makes of its
        reading, its heads, and what was written into its input where parts are writers, from one
        forward pass or from a cache of these tokens."""
        view, tokens = self.view, self.prompts.tokens
        heads: dict[int, list[int]] = {layer: [] for layer in sorted({l for l, _ in self.heads})}
        for layer, head in self.heads:
            heads[layer].append(head)
        splits: list[R] = []

        def on_layer(layer: LayerView, written: Written | None = None) -> None:
            splits.append(of_layer(self.family.reading(layer), heads[layer.layer], written))

        if cache is not None:
            _check_cache(view, self.prompts, cache)
        if self.family.grain is not None:
            run_written(view, tokens, list(heads), on_layer, cache=cache)
        elif cache is None:
            view.run_layers(tokens, list(heads), on_layer)
        else:
            for layer in heads:
                on_layer(view.layer(layer, cache))
        order = [(layer, head) for layer, some in heads.items() for head in some]
        return self._joined(splits, torch.tensor([order.index(head) for head in self.heads]))

    def _joined(self, splits: Sequence[R], pick: Int[Tensor, " head"]) -> R:
        """Splits of several layers as one: what has a head axis in the order of ``pick``, of a
        number the largest, of labels of (bias, bias) the one that is right for all."""
        fields: dict[str, Any] = {"heads": self.heads, "str_tokens": self.prompts.str_tokens}
        for name in (field.name for field in dataclasses.fields(splits[0])):
            values = [vars(split)[name] for split in splits]
            if isinstance(values[0], Tensor):
                dim = axes_of(type(splits[0]))[name].index("head")
                fields[name] = torch.cat(values, dim).index_select(dim, pick)
            elif isinstance(values[0], HeadPlanes):
                fields[name] = HeadPlanes.beside(values).select(pick)
            elif name == "checks":
                fields[name] = tuple(check for checks in values for check in checks)
            elif name in ("scale", "bias_label"):
                fields[name] = max(values) if name == "scale" else common_label(values)
        fields["provenance"] = provenance_of(
            self.view,
            self.prompts,
            self.basis,
            [flag for split in splits for flag in split.provenance.flags],
            normalized=self.family.normalized,
            after_bos=self.family.grain is not None,
        )
        return dataclasses.replace(splits[0], **fields)


def _check_cache(view: ModelView, prompts: TokenWindows, cache: Any) -> None:
    """Refuse a cache whose first state differs from what the model computes for these tokens, at
    any of them, by more than :data:`CACHE_TOLERANCE`."""
    entries = getattr(cache, "cache_dict", cache)
    expected, instead = "an ActivationCache, or a mapping from hook names", "cache=None"
    fits, got = isinstance(entries, Mapping), describe(cache)
    require(fits, "cache", expected=expected, got=got, instead=instead)
    name = next((name for name in view.state_hooks if name in entries), None)
    if name is None:
        return  # what makes the layers refuses it, with an error of its own
    state = view.activations(prompts.tokens, [name])[name].float()
    expected, got = f"activations {tuple(state.shape)} of these tokens", tuple(entries[name].shape)
    fits, whole = got == state.shape, "a cache with a batch dimension (remove_batch_dim=False)"
    require(fits, "cache", expected=expected, got=got, instead=whole)
    error = torch.linalg.vector_norm(state - entries[name].to(state), dim=-1)
    far = int((error > CACHE_TOLERANCE * torch.linalg.vector_norm(state, dim=-1)).sum())
    got = f"others at {far} tokens"
    require(far == 0, "cache", expected=expected, got=got, instead=instead)


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
    about: dict[str, Any] = {"window": (start, rows.tokens.shape[1]), "normalized": normalized}
    if basis is not None:
        flags = [*flags, *basis.remarks(view)]
        about["sources"] = basis.provenance.sources
    return view.provenance(rows, streamed=False, flags=tuple(dict.fromkeys(flags)), **about)
