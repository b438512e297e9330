"""Which part of W_QK takes its place in a rotary model, where it is another matrix at every offset
D (query position minus key position)? For :mod:`tl_geometry.interventions.surrogates`.

With R_D the rotation by D positions, ``W_D = W_Q R_D W_K^T = sum_m cos(theta_m D) A_m + sin(theta_m
D) B_m`` over rotary planes m. The best ``V L_D V^T + diag(delta_D)`` of W_D (joint least squares,
:func:`tl_geometry.weights.low_rank_diagonal.fit_low_rank_diagonal`) is linear in W_D, so that it is
the same sum of one L and one diagonal for each plane. No d_model x d_model matrix is formed:

    x_i V L_D V^T x_j = q(P x_i) . k(P x_j) - sum_e delta_D[e] (P x_i)_e (P x_j)_e,    P = V V^T

where q and k are the model's own rotated projections, and delta_D solves
``(I - P o P) delta_D = diag(W_D) - diag(P W_D P)``.
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
"""Coordinates of the stream that are projected at a time: bounds memory for large models."""


def product_of(
    seen: LayerView, h: Float[Tensor, "batch position d_model"], heads: Sequence[int]
) -> Float[Tensor, "batch head query key"]:
    """``x W x^T`` of some heads for a part ``h`` of the stream, at the scales of the forward
    pass."""
    chosen = list(heads)
    q, k = seen.project_q(h)[:, :, chosen], seen.project_k(h)[:, :, chosen]
    return seen.scale * einsum(q, k, "b i h e, b j h e -> b h i j")


@dataclass(frozen=True, eq=False)
class OffsetReplacement:
    """What takes the place of ``x W_D x^T``: a part of W_D (see
    :data:`tl_geometry.interventions.surrogates.PARTS`) for some heads.

    ``V [d_model rank]`` are the directions, those of position or random ones. The diagonals of all
    offsets are found from the layer's weights in the first forward pass, and kept for prompts of
    the same length.
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
        inside = x @ V @ V.mT
        if self.part == "low_rank":
            return product_of(seen, inside, self.heads)
        out = x.new_zeros(len(x), len(self.heads), x.shape[1], x.shape[1])
        if self.part == "none":
            return out
        low = None if self.part == "diagonal" else inside
        for offset in _offsets(seen):
            _add_diagonal(out, x, low, self._delta(seen, offset < 0)[abs(offset)], offset)
        scales = [
            rearrange(s[:, :, list(self.heads)], "b i h -> b h i")
            for s in (seen.q_scale, seen.k_scale)
        ]
        out = out * scales[0].unsqueeze(-1) * scales[1].unsqueeze(-2)
        return out if low is None else out + product_of(seen, low, self.heads)

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
    """Add ``sum_e delta_e (x_i x_j - low_i low_j)_e`` to the cells of one offset."""
    n, query, key = x.shape[1] - abs(offset), max(offset, 0), max(-offset, 0)
    pairs = x[:, query : query + n] * x[:, key : key + n]
    if low is not None:
        pairs = pairs - low[:, query : query + n] * low[:, key : key + n]
    out.diagonal(-offset, dim1=-2, dim2=-1).add_(rearrange(pairs @ delta.mT, "b i h -> b h i"))


def offset_diagonals(
    seen: LayerView,
    heads: Sequence[int],
    V: Float[Tensor, "d_model rank"] | None,
    *,
    ahead: bool = False,
) -> Float[Tensor, "position head d_model"]:
    """delta_D of the best ``V L_D V^T + diag(delta_D)`` at offsets D = 0, 1, ...; for ``V=None``
    ``diag(W_D)`` itself.

    At offset D the query stands at position D and the key at 0, or the other way round with
    ``ahead``.
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
    """Queries and keys of some vectors, float64 ``[row position head d_head]``: one rotated by the
    offset, the other at position 0."""
    parts = rearrange(rows, "row d -> row 1 1 d").expand(-1, 1, seen.h.shape[1], -1)
    q, k = seen.q_map(parts)[:, 0, :, heads].double(), seen.k_map(parts)[:, 0, :, heads].double()
    return (q[:, :1].expand_as(q), k) if ahead else (q, k[:, :1].expand_as(k))
