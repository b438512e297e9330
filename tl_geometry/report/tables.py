"""Tables for people: three digits, units, intervals beside their number, a search where they are
long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tl_geometry.base import html
from tl_geometry.base.results import Result
from tl_geometry.render.head_view import in_words

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


def number(value: object) -> str:
    """A cell for people: three significant digits, a true minus, groups of thousands, a dash where
    there is nothing.

    >>> [number(v) for v in (0.123456, -3, 12345.6, 1e-7, True, None, float("nan"), "a_b")]
    ['0.123', '−3', '12,300', '1.00e−07', 'yes', '–', '–', 'a_b']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        kept = float(f"{value:.3g}")
        places = 0 if not kept else max(0, 2 - math.floor(math.log10(abs(kept))))
        return f"{kept:,.{places}f}".replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


def by_error(value: float, error: float) -> str:
    """A number to the second digit of its error, and three digits where there is none.

    >>> by_error(17.2361, 0.04), by_error(0.93149, 0.012), by_error(5.0, 0.0)
    ('17.236', '0.931', '5')
    """
    if float(value).is_integer() and abs(value) < 1e6:
        return number(int(value))
    if not (math.isfinite(error) and error > 0):
        return number(value)
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "−")


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
    """A table as HTML, folded where it is long, with a field to search it; ``columns`` are some of
    its columns, all by default."""
    names, rows = joined(table)
    kept = [n for n in names if columns is None or n in columns]
    picked = [[row[names.index(n)] for n in kept] for row in rows[:LONGEST]]
    headings = [heading(table, n) for n in kept]
    labels = [f"{text} ({unit})" if unit else text for text, unit in headings]
    labels, picked = upright(labels, picked)
    body = _body(table, labels, picked)
    said = html.escape(about or name.replace("_", " "))
    left = f" of {len(rows):,} rows" if len(rows) > LONGEST else ""
    size = f"{min(len(rows), LONGEST):,}{left or ' rows'}, {len(kept)} of {len(names)} columns"
    note = f"<small> · {size}; all of it in {html.escape(name)}.csv</small>"
    search = (
        f'<input type="search" placeholder="Search" aria-label="Search: {said}"> <output></output>'
        if len(picked) >= SEARCHED
        else ""
    )
    short = len(picked) <= SHORT and len(labels) <= 8
    return (
        f'<details class="table" id="table-{anchor(name)}"{" open" if short else ""}>'
        f"<summary>{said}{note}</summary>{search}"
        f'<div class="scroll" tabindex="0">{body}</div></details>'
    )


def anchor(text: str) -> str:
    """A name as part of an element's id.

    >>> anchor("dominant_only")
    'dominant-only'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def _body(table: Result, labels: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows and their headings; numbers stand to the right."""
    sides = [
        ""
        if any(isinstance(row[i], str) and not _numeric(row[i]) for row in rows)
        else ' class="n"'
        for i in range(len(labels))
    ]
    head = "".join(f"<th{s}>{html.escape(c)}</th>" for c, s in zip(labels, sides, strict=True))
    lines = (
        "".join(
            f"<td{side}>{html.escape(number(table.readable(value)))}</td>"
            for value, side in zip(row, sides, strict=True)
        )
        for row in rows
    )
    filled = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{filled}</tbody></table>"


def _numeric(value: object) -> bool:
    """Whether a text begins with a number: one with its bounds."""
    return str(value).lstrip("−")[:1].isdigit() and ("[" in str(value) or "±" in str(value))
