"""How did Song & Zhong 2023 (arXiv:2310.04861) split attention scores? :func:`published_split`
computes Eq. 7 as printed, or as in their code.

Neither sums to the scores of a model with LayerNorm and biases. They reproduce published figures;
:func:`tl_geometry.split_scores` is the one that sums.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.base.errors import choice, require

FORMS = ("paper", "reference")


def published_split(
    model: Any,
    tokens: Int[Tensor, "batch position"],
    basis: tlg.PositionContext,
    layer: int,
    *,
    form: str = "paper",
) -> dict[tuple[str, str], Float[Tensor, "batch head query key"]]:
    """Attention scores of a layer (the QK circuit) by pairs of parts, as Song & Zhong 2023 split
    them (Eq. 7 and Fig. 4), before the mask.

    ``"paper"``, the equation as printed: terms ``p_a W_Q W_K^T p_b / sqrt(d_head)`` of the parts
    mean, pos and cvec of the stream, without LayerNorm, biases and rotation.

    ``"reference"``, their code: the parts pos and ``cvec = h - pos`` (the mean stays in it) pass
    through the whole LayerNorm by themselves, and each gets all biases. Their attention panel also
    renormalises the pattern after deleting the first token; the model itself attends to it.

    Args:
        model: a TransformerLens model.
        tokens: ids ``[batch position]``, such as ``model.to_tokens(prompt)``.
        basis: of :func:`tl_geometry.decompose`, not normalised, at least as long.
        layer: the block.
        form: ``"paper"`` or ``"reference"``.

    Returns term -> scores, a key per pair (query part, key part).
    Raises ``GeometryError`` for a basis of another model, or a shorter one.

    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> list(published_split(model, windows.tokens[:1], basis, 0, form="reference"))
    [('pos', 'pos'), ('pos', 'cvec'), ('cvec', 'pos'), ('cvec', 'cvec')]
    """
    choice(form, FORMS, "form")
    view, length = tlg.view(model), tokens.shape[1]
    basis.check_model(view)
    basis.require_raw("published_split")
    least = f"a basis of at least {length} positions"
    require(length <= basis.length, "basis", expected=least, got=basis.length)
    row, hook = basis.index(layer), view.state_hooks[layer]
    h = view.activations(tokens, [hook])[hook].float()
    mean = basis.mean[row].to(h)
    pos = torch.stack([basis.pos_at(t)[row] for t in range(length)]).to(h).expand_as(h)
    if form == "paper":
        parts = {"mean": mean.expand_as(h), "pos": pos, "cvec": h - mean - pos}
    else:
        norm = view.attention_norm(layer)
        parts = {name: norm.apply(part) for name, part in (("pos", pos), ("cvec", h - pos))}
    weights, biases = view.weights(layer), form == "reference"
    q, k = (
        {
            name: einsum(part, W.to(h), "b i d, h d e -> b h i e") + biases * bias.to(h)[:, None]
            for name, part in parts.items()
        }
        for W, bias in ((weights.W_Q, weights.b_Q), (weights.W_K, weights.b_K))
    )
    scale = weights.W_Q.shape[-1] ** -0.5
    return {(a, b): q[a] @ k[b].mT * scale for a, b in product(parts, parts)}
