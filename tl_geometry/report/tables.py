"""Tables for people: three digits, units, intervals beside their number, a search where they are
long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tl_geometry.base.results import Result
from tl_geometry.render.head_view import in_words
from tl_geometry.report.origin import by_error, number
from tl_geometry.report.templates import anchor, fill

SHORT, WIDE, LONGEST = 14, 12, 600
"""Rows and columns of a table that stands open, and the most rows on a page."""
SEARCHED = 15
"""Rows from which a table can be searched."""
UNITS = {
    "loss": "nats",
    "loss_change": "nats",
    "induction_loss": "nats",
    "induction_loss_change": "nats",
    "loss_increase": "nats",
    "change": "nats",
    "kl": "nats",
    "kl_reverse": "nats",
    "saved": "nats",
    "own_loss": "nats",
    "baseline_mean": "nats",
    "pattern_moved": "total variation",
    "share": "of the sum of squares",
    "step": "radians",
    "next_angle": "radians",
    "length": "radians",
    "net": "radians",
    "top1": "share",
}
"""Units of columns; shares and cosines have none."""
NAMES = {
    "pos": "position",
    "ctx": "context",
    "resid": "residual",
    "ss_total": "sum of squares",
    "pos_debiased": "position without noise",
    "pos_corrected": "position in any number of windows",
    "ctx_corrected": "context in any number of windows",
    "resid_corrected": "residual in any number of windows",
    "pos_reliability": "reliability of position",
    "ctx_agreement": "agreement of a window's ends",
    "ctx_null": "context of spliced windows",
    "ctx_null_corrected": "the same in any number of windows",
    "saved": "saved over a random term",
    "top_share": "share of the largest tokens",
    "low_frequency": "energy in low frequencies",
    "dropped_mass": "attention left out",
    "incoherence_avg": "mean |cos|",
    "incoherence_max": "largest |cos|",
    "top1": "same likeliest token",
    "top5": "likeliest five in common",
}
"""Columns whose key says too little."""
UNITS_OF = {("TruncationCurve", "top5"): "of 5", ("SkipMap", "top5"): "share"}
"""Units of columns that tables measure differently."""


def joined(table: Result) -> tuple[list[str], list[list[object]]]:
    """Columns and rows with bounds and standard errors written beside their number: ``x_low`` and
    ``x_high``, or ``x_se``, stand in the cell of ``x``."""
    columns, rows = list(table.columns()), table.rows()
    place = {name: i for i, name in enumerate(columns)}
    out: list[str] = []
    cells: list[list[object]] = [[] for _ in rows]
    for i, name in enumerate(columns):
        base = name.rsplit("_", 1)[0]
        if name.endswith(("_low", "_high", "_se")) and base in place:
            continue
        ends = [place.get(_bounded(name, place) + end) for end in ("_low", "_high")]
        error = place.get(f"{name}_se")
        out.append(name)
        for row, made in zip(rows, cells, strict=True):
            if None not in ends and math.isfinite(_float(row[ends[0] or 0])):
                low, high = (number(row[end or 0]) for end in ends)
                made.append(f"{number(row[i])} [{low}, {high}]")
            elif error is not None and math.isfinite(_float(row[error])):
                size = _float(row[error])
                made.append(f"{by_error(_float(row[i]), size)} ± {size:.2g}")
            else:
                made.append(row[i])
    return out, cells


def _bounded(name: str, place: Mapping[str, int]) -> str:
    """Whose bounds stand beside a column: those of a change beside the change, not the whole."""
    if name.endswith("_change"):
        return name.removesuffix("_change")
    return "" if f"{name}_change" in place else name


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def heading(table: Result, column: str) -> tuple[str, str]:
    """What stands above a column, and its unit.

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
    """A table of many columns and few rows on its side, a measure per line.

    >>> upright(["state", *"abcdefghijklm"], [[0, *range(13)]])[1][0]
    ['a', 0]
    """
    if len(columns) <= WIDE or len(rows) > WIDE:
        return list(columns), [list(row) for row in rows]
    head = [columns[0], *(number(row[0]) for row in rows)]
    return head, [[name, *(row[i] for row in rows)] for i, name in enumerate(columns) if i]


def shown(
    name: str, table: Result, *, about: str = "", columns: Sequence[str] | None = None
) -> str:
    """A table on the page, folded where it is long or wide, searchable where it is long;
    ``columns`` are some of its columns, all by default."""
    names, rows = joined(table)
    chosen = [n for n in names if columns is None or n in columns]
    headings = [heading(table, n) for n in chosen]
    labels = [f"{text} ({unit})" if unit else text for text, unit in headings]
    cells = [[row[names.index(n)] for n in chosen] for row in rows[:LONGEST]]
    labels, cells = upright(labels, cells)
    right = [all(not isinstance(c, str) or _numeric(c) for c in column) for column in zip(*cells)]
    left = f" of {len(rows):,} rows" if len(rows) > LONGEST else " rows"
    return fill(
        "table",
        name=name,
        anchor=anchor(name),
        about=about or name.replace("_", " "),
        size=f"{min(len(rows), LONGEST):,}{left}, {len(chosen)} of {len(names)} columns",
        open=len(cells) <= SHORT and len(labels) <= 8,
        searched=len(cells) >= SEARCHED,
        headings=list(zip(labels, right or [True] * len(labels), strict=True)),
        rows=[[number(table.readable(cell)) for cell in row] for row in cells],
    )


def _numeric(value: object) -> bool:
    """Whether a text begins with a number: one with its bounds."""
    return str(value).lstrip("−")[:1].isdigit() and ("[" in str(value) or "±" in str(value))
