"""Shards of one corpus put together: their sums in contiguous groups again, and the same shard
given twice refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.decomposition.moments import Moments

MOST_SHARED = 0.5
"""Share of a part's contexts that another part may hold too before both are taken for the same
shard."""


def joined(parts: Sequence[Moments], *, contiguous: bool = True) -> Moments:
    """The sums of all parts, in as many groups as the part with most has; each group joins the one
    that holds its middle.

    Groups that are not ``contiguous`` (files of earlier versions) are joined by their number.
    """
    groups, total, start = max(len(m.counts) for m in parts), sum(m.contexts for m in parts), 0
    whole = parts[0]
    for i, part in enumerate(parts):
        middle = start + part.counts.cumsum(0) - (part.counts + 1) // 2
        group_of = (
            (middle * groups // total).clamp(0, groups - 1)
            if contiguous
            else torch.arange(len(part.counts))
        )
        mine = part if len(parts) == 1 else part.regrouped(group_of, groups)
        whole = mine if i == 0 else Moments.merge(whole, mine)
        start += part.contexts
    return whole


def same_contexts(parts: Sequence[Moments], hashes: Sequence[Tensor | None]) -> list[str]:
    """Refuse a shard given twice, by its sums or the hashes of its tokens; a remark on single
    contexts that are in two."""
    instead = "each shard once, or decompose over all tokens"
    shared = 0
    for i, part in enumerate(parts):
        for k in range(i):
            twins = torch.equal(parts[k].sums, part.sums)
            require(
                not twins,
                "merge",
                expected="disjoint contexts",
                got=f"parts {k} and {i} with the same sums",
                instead=instead,
            )
            mine, theirs = hashes[i], hashes[k]
            if mine is None or theirs is None:
                continue
            both = int(torch.isin(mine, theirs).sum())
            got = f"{both} contexts that are in parts {k} and {i}"
            few = both <= MOST_SHARED * min(len(mine), len(theirs))
            require(few, "merge", expected="disjoint contexts", got=got, instead=instead)
            shared += both
    return [f"{shared} contexts are in more than one of the merged parts"] if shared else []
