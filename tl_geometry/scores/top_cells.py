"""Which keys have the largest scores, for each head and query of a split? Behind
``split.top_cells(k)``: exact, a few query rows at a time, for prompts that are too long to look at
every score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.models.row_pass import query_slices

if TYPE_CHECKING:
    from tl_geometry.scores.split import ScoreSplit

NO_KEY = -1
"""Stands for a key where a row sees fewer than k keys."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TopCells(Result):
    """The strongest cells of each head and query row, strongest first: by absolute value for a
    term, by value for the total score, whose largest cells get the most attention.

    ``keys`` are positions and ``values`` the term or total there, with its sign. Where a row sees
    fewer than k keys the key is :data:`NO_KEY` and the value NaN. ``term`` is the term's name,
    ``""`` for the total.
    """

    heads: tuple[tuple[int, int], ...]
    term: str
    keys: Int[Tensor, "batch head query cell"]
    values: Float[Tensor, "batch head query cell"]
    str_tokens: tuple[str, ...] = ()
    table_axes: ClassVar[tuple[str, ...]] = ("batch", "head", "query", "cell")
    table_values: ClassVar[tuple[str, ...]] = ("keys", "values")

    def table_mask(self) -> Tensor:
        return self.keys != NO_KEY


def top_cells(split: ScoreSplit, k: int, term: tuple[str, str] | None) -> TopCells:
    """:meth:`ScoreSplit.top_cells`: cells by the absolute value of a term, or by the total
    score."""
    length = split.k.shape[2]
    require(1 <= k <= length, "k", expected=f"1 to {length}, the keys of a prompt", got=k)
    keys, values = [], []
    for rows in query_slices(split.q[0]):
        allowed = split.mask[:, rows].to(split.q.device)
        cells = split.total_rows(rows) if term is None else split.terms.rows(term, rows)
        size = torch.where(allowed, cells if term is None else cells.abs(), -torch.inf)
        best = largest_first(size, k)
        missing = torch.isneginf(size.gather(-1, best))
        keys.append(best.masked_fill(missing, NO_KEY))
        values.append(cells.gather(-1, best).masked_fill(missing, torch.nan))
    return TopCells(
        provenance=split.provenance,
        heads=split.heads,
        term="" if term is None else "-".join(term),
        keys=torch.cat(keys, 2).cpu(),
        values=torch.cat(values, 2).cpu(),
        str_tokens=split.str_tokens,
    )


def largest_first(x: Float[Tensor, "*row key"], k: int) -> Int[Tensor, "*row cell"]:
    """Indices of the ``k`` largest numbers of each row, largest first, equal ones in their order.

    ``topk`` alone may take any of several equal numbers, so rows with such ties are sorted in full.

    >>> largest_first(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist()
    [1, 3, 2]
    """
    values, places = x.topk(k)
    last = values[..., -1:]
    # rows in which numbers equal to the last one taken were left behind
    tied = (x == last).sum(-1) > (values == last).sum(-1)
    places[tied] = x[tied].sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # by key first, so that the stable sort by value leaves equal numbers in the order of their keys
    places = places.sort(-1).values
    order = x.gather(-1, places).sort(dim=-1, descending=True, stable=True).indices
    return places.gather(-1, order)
