"""Does the structure that a picture of W_QK shows carry the computation? :func:`surrogate` runs a
live model with W = W_QK of some heads replaced by a part W' of it (Song & Zhong 2023, Eq. 8).

The scores of a head are ``S = x W x^T + (bias terms)``, x the normalised stream; ``x W x^T``
becomes ``x W' x^T``, and bias terms, ALiBi, mask, soft cap and sinks stay. With V the leading
positional directions:

    structured    the best ``V L V^T + diag(d)``
    low_rank      the best ``V L V^T``
    diagonal      diag(W)
    none          zero

In a rotary model W is another matrix at every offset of query and key; ``low_rank``, which projects
the stream, is that part of each of them, and the diagonals have no such meaning.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import UnsupportedModelError, check_seed, require
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.prompts import Edit
from tl_geometry.interventions.terms import HeadsLike, edit_of_scores, heads_by_layer
from tl_geometry.models.edits import RunningHeads
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.weights import bilinear, low_rank_diagonal
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.vocabulary import factors_of

PARTS = ("structured", "low_rank", "diagonal", "none")
OF_ROTARY = ("low_rank", "none")
WITH_DIRECTIONS = ("structured", "low_rank")
DIRECTIONS, RANK = 60, 20
"""The most directions, and how many by default: those of Song & Zhong 2023."""


def product_of(
    run: RunningHeads, h: Float[Tensor, "batch position d_model"]
) -> Float[Tensor, "batch head query key"]:
    """``x W x^T`` of the running heads, x a part ``h`` of the stream at the scales of the pass."""
    q, k = (run.layer.project(h, which)[:, :, list(run.heads)] for which in "qk")
    return run.layer.scale * einsum(q, k, "b i h e, b j h e -> b h i j")


def surrogate(
    model: ModelLike,
    basis: PositionContext,
    heads: HeadsLike = None,
    *,
    part: str = "structured",
    rank: int | None = None,
    random: bool = False,
    seed: int = 0,
) -> Edit:
    """Ablation within the QK circuit: a live model in which W_QK of ``heads`` (all for ``None``) is
    replaced by a part of it.

    Args:
        part: ``"structured"``, ``"low_rank"``, ``"diagonal"`` or ``"none"`` (see the module).
        rank: dimension of the subspace (of ``"structured"`` and ``"low_rank"``), 1 to 60 and 20 by
            default; at most the rank of the positional vectors at the layer's input.
        random: V are random directions (``seed``) in place of the positional ones: the control.

    Raises ``UnsupportedModelError`` for a part that a rotary model's W_QK does not have, and
    ``GeometryError`` for another rank.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> with tlg.interventions.surrogate(model, basis, "L1H0", part="low_rank", rank=4):
    ...     logits = model(windows.tokens)
    """
    view = as_view(model)
    seed = check_seed(seed, "seed")
    checks.choice(part, PARTS, "part")
    rotary = view.position == "rotary"
    fits, expected = part in OF_ROTARY or not rotary, "a W_QK that is one matrix for all offsets"
    what, got = f"part {part!r}", f"rotary positions in {view.name}"
    instead = " or ".join(f'part="{p}"' for p in OF_ROTARY)
    require(fits, what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    require_basis(basis)
    basis.check_model(view)
    most = min(DIRECTIONS, view.d_model)
    number = checks.count(min(RANK, most) if rank is None else rank, "rank", most=most)
    along, expected = part in WITH_DIRECTIONS, "a part with directions beside random=True"
    require(along or not random, "part", expected=expected, got=repr(part))
    of_heads = checks.heads(heads, view.n_layers, view.n_heads)
    chosen = heads_by_layer(of_heads)
    factors = {} if part in OF_ROTARY else dict(factors_of(view, list(chosen), "QK"))
    parts: dict[int, tuple[Tensor, ...]] = {}
    for layer, some in chosen.items():
        V = torch.zeros(view.d_model, 0)
        if along:
            V = directions(view, basis, layer, number, seed if random else None)
        parts[layer] = (V,)
        if part not in OF_ROTARY:
            W = Factors(*(side[list(some)] for side in (factors[layer].left, factors[layer].right)))
            fit = low_rank_diagonal.fit_low_rank_diagonal(W, V.to(W.left))
            parts[layer] = (V, fit.L, fit.delta)

    def scores(run: RunningHeads) -> Tensor:
        layer, (V, *fit) = run.layer, parts[run.layer.layer]
        x = remove_mean(layer.h, layer.norm.norm_type)
        rest, V = run.total - product_of(run, layer.h), V.to(x)
        if not fit:
            return rest + product_of(run, x @ V @ V.mT)
        sides, (L, delta) = (layer.q_scale, layer.k_scale), (t.to(x) for t in fit)
        q, k = (einsum(x, s[:, :, list(run.heads)], "b i d, b i h -> b h i d") for s in sides)
        return rest + (q @ V) @ L @ (k @ V).mT + (q * delta.unsqueeze(-2)) @ k.mT

    options: dict[str, Any] = {"heads": of_heads, "part": part, "rank": rank, "random": random}
    again = partial(surrogate, model=view, basis=basis, seed=seed, **options)
    return edit_of_scores(view, of_heads, scores, basis=basis if along else None, again=again)


def directions(
    view: ModelView, basis: PositionContext, layer: int, rank: int, seed: int | None
) -> Float[Tensor, "d_model rank"]:
    """The leading positional directions of a layer's input, or with a ``seed`` as many uniformly
    random orthonormal ones (for a LayerNorm each sums to zero)."""
    pos, norm_type = basis.pos[basis.index(layer)], view.attention_norm(layer).norm_type
    most, centered = min(DIRECTIONS, view.d_model), norm_type == "LN"
    V, _, pos_rank = bilinear.leading_directions(pos, most, centered=centered)
    expected, got = "positional vectors that differ", f"none at state {layer}"
    require(pos_rank > 0, "basis", expected=expected, got=got, instead="a longer window")
    V = V[:, : min(rank, pos_rank)]
    if seed is None:
        return V
    draw = torch.randn(V.shape, generator=checks.seeded(seed), dtype=torch.float64).to(V)
    return torch.linalg.qr(remove_mean(draw.mT, norm_type).mT).Q
