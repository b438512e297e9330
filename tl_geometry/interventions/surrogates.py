"""Surrogates of W_QK: run a live model with a head's score matrix replaced by a structured part of
it.

Does the structure that a picture of W_QK shows carry the computation? For the chosen heads of a
layer, whose scores are ``S = x W x^T + (bias terms)`` with x the normalised stream:

1. the layer's view is built from the running forward pass (:mod:`tl_geometry.models.live_edits`);
2. ``x W x^T`` is replaced by ``x W' x^T``; bias terms, ALiBi, mask, soft cap and sinks stay;
3. the new pattern acts through ``attn.hook_z``, the one hook that every TransformerLens class
   obeys.

In a rotary model W is another matrix at every offset D of query minus key, ``W_D = W_Q R_D W_K^T``,
and so is its part (:mod:`tl_geometry.interventions.offsets`). A random subspace of the same
dimension is the control.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import UnsupportedModelError, choice, require
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.offsets import NO_OFFSETS, OffsetReplacement, product_of
from tl_geometry.models.edit_lists import LiveEdit, live_edit
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import next_token_loss
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.weights import bilinear, low_rank_diagonal
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.vocabulary import factors_of, require_trained_head, weight_provenance

PARTS = ("structured", "low_rank", "diagonal", "thresholded", "random", "none", "whole")
"""What may take the place of W_QK: ``V L V^T + D``, the best ``V L V^T``, diag(W), diag(W) plus the
rotated entries above the threshold, ``V L V^T + D`` in a random subspace of the same dimension,
nothing, and W itself (a check: it changes nothing)."""


class Replacement(NamedTuple):
    """``W' = left right^T + diag(diagonal)`` for the chosen heads of a layer, the attention scale
    inside."""

    heads: tuple[int, ...]
    left: Float[Tensor, "head d_model rank"]
    right: Float[Tensor, "head d_model rank"]
    diagonal: Float[Tensor, "head d_model"]

    def product(self, seen: LayerView) -> Float[Tensor, "batch head query key"]:
        """``x W' x^T`` per head, in the running forward pass."""
        x, chosen = remove_mean(seen.h, seen.norm.norm_type), list(self.heads)
        scaled = (
            einsum(x, s[:, :, chosen], "b i d, b i h -> b h i d")
            for s in (seen.q_scale, seen.k_scale)
        )
        return self.scores(*scaled)

    def scores(
        self,
        q: Float[Tensor, "batch head query d_model"],
        k: Float[Tensor, "batch head key d_model"],
    ) -> Tensor:
        """``q W' k^T`` per head, in the dtype of ``q``."""
        left, right, diagonal = (t.to(q) for t in (self.left, self.right, self.diagonal))
        return (q @ left) @ (k @ right).mT + (q * diagonal.unsqueeze(-2)) @ k.mT


def structured_part(
    factors: Factors, basis: Float[Tensor, "d_model column"], part: str, *, k: int, seed: int = 0
) -> Factors | None:
    """Left and right factors of a part (see :data:`PARTS`) without its diagonal; ``None`` for a
    part that is only diagonal.

    >>> generator = torch.Generator().manual_seed(0)
    >>> V = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64)).Q
    >>> W = Factors(V[None], V[None])
    >>> found = structured_part(W, V, "low_rank", k=2)
    >>> bool(torch.allclose(found.left @ found.right.mT, W.left @ W.right.mT))
    True
    """
    return _part(factors, basis, choice(part, PARTS, "part"), k, seed)[0]


def _part(
    factors: Factors, basis: Tensor, part: str, k: int, seed: int
) -> tuple[Factors | None, Tensor]:
    heads, nothing = factors.left.shape[0], torch.zeros_like(factors.diagonal)
    V = basis[:, :k].to(factors.left)
    if part == "whole":
        return factors, nothing
    if part in ("diagonal", "none"):
        return None, factors.diagonal if part == "diagonal" else nothing
    if part == "thresholded":
        eye = torch.eye(V.shape[0], dtype=V.dtype, device=V.device)
        rotation = bilinear.complete(basis.to(factors.left), eye)
        dense = bilinear.rotated_block(factors, rotation)
        threshold = bilinear.structure(factors, basis.to(factors.left), k=k).threshold
        kept = torch.where(dense.abs() > threshold[:, None, None], dense, 0.0)
        return Factors(rotation @ kept, rotation.expand(heads, -1, -1)), factors.diagonal
    if part == "random":
        centered = float(factors.left.sum(-2).abs().max()) < 1e-6 * float(factors.left.abs().max())
        V = random_directions(V, centered, seed)
    if part == "low_rank":
        return Factors(
            V @ bilinear.rotated_block(factors, V, remove=nothing), V.expand(heads, -1, -1)
        ), nothing
    fit = low_rank_diagonal.fit_low_rank_diagonal(factors, V)
    return Factors(V @ fit.L, V.expand(heads, -1, -1)), fit.delta


def random_directions(
    V: Float[Tensor, "d_model rank"], centered: bool, seed: int
) -> Float[Tensor, "d_model rank"]:
    """As many orthonormal directions as ``V`` has, uniformly random (orthogonal to the ones for a
    LayerNorm)."""
    draw = torch.randn(
        V.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(V)
    return torch.linalg.qr(remove_mean(draw.mT, "LN" if centered else None).mT).Q


def replacements(
    view: ModelView,
    basis: PositionContext,
    heads: Sequence[tuple[int, int]],
    part: str,
    *,
    rank: int | None = None,
    seed: int = 0,
) -> dict[int, Replacement | OffsetReplacement]:
    """The replacement of each layer that has chosen heads."""
    choice(part, PARTS, "part")
    rotary = view.position == "rotary"
    require(
        not (rotary and part in NO_OFFSETS),
        f"part {part!r}",
        expected="a part of a W_QK that is one matrix for all offsets",
        got=f"rotary positions in {view.name}",
        instead=f"one of {', '.join(map(repr, offset_parts(view)))}",
        error=UnsupportedModelError,
    )
    require_basis(basis)
    basis.check_model(view)
    layers = sorted({l for l, _ in heads})
    factors = {} if rotary else dict(factors_of(view, layers, "QK"))
    out: dict[int, Replacement | OffsetReplacement] = {}
    for layer in layers:
        mine = tuple(h for l, h in heads if l == layer)
        rows, centered = basis.pos[basis.index(layer)], view.attention_norm(layer).norm_type == "LN"
        directions, _, found = bilinear.leading_directions(
            rows, min(60, view.d_model), centered=centered
        )
        k = min(rank or 20, found)
        require(
            k > 0,
            "basis",
            expected="positional vectors that differ",
            got=f"none at state {layer}",
            instead="a longer window",
        )
        if rotary:
            V = directions[:, :k]
            out[layer] = OffsetReplacement(
                mine, part, random_directions(V, centered, seed) if part == "random" else V
            )
            continue
        chosen = Factors(factors[layer].left[list(mine)], factors[layer].right[list(mine)])
        product, diagonal = _part(chosen, directions, part, k, seed)
        empty = torch.zeros_like(chosen.left[..., :1])
        left, right = (empty, empty) if product is None else (product.left, product.right)
        out[layer] = Replacement(mine, left, right, diagonal)
    return out


def offset_parts(view: ModelView) -> tuple[str, ...]:
    """The parts of :data:`PARTS` but the whole that a model's W_QK has: in a rotary model those
    with a meaning at every offset.

    >>> import tl_geometry as tlg
    >>> offset_parts(tlg.view(tlg.zoo.embedded()))[:2]
    ('structured', 'low_rank')
    """
    return tuple(p for p in PARTS[:-1] if view.position != "rotary" or p not in NO_OFFSETS)


def replaced_scores(
    seen: LayerView, scores: Tensor, new: Replacement | OffsetReplacement
) -> Float[Tensor, "batch head query key"]:
    """Scores of the chosen heads with ``x W x^T`` replaced; bias terms and ALiBi stay."""
    return scores - product_of(seen, seen.h, new.heads) + new.product(seen)


OnPattern = Callable[[LayerView, tuple[int, ...], Tensor, Tensor], None]
"""Receives a layer's view, the replaced heads, their own patterns and their new ones."""


def _edit(layer: int, new: Replacement | OffsetReplacement, on_pattern: OnPattern | None) -> Edit:
    def scores(seen: LayerView, before: Tensor) -> Tensor:
        after = replaced_scores(seen, before, new)
        if on_pattern is not None:
            chosen = list(new.heads)
            on_pattern(
                seen, new.heads, seen.pattern_of(before, chosen), seen.pattern_of(after, chosen)
            )
        return after

    return Edit(layer, new.heads, scores)


def surrogate(
    model: ModelLike,
    basis: PositionContext,
    heads: Iterable[Head] | Head | None = None,
    part: str = "structured",
    *,
    layers: Iterable[int] | int | None = None,
    rank: int | None = None,
    seed: int = 0,
    on_pattern: OnPattern | None = None,
) -> LiveEdit:
    """Run a live model with W_QK of the chosen heads replaced by a part of it (Song & Zhong 2023,
    Eq. 8), inside ``with`` or by :meth:`~tl_geometry.interventions.LiveEdit.hooks`.

    Args:
        heads: ``(layer, head)`` or ``"L5H1"``, one or several; all heads of ``layers`` (or of the
            model) by default.
        part: one of :data:`PARTS`; ``"random"`` is the control for ``"structured"``. In a rotary
            model every part is that of W_QK at the offset of each cell; ``"thresholded"`` has no
            meaning there.
        rank: dimension of the subspace, by default the smaller of 20 and the rank of the positional
            vectors at the layer's input.
        on_pattern: called with the layer's view, the heads and their new pattern, whenever a layer
            runs.

    Raises ``UnsupportedModelError`` for a part that the model's W_QK does not have.
    """
    view = as_view(model)
    pairs = checks.heads(heads, view.n_layers, view.n_heads, layers)

    def prepare() -> tuple[ModelView, list[Edit]]:
        now = as_view(model)
        new = replacements(now, basis, pairs, part, rank=rank, seed=seed)
        return now, [_edit(layer, one, on_pattern) for layer, one in new.items()]

    return live_edit(prepare)


@dataclass(frozen=True, eq=False, kw_only=True)
class SurrogateEffect(Result):
    """What replacing W_QK by each part does: next-token loss (nats) and patterns.

    ``moved [part head]`` is the mean over prompts and queries (from the second on) of the total
    variation between the model's pattern and the one that the part gives, at the layer's actual
    input.
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
    heads: Iterable[Head] | Head | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    parts: Sequence[str] | None = None,
    rank: int | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> SurrogateEffect:
    """Change in next-token loss, and in the heads' patterns, when W_QK of the chosen heads is
    replaced by each part of it.

    All chosen heads are replaced at once, by every part that the model's W_QK has (see
    :func:`offset_parts`) or by ``parts``. The structure carries the computation where
    ``"structured"`` costs little and ``"random"``, a subspace of the same dimension, costs much.
    Raises ``UnsupportedModelError`` for models without a trained head and for bidirectional ones,
    whose next-token loss means nothing.
    """
    view = as_view(model)
    require_trained_head(view, "surrogate_effect")
    require(
        view.causal,
        "surrogate_effect",
        expected="a causal model",
        got=f"{view.name}, which attends to both sides",
        instead="surrogate(...) and your own measure",
        error=UnsupportedModelError,
    )
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    pairs = tuple(sorted(checks.heads(heads, view.n_layers, view.n_heads, layers)))
    wanted = offset_parts(view) if parts is None else parts
    parts = tuple(
        choice(p, PARTS, "part") for p in ([wanted] if isinstance(wanted, str) else wanted)
    )
    clean = next_token_loss(view, rows.tokens)
    losses: list[float] = []
    moved: list[Tensor] = []
    for part in parts:
        distance: dict[tuple[int, int], float] = {}

        def record(
            seen: LayerView,
            chosen: tuple[int, ...],
            before: Tensor,
            after: Tensor,
            distance: Any = distance,
        ) -> None:
            # one batch of the prompts
            tv = 0.5 * (after - before).abs().sum(-1)[..., 1:].mean(2).sum(0) / len(rows)
            for h, v in zip(chosen, tv.tolist(), strict=True):
                distance[seen.layer, h] = distance.get((seen.layer, h), 0.0) + v

        with surrogate(view, basis, pairs, part, rank=rank, seed=seed, on_pattern=record):
            losses.append(next_token_loss(view, rows.tokens))
        moved.append(torch.tensor([distance.get(pair, torch.nan) for pair in pairs]))
    return SurrogateEffect(
        provenance=dataclasses.replace(
            weight_provenance(view, sources=("song2023",), flags=basis.remarks(view)),
            corpus=rows.corpus,
            token_hash=rows.token_hash,
            has_bos=rows.has_bos,
            contexts=len(rows),
            seed=seed,
        ),
        heads=pairs,
        parts=parts,
        clean_loss=clean,
        loss=torch.tensor(losses, dtype=torch.float64),
        moved=torch.stack(moved),
    )
