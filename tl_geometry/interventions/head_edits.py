"""Which heads does an edit mean, in which layers, and which other prompt does a prompt get? Every
module that edits chosen heads asks here: terms, planes, edges, surrogates, knockouts, paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import fail, require
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


def heads_in_sets(
    sets: Sequence[Heads], layer: int, n_heads: int
) -> Bool[Tensor, "condition head"]:
    """Which heads of a layer each set has.

    >>> heads_in_sets([[(0, 1)], [(0, 0), (1, 1)]], 0, 2).tolist()
    [[False, True], [True, False]]
    """
    chosen = torch.zeros(len(sets), n_heads, dtype=torch.bool)
    for row, heads in enumerate(sets):
        chosen[row, [head for at, head in heads if at == layer]] = True
    return chosen


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


def from_another_prompt(term: Tensor, seed: int, what: str) -> Tensor:
    """The same term ``[batch ...]`` of another prompt of the batch, for every prompt."""
    require_several(len(term), what)
    return term[derangement(len(term), seed).to(term.device)]
