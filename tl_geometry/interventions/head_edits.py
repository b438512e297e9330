"""Which heads does an edit mean, in which layers, and which other prompt does a prompt get? Every
module that edits chosen heads asks here: terms, planes, edges, surrogates, knockouts, paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

HeadsLike = Iterable[Head] | Head | None
"""One head, several, or all (``None``)."""
Heads = Sequence[tuple[int, int]]
"""Heads as (layer, head) pairs."""


def edit_of_heads(
    model: ModelLike,
    heads: HeadsLike,
    edits: Callable[[ModelView, Heads], list[Edit]],
    *,
    layers: Iterable[int] | int | None = None,
) -> LiveEdit:
    """A context manager, and list of hooks, that edits ``heads`` (by default all, or all of
    ``layers``).

    Wrong heads are refused now. ``edits`` is called later, when the context is entered or the list
    of hooks is made, because weights may have changed by then.
    """
    view = as_view(model)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)

    def prepare() -> tuple[ModelView, list[Edit]]:
        current = as_view(model)
        return current, edits(current, chosen)

    return LiveEdit(prepare)


def by_layer(heads: Heads) -> dict[int, tuple[int, ...]]:
    """The chosen heads of each layer, both in ascending order.

    >>> by_layer([(1, 2), (0, 1), (1, 0)])
    {0: (1,), 1: (0, 2)}
    """
    layers = sorted({layer for layer, _ in heads})
    return {at: tuple(sorted(head for layer, head in heads if layer == at)) for at in layers}


def replaced_in_sets(
    z: Float[Tensor, "row position head d_head"],
    sets: Sequence[Heads],
    layer: int,
    new: Callable[[Tensor], Tensor],
) -> Float[Tensor, "row position head d_head"]:
    """Mixed values of a layer, ``(set prompt)`` by row, with those of the heads of each set
    replaced; ``new`` gives the others, ``[set prompt position head d_head]``.

    >>> z = torch.ones(2, 1, 2, 1)
    >>> replaced_in_sets(z, [[(0, 1)], [(0, 0), (1, 1)]], 0, torch.zeros_like).flatten(1).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    chosen = torch.zeros(len(sets), z.shape[2], dtype=torch.bool)
    for row, heads in enumerate(sets):
        chosen[row, [head for at, head in heads if at == layer]] = True
    by_set = rearrange(z, "(c b) i h e -> c b i h e", c=len(sets))
    mask = rearrange(chosen, "c h -> c 1 1 h 1").to(z.device)
    return torch.where(mask, new(by_set), by_set).flatten(0, 1)


def mixed_values(view: ModelView, layer: LayerView) -> Float[Tensor, "batch position head d_head"]:
    """The mixed values ``z_i = sum_j pattern_ij v_j`` of a layer's heads, refused where it has
    none."""
    if layer.z is None:
        fail(f"layer {layer.layer} of {view.name}", expected="mixed values", got="none")
    return layer.z


def bias_of(layer: LayerView, heads: Sequence[int]) -> Float[Tensor, "head query key"] | None:
    """The bias (ALiBi) that some heads add to their scores, ``None`` where there is none."""
    return None if layer.bias is None else layer.bias[list(heads)]


def derangement(prompts: int, seed: int) -> Int[Tensor, " batch"]:
    """Which other prompt each prompt gets: a permutation without fixed point, where there are at
    least two. The prompts are put in a random order, and each gets the one before it in that order
    (the first gets the last).

    >>> order = derangement(5, 0)
    >>> sorted(order.tolist()), bool((order == torch.arange(5)).any())
    ([0, 1, 2, 3, 4], False)
    """
    order = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed))
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    return other


def require_several(prompts: int, what: str) -> None:
    """Refuse a single prompt, which has no other to take anything from."""
    expected, instead = "a batch of at least 2 prompts", "more prompts of the same length"
    require(prompts >= 2, what, expected=expected, got=prompts, instead=instead)


def other_prompts(
    view: ModelView,
    rows: TokenWindows,
    other: TokensLike | None,
    prepend_bos: bool | None,
    seed: int,
    what: str,
) -> Int[Tensor, "batch position"]:
    """The prompt from which each prompt gets something: that of the same row of ``other``, by
    default another of the prompts."""
    if other is None:
        require_several(len(rows), what)
        return rows.tokens[derangement(len(rows), seed)]
    others = token_rows(view, other, prepend_bos=prepend_bos).tokens
    shape, got = tuple(rows.tokens.shape), tuple(others.shape)
    expected = f"counterfactual prompts {shape}, one for each prompt"
    require(got == shape, what, expected=expected, got=got)
    return others


def from_another_prompt(term: Tensor, seed: int, what: str) -> Tensor:
    """The same term ``[batch ...]`` of another prompt of the batch, for every prompt."""
    require_several(len(term), what)
    return term[derangement(len(term), seed).to(term.device)]
