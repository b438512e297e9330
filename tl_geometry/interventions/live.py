"""Editing attention patterns of a live model through ``hook_z``, the one hook that every TransformerLens class obeys.

1. Hooks record a layer's input, queries, keys and values as the running forward pass makes them (whatever was edited before it).
2. When ``hook_z`` fires, the view of the layer is built from them, and ``z = pattern @ v`` is checked for the heads to be edited:
   a padding mask, a dropout or another edit of the same head is refused instead of giving a wrong answer.
3. The edit says what the pattern becomes; ``z' = z + (pattern' - pattern) @ v``.

Hooks survive ``run_with_hooks`` and ``run_with_cache`` inside the context and are removed by their own handles on exit, also on
exceptions, so that the model is left exactly as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry._check import fail, require
from tl_geometry.closing import closing_bound
from tl_geometry.errors import ClosingError, UnsupportedModelError
from tl_geometry.records import Hook, LayerView, ModelView
from tl_geometry.verbs.details import model_pattern

ScoreEdit = Callable[[LayerView, Float[Tensor, "batch head query key"]], Tensor]
"""Receives a layer and the scores of the edited heads (before any soft cap) and returns the scores to use."""


@dataclass(frozen=True, eq=False)
class Edit:
    """New scores for some heads of one layer."""

    layer: int
    heads: tuple[int, ...]
    scores: ScoreEdit


@contextmanager
def attached(view: ModelView, hooks: Mapping[str, Hook], *, first: bool = False) -> Iterator[None]:
    """Hooks on a live model, removed by their own handles on exit. ``first`` runs them before hooks that are there already."""
    points, added = dict(view.model.hook_dict), []
    missing = [name for name in hooks if name not in points]
    require(
        not missing,
        f"hooks of {view.name}",
        expected=f"hooks of this {view.kind}",
        got=f"no {', '.join(missing)}",
        error=UnsupportedModelError,
    )
    try:
        for name, call in hooks.items():
            known = {id(h) for h in points[name].fwd_hooks}
            points[name].add_hook(lambda value, hook, _call=call: _call(value), is_permanent=True, prepend=first)
            added += [(points[name], h) for h in points[name].fwd_hooks if id(h) not in known]
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks[:] = [h for h in point.fwd_hooks if h is not handle]


@contextmanager
def edited_scores(view: ModelView, edits: Sequence[Edit]) -> Iterator[None]:
    """Run a live model with the scores of some heads replaced, inside ``with``."""
    hooks: dict[str, Hook] = {}
    for edit in edits:
        hooks |= _layer_hooks(view, edit)
    with attached(view, hooks):
        yield


def _layer_hooks(view: ModelView, edit: Edit) -> dict[str, Hook]:
    seen: dict[str, Tensor] = {}
    prefix = f"blocks.{edit.layer}."
    names, z_name = view.layer_hooks(edit.layer), f"{prefix}attn.hook_z"

    def keep(name: str) -> Hook:
        return lambda value: seen.__setitem__(name, value.detach())

    def act(z: Tensor) -> Tensor:
        seen[z_name] = z.detach()
        with torch.no_grad():
            layer = view.layer(edit.layer, dict(seen), verify=False)
            seen.clear()
            change = _change(view, layer, edit, z)
        return z + change

    return {name: keep(name) for name in names if name != z_name} | {z_name: act}


def score_of(layer: LayerView, heads: Sequence[int]) -> Float[Tensor, "batch head query key"]:
    """Scores of some heads before any soft cap."""
    scores = layer.scale * einsum(layer.q[:, :, heads], layer.k[:, :, heads], "b i h e, b j h e -> b h i j")
    return scores if layer.bias is None else scores + layer.bias[list(heads)]


def _change(view: ModelView, layer: LayerView, edit: Edit, z: Tensor) -> Tensor:
    """``(pattern' - pattern) @ v`` of the edited heads in the shape of ``z``, zero for the others."""
    heads = list(edit.heads)
    values = _values(view, layer)[:, :, heads]
    scores = score_of(layer, heads)
    pattern = model_pattern(scores, layer, heads)
    by_head = rearrange(z, "b i (h e) -> b i h e", e=values.shape[-1]) if z.dim() == 3 else z
    error = einsum(pattern, values, "b h i j, b j h e -> b i h e") - by_head[:, :, heads]
    _check_mixed(view, layer, heads, error.abs().max(), values)
    moved = model_pattern(edit.scores(layer, scores), layer, heads) - pattern
    change = torch.zeros_like(by_head)
    change[:, :, heads] = einsum(moved, values, "b h i j, b j h e -> b i h e").to(z.dtype)
    return change.reshape(z.shape)


def _values(view: ModelView, layer: LayerView) -> Float[Tensor, "batch position head d_head"]:
    if layer.v is None:
        fail(f"layer {layer.layer} of {view.name}", expected="values", got="none", error=UnsupportedModelError)
    return layer.v


def _check_mixed(view: ModelView, layer: LayerView, heads: Sequence[int], error: Tensor, values: Tensor) -> None:
    """Refuse where the pattern that is about to be edited is not the one that the model used."""
    size = layer.scale * (layer.q[:, :, heads].norm(dim=-1).max() * layer.k[:, :, heads].norm(dim=-1).max())
    size = float(size if layer.bias is None else size + layer.bias.abs().amax())
    bound = (4 * closing_bound(layer.roundoff, max(size, 1.0)) + 32 * layer.roundoff) * float(values.abs().max())
    require(
        float(error) <= bound, f"layer {layer.layer} of {view.name}", expected=f"z = pattern @ v within {bound:.2g}",
        got=f"{float(error):.2g}", instead="prompts of equal length without padding mask, and one edit for each head", error=ClosingError,
    )  # fmt: skip
