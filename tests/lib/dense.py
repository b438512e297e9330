"""Covariance and gain shares of terms that are held as matrices, by the definition: what the
contraction of :mod:`tl_geometry.scores` is compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def marginals(table: Any) -> SimpleNamespace:
    """Shares of the ``parts`` of a share table by side: ``cs`` and ``gs`` ``[head side part]``,
    summed over the parts of the other side. ALiBi counts as a part on both."""
    parts = tuple(dict.fromkeys(part for pair in table.pairs for part in pair))
    member = torch.tensor(
        [[[pair[side] == name for name in parts] for side in (0, 1)] for pair in table.pairs]
    ).double()
    cs, gs = (torch.einsum("ht,tsp->hsp", x, member) for x in (table.cs, table.gs))
    return SimpleNamespace(parts=parts, cs=cs, gs=gs)
