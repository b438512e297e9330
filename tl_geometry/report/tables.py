"""How does a reader see the tables of a report? With three digits, units, intervals beside their
number, and a search where they are long. :mod:`tl_geometry.report.section` and
:mod:`tl_geometry.papers` use this file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tl_geometry.base.results import Result
from tl_geometry.render.head_view import in_words
from tl_geometry.report.origin import by_error, number
from tl_geometry.report.templates import anchor, fill

SHORT, WIDE, LONGEST = 14, 12, 600
"""SHORT: most rows of a table that is shown unfolded. WIDE: a table with more columns than
this, but not more rows, is turned on its side. LONGEST: most rows on a page; the file has all."""
SEARCHED = 15
"""Fewest rows of a table that has a search."""
NATS = (
    *("loss", "loss_change", "induction_loss", "induction_loss_change", "loss_increase"),
    *("change", "kl", "kl_reverse", "saved", "own_loss", "baseline_mean"),
)
"""Columns in nats."""
UNITS = {
    **dict.fromkeys(NATS, "nats"),
    **dict.fromkeys(("step", "next_angle", "length", "net"), "radians"),
    "pattern_moved": "total variation",
    "share": "of the sum of squares",
    "top1": "share",
}
"""Column -> its unit; shares and cosines have none."""
NAMES = {
    "pos": "position",
    "ctx": "context",
    "resid": "residual",
    "ss_total": "sum of squares",
    "pos_debiased": "position without noise",
    "pos_corrected": "position, corrected for noise",
    "ctx_corrected": "context, corrected for noise",
    "resid_corrected": "residual, corrected for noise",
    "pos_reliability": "reliability of position",
    "ctx_null": "context of spliced windows",
    "ctx_null_corrected": "context of spliced windows, corrected",
    "saved": "saved over a random term",
    "top_share": "share of the largest tokens",
    "low_frequency": "energy in low frequencies",
    "dropped_mass": "attention left out",
    "incoherence_avg": "mean |cos|",
    "incoherence_max": "largest |cos|",
    "top1": "same likeliest token",
    "top5": "likeliest five in common",
}
"""Column -> its heading, where its name is not clear by itself."""
UNITS_OF = {("TruncationCurve", "top5"): "of 5", ("SkipMap", "top5"): "share"}
"""Type of table and column -> unit, for columns whose unit depends on the table."""


def joined(table: Result) -> tuple[list[str], list[list[object]]]:
    """Columns and rows with bounds and standard errors beside their number: the cell of ``x`` also
    holds ``x_low`` and ``x_high``, or ``x_se``, which have no columns of their own."""
    columns, ends = table.columns(), ("_low", "_high", "_se")
    column_index = {name: i for i, name in enumerate(columns)}
    bound_columns = [
        column
        for column in columns
        if column.endswith(ends) and column.rsplit("_", 1)[0] in column_index
    ]
    names = [name for name in columns if name not in bound_columns]
    return names, [[_joined(row, name, column_index) for name in names] for row in table.rows()]


def _joined(row: Sequence[object], name: str, place: Mapping[str, int]) -> object:
    """One cell with its bounds or its standard error."""
    # loss_low and loss_high are the bounds of loss_change: they stand beside it, not beside loss
    bounded = name.removesuffix("_change")
    bounded = "" if f"{name}_change" in place else bounded
    low, high, error = (
        _float(row[place[key]]) if key in place else math.nan
        for key in (f"{bounded}_low", f"{bounded}_high", f"{name}_se")
    )
    value = row[place[name]]
    if math.isfinite(low):
        return f"{number(value)} [{number(low)}, {number(high)}]"
    if math.isfinite(error):
        return f"{by_error(_float(value), error)} ± {error:.2g}"
    return value


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def heading(table: Result, column: str) -> tuple[str, str]:
    """The heading of a column, and its unit.

    >>> from tl_geometry.base.results import Provenance
    >>> heading(Result(provenance=Provenance()), "loss_change")
    ('loss change', 'nats')
    """
    unit = UNITS_OF.get((type(table).__name__, column), UNITS.get(column, ""))
    shown = NAMES.get(column)
    if shown is None:
        shown = in_words(str(table.readable(column)))
    return shown, unit


def upright(
    columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> tuple[list[str], list[list[object]]]:
    """Turn a table of many columns and few rows on its side, one line for each column. Others stay.

    >>> upright(["state", *"abcdefghijklm"], [[0, *range(13)]])[1][0]
    ['a', 0]
    """
    if len(columns) <= WIDE or len(rows) > WIDE:
        return list(columns), [list(row) for row in rows]
    # the first column names the rows, and becomes the heading
    head = [columns[0], *(number(row[0]) for row in rows)]
    return head, [[name, *(row[i] for row in rows)] for i, name in enumerate(columns) if i]


@dataclass(frozen=True, eq=False, kw_only=True)
class TableBlock:
    """A table at its place in the text. ``columns`` are those shown on the page, all by default."""

    name: str
    table: Result
    about: str = ""
    columns: Sequence[str] | None = None

    def html(self) -> str:
        """The table, folded if it is long or wide, with a search if it is long."""
        names, rows = joined(self.table)
        chosen = [key for key in names if self.columns is None or key in self.columns]
        headings = [heading(self.table, key) for key in chosen]
        labels = [f"{text} ({unit})" if unit else text for text, unit in headings]
        cells = [[row[names.index(key)] for key in chosen] for row in rows[:LONGEST]]
        labels, cells = upright(labels, cells)
        # columns of numbers are aligned to the right
        is_number = [
            all(not isinstance(value, str) or _numeric(value) for value in column)
            for column in zip(*cells)
        ]
        of_rows = f" of {len(rows):,} rows" if len(rows) > LONGEST else " rows"
        return fill(
            "table",
            name=self.name,
            anchor=anchor(self.name),
            about=self.about or self.name.replace("_", " "),
            size=f"{min(len(rows), LONGEST):,}{of_rows}, {len(chosen)} of {len(names)} columns",
            open=len(cells) <= SHORT and len(labels) <= 8,
            searched=len(cells) >= SEARCHED,
            headings=list(zip(labels, is_number or [True] * len(labels), strict=True)),
            rows=[[number(self.table.readable(cell)) for cell in row] for row in cells],
        )


def _numeric(value: object) -> bool:
    """Whether a text is a number with its bounds or its error, as :func:`joined` writes it."""
    return str(value).lstrip("−")[:1].isdigit() and ("[" in str(value) or "±" in str(value))
