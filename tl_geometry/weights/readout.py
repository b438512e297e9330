"""Which tokens do the singular vectors of a head point to? :func:`token_readout` answers for W_QK
and W_OV of every head (Molina 2023, section 4: the logit lens of QK and OV circuits).

Singular vectors come from the factors of a head (:func:`tl_geometry.base.linalg.product_svd`).
Scores are dot products with one row per token; only the extreme tokens at both ends are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks, linalg
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.tables import Table
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.weights import vocabulary
from tl_geometry.weights.bilinear import MATRICES

SCORES = 2**25
"""Scores that exist at one time: 128 MiB in float32."""
GAP = 1e-6
"""Relative distance of two singular values below which their vectors are not told apart: float32
weights round at 1e-7."""


class Extremes(NamedTuple):
    """Ids and scores of the tokens with the largest (end 0) and the smallest scores (end 1), most
    extreme first (equal scores by token id)."""

    ids: Int[Tensor, "*batch 2 column"]
    scores: Float[Tensor, "*batch 2 column"]


def extremes(
    vectors: Float[Tensor, "*batch d_model"], tokens: Float[Tensor, "d_vocab d_model"], k: int
) -> Extremes:
    """The ``k`` tokens with the largest and with the smallest dot product ``<vector, token row>``,
    for every vector.

    A few vectors at a time: nothing of size [vectors d_vocab] exists. Computed in the dtype of
    ``tokens``.

    >>> tokens = torch.tensor([[2.0, 0.0], [-1.0, 5.0], [0.5, 1.0]])
    >>> e = extremes(torch.tensor([1.0, 0.0]), tokens, 2)
    >>> e.ids.tolist(), e.scores.tolist()
    ([[0, 2], [1, 2]], [[2.0, 0.5], [-1.0, 0.5]])
    """
    k = checks.count(k, "k", most=len(tokens))
    flat = vectors.reshape(-1, vectors.shape[-1]).to(tokens)
    found = []
    for some in flat.split(max(1, SCORES // len(tokens))):
        scores = some @ tokens.mT
        found.append(torch.stack([scores, -scores], 1).topk(k))
    best, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    # topk leaves the order of equal scores open: sort by id, then stably by score
    ids, order = ids.sort()
    best, order = best.gather(-1, order).sort(descending=True, stable=True)
    signed, shape = torch.stack([best[:, 0], -best[:, 1]], 1), (*vectors.shape[:-1], 2, k)
    return Extremes(ids.gather(-1, order).reshape(shape), signed.reshape(shape))


def _read(svd: linalg.SVD, reads: Tensor, writes: Tensor, features: int, k: int) -> list[Extremes]:
    """Tokens that the first ``features`` singular directions of every head point to, a row each, on
    the left (query or reading) side and on the right (key or writing) side.

    A pair of singular vectors is defined up to a common sign. It is chosen so that the best token
    of the right vector scores at least as high as the best token of its negative (a tie keeps the
    sign).
    """
    features = checks.count(features, "features", most=svd.S.shape[-1])
    pattern = "head d_model rank -> (head rank) d_model"
    left, right = (
        extremes(rearrange(vectors[..., :features], pattern), tokens, k)
        for vectors, tokens in ((svd.U, reads), (svd.V, writes))
    )
    # the best score of the negative vector is minus the smallest score
    flip = (right.scores[:, 0, :1] < -right.scores[:, 1, :1]).unsqueeze(-1)
    return [
        Extremes(torch.where(flip, ids.flip(-2), ids), torch.where(flip, -scores.flip(-2), scores))
        for ids, scores in (left, right)
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenReadout(Guarded, Table):
    """Tokens with the largest and smallest scores on each head's first singular directions: one row
    per head and direction, heads first (see :func:`token_readout`).

    ``left`` is the query side of W_QK or the reading side of W_OV, ``right`` the key side or the
    writing side: ids and scores ``[row 2 k]`` of the tokens with the largest and the smallest dot
    products. ``values`` are all singular values per head, ``coverage`` their curves
    ``cumsum(s) / sum(s)``, not squared (NaN where all are zero); equal singular values, as by
    chance, would give a straight line. Directions that are ``degenerate``, whose
    singular value is zero or within 1e-6 of a neighbour, are not unique.
    """

    matrix: str
    heads: tuple[tuple[int, int], ...]
    values: Float[Tensor, "head rank"]
    coverage: Float[Tensor, "head rank"]
    left: Extremes
    right: Extremes


def _degenerate(values: Float[Tensor, "head rank"]) -> Bool[Tensor, "head rank"]:
    """Which singular values are zero, or within a relative :data:`GAP` of a neighbour."""
    larger, smaller = values[:, :-1], values[:, 1:]
    close, size = larger - smaller <= GAP * larger, values.shape[1]
    alone, rank = torch.zeros_like(close[:, :1]), linalg.numerical_rank(values, (size, size))
    zero = torch.arange(size) >= rank.unsqueeze(-1)
    return torch.cat([close, alone], -1) | torch.cat([alone, close], -1) | zero


def token_readout(
    model: ModelLike,
    *,
    matrix: str = "QK",
    layers: Iterable[int] | int | None = None,
    heads: Iterable[checks.Head] | checks.Head | None = None,
    features: int = 5,
    k: int = 5,
) -> TokenReadout:
    """Logit lens of QK and OV circuits: what heads read and write, in tokens, by the singular
    directions of W_QK or W_OV (Molina 2023, section 4).

    Both sides of W_QK and the left side of W_OV are scored against the token embeddings after the
    block's norm, the right side of W_OV against the unembedding (rows less their mean). Weights and
    rows are canonical (gains folded into the weights), so that the way of loading the model does
    not change the result; the published code takes raw ones. W_QK of a rotary model is that of
    equal positions.

    Args:
        matrix: ``"QK"`` or ``"OV"``.
        layers: which layers, by default all.
        heads: which heads (``(layer, head)`` or ``"L5H1"``), by default all of the layers.
        features: singular directions per head.
        k: tokens at each end of a direction.

    Raises ``GeometryError`` for heads or layers that the model does not have, and for more
    ``features`` or tokens than there are.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.token_readout(model, heads="L1H0", features=2, k=3).left.ids.shape  # row, end, token
    torch.Size([2, 2, 3])
    """
    view = as_view(model)
    checks.choice(matrix, MATRICES, "matrix")
    pairs = tuple(sorted(checks.heads(heads, view.n_layers, view.n_heads, layers)))
    rows = vocabulary.embeddings(view)
    writes = vocabulary.output_rows(view) if matrix == "OV" else None
    norm_of_reads, reads, values = None, rows, []
    sides: list[list[Extremes]] = []
    read_layers = sorted({layer for layer, _ in pairs})
    for layer, factors in vocabulary.factors_of(view, read_layers, matrix):
        chosen = [h for l, h in pairs if l == layer]
        svd = linalg.product_svd(factors.left[chosen], factors.right[chosen])
        norm = view.attention_norm(layer)
        # without gain and bias most layers have the same norm: its rows are reused
        if norm_of_reads != (norm.norm_type, norm.eps):
            norm_of_reads = (norm.norm_type, norm.eps)
            reads = vocabulary.normalized_rows(rows, norm, affine=False)
        sides.append(_read(svd, reads, reads if writes is None else writes, features, k))
        values.append(svd.S)
    left, right = (
        Extremes(*(torch.cat(parts).cpu() for parts in zip(*side, strict=True)))
        for side in zip(*sides, strict=True)
    )
    spectrum = torch.cat(values).cpu()
    words = [vocabulary.said(view, side.ids[:, end]) for side in (left, right) for end in (0, 1)]
    coverage = spectrum.cumsum(-1) / spectrum.sum(-1, keepdim=True)
    curves = (spectrum, coverage, _degenerate(spectrum))
    numbers = [curve[:, :features].flatten().tolist() for curve in curves]
    places = ((*head, feature) for head in pairs for feature in range(features))
    cells = zip(places, *numbers, *words, strict=True)
    names = ("queries", "keys") if matrix == "QK" else ("reads", "writes")
    tokens = (f"{name}{end}" for name in names for end in ("", "_opposite"))
    untrained = matrix == "OV" and not view.head_trained
    flags = ("output head not trained: writes are read in the embedding",) if untrained else ()
    return TokenReadout(
        provenance=view.provenance(sources=("molina2023",), flags=flags),
        names=("layer", "head", "feature", "value", "coverage", "degenerate", *tokens),
        cells=tuple((*place, *row) for place, *row in cells),
        chance="any matrix has singular vectors, and every vector has a nearest token",
        matrix=matrix,
        heads=pairs,
        values=spectrum,
        coverage=coverage,
        left=left,
        right=right,
    )
