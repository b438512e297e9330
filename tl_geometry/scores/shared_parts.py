"""Sums of terms whose parts are the same vectors in every context but for a scale of each token, as
mean and position are at a frozen norm scale. Contexts are added up before such parts are
contracted, so that the cost is that of the parts that each context has of its own.

With queries ``r_i M_p[i]`` and keys ``s_j K_c[j]`` of shared parts p and c, own queries x and keys
y, and weights W whose rows sum to zero (r, s, x, y and W differ by context)::

    sum W_ij <r_i M_p[i], s_j K_c[j]> = sum_i <M_p[i], sum_j A_ij K_c[j]>,   A_ij = sum r_i W_ij s_j
    sum W_ij <r_i M_p[i], y_j>        = sum_i <M_p[i], sum r_i sum_j W_ij y_j>
    sum W_ij <x_i, s_j K_c[j]>        = sum_j <sum s_j sum_i W_ij x_i, K_c[j]>

A constant vector may be taken from the keys of a part without changing ``sum_j W_ij k_j``. Of
``K_c`` its mean over positions is taken, which leaves smaller numbers to round, and the mean comes
back with ``s_j`` less its own mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Pairs = Callable[[Tensor, Tensor], Tensor]
"""Products of queries ``[batch head query part d_head]`` and what they meet, in the same form,
summed over contexts and queries: ``[head plane part column]``."""


class Shared(NamedTuple):
    """Queries and keys of some parts without their scales, and the scales."""

    q: Float[Tensor, "head query part d_head"]
    k: Float[Tensor, "head key part d_head"]
    q_scale: Float[Tensor, "batch head query"]
    k_scale: Float[Tensor, "batch head key"]

    def total(self, which: str) -> Float[Tensor, "batch head position d_head"]:
        """The sum of the parts."""
        return getattr(self, f"{which}_scale").unsqueeze(-1) * getattr(self, which).sum(2)

    def size(self, which: str) -> Float[Tensor, "batch head"]:
        """The norm of all parts together."""
        sizes = torch.linalg.vector_norm(getattr(self, which).flatten(2), dim=-1)
        return torch.linalg.vector_norm(getattr(self, f"{which}_scale") * sizes, dim=-1).double()


def with_shared(
    weight: Float[Tensor, "batch head query key"],
    rows: Float[Tensor, "batch head query part d_head"],
    tables: Float[Tensor, "batch head key column"],
    shared: Sequence[Shared],
    at: slice,
    pairs: Pairs,
) -> Float[Tensor, "head plane pair"]:
    """``sum_ij W_ij X_ij`` of the terms of shared and own parts, in this order; ``rows`` are own
    queries at the positions ``at``, ``tables`` own keys side by side."""
    end, own = weight.shape[-1], rows.shape[3:]
    weighted = (weight @ tables).unflatten(-1, own)  # by query
    if not shared:
        return pairs(rows, weighted).flatten(2)
    columns = (weight.mT @ rows.flatten(3)).unflatten(-1, own)  # by key
    found = [
        [pairs(one.q[:, at][None], _summed(one.q_scale[:, :, at], weighted))] for one in shared
    ]
    found.append([pairs(rows, weighted)])
    for one in reversed(shared):
        scale, middle = one.k_scale[:, :, :end], one.k[:, :end].mean(1, keepdim=True)
        keys, moved = one.k[:, :end] - middle, scale - scale.mean(-1, keepdim=True)
        met = pairs(_summed(scale, columns), keys[None])
        met = met + pairs(_summed(moved, columns).sum(2, keepdim=True), middle[None])
        found[-1].insert(0, met)
        for row, other in zip(found, shared):
            of_queries, scaled = other.q_scale[:, :, at], weight * scale.unsqueeze(2)
            mixed = _summed(of_queries, scaled)[0] @ keys.flatten(2)
            level = _summed(of_queries, weight @ moved.unsqueeze(-1))[0]
            mixed = mixed + level * middle.flatten(2)
            row.insert(0, pairs(other.q[:, at][None], mixed.unflatten(-1, one.k.shape[2:])[None]))
    return torch.cat([torch.cat(row, -1) for row in found], -2).flatten(2)


def _summed(
    scale: Float[Tensor, "batch head position"], values: Float[Tensor, "batch head position *_"]
) -> Float[Tensor, "1 head position *_"]:
    """Scaled values, summed over contexts."""
    scale = scale.reshape(*scale.shape, *[1] * (values.dim() - 3))
    return (scale * values).sum(0, keepdim=True)
