"""Which tokens do the singular vectors of a head point to? The formulas of
:func:`tl_geometry.token_readout` and of the probes (Molina 2023).

Singular vectors come from the factors of a head (:func:`tl_geometry.base.linalg.product_svd`).
Scores are dot products with one row per token. The vocabulary is read in chunks with a running
top-k at both ends, so that only the extreme tokens are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.linalg import SVD, numerical_rank

VOCABULARY_CHUNK = 8192
"""Tokens scored at a time: with :data:`VECTOR_CHUNK`, 128 MiB of scores in float32."""
VECTOR_CHUNK = 4096
"""Vectors scored at a time."""


class Extremes(NamedTuple):
    """Ids and scores of the tokens with the largest (``top``) and smallest (``bottom``) scores,
    most extreme first (equal scores by token id)."""

    top_ids: Int[Tensor, "*batch column"]
    top_scores: Float[Tensor, "*batch column"]
    bottom_ids: Int[Tensor, "*batch column"]
    bottom_scores: Float[Tensor, "*batch column"]


def _top_k(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores and their ids, equal scores in the order of the ids."""
    best_scores, best_ids = scores.topk(min(k, scores.shape[-1]), dim=-1)
    # topk leaves the order of equal scores open: sort by id, then stably by score
    best_ids, order = ids.gather(-1, best_ids).sort(dim=-1)
    best_scores, order = best_scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return best_scores, best_ids.gather(-1, order)


def extremes(
    vectors: Float[Tensor, "*batch d_model"], tokens: Float[Tensor, "d_vocab d_model"], k: int
) -> Extremes:
    """The ``k`` tokens with the largest and with the smallest dot product ``<vector, token row>``,
    for every vector.

    The vocabulary is read in chunks; nothing of size [vectors d_vocab] exists. Computed in the
    dtype of ``tokens``.

    >>> tokens = torch.tensor([[2.0, 0.0], [-1.0, 5.0], [0.5, 1.0]])
    >>> e = extremes(torch.tensor([1.0, 0.0]), tokens, 2)
    >>> e.top_ids.tolist(), e.bottom_ids.tolist(), e.bottom_scores.tolist()
    ([0, 2], [1, 2], [-1.0, 0.5])
    """
    require(1 <= k <= len(tokens), "k", expected=f"1 to {len(tokens)} tokens", got=k)
    flat_vectors = vectors.reshape(-1, vectors.shape[-1]).to(tokens)
    chunk_extremes = [
        _extremes(vector_chunk, tokens, k) for vector_chunk in flat_vectors.split(VECTOR_CHUNK)
    ]
    joined = (
        torch.cat(column).reshape(*vectors.shape[:-1], k)
        for column in zip(*chunk_extremes, strict=True)
    )
    return Extremes(*joined)


def _extremes(rows: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and scores of :func:`extremes`: a running top-k of the scores and of their negatives."""
    best: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(tokens), VOCABULARY_CHUNK):
        scores = rows @ tokens[start : start + VOCABULARY_CHUNK].mT
        ids = torch.arange(start, start + scores.shape[-1], device=scores.device).expand_as(scores)
        for end, sign in enumerate((1, -1)):
            top, top_ids = _top_k(sign * scores, ids, k)
            # the first chunk has nothing to merge with
            if start == 0:
                best.append((top, top_ids))
                continue
            scores_before, ids_before = best[end]
            best[end] = _top_k(
                torch.cat([scores_before, top], -1), torch.cat([ids_before, top_ids], -1), k
            )
    (top_scores, top_token_ids), (negated_scores, bottom_token_ids) = best
    return top_token_ids, top_scores, bottom_token_ids, -negated_scores


def coverage(singular_values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch rank"]:
    """Coverage curve ``cumsum(s) / sum(s)`` of singular values, not squared (NaN where all are
    zero).

    >>> coverage(torch.tensor([3.0, 1.0])).tolist()
    [0.75, 1.0]
    """
    return singular_values.cumsum(-1) / singular_values.sum(-1, keepdim=True)


def features_needed(
    singular_values: Float[Tensor, "*batch rank"], share: float = 0.99
) -> Int[Tensor, "*batch"]:
    """Number of singular directions whose coverage first exceeds ``share`` (0 where all singular
    values are zero).

    >>> int(features_needed(torch.tensor([3.0, 1.0, 0.0]), share=0.7))
    1
    """
    curve = coverage(singular_values)
    needed = ((curve <= share).sum(-1) + 1).clamp(max=singular_values.shape[-1])
    return torch.where(curve[..., -1].isnan(), 0, needed)


def near_degenerate(
    singular_values: Float[Tensor, "*batch rank"], gap: float = 1e-6
) -> Bool[Tensor, "*batch rank"]:
    """Which singular values are zero, or within a relative ``gap`` of a neighbour: their singular
    vectors are not unique.

    >>> near_degenerate(torch.tensor([3.0, 3.0, 1.0, 0.0])).tolist()
    [True, True, False, True]
    """
    larger, smaller = singular_values[..., :-1], singular_values[..., 1:]
    close = larger - smaller <= gap * larger
    no_neighbour = torch.zeros_like(close[..., :1])
    size = singular_values.shape[-1]
    rank = numerical_rank(singular_values, (size, size)).unsqueeze(-1)
    zero = torch.arange(size, device=singular_values.device) >= rank
    return torch.cat([close, no_neighbour], -1) | torch.cat([no_neighbour, close], -1) | zero


def _flip(ends: Extremes, flip: Bool[Tensor, "..."]) -> Extremes:
    """The same extremes, top and bottom exchanged where the vector was reversed."""
    turned = Extremes(ends.bottom_ids, -ends.bottom_scores, ends.top_ids, -ends.top_scores)
    return Extremes(
        *(
            torch.where(flip.unsqueeze(-1), opposite, end)
            for end, opposite in zip(ends, turned, strict=True)
        )
    )


def read_tokens(
    svd: SVD,
    left_tokens: Float[Tensor, "d_vocab d_model"],
    right_tokens: Float[Tensor, "d_vocab d_model"],
    *,
    features: int = 5,
    k: int = 5,
) -> tuple[Extremes, Extremes]:
    """Tokens that the first ``features`` singular directions of every head point to (Molina 2023,
    section 4), on the left (query or reading) side and on the right (key or writing) side.

    A pair of singular vectors is defined up to a common sign. It is chosen so that the best token
    of the right vector scores at least as high as the best token of its negative (a tie keeps the
    sign).

    >>> eye = torch.eye(3)
    >>> svd = SVD(eye[:, :1], torch.ones(1), -eye[:, 1:2])
    >>> left, right = read_tokens(svd, eye, eye, features=1, k=1)
    >>> # the pair was flipped: it writes token 1 and reads minus token 0
    >>> right.top_ids.tolist(), left.bottom_ids.tolist()
    ([[1]], [[0]])
    """
    expected = f"1 to {svd.S.shape[-1]}"
    require(1 <= features <= svd.S.shape[-1], "features", expected=expected, got=features)
    U, V = svd.U[..., :features], svd.V[..., :features]
    left = extremes(rearrange(U, "... d_model rank -> ... rank d_model"), left_tokens, k)
    right = extremes(rearrange(V, "... d_model rank -> ... rank d_model"), right_tokens, k)
    # the best score of the negative vector is minus the smallest score
    flip = right.top_scores[..., 0] < -right.bottom_scores[..., 0]
    return _flip(left, flip), _flip(right, flip)
