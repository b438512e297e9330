"""Helpers that every live edit of chosen heads shares: terms, planes, edges, surrogates, knockouts
and paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import require
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
    """A context manager, and list of hooks, that edits ``heads`` (all, or all of ``layers``).

    Heads are checked at once; ``edits`` makes the edits from the model as it is when the context
    is entered or the list of hooks is made.
    """
    view = as_view(model)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)

    def prepare() -> tuple[ModelView, list[Edit]]:
        now = as_view(model)
        return now, edits(now, chosen)

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
    for row, of in enumerate(sets):
        chosen[row, [head for at, head in of if at == layer]] = True
    return chosen


def bias_of(layer: LayerView, heads: Sequence[int]) -> Float[Tensor, "head query key"] | None:
    """The bias (ALiBi) that some heads add to their scores, ``None`` where there is none."""
    return None if layer.bias is None else layer.bias[list(heads)]


def derangement(n: int, seed: int) -> Int[Tensor, " batch"]:
    """A permutation without fixed point: a seeded order of the prompts, each replaced by the next
    one in it.

    >>> order = derangement(5, 0)
    >>> sorted(order.tolist()), bool((order == torch.arange(5)).any())
    ([0, 1, 2, 3, 4], False)
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    out = torch.empty_like(order)
    out[order] = order.roll(1)
    return out


def require_several(prompts: int, what: str) -> None:
    """Refuse a single prompt, which has no other to take anything from."""
    expected, instead = "a batch of at least 2 prompts", "more prompts of the same length"
    require(prompts >= 2, what, expected=expected, got=prompts, instead=instead)


def from_another_prompt(term: Tensor, seed: int, what: str) -> Tensor:
    """The same term ``[batch ...]`` of another prompt of the batch, for every prompt."""
    require_several(len(term), what)
    return term[derangement(len(term), seed).to(term.device)]
