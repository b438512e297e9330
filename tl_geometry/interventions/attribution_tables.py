"""Do the heads that write a logit matter to it? :func:`beside_knockouts` adds columns to a table of
attributions: what a knockout of each head does, and whether that disagrees with the head's direct
contribution. It takes the tables of ``explain_logit``, ``explain_logits``, ``trace_logit``,
``average_graphs`` and ``edge_scores(...).nodes()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.interventions.knockouts import HeadKnockouts

WRITER = "writer"
"""The column of a table that names its heads."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttributionTable(Result):
    """A table of attributions with the columns of knockouts after its own.

    ``names`` and ``cells`` are the columns and rows of the table. The columns of knockouts are the
    ``effect`` on their metric with its interval and, where they were measured, the ``direct``
    contribution and whether the two disagree (:class:`HeadKnockouts`). Rows of writers that were
    not knocked out have NaN, and ``disagrees`` is false there.
    """

    names: tuple[str, ...]
    cells: tuple[tuple[object, ...], ...]
    effect: Float[Tensor, " row"]
    effect_low: Float[Tensor, " row"]
    effect_high: Float[Tensor, " row"]
    direct: Float[Tensor, " row"] | None
    disagrees: Bool[Tensor, " row"] | None

    def _knockout_columns(self) -> dict[str, Tensor]:
        names = ("effect", "effect_low", "effect_high", "direct", "disagrees")
        columns = {name: getattr(self, name) for name in names}
        return {name: values for name, values in columns.items() if values is not None}

    def columns(self) -> Sequence[str]:
        return (*self.names, *self._knockout_columns())

    def rows(self) -> Sequence[Sequence[object]]:
        columns = (values.tolist() for values in self._knockout_columns().values())
        numbers = zip(*columns, strict=True)
        return [(*cells, *added) for cells, added in zip(self.cells, numbers, strict=True)]


def beside_knockouts(table: Result, knockouts: HeadKnockouts) -> AttributionTable:
    """A table of attributions to heads, with columns for what knockouts of these heads do.

    Args:
        table: with a column ``"writer"`` that names heads (``"L5H1"``), of the same model.
        knockouts: of :func:`head_knockouts`; rows of several heads are left out. If made with
            ``attributions=True``, the direct contributions on its prompts come too, and whether
            they disagree with the knockouts.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=12)
    >>> knockouts = tlg.interventions.head_knockouts(
    ...     model, prompts, targets=[(5, 9)] * 12, controls=0, progress=False
    ... )
    >>> table = tlg.circuits.explain_logits(model, prompts, [(5, 9)] * 12)
    >>> tlg.interventions.beside_knockouts(table, knockouts).columns()[-3:]
    ('effect', 'effect_low', 'effect_high')
    """
    got, instead = type(knockouts).__name__, "head_knockouts(model, prompts, targets=targets)"
    fits, expected = isinstance(knockouts, HeadKnockouts), "knockouts of heads"
    require(fits, "knockouts", expected=expected, got=got, instead=instead)
    got = f"{type(table).__name__} with {table.columns() if isinstance(table, Result) else 'none'}"
    fits, expected = isinstance(table, Result) and WRITER in table.columns(), f"a column {WRITER!r}"
    require(fits, "table", expected=expected, got=got, instead="explain_logit or trace_logit")
    require_same_model(table, knockouts)
    writer_column = list(table.columns()).index(WRITER)
    cells = tuple(map(tuple, table.rows()))
    knockout_rows = {head_name(head): row for head, row in knockouts.by_head.items()}
    # -1 for a writer that was not knocked out: it picks some value, which is then masked
    picked = torch.tensor([knockout_rows.get(str(row[writer_column]), -1) for row in cells])

    def by_row(values: Tensor, missing: float | bool) -> Tensor:
        return torch.where(picked >= 0, values[picked], missing)

    value, low, high, _ = (by_row(values, torch.nan) for values in knockouts.effect)
    direct, disagrees = knockouts.direct, knockouts.disagrees
    return AttributionTable(
        provenance=table.provenance,
        names=tuple(table.columns()),
        cells=cells,
        effect=value,
        effect_low=low,
        effect_high=high,
        direct=None if direct is None else by_row(direct.mean(1), torch.nan),
        disagrees=None if disagrees is None else by_row(disagrees, False),
    )


def require_same_model(result: Result, knockouts: HeadKnockouts) -> None:
    """Refuse knockouts of another model than that of a result."""
    table, knocked = result.provenance, knockouts.provenance
    expected, got = f"knockouts of {table.model} with the same weights", f"those of {knocked.model}"
    require(table.fingerprint == knocked.fingerprint, "knockouts", expected=expected, got=got)
