"""What drives each head, in one row per head? The table that :func:`tl_geometry.sweep_heads`
returns, its selection (``.top``) and its display."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import fail, listed, require
from tl_geometry.base.intervals import Interval
from tl_geometry.scores.head_types import HEAD_TYPES
from tl_geometry.scores.share_table import ShareTable
from tl_geometry.scores.terms import TermResult

LABEL = (
    *("dominant_{}", "{}_by_cs", "{}_share", "{}_margin"),
    *("{}_by_gs", "{}_gain", "{}_gain_margin", "{}_flag"),
)
"""Columns of a label, with "group" or "term" for the braces: the fields of
:class:`tl_geometry.scores.labels.Dominant`, in their order."""
NUMBERS = ("{}_share", "{}_margin", "{}_gain", "{}_gain_margin")
"""The numeric ones of :data:`LABEL`."""
READ = (
    *("layer", "head", "dominant_group", "group_share", "group_gain", "dropped_mass"),
    *("induction", "previous", "group_by_cs", "group_by_gs", "dominant_term"),
)
"""Columns that are shown where there is no room for all, the most important first."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepColumns(TermResult):
    """Some columns of a sweep table, for its display."""

    cells: dict[str, list[object]]

    def _caption(self, table: Sequence[Sequence[object]]) -> str:
        return super()._caption(table).replace(type(self).__name__, SweepTable.__name__, 1)

    def columns(self) -> Sequence[str]:
        return list(self.cells)

    def rows(self) -> Sequence[Sequence[object]]:
        return list(zip(*self.cells.values(), strict=True))


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
    from another range of ids). ``details`` holds what ``detail=`` asked for, one tensor per
    quantity, head axis first.
    """

    types: dict[str, Float[Tensor, " head"]]
    baselines: dict[str, float]
    type_errors: dict[str, Float[Tensor, " head"]] = field(default_factory=dict)
    details: dict[str, Tensor] = field(default_factory=dict)

    def shares(self) -> ShareTable:
        """The same shares as one row per head and term."""
        return ShareTable(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ShareTable)})

    def columns(self) -> Sequence[str]:
        return list(self._cells())

    def rows(self) -> Sequence[Sequence[object]]:
        return list(zip(*self._cells().values(), strict=True))

    def _cells(self) -> dict[str, list[object]]:
        """All columns by name, each with a value per head."""
        layers, heads = zip(*self.heads, strict=True)
        cells: dict[str, Any] = {"layer": layers, "head": heads}
        for level, best in (("group", self.by_group), ("term", self.by_term)):
            cells |= {c.format(level): values for c, values in zip(LABEL, best, strict=True)}
        cells["dropped_mass"] = self._mass()
        unknown = torch.full_like(self.sums.total, torch.nan)
        for name in self._types():
            cells |= {name: self.types[name], f"{name}_se": self.type_errors.get(name, unknown)}
            cells[f"{name}_uniform"] = [self.baselines[name]] * len(self.heads)
        for share in self._measured():
            values = torch.cat([getattr(self, f"group_{share}"), getattr(self, share)], 1)
            names = [f"{share}_{name}" for name in (*self.groups, *self.terms)]
            cells |= dict(zip(names, values.unbind(1), strict=True))
        cells |= self._bounds()
        cells |= {name: self.details[name] for name in self._scalars()}
        return {k: v.tolist() if isinstance(v, Tensor) else list(v) for k, v in cells.items()}

    def _bounds(self) -> dict[str, Float[Tensor, " head"]]:
        """Columns of the corrected shares of the groups and their intervals; empty where these were
        not asked for."""
        bounds: dict[str, Tensor] = {}
        for share, interval in (("cs", self.group_intervals), ("gs", self.group_gain_intervals)):
            if interval is None or not self.groups:
                continue
            for index, group in enumerate(self.groups):
                of_group = Interval(*(values[:, index] for values in interval))
                bounds |= of_group.columns(f"{share}_{group}_corrected")
        return bounds

    def _measured(self) -> tuple[str, ...]:
        """Which shares were measured: energies only where ``detail`` asked for them."""
        return ("cs", "gs") if bool(self.sums.energies.isnan().all()) else ("cs", "gs", "es")

    def _types(self) -> list[str]:
        return [t for t in HEAD_TYPES if t in self.types]

    def _scalars(self) -> list[str]:
        return sorted(name for name, value in self.details.items() if value.dim() == 1)

    def top(self, column: str, n: int | None = 10, *, ascending: bool = False) -> SweepTable:
        """The ``n`` heads with the largest values of a numeric column (``"induction"``,
        ``"cs_pos-pos"``, ...), largest first (smallest first with ``ascending``), NaN last;
        ``None`` for all heads. The name of a group or term alone means its covariance share:
        ``"position"``."""
        cells = self._cells()
        column = f"cs_{column}" if column in (*self.groups, *self.terms) else column
        text_columns = [
            c.format(level) for level in ("group", "term") for c in LABEL if c not in NUMBERS
        ]
        numeric = [c for c in cells if c not in text_columns]
        asked = not str(column).startswith("es_") or "es" in self._measured()
        instead = 'sweep_heads(..., detail="energy")'
        require(asked, "column", expected="a measured share", got=repr(column), instead=instead)
        if column not in numeric:
            expected, instead = f"one of {listed(numeric, column)}", "table.columns() for all"
            fail("column", expected=expected, got=repr(column), instead=instead)
        require(n is None or n >= 1, "n", expected="at least 1 row, or None for all", got=n)
        values = torch.tensor(cells[column], dtype=torch.float64)
        worst = torch.inf if ascending else -torch.inf
        order = torch.where(torch.isnan(values), worst, values).argsort(
            descending=not ascending, stable=True
        )
        return self.select(order[:n])

    def text(self, limit: int | None = None) -> str:
        """The columns :data:`READ` as aligned plain text: as many as fit the width of the terminal,
        but at least three."""
        width, cells = shutil.get_terminal_size().columns, self._cells()
        shown = self._reader_columns(cells, len(READ)).text(limit)
        for count in range(len(READ) - 1, 2, -1):
            # without the first line, the caption, which may be wider than the table
            if max(map(len, shown.splitlines()[1:])) <= width:
                break
            shown = self._reader_columns(cells, count).text(limit)
        return shown

    def _repr_html_(self) -> str:
        return self._reader_columns(self._cells(), len(READ))._repr_html_()

    def _reader_columns(self, cells: dict[str, list[object]], count: int) -> SweepColumns:
        """The first ``count`` columns of :data:`READ`, with a flag that says where all are."""
        chosen = [column for column in READ if column in cells][:count]
        more = f"{len(chosen)} of {len(cells)} columns (all: .to_dataframe(), render.heads)"
        return SweepColumns(
            provenance=self.provenance.flagged(more),
            cells={column: cells[column] for column in chosen},
            bias_label=self.bias_label,
        )

    def select(self, rows: Int[Tensor, " head"]) -> SweepTable:
        """Some of the heads, in the given order."""
        by_head = ("types", "type_errors", "details")
        mappings = {name: {k: v[rows] for k, v in getattr(self, name).items()} for name in by_head}
        return dataclasses.replace(
            self,
            heads=tuple(self.heads[i] for i in rows.tolist()),
            sums=self.sums.select(rows, "head"),
            dropped_mass=None if self.dropped_mass is None else self.dropped_mass[rows],
            resampled=self.resampled and self.resampled.select(rows),
            head_planes=self.head_planes and self.head_planes.select(rows),
            **mappings,
        )
