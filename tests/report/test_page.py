"""Tables of a report as their readers have them."""

from __future__ import annotations

import re
from html import unescape
from math import nan
from typing import Any, NamedTuple

import pytest
from tqdm.auto import tqdm

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.base.tables import Table
from tl_geometry.report.section import Draft
from tl_geometry.report.tables import TableBlock

pytestmark = pytest.mark.once


def table(names: tuple[str, ...], *rows: tuple[Any, ...]) -> Table:
    return Table(names=names, cells=rows, provenance=Provenance())


class Shown(NamedTuple):
    """A table as its reader sees it."""

    open: bool
    search: bool
    about: str
    headings: list[tuple[str, bool]]
    rows: list[list[str]]


def shown(block: TableBlock) -> Shown:
    html = unescape(block.html())
    heads = re.findall(r"<th( class=\"n\")?>(.*?)</th>", html)
    lines = re.findall(r"<tr>(.*?)</tr>", html.partition("<tbody>")[2])
    return Shown(
        open=" open>" in html,
        search='type="search"' in html,
        about=html.partition("<summary>")[2].partition("</small>")[0].replace("<small>", ""),
        headings=[(text, bool(right)) for right, text in heads],
        rows=[re.findall(r"<td[^>]*>(.*?)</td>", line) for line in lines],
    )


def test_a_table_has_units_bounds_and_numbers_to_the_right() -> None:
    names = ("what", "loss", "loss_se", "loss_change", "loss_low", "loss_high", "top1")
    names += ("mean_kl", "mean_kl_se", "a_low")
    held = table(
        names,
        ("3 of 4", 3.14159, 0.02, -0.25, -0.5, 0.0625, True, 12345.6, 100.0, 1),
        ("none ± 2", nan, nan, 0.5, nan, nan, False, None, nan, 2),
    )
    assert shown(TableBlock(name="the_edits", table=held)) == Shown(
        open=True,
        search=False,
        about="the edits · 2 rows, 6 of 6 columns; all of it in the_edits.csv",
        headings=[
            ("what", False),
            ("loss (nats)", True),
            ("loss change (nats)", True),
            ("same likeliest token (share)", True),
            ("mean kl", True),
            ("a low", True),
        ],
        rows=[
            ["3 of 4", "3.142 ± 0.02", "−0.250 [−0.500, 0.0625]", "yes", "12,346 ± 1e+02", "1"],
            ["none ± 2", "–", "0.500", "no", "–", "2"],
        ],
    )
    chosen = TableBlock(name="edits", table=held, about="Edits", columns=("mean_kl", "what"))
    assert shown(chosen).headings == [("what", False), ("mean kl", True)]
    assert shown(chosen).about == "Edits · 2 rows, 2 of 6 columns; all of it in edits.csv"
    assert shown(TableBlock(name="e", table=table(("a", "b")))).headings == [
        ("a", True),
        ("b", True),
    ]


def of_size(rows: int, columns: int) -> Shown:
    names = tuple(f"c{i}" for i in range(columns))
    cells = [tuple(100 * row + i for i in range(columns)) for row in range(rows)]
    return shown(TableBlock(name="t", table=table(names, *cells)))


def test_long_tables_are_folded_and_searched_and_wide_ones_turned() -> None:
    assert [of_size(rows, 3).open for rows in (14, 15)] == [True, False]
    assert [of_size(rows, 3).search for rows in (14, 15)] == [False, True]
    assert [of_size(3, columns).open for columns in (8, 9)] == [True, False]
    assert [len(of_size(3, columns).rows) for columns in (12, 13)] == [3, 12]
    assert [len(of_size(rows, 13).headings) for rows in (12, 13)] == [13, 13]
    assert [len(of_size(rows, 14).headings) for rows in (12, 13)] == [13, 14]
    turned = of_size(2, 13)
    assert turned.headings[0][0] == "c0"
    assert [text for text, _ in turned.headings] == ["c0", "0", "100"]
    assert turned.rows == [[f"c{i}", str(i), str(100 + i)] for i in range(1, 13)]
    for rows, size in ((600, "600 rows"), (601, "600 of 601 rows")):
        assert len(of_size(rows, 2).rows) == 600
        assert of_size(rows, 2).about.startswith(f"t · {size}, 2 of 2 columns")


def test_a_column_of_a_table_where_others_have_given_values() -> None:
    held = table(("a", "b", "c"), (1, "x", 5), (2, "y", 6), (1, "y", 7))
    assert held.column("c") == [5, 6, 7]
    assert held.column("c", a=1) == [5, 7]
    assert held.column("c", a=1, b="y") == [7]
    assert held.column("c", a=1, b="y", c=7) == [7]
    with pytest.raises(GeometryError) as refused:
        held.column("d")
    assert refused.value.what == "column"


def test_a_section_is_named_in_any_bar() -> None:
    """Also in one without a total, of which no truth value can be asked."""
    bar = tqdm(disable=True)
    assert Draft("Title", bar).bar is bar
