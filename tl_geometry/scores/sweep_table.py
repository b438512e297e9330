"""What drives each head, in one row per head: the table that :func:`tl_geometry.sweep_heads`
returns, its selection (``.top``) and its display."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.base.intervals import Interval
from tl_geometry.base.tables import Table
from tl_geometry.scores.head_types import HEAD_TYPES
from tl_geometry.scores.share_table import SHARES, ShareTable
from tl_geometry.scores.terms import key_of

LABEL = (
    *("dominant_{}", "{}_by_cs", "{}_share", "{}_margin"),
    *("{}_by_gs", "{}_gain", "{}_gain_margin", "{}_flag"),
)
"""Columns of a label, with "group" or "term" for the braces: the fields of
:class:`tl_geometry.scores.labels.Dominant`, in their order."""
READ = (
    *("layer", "head", "dominant_group", "group_share", "group_gain", "dropped_mass"),
    *("induction", "previous", "group_by_cs", "group_by_gs", "dominant_term"),
)
"""Columns that are shown where there is no room for all, the most important first."""
SHOWN = 8
"""How many of them plain text has: about 100 characters."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepTable(ShareTable):
    """One row per head: the dominant group and term, shares of all, head-type scores with
    baselines.

    ``dominant_group`` is the group that is first by covariance (``group_by_cs``, with its share
    ``group_share`` and its lead ``group_margin``) and by gain (``group_by_gs``, ``group_gain``,
    ``group_gain_margin``), each with a clear lead; else ``"unclear"``. ``group_flag`` says where
    covariance and gain name different groups. Likewise for terms. ``dropped_mass`` is the attention
    to left-out keys, which no share describes.

    ``types[name]`` are the head-type scores on repeated random tokens
    (:mod:`tl_geometry.scores.head_types`), ``baselines[name]`` what uniform attention would score,
    ``type_errors`` standard errors of the scores over twelve sequences (in a large vocabulary each
    from another range of ids). With intervals ``nulls`` holds the share that position has by noise
    alone (mean and 95% quantile), the p-value of the share of position, and that p-value adjusted
    for the number of heads (Benjamini and Hochberg 1995).
    """

    types: Mapping[str, Float[Tensor, " head"]]
    baselines: Mapping[str, float]
    type_errors: Mapping[str, Float[Tensor, " head"]]
    nulls: Mapping[str, Float[Tensor, " head"]] = field(default_factory=dict)

    def shares(self) -> ShareTable:
        """The same shares as one row per head and term."""
        return ShareTable(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ShareTable)})

    def columns(self) -> Sequence[str]:
        return list(self._cells())

    def rows(self) -> Sequence[Sequence[object]]:
        return list(zip(*self._cells().values(), strict=True))

    def _cells(self) -> dict[str, list[Any]]:
        """All columns by name, each with a value per head."""
        layers, heads = zip(*self.heads, strict=True)
        cells: dict[str, Any] = {"layer": layers, "head": heads}
        for level in ("group", "term"):
            best = self.dominant_by(level)
            cells |= {c.format(level): values for c, values in zip(LABEL, best, strict=True)}
        cells["dropped_mass"] = self.dropped_mass
        for name in HEAD_TYPES:
            cells |= {name: self.types[name], f"{name}_se": self.type_errors[name]}
            cells[f"{name}_uniform"] = [self.baselines[name]] * len(self.heads)
        for share in SHARES:
            values = torch.cat([getattr(self, f"group_{share}"), getattr(self, share)], 1)
            names = [f"{share}_{name}" for name in (*self.groups, *self.terms)]
            cells |= dict(zip(names, values.unbind(1), strict=True))
        for share in SHARES:
            interval = self.interval(share)
            if interval is not None:
                for g, group in enumerate(self.groups):
                    of_group = Interval(*(values[:, g] for values in interval))
                    cells |= of_group.columns(f"{share}_{group}_corrected")
        cells |= dict(sorted(self.nulls.items()))
        return {k: v.tolist() if isinstance(v, Tensor) else list(v) for k, v in cells.items()}

    def top(self, column: str, n: int | None = 10, *, ascending: bool = False) -> SweepTable:
        """The ``n`` heads with the largest values of a numeric column (``"induction"``,
        ``"cs_pos-pos"``, ...), largest first (smallest first with ``ascending``), NaN last;
        ``None`` for all heads. The name of a group or term alone means its covariance share:
        ``"position"``. Names are taken as they are shown, too: ``"mean-mean"``."""
        cells = self._cells()
        key = key_of(column) if isinstance(column, str) else column
        key = f"cs_{key}" if key in (*self.groups, *self.terms) else key
        numeric = [c for c, values in cells.items() if not isinstance(values[0], str)]
        if key not in numeric:
            expected = f"one of {', '.join(numeric[:12])} ..."
            fail("column", expected=expected, got=repr(column), instead="table.columns() for all")
        count = None if n is None else checks.whole(n)
        fits, expected = n is None or (count is not None and count >= 1), "at least 1, None for all"
        require(fits, "n", expected=expected, got=repr(n))
        values = torch.tensor(cells[key], dtype=torch.float64)
        worst = torch.inf if ascending else -torch.inf
        order = torch.where(torch.isnan(values), worst, values)
        return self.select(order.argsort(descending=not ascending, stable=True)[:count])

    def text(self, limit: int | None = None) -> str:
        """The first columns of :data:`READ` as aligned plain text."""
        return f"Sweep{self._read(SHOWN).text(limit)}"  # which begins with "Table("

    def _repr_html_(self) -> str:
        return self._read(len(READ))._repr_html_()

    def _read(self, count: int) -> Table:
        """The first ``count`` columns of :data:`READ`, with a flag that says where all are."""
        cells = self._cells()
        more = f"{count} of {len(cells)} columns (all: .to_dataframe(), render.heads)"
        columns = [map(self.readable, cells[column]) for column in READ[:count]]
        rows: Any = tuple(zip(*columns, strict=True))
        return Table(provenance=self.provenance.flagged(more), names=READ[:count], cells=rows)
