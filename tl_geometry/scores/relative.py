"""How do attention scores depend on relative position, the offset i - j of query and key?
:func:`offset_profile` answers for a term, a choice of rotary planes, or the whole score.

On a normalised basis the (bias, bias) term of a rotary model without QK-norm is exactly a function
of the offset, the kernel ``kappa(D) = scale <R_D q, k>`` of the projected mean and constants q and
k, with R_D the rotation by D positions: its profile is that function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.guarded import Guarded
from tl_geometry.base.intervals import paired_interval
from tl_geometry.base.results import Result
from tl_geometry.scores.score_split import ScoreSplit

TOTAL = "all terms"
"""Name of the sum of all terms in a profile."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OffsetProfile(Guarded, Result):
    """Mean of a term at each offset i - j from ``first`` on, with ``low`` and ``high`` the bounds
    of its 95% interval over prompts: what :func:`offset_profile` returns. The basis is taken
    as given, so the interval does not cover its sampling error.

    In units of the score before any soft cap; NaN where no cell has the offset. ``cells`` counts
    the cells of one prompt. Bounds are NaN for fewer than 10 prompts.
    """

    heads: tuple[tuple[int, int], ...]
    term: str
    first: int
    mean: Float[Tensor, "head offset"]
    low: Float[Tensor, "head offset"]
    high: Float[Tensor, "head offset"]
    cells: Int[Tensor, "head offset"]
    table_axes, table_values = ("head", "offset"), ("mean", "low", "high", "cells")

    @property
    def offsets(self) -> Int[Tensor, " offset"]:
        """The offsets i - j in tokens."""
        return torch.arange(self.mean.shape[1]) + self.first

    @property
    def peak(self) -> Int[Tensor, " head"]:
        """The offset of each head's largest mean."""
        top = torch.where(torch.isnan(self.mean), -torch.inf, self.mean).argmax(-1)
        return self.offsets[top]

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        return {axis: self.offsets.tolist()} if axis == "offset" else super().axis_labels(axis)


def offset_profile(
    split: ScoreSplit,
    term: tuple[str, str] | str | None = None,
    *,
    drop: int | None = None,
) -> OffsetProfile:
    """Mean of a term of a split (all terms together for ``None``) at each offset, over the allowed
    cells without the first ``drop`` queries and keys, and a t interval over prompts.

    ``mean_D = mean over prompts of (mean over cells with i - j = D)``. For (bias, bias) on a
    normalised basis of a rotary model without QK-norm it is the kernel, the same in every prompt,
    so that its interval has no width.
    """
    start = split.first(drop)
    matrix = split.summed() if term is None else split.terms[term]
    term_matrix, allowed = matrix[..., start:, start:].double(), split.allowed[:, start:, start:]
    batch, heads, length, _ = term_matrix.shape
    # i - j + length - 1, so that the most negative offset has index 0
    index = torch.arange(length).unsqueeze(1) - torch.arange(length) + length - 1
    index = index.flatten()
    size = 2 * length - 1
    cells = allowed.new_zeros(heads, size, dtype=torch.int64)
    cells.index_add_(1, index, allowed.flatten(1).long())
    sums = term_matrix.new_zeros(batch, heads, size)
    sums.index_add_(2, index, torch.where(allowed, term_matrix, 0).flatten(2))
    means = sums / torch.where(cells > 0, cells.to(sums), torch.nan)
    mean, low, high, _ = paired_interval(means)
    # the first offset that any head's mask allows (argmax returns the first maximum)
    first = int((cells > 0).any(0).int().argmax())
    mean, low, high, cells = (x[:, first:] for x in (mean, low, high, cells))
    name = TOTAL if term is None else split.label("-".join(split.terms.pair(term)))
    return OffsetProfile(
        provenance=split.provenance,
        heads=split.heads,
        term=name,
        first=first - (length - 1),
        mean=mean,
        low=low,
        high=high,
        cells=cells,
    )
