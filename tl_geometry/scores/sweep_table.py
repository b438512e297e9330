"""The table that a sweep returns: one row per head."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Result
from tl_geometry.scores.head_types import HEAD_TYPES
from tl_geometry.scores.share_table import ShareTable
from tl_geometry.scores.terms import label

LABEL = (
    *("dominant_{}", "{}_by_cs", "{}_share", "{}_margin"),
    *("{}_by_gs", "{}_gain", "{}_gain_margin", "{}_flag"),
)
"""Columns of a label, of groups and of terms: the fields of
:class:`tl_geometry.scores.labels.Dominant`, in their order."""
NUMBERS = ("{}_share", "{}_margin", "{}_gain", "{}_gain_margin")
"""Those of them that are numbers."""
READ = (
    *("layer", "head", "dominant_group", "group_share", "group_gain", "dropped_mass"),
    *("induction", "previous", "group_by_cs", "group_by_gs", "dominant_term"),
)
"""Columns that a reader of a sweep needs, the most needed first."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepColumns(Result):
    """Some columns of a sweep, as it shows itself."""

    names: tuple[str, ...]
    cells: tuple[tuple[object, ...], ...]
    bias_label: str

    def _caption(self, table: Sequence[Sequence[object]]) -> str:
        return super()._caption(table).replace(type(self).__name__, SweepTable.__name__, 1)

    def readable(self, value: object) -> object:
        return label(value, self.bias_label) if isinstance(value, str) else value

    def columns(self) -> Sequence[str]:
        return self.names

    def rows(self) -> Sequence[Sequence[object]]:
        return self.cells


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepTable(ShareTable):
    """One row per head: the dominant group and term, shares of all, head-type scores with
    baselines.

    ``dominant_group`` is the group that is first by covariance (``group_by_cs``, with its share
    ``group_share`` and its lead ``group_margin``) and by gain (``group_by_gs``, ``group_gain``,
    ``group_gain_margin``), each with a clear lead; else ``"unclear"``, and ``group_flag`` says
    where the two name different groups. Likewise for terms. ``dropped_mass`` is the attention that
    no share describes.

    ``types[name]`` and ``baselines[name]`` are the head-type scores (see
    :mod:`tl_geometry.scores.head_types`) on repeated random tokens and what uniform attention would
    score, ``type_errors`` their standard errors over twelve sequences (of as many ranges of ids in
    a large vocabulary); ``details`` holds what
    ``detail=`` asked for, one tensor per quantity, heads first.
    """

    types: dict[str, Float[Tensor, " head"]]
    baselines: dict[str, float]
    type_errors: dict[str, Float[Tensor, " head"]] = field(default_factory=dict)
    details: dict[str, Tensor] = field(default_factory=dict)

    def shares(self) -> ShareTable:
        """The same shares as one row per head and term."""
        return ShareTable(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ShareTable)})

    def columns(self) -> Sequence[str]:
        best = [column.format(of) for of in ("group", "term") for column in LABEL]
        shares = [
            f"{share}_{name}" for share in self._measured() for name in (*self.groups, *self.terms)
        ]
        types = [name for t in self._types() for name in (t, f"{t}_se", f"{t}_uniform")]
        more = (*self._bounds()[0], *self._scalars())
        return ["layer", "head", *best, "dropped_mass", *types, *shares, *more]

    def _bounds(self) -> tuple[list[str], Float[Tensor, "head column"]]:
        """Corrected shares of the groups with their intervals, where they were asked for."""
        known = {"cs": self.group_intervals, "gs": self.group_gain_intervals}
        found = {share: x for share, x in known.items() if x is not None and self.groups}
        ends = ("corrected", "corrected_low", "corrected_high")
        names = [f"{share}_{g}_{end}" for share in found for g in self.groups for end in ends]
        values = [torch.stack(x[:3], -1).flatten(1) for x in found.values()]
        return names, torch.cat([self.total.new_zeros(len(self.heads), 0), *values], 1)

    def _measured(self) -> tuple[str, ...]:
        """Kinds of shares that were measured: energies only where ``detail`` asked for them."""
        return ("cs", "gs") if bool(self.energies.isnan().all()) else ("cs", "gs", "es")

    def _types(self) -> list[str]:
        return [t for t in HEAD_TYPES if t in self.types]

    def _scalars(self) -> list[str]:
        return sorted(name for name, value in self.details.items() if value.dim() == 1)

    def rows(self) -> Sequence[Sequence[object]]:
        kinds = [x for kind in self._measured() for x in (f"group_{kind}", kind)]
        shares = torch.cat([*(getattr(self, x) for x in kinds), self._bounds()[1]], dim=1).tolist()
        dominant = (self.by_group, self.by_term)
        flat = [self.details[name].tolist() for name in self._scalars()]
        mass = self._mass().tolist()
        out: list[list[object]] = []
        for h, (layer, head) in enumerate(self.heads):
            best = [field[h] for found in dominant for field in found]
            best = [float(x) if isinstance(x, Tensor) else x for x in best]
            types = [x for t in self._types() for x in self._type(t, h)]
            out.append([layer, head, *best, mass[h], *types, *shares[h], *(v[h] for v in flat)])
        return out

    def _type(self, name: str, row: int) -> tuple[float, float, float]:
        """A head-type score, its standard error (NaN where none is known), the uniform one."""
        error = float(self.type_errors[name][row]) if name in self.type_errors else math.nan
        return float(self.types[name][row]), error, self.baselines[name]

    def top(self, column: str, n: int | None = 10, *, ascending: bool = False) -> SweepTable:
        """The ``n`` heads with the largest values of a numeric column, in order (``"induction"``,
        ``"cs_pos-pos"``, ...); NaN last. The name of a group or term alone is its covariance
        share: ``"position"``."""
        names = list(self.columns())
        column = f"cs_{column}" if column in (*self.groups, *self.terms) else column
        words = [c.format(of) for of in ("group", "term") for c in LABEL if c not in NUMBERS]
        numeric = [c for c in names if c not in words]
        asked = not str(column).startswith("es_") or "es" in self._measured()
        instead = 'sweep_heads(..., detail="energy")'
        require(asked, "column", expected="a measured share", got=repr(column), instead=instead)
        if column not in numeric:
            fail("column", expected=f"one of {self._listed(numeric)}", got=repr(column))
        require(n is None or n >= 1, "n", expected="at least 1 row, or None for all", got=n)
        cells: list[Any] = [row[names.index(column)] for row in self.rows()]
        values = torch.tensor([float(cell) for cell in cells], dtype=torch.float64)
        worst = torch.inf if ascending else -torch.inf
        order = torch.where(torch.isnan(values), worst, values).argsort(
            descending=not ascending, stable=True
        )
        return self.select(order[:n])

    def text(self, limit: int | None = None) -> str:
        """The columns that a reader needs as aligned plain text, no wider than the terminal."""
        width, count = shutil.get_terminal_size().columns, len(READ)
        shown = self._read(count).text(limit)
        while count > 3 and max(map(len, shown.splitlines()[1:])) > width:
            count -= 1
            shown = self._read(count).text(limit)
        return shown

    def _repr_html_(self) -> str:
        return self._read(len(READ))._repr_html_()

    def _read(self, count: int) -> SweepColumns:
        """The first ``count`` columns that a reader needs, and where the others are."""
        names, rows = list(self.columns()), self.rows()
        chosen = [c for c in READ if c in names][:count]
        at = [names.index(c) for c in chosen]
        more = f"{len(chosen)} of {len(names)} columns (all: .to_dataframe(), render.heads)"
        return SweepColumns(
            provenance=self.provenance.flagged(more),
            names=tuple(chosen),
            cells=tuple(tuple(row[i] for i in at) for row in rows),
            bias_label=self.bias_label,
        )

    def _listed(self, numeric: Sequence[str]) -> str:
        """All numeric columns for a message, families of names together."""
        types, shares = self._types(), (*self.groups, *self.terms)
        told = {f"{share}_{name}" for share in self._measured() for name in shares}
        told |= {f"{t}{end}" for t in types for end in ("", "_se", "_uniform")}
        told |= set(self._bounds()[0])
        kinds = " or ".join(f"{share}_" for share in self._measured())
        rest = [c for c in numeric if c not in told]
        bounds = ", a group before _corrected, _corrected_low or _corrected_high"
        bounds = bounds if self._bounds()[0] else ""
        return (
            f"{', '.join(shares)} (alone, or behind {kinds}{bounds}); {', '.join(types)} "
            f"(alone, or before _se or _uniform); {', '.join(rest)}"
        )

    def select(self, rows: Int[Tensor, " head"]) -> SweepTable:
        """Some of the heads, in the given order."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        picked: dict[str, Any] = {k: v[rows] for k, v in values.items() if isinstance(v, Tensor)}
        each = ("types", "type_errors", "details")
        picked |= {k: {n: v[rows] for n, v in values[k].items()} for k in each}
        return dataclasses.replace(
            self, heads=tuple(self.heads[i] for i in rows.tolist()), **picked
        )
