"""Sums of the terms of parts that all contexts share: mean and positional vectors, which differ
between contexts by a scale alone, and constants. They are contracted once for all contexts, so that
the cost is that of the parts that each context has of its own.

With queries ``r_i M_p[i]`` and keys ``s_j K_c[j]`` of shared parts p and c, own queries x and keys
y, and weights W whose rows sum to zero (r, s, x, y and W differ by context, and every sum is over
contexts too)::

    sum W_ij <r_i M_p[i], s_j K_c[j]> = sum_i <M_p[i], sum_j A_ij K_c[j]>,   A_ij = sum r_i W_ij s_j
    sum W_ij <r_i M_p[i], y_j>        = sum_i <M_p[i], sum r_i sum_j W_ij y_j>
    sum W_ij <x_i, s_j K_c[j]>        = sum_j <sum s_j sum_i W_ij x_i, K_c[j]>

A constant vector may be taken from the keys of a part without changing ``sum_j W_ij k_j``. Of
``K_c`` its mean over positions is taken, which leaves smaller numbers to round, and the mean comes
back with ``sum_j W_ij s_j``, for which ``s_j`` less its own mean serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Pairs = Callable[[Tensor, Tensor], Tensor]
"""Products of queries ``[head batch query part d_head]`` and what they meet, in the same form,
summed over contexts and queries: ``[head plane part column]``."""


class Shared(NamedTuple):
    """Queries and keys of some parts without their scales, and the scales, ``None`` where these are
    one."""

    q: Float[Tensor, "head query part d_head"]
    k: Float[Tensor, "head key part d_head"]
    q_scale: Float[Tensor, "head batch query"] | None
    k_scale: Float[Tensor, "head batch key"] | None

    def total(self, which: str) -> Float[Tensor, "head _ position d_head"]:
        """The sum of the parts, of each context or of all."""
        scale, parts = getattr(self, f"{which}_scale"), getattr(self, which).sum(2).unsqueeze(1)
        return parts if scale is None else scale.unsqueeze(-1) * parts

    def size(self, which: str) -> Float[Tensor, "head _"]:
        """The norm of all parts together, of each context or of all."""
        scale, parts = getattr(self, f"{which}_scale"), getattr(self, which).flatten(2)
        sizes = torch.linalg.vector_norm(parts, dim=-1).unsqueeze(1)
        sizes = sizes if scale is None else scale * sizes
        return torch.linalg.vector_norm(sizes, dim=-1).double()

    def over_contexts(
        self, values: Float[Tensor, "head batch query *_"], at: slice
    ) -> Float[Tensor, "head query *_"]:
        """``sum r_i values_i`` over contexts, at the queries ``at``."""
        if self.q_scale is None:
            return values.sum(1)
        scale = self.q_scale[:, :, at].reshape(*values.shape[:3], *[1] * (values.dim() - 3))
        summed = values[:, 0] * scale[:, 0]
        for value, factor in zip(values[:, 1:].unbind(1), scale[:, 1:].unbind(1), strict=True):
            summed.addcmul_(value, factor)  # so that the product is not written out
        return summed


class TermSums:
    """``sum_ij W_ij X_ij`` of the terms of shared and own parts, in this order, one block of query
    rows after another."""

    def __init__(
        self,
        shared: Sequence[Shared],
        keys: Float[Tensor, "head batch key part d_head"],
        pairs: Pairs,
    ) -> None:
        self.shared, self.own_keys, self.pairs = shared, keys, pairs
        self.middles = [one.k.mean(1, keepdim=True) for one in shared]
        self.keys = [one.k - middle for one, middle in zip(shared, self.middles, strict=True)]
        # what own queries bring to the keys of each shared part, and to their mean
        self.by_key = [torch.zeros_like(keys[:, 0]) for _ in shared]
        self.at_middle = [torch.zeros_like(keys[:, 0, :1]) for _ in shared]
        self.found: list[Tensor] = []

    def add(
        self,
        weight: Float[Tensor, "head batch query key"],
        rows: Float[Tensor, "head batch query part d_head"],
        at: slice,
    ) -> None:
        """Take in a block: its weights, and own queries at the positions ``at``."""
        end, own = weight.shape[-1], rows.shape[3:]
        weighted = (weight @ self.own_keys[:, :, :end].flatten(3)).unflatten(-1, own)
        meet = lambda one, values: self.pairs(one.q[:, None, at], values.unsqueeze(1))  # noqa: E731
        found = [[meet(one, one.over_contexts(weighted, at))] for one in self.shared]
        queries = rows.flatten(3).flatten(1, 2)
        for c, one in reversed([*enumerate(self.shared)]):
            scaled, level = weight, None
            if one.k_scale is not None:
                scale = one.k_scale[:, :, :end]
                scaled = weight * scale.unsqueeze(2)
                level = weight @ (scale - scale.mean(-1, keepdim=True)).unsqueeze(-1)
                self.at_middle[c] += (level.unsqueeze(-1) * rows).sum((1, 2)).unsqueeze(1)
            by_key = scaled.flatten(1, 2).mT @ queries  # over queries and contexts
            self.by_key[c][:, :end] += by_key.unflatten(-1, own)
            for row, other in zip(found, self.shared, strict=True):
                mixed = other.over_contexts(scaled, at) @ self.keys[c][:, :end].flatten(2)
                if level is not None:
                    mixed = mixed + other.over_contexts(level, at) * self.middles[c].flatten(2)
                row.insert(0, meet(other, mixed.unflatten(-1, one.k.shape[2:])))
        found.append([self.pairs(rows, weighted)])
        new = [torch.cat(row, -1) for row in found]
        self.found = new if not self.found else [a + b for a, b in zip(self.found, new)]

    def total(self) -> Float[Tensor, "head plane pair"]:
        """The sums over all blocks."""
        of_own = self.found[-1]
        for c in reversed(range(len(self.shared))):
            met = self.pairs(self.by_key[c].unsqueeze(1), self.keys[c].unsqueeze(1))
            met = met + self.pairs(self.at_middle[c].unsqueeze(1), self.middles[c].unsqueeze(1))
            of_own = torch.cat([met, of_own], -1)
        return torch.cat([*self.found[:-1], of_own], -2).flatten(2)
