"""What are a head's scores when W_QK is replaced by a part of itself, in a rotary model? For
:mod:`tl_geometry.interventions.surrogates`.

In a rotary model W_QK is another matrix at every offset D of query minus key position:
``W_D = W_Q R_D W_K^T``, with R_D the rotation by D positions. So is each part of it. The part
``V L_D V^T + diag(delta_D)`` is the best of its form at that offset (joint least squares,
:func:`tl_geometry.weights.low_rank_diagonal.fit_low_rank_diagonal`).

No d_model x d_model matrix is formed. With P = V V^T, delta_D solves
``(I - P o P) delta_D = diag(W_D) - diag(P W_D P)``, and the low-rank part of the scores is

    x_i V L_D V^T x_j = q(P x_i) . k(P x_j) - sum_e delta_D[e] (P x_i)_e (P x_j)_e

where q and k are the model's own rotated projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.norms import remove_mean
from tl_geometry.weights import low_rank_diagonal

NO_OFFSETS = ("thresholded",)
"""Parts without a meaning here: which entries survive a threshold differs from offset to offset."""
ROWS = 64
"""Coordinates of the stream that are projected at a time. All d_model at once, each at every
position, would take too much memory in a large model."""


def product_of(
    seen: LayerView, h: Float[Tensor, "batch position d_model"], heads: Sequence[int]
) -> Float[Tensor, "batch head query key"]:
    """``x W x^T`` of some heads, with x a part ``h`` of the stream after the norm, at the scales of
    the forward pass."""
    chosen = list(heads)
    q, k = seen.project_q(h)[:, :, chosen], seen.project_k(h)[:, :, chosen]
    return seen.scale * einsum(q, k, "b i h e, b j h e -> b h i j")


@dataclass(frozen=True, eq=False)
class OffsetReplacement:
    """What takes the place of ``x W_D x^T`` in the scores of some heads: the same product with a
    part of W_D (see :data:`tl_geometry.interventions.surrogates.PARTS`).

    ``V [d_model rank]`` are the directions, those of position or random ones. ``diagonals`` holds
    the diagonals of all offsets, by the length of the prompts and the sign of the offset: they are
    made from the layer's weights in the first pass of each length.
    """

    heads: tuple[int, ...]
    part: str
    V: Float[Tensor, "d_model rank"]
    diagonals: dict[tuple[int, bool], Float[Tensor, "position head d_model"]] = field(
        default_factory=dict
    )

    def product(self, seen: LayerView) -> Float[Tensor, "batch head query key"]:
        """``x W'_D x^T`` per head, in the running forward pass."""
        if self.part == "whole":
            return product_of(seen, seen.h, self.heads)
        x = remove_mean(seen.h, seen.norm.norm_type)
        V = self.V.to(x)
        projected = x @ V @ V.mT
        if self.part == "low_rank":
            return product_of(seen, projected, self.heads)
        diagonal_part = x.new_zeros(len(x), len(self.heads), x.shape[1], x.shape[1])
        if self.part == "none":
            return diagonal_part
        low = None if self.part == "diagonal" else projected
        for offset in _offsets(seen):
            delta = self._delta(seen, offset < 0)[abs(offset)]
            _add_diagonal(diagonal_part, x, low, delta, offset)
        # product_of applies the norm's scales itself; here they are still missing
        q_scale, k_scale = (
            rearrange(scale[:, :, list(self.heads)], "b i h -> b h i")
            for scale in (seen.q_scale, seen.k_scale)
        )
        diagonal_part = diagonal_part * q_scale.unsqueeze(-1) * k_scale.unsqueeze(-2)
        return diagonal_part if low is None else diagonal_part + product_of(seen, low, self.heads)

    def _delta(self, seen: LayerView, ahead: bool) -> Float[Tensor, "position head d_model"]:
        """Diagonals of all offsets of one sign; ``ahead`` for keys that come after the query."""
        key = (seen.h.shape[1], ahead)
        if key not in self.diagonals:
            V = None if self.part == "diagonal" else self.V
            self.diagonals[key] = offset_diagonals(seen, self.heads, V, ahead=ahead).to(seen.h)
        return self.diagonals[key]


def _offsets(seen: LayerView) -> list[int]:
    """Offsets of query minus key at which some cell is allowed."""
    positions = torch.arange(seen.allowed.shape[-1], device=seen.allowed.device)
    return (positions[:, None] - positions)[seen.allowed].unique().tolist()


def _add_diagonal(out: Tensor, x: Tensor, low: Tensor | None, delta: Tensor, offset: int) -> None:
    """Add ``sum_e delta_e (x_i x_j - low_i low_j)_e`` to the cells of one offset, in place."""
    cells = x.shape[1] - abs(offset)
    queries = slice(max(offset, 0), max(offset, 0) + cells)
    keys = slice(max(-offset, 0), max(-offset, 0) + cells)
    pairs = x[:, queries] * x[:, keys]
    if low is not None:
        pairs = pairs - low[:, queries] * low[:, keys]
    out.diagonal(-offset, dim1=-2, dim2=-1).add_(rearrange(pairs @ delta.mT, "b i h -> b h i"))


def offset_diagonals(
    seen: LayerView,
    heads: Sequence[int],
    V: Float[Tensor, "d_model rank"] | None,
    *,
    ahead: bool = False,
) -> Float[Tensor, "position head d_model"]:
    """delta_D of the best ``V L_D V^T + diag(delta_D)`` at offsets D = 0, 1, ... (with ``ahead`` 0,
    -1, ...: keys after the query); for ``V=None`` ``diag(W_D)`` itself.

    W_D depends on the offset alone, so that the query is put at position D and the key at 0 (with
    ``ahead`` the other way round).
    """
    size, chosen = seen.h.shape[-1], list(heads)
    eye = torch.eye(size, dtype=seen.h.dtype, device=seen.h.device)
    parts = [_projected(seen, rows, chosen, ahead) for rows in eye.split(ROWS)]
    diagonal = seen.scale * torch.cat(
        [einsum(q, k, "row t h e, row t h e -> t h row") for q, k in parts], dim=-1
    )
    if V is None:
        return diagonal
    V = V.double().to(diagonal.device)
    q, k = _projected(seen, V.mT.to(seen.h), chosen, ahead)
    block = seen.scale * einsum(q, k, "a t h e, b t h e -> t h a b")
    target = diagonal - torch.einsum("da,thab,db->thd", V, block, V)
    return low_rank_diagonal.solve_diagonal(V, V, target.mT)[0].mT


def _projected(
    seen: LayerView, rows: Tensor, heads: list[int], ahead: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys of some vectors, float64 ``[row position head d_head]``: the one that moves
    at every position, the other at position 0."""
    parts = rearrange(rows, "row d -> row 1 1 d").expand(-1, 1, seen.h.shape[1], -1)
    q, k = seen.q_map(parts)[:, 0, :, heads].double(), seen.k_map(parts)[:, 0, :, heads].double()
    return (q[:, :1].expand_as(q), k) if ahead else (q, k[:, :1].expand_as(k))
