"""Additive parts of a layer's input, and the queries, keys and values of each: position and context
of a basis, writers, or tensors of the caller. ``split_scores`` and ``split_values`` take any of
these three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.writers import GRAINS, Written, writer_names
from tl_geometry.scores.terms import ALIBI, BIAS

STREAM_PARTS = (("pos", "cvec"), ("pos", "ctx", "resid"))
"""Named splits of the stream; the mean belongs to ``bias``."""
UserParts = Mapping[
    str, Float[Tensor, "batch position d_model"] | Float[Tensor, "layer batch position d_model"]
]
Parts = dict[str, Float[Tensor, "batch position d_model"]]
"""Tensors that sum to the input of a layer."""


@dataclass(frozen=True)
class Family:
    """Additive parts of a layer's input: their ``names``, and what gives them (from the layer, and
    for writers of some ``grain`` from what was written into its input).

    ``normalized`` says that the parts sum to the normed input (without gain and bias) instead of
    the input, ``mean_in_bias`` that the first part, the mean, belongs to the constants.
    """

    names: tuple[str, ...]
    parts: Callable[[LayerView, Written | None], Parts]
    normalized: bool = False
    mean_in_bias: bool = False
    grain: str | None = None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the part axis: the constants of norm and projection come first."""
        return (BIAS, *self.names)

    def reading(self, layer: LayerView) -> LayerView:
        """The layer as a function of what is split: its input, or with a normalised basis the
        normed input."""
        return layer.normalized() if self.normalized else layer

    def project(
        self, layer: LayerView, which: str, heads: Sequence[int], written: Written | None
    ) -> Float[Tensor, "part batch position head d_head"]:
        """Queries (without the score scale), keys or values of each part of a :meth:`reading`, the
        constants with ``bias``. No part is the remainder of the others, so that their sum is a real
        check."""
        parts = torch.stack(list(self.parts(layer, written).values()))
        projected = layer.project(parts, which)
        constant = getattr(layer, f"{which}_constant").unsqueeze(0)
        if self.mean_in_bias:
            constant, projected = constant + projected[:1], projected[1:]
        return torch.cat([constant, projected])[..., list(heads), :]


def stream_parts(basis: PositionContext, names: Sequence[str], layer: LayerView) -> Parts:
    """Mean, positional vectors and context of one layer's input, or with a normalised basis of its
    normed input: ``mean``, ``pos`` and ``cvec``, or ``ctx`` and ``resid`` where ``names`` has them.
    """
    h, length = layer.h.double(), layer.h.shape[1]
    mean, pos = (x.to(h.device) for x in basis.of_state(layer.layer, length))
    cvec = h - mean - pos
    parts = {"mean": mean.expand_as(h), "pos": pos.expand_as(h)}
    if "ctx" in names:
        start, stop = basis.window
        # a prompt that ends before the window still averages over one position
        window = slice(min(start, length - 1), max(min(stop, length), 1))
        ctx = cvec[:, window].mean(1, keepdim=True).expand_as(h)
        parts |= {"ctx": ctx, "resid": cvec - ctx}
    else:
        parts["cvec"] = cvec
    return {name: value.to(layer.h) for name, value in parts.items()}


def _writer_parts(
    names: Sequence[str], grain: str, layer: LayerView, written: Written | None
) -> Parts:
    """What was written, by name; what has not written yet is zero."""
    assert written is not None
    by_name, nothing = written.parts(grain), torch.zeros_like(layer.h)
    return {name: by_name.get(name, nothing) for name in names}


def _given_parts(given: UserParts, n_layers: int, layer: LayerView, _: Written | None) -> Parts:
    """Tensors of the caller's own for one layer, if they sum to its input: ``[batch position
    d_model]``, the same for every layer, or ``[layer batch position d_model]``, with one for each
    layer of the model (the final state may follow)."""
    parts: Parts = {}
    for name, value in given.items():
        what = f"part {name!r}"
        is_tensor, got = isinstance(value, Tensor), checks.describe(value)
        require(is_tensor, what, expected="a tensor [batch position d_model]", got=got)
        if value.dim() == 4:
            fits = len(value) in (n_layers, n_layers + 1)
            expected = f"a first axis of {n_layers} layers"
            require(fits, what, expected=expected, got=checks.describe(value))
            value = value[layer.layer]
        fits, expected = value.shape == layer.h.shape, f"shape {tuple(layer.h.shape)}"
        require(fits, what, expected=expected, got=checks.describe(value))
        parts[name] = checks.finite(value, what).to(layer.h.device)
    stacked = torch.stack([v.double() for v in parts.values()])
    coarsest = max([layer.roundoff, *(unit_roundoff(v.dtype) for v in parts.values())])
    error, size = float((stacked.sum(0) - layer.h.double()).abs().max()), stacked.abs().sum(0).max()
    fits = error <= reconstruction_bound(coarsest, float(size))
    expected, got = f"parts that sum to the input of layer {layer.layer}", f"off by {error:.3g}"
    require(fits, "parts", expected=expected, got=got, instead="one more part for the rest")
    return {name: value.to(layer.h) for name, value in parts.items()}


def family_of(
    view: ModelView,
    parts: Sequence[str] | UserParts,
    basis: PositionContext | None,
    layers: Sequence[int],
) -> Family:
    """The family that the argument ``parts`` stands for, or an error that lists what is possible;
    ``layers`` are the blocks to be split."""
    if isinstance(parts, Mapping):
        reserved = [n for n in parts if not isinstance(n, str) or n in (BIAS, ALIBI) or "-" in n]
        expected = "names other than bias and alibi, without '-'"
        require(len(parts) > 0 and not reserved, "parts", expected=expected, got=reserved or "none")
        return Family(tuple(parts), partial(_given_parts, parts, view.n_layers))
    names = tuple(map(str, parts)) if isinstance(parts, list | tuple) else (str(parts),)
    expected = f"one of {STREAM_PARTS + GRAINS}, or a mapping from names to tensors"
    fits = parts in GRAINS or names in STREAM_PARTS
    require(fits, "parts", expected=expected, got=checks.describe(parts))
    if isinstance(parts, str):
        # those of the last layer, so that all layers have the same parts
        names = tuple(writer.name for writer in writer_names(view, max(layers), parts))
        return Family(names, partial(_writer_parts, names, parts), grain=parts)
    if basis is None:
        expected = f"a PositionContext for parts={parts!r}"
        instead = 'decompose(model, tokens), or parts="writers", which needs no basis'
        fail("basis", expected=expected, got=None, instead=instead)
    basis.require_identifiable("split")
    for layer in layers:
        basis.index(layer)
    return Family(
        names,
        lambda layer, _: stream_parts(basis, names, layer),
        basis.provenance.normalized,
        mean_in_bias=True,
    )
