"""Does the structure that a picture of W_QK shows carry the computation? :func:`surrogate` runs a
live model with W_QK of some heads replaced by a part of it, and :func:`surrogate_effect` measures
what each part does to loss and patterns. A random subspace of the same dimension is the control.

The scores of a head are ``S = x W x^T + (bias terms)``, with x the normalised stream and W its
W_QK. In the running forward pass ``x W x^T`` becomes ``x W' x^T``, with W' the part; bias terms,
ALiBi, mask, soft cap and sinks stay. How the new scores act in every TransformerLens class:
:mod:`tl_geometry.models.live_edits`.

In a rotary model W is another matrix at every offset D of query minus key, ``W_D = W_Q R_D W_K^T``,
and so is its part (:mod:`tl_geometry.interventions.offsets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import UnsupportedModelError, choice, require
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.head_edits import Heads, HeadsLike, by_layer, edit_of_heads
from tl_geometry.interventions.offsets import NO_OFFSETS, OffsetReplacement, product_of
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit, edited_scores
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import next_token_loss, require_output
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.weights import bilinear, low_rank_diagonal
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.vocabulary import factors_of

PARTS = ("structured", "low_rank", "diagonal", "thresholded", "random", "none", "whole")
"""What may take the place of W = W_QK, with V the leading positional directions:

- ``structured``: the best ``V L V^T + diag(d)``
- ``low_rank``: the best ``V L V^T``
- ``diagonal``: diag(W)
- ``thresholded``: diag(W) plus the entries above the threshold, rotated to positional directions
- ``random``: as ``structured``, with V random directions
- ``none``: zero
- ``whole``: W itself (a check: it changes nothing)
"""
DIRECTIONS, RANK = 60, 20
"""Positional directions that a threshold is taken from, and the largest default dimension of the
subspace: those of Song & Zhong 2023."""


class Replacement(NamedTuple):
    """``W' = left right^T + diag(diagonal)`` for the chosen heads of a layer, times the attention
    scale. A part that is only diagonal has factors of width 0."""

    heads: tuple[int, ...]
    left: Float[Tensor, "head d_model rank"]
    right: Float[Tensor, "head d_model rank"]
    diagonal: Float[Tensor, "head d_model"]

    def product(self, seen: LayerView) -> Float[Tensor, "batch head query key"]:
        """``x W' x^T`` per head, in the running forward pass."""
        x, chosen = remove_mean(seen.h, seen.norm.norm_type), list(self.heads)
        q, k = (
            einsum(x, scale[:, :, chosen], "b i d, b i h -> b h i d")
            for scale in (seen.q_scale, seen.k_scale)
        )
        left, right, diagonal = (part.to(q) for part in (self.left, self.right, self.diagonal))
        return (q @ left) @ (k @ right).mT + (q * diagonal.unsqueeze(-2)) @ k.mT


def part_of(
    factors: Factors, basis: Float[Tensor, "d_model column"], part: str, k: int, seed: int = 0
) -> tuple[Factors, Float[Tensor, "head d_model"]]:
    """Left and right factors of a part of W_QK (see :data:`PARTS`), and the diagonal that is added
    to their product. The first ``k`` columns of ``basis`` are V.

    >>> generator = torch.Generator().manual_seed(0)
    >>> V = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64)).Q
    >>> W = Factors(V[None], V[None])
    >>> low, diagonal = part_of(W, V, "low_rank", k=2)
    >>> same = torch.allclose(low.left @ low.right.mT, W.left @ W.right.mT)
    >>> bool(same), bool(diagonal.any())
    (True, False)
    """
    heads, zero = factors.left.shape[0], torch.zeros_like(factors.diagonal)
    V = basis[:, :k].to(factors.left)
    if part == "whole":
        return factors, zero
    if part in ("diagonal", "none"):
        empty = factors.left[..., :0]
        return Factors(empty, empty), factors.diagonal if part == "diagonal" else zero
    if part == "thresholded":
        eye = torch.eye(V.shape[0], dtype=V.dtype, device=V.device)
        rotation = bilinear.complete(basis.to(factors.left), eye)
        dense = bilinear.rotated_block(factors, rotation)
        threshold = bilinear.structure(factors, basis.to(factors.left), k=k).threshold
        large = torch.where(dense.abs() > threshold[:, None, None], dense, 0.0)
        return Factors(rotation @ large, rotation.expand(heads, -1, -1)), factors.diagonal
    if part == "low_rank":
        block = bilinear.rotated_block(factors, V, remove=zero)
        return Factors(V @ block, V.expand(heads, -1, -1)), zero
    if part == "random":
        # factors of a LayerNorm model are centred: their columns sum to zero, but for rounding
        centered = float(factors.left.sum(-2).abs().max()) < 1e-6 * float(factors.left.abs().max())
        V = random_directions(V, centered, seed)
    fit = low_rank_diagonal.fit_low_rank_diagonal(factors, V)
    return Factors(V @ fit.L, V.expand(heads, -1, -1)), fit.delta


def random_directions(
    V: Float[Tensor, "d_model rank"], centered: bool, seed: int
) -> Float[Tensor, "d_model rank"]:
    """As many orthonormal directions as ``V`` has, uniformly random; for a LayerNorm (``centered``)
    each sums to zero."""
    draw = torch.randn(
        V.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(V)
    return torch.linalg.qr(remove_mean(draw.mT, "LN" if centered else None).mT).Q


def replacements(
    view: ModelView,
    basis: PositionContext,
    heads: Heads,
    part: str,
    *,
    rank: int | None = None,
    seed: int = 0,
) -> dict[int, Replacement | OffsetReplacement]:
    """The replacement of each layer that has chosen heads."""
    choice(part, PARTS, "part")
    rotary = view.position == "rotary"
    fits = not (rotary and part in NO_OFFSETS)
    what, expected = f"part {part!r}", "a part of a W_QK that is one matrix for all offsets"
    got = f"rotary positions in {view.name}"
    instead = f"one of {', '.join(map(repr, offset_parts(view)))}"
    require(fits, what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    require_basis(basis)
    basis.check_model(view)
    most = min(DIRECTIONS, view.d_model)
    rank = min(RANK, most) if rank is None else rank
    require(1 <= rank <= most, "rank", expected=f"1 to {most} directions", got=rank)
    layers = by_layer(heads)
    factors = {} if rotary else dict(factors_of(view, list(layers), "QK"))
    new: dict[int, Replacement | OffsetReplacement] = {}
    for layer, chosen in layers.items():
        pos, centered = basis.pos[basis.index(layer)], view.attention_norm(layer).norm_type == "LN"
        directions, _, pos_rank = bilinear.leading_directions(pos, most, centered=centered)
        k = min(rank, pos_rank)
        expected, got = "positional vectors that differ", f"none at state {layer}"
        require(k > 0, "basis", expected=expected, got=got, instead="a longer window")
        if rotary:
            V = directions[:, :k]
            V = random_directions(V, centered, seed) if part == "random" else V
            new[layer] = OffsetReplacement(chosen, part, V)
            continue
        left, right = factors[layer].left[list(chosen)], factors[layer].right[list(chosen)]
        product, diagonal = part_of(Factors(left, right), directions, part, k, seed)
        new[layer] = Replacement(chosen, product.left, product.right, diagonal)
    return new


def offset_parts(view: ModelView) -> tuple[str, ...]:
    """The parts of :data:`PARTS` that a model's W_QK has, but for ``"whole"``: in a rotary model
    those with a meaning at every offset.

    >>> import tl_geometry as tlg
    >>> offset_parts(tlg.view(tlg.zoo.embedded()))[:2]
    ('structured', 'low_rank')
    """
    rotary = view.position == "rotary"
    return tuple(part for part in PARTS[:-1] if not (rotary and part in NO_OFFSETS))


def replaced_scores(
    seen: LayerView, scores: Tensor, new: Replacement | OffsetReplacement
) -> Float[Tensor, "batch head query key"]:
    """Scores of the chosen heads with ``x W x^T`` replaced; bias terms and ALiBi stay."""
    return scores - product_of(seen, seen.h, new.heads) + new.product(seen)


def surrogate(
    model: ModelLike,
    basis: PositionContext,
    heads: HeadsLike = None,
    part: str = "structured",
    *,
    layers: Iterable[int] | int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> LiveEdit:
    """Run a live model with W_QK of the chosen heads replaced by a part of it (Song & Zhong 2023,
    Eq. 8), inside ``with`` or by :meth:`~tl_geometry.interventions.LiveEdit.hooks`.

    Args:
        heads: ``(layer, head)`` or ``"L5H1"``, one or several; all heads of ``layers`` (or of the
            model) by default.
        part: one of :data:`PARTS`; ``"random"`` is the control for ``"structured"``. In a rotary
            model every part is that of W_QK at the offset of each cell; ``"thresholded"`` has no
            meaning there.
        rank: dimension of the subspace, 1 to 60 and 20 by default. Where the positional vectors at
            the layer's input have a smaller rank, it is that rank.

    Raises ``UnsupportedModelError`` for a part that the model's W_QK does not have, and
    ``GeometryError`` for a rank outside 1 to 60 (or d_model, if that is less).
    """

    def edits(view: ModelView, chosen: Heads) -> list[Edit]:
        return [
            Edit(layer, new.heads, partial(replaced_scores, new=new))
            for layer, new in replacements(view, basis, chosen, part, rank=rank, seed=seed).items()
        ]

    return edit_of_heads(model, heads, edits, layers=layers)


@dataclass(frozen=True, eq=False, kw_only=True)
class SurrogateEffect(Result):
    """What replacing W_QK by each part does: next-token loss (nats) and patterns.

    ``moved [part head]`` is how far patterns move: the total variation between the pattern of W_QK
    and that of the part, both at the layer's input in the edited pass, averaged over prompts and
    queries (from the second on).
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    clean_loss: float
    loss: Float[Tensor, " part"]
    moved: Float[Tensor, "part head"]

    def columns(self) -> Sequence[str]:
        return ("part", "loss", "change", "pattern_moved")

    def rows(self) -> Sequence[Sequence[object]]:
        head = [["model", self.clean_loss, 0.0, 0.0]]
        body = zip(self.parts, self.loss.tolist(), self.moved.mean(-1).tolist(), strict=True)
        return [*head, *([part, loss, loss - self.clean_loss, moved] for part, loss, moved in body)]


def surrogate_effect(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext,
    heads: HeadsLike = None,
    *,
    layers: Iterable[int] | int | None = None,
    parts: Sequence[str] | None = None,
    rank: int | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> SurrogateEffect:
    """Change in next-token loss, and in the heads' patterns, when W_QK of the chosen heads is
    replaced by each part of it.

    All chosen heads are replaced at once, by each of ``parts`` (by default every part that the
    model's W_QK has, see :func:`offset_parts`). The structure carries the computation where
    ``"structured"`` costs little and ``"random"``, a subspace of the same dimension, costs much.

    Raises ``UnsupportedModelError`` for models without a trained head and for bidirectional ones,
    whose next-token loss means nothing.
    """
    view = as_view(model)
    require_output(view, "surrogate_effect")
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    pairs = tuple(sorted(checks.heads(heads, view.n_layers, view.n_heads, layers)))
    wanted = offset_parts(view) if parts is None else parts
    wanted = [wanted] if isinstance(wanted, str) else wanted
    parts = tuple(choice(part, PARTS, "part") for part in wanted)
    require(len(parts) > 0, "parts", expected=f"some of {', '.join(PARTS)}", got="none")
    losses: list[float] = []
    moved: list[Tensor] = []
    for part in parts:
        new = replacements(view, basis, pairs, part, rank=rank, seed=seed)
        distance = dict.fromkeys(pairs, 0.0)
        edits = [
            _recorded(layer, replacement, distance, len(rows)) for layer, replacement in new.items()
        ]
        with edited_scores(view, edits):
            losses.append(next_token_loss(view, rows.tokens))
        moved.append(torch.tensor([distance[pair] for pair in pairs]))
    return SurrogateEffect(
        provenance=view.provenance(rows, seed=seed, flags=basis.remarks(view)),
        heads=pairs,
        parts=parts,
        clean_loss=next_token_loss(view, rows.tokens),
        loss=torch.tensor(losses, dtype=torch.float64),
        moved=torch.stack(moved),
    )


def _recorded(
    at: int,
    new: Replacement | OffsetReplacement,
    distance: dict[tuple[int, int], float],
    prompts: int,
) -> Edit:
    """The edit of one layer. Each batch adds to ``distance`` its share of the mean over ``prompts``
    of the total variation of each head's pattern."""

    def scores(seen: LayerView, before: Tensor) -> Tensor:
        after, heads = replaced_scores(seen, before, new), list(new.heads)
        moved = seen.pattern_of(after, heads) - seen.pattern_of(before, heads)
        # the first query sees one key only, and cannot move
        variation = 0.5 * moved.abs().sum(-1)[..., 1:].mean(2).sum(0) / prompts
        for head, value in zip(heads, variation.tolist(), strict=True):
            distance[at, head] += value
        return after

    return Edit(at, new.heads, scores)
