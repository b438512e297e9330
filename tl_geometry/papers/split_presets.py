"""How did Song & Zhong 2023 split attention scores? ``split_scores`` calls :func:`paper` for
``preset="paper"`` (Eq. 7 as printed) and :func:`reference` for ``preset="reference"`` (as in their
code).

Neither sums to the scores of a model with LayerNorm and biases. They reproduce published figures;
the default preset, ``"exact"``, is the one that sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from einops import einsum
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView


def paper(view: ModelView, layer: LayerView, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[part batch position head d_head]`` of ``p_a W_Q W_K^T p_b /
    sqrt(d_head)``: no LayerNorm, no biases, no rotation."""
    weights, stream = view.weights(layer.layer), torch.stack(list(parts.values()))
    scale = layer.q.shape[-1] ** -0.5
    q, k = (
        einsum(stream, W.to(stream), "part b i d, h d e -> part b i h e")
        for W in (weights.W_Q, weights.W_K)
    )
    return q * scale, k


def reference(
    view: ModelView, layer: LayerView, parts: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries and keys of ``pos`` and ``h - pos`` (the mean stays in the content part). Each passes
    through the whole LayerNorm by itself, and each gets all biases."""
    # with QK-norm, queries and keys have scales of their own, which this formula does not divide by
    shared_scales = [torch.equal(scale, layer.v_scale) for scale in (layer.q_scale, layer.k_scale)]
    expected, instead = "'exact' for models with QK-norm", "preset='exact'"
    require(all(shared_scales), "preset", expected=expected, got="'reference'", instead=instead)
    stream = torch.stack([parts["pos"], parts["cvec"] + parts["mean"]])
    norm_scale = layer.norm.scale(stream)[..., None, None]

    def through(project: Callable[[Tensor], Tensor], constant: Tensor) -> Tensor:
        return project(stream) / norm_scale + constant

    q = through(layer.q_map, layer.q_constant) * layer.scale
    return q, through(layer.k_map, layer.k_constant)
