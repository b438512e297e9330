"""The table that a sweep returns: one row per head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.scores.head_types import HEAD_TYPES
from tl_geometry.scores.tables import ShareTable


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepTable(ShareTable):
    """One row per head: shares of groups and terms, the dominant ones with their margin, head-type
    scores with baselines.

    ``group_gain`` and ``term_gain`` are the gain shares of the group and the term with the largest
    covariance share (the label's, where there is one), ``dropped_mass`` the attention that no share
    describes.

    ``types[name]`` and ``baselines[name]`` are the head-type scores (see
    :mod:`tl_geometry.scores.head_types`) on repeated random tokens and what uniform attention would
    score, ``type_errors`` their standard errors over twelve sequences; ``details`` holds what
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
        best = ["dominant_group", "group_share", "group_margin", "group_gain"]
        best += ["dominant_term", "term_share", "term_margin", "term_gain"]
        shares = [
            f"{share}_{name}" for share in self._measured() for name in (*self.groups, *self.terms)
        ]
        types = [name for t in self._types() for name in (t, f"{t}_se", f"{t}_uniform")]
        return ["layer", "head", *best, "dropped_mass", *types, *shares, *self._scalars()]

    def _measured(self) -> tuple[str, ...]:
        """Kinds of shares that were measured: energies only where ``detail`` asked for them."""
        return ("cs", "gs") if bool(self.energies.isnan().all()) else ("cs", "gs", "es")

    def _types(self) -> list[str]:
        return [t for t in HEAD_TYPES if t in self.types]

    def _scalars(self) -> list[str]:
        return sorted(name for name, value in self.details.items() if value.dim() == 1)

    def rows(self) -> Sequence[Sequence[object]]:
        kinds = [x for kind in self._measured() for x in (f"group_{kind}", kind)]
        shares = torch.cat([getattr(self, x) for x in kinds], dim=1).tolist()
        best = [
            (self.by_group, _of_largest(self.group_cs, self.group_gs)),
            (self.by_term, _of_largest(self.cs, self.gs)),
        ]
        flat = [self.details[name].tolist() for name in self._scalars()]
        mass = self._mass().tolist()
        out: list[list[object]] = []
        for h, (layer, head) in enumerate(self.heads):
            row: list[object] = [layer, head]
            for found, gain in best:
                numbers = (found.share[h], found.margin[h], gain[h])
                row += [found.labels[h], *map(float, numbers)]
            types = [x for t in self._types() for x in self._type(t, h)]
            out.append([*row, mass[h], *types, *shares[h], *(v[h] for v in flat)])
        return out

    def _type(self, name: str, row: int) -> tuple[float, float, float]:
        """A head-type score, its standard error (NaN where none is known), the uniform one."""
        error = float(self.type_errors[name][row]) if name in self.type_errors else math.nan
        return float(self.types[name][row]), error, self.baselines[name]

    def top(self, column: str, n: int | None = 10, *, ascending: bool = False) -> SweepTable:
        """The ``n`` heads with the largest values of a numeric column, in order (``"induction"``,
        ``"cs_pos-pos"``, ...); NaN last."""
        names = list(self.columns())
        numeric = [c for c in names if c not in ("dominant_group", "dominant_term")]
        asked = not column.startswith("es_") or "es" in self._measured()
        instead = 'sweep_heads(..., detail="energy")'
        require(asked, "column", expected="a measured share", got=repr(column), instead=instead)
        checks.choice(column, numeric, "column")
        require(n is None or n >= 1, "n", expected="at least 1 row, or None for all", got=n)
        cells: list[Any] = [row[names.index(column)] for row in self.rows()]
        values = torch.tensor([float(cell) for cell in cells], dtype=torch.float64)
        worst = torch.inf if ascending else -torch.inf
        order = torch.where(torch.isnan(values), worst, values).argsort(
            descending=not ascending, stable=True
        )
        return self.select(order[:n])

    def select(self, rows: Int[Tensor, " head"]) -> SweepTable:
        """Some of the heads, in the given order."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        picked: dict[str, Any] = {k: v[rows] for k, v in values.items() if isinstance(v, Tensor)}
        each = ("types", "type_errors", "details")
        picked |= {k: {n: v[rows] for n, v in values[k].items()} for k in each}
        return dataclasses.replace(
            self, heads=tuple(self.heads[i] for i in rows.tolist()), **picked
        )


def _of_largest(
    shares: Float[Tensor, "head term"], values: Float[Tensor, "head term"]
) -> Float[Tensor, " head"]:
    """The value of what has the largest share; NaN without any."""
    if shares.shape[1] == 0:
        return torch.full(shares.shape[:1], torch.nan, dtype=values.dtype)
    return values.gather(1, torch.nan_to_num(shares).argmax(1, keepdim=True))[:, 0]
