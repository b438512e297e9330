"""Numbers, tables and files of a report as their readers have them, at the limits of each rule."""

from __future__ import annotations

import json
import locale
import re
import shutil
from html import unescape
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tqdm.auto import tqdm

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.base.run_files import CHECKPOINT
from tl_geometry.render.figure import View, canvas
from tl_geometry.report.findings import Finding
from tl_geometry.report.folder import Folder, digest, write_csv
from tl_geometry.report.origin import Cells, by_error, number, plain
from tl_geometry.report.section import Card, Draft, Section
from tl_geometry.report.tables import Table, TableBlock


def table(names: tuple[str, ...], *rows: tuple[Any, ...]) -> Table:
    return Table(names=names, cells=rows, provenance=Provenance())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "0.000100"),
        (9.99e-5, "9.99e−05"),
        (999_499.0, "999,000"),
        (1e6, "1.00e+06"),
        (1.5e6, "1.50e+06"),
        (0.0, "0"),
        (1.0, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (-12.34, "−12.3"),
        (inf, "inf"),
        (-1234, "−1,234"),
        (False, "no"),
    ],
)
def test_a_number_has_three_digits(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (999_999.0, nan, "999,999"),
        (1e6, nan, "1.00e+06"),
        (1.5e6, nan, "1.50e+06"),
        (0.5, 1.0, "0.5"),
        (0.5, 0.9, "0.50"),
        (1234.6, 10.0, "1,235"),
        (1234.6, 200.0, "1,235"),
        (-0.0004, 0.04, "0.000"),
        (2.46, 0.0, "2.46"),
        (2.46, inf, "2.46"),
        (2.46, -0.01, "2.46"),
        (-2.46913, 0.011, "−2.469"),
    ],
)
def test_a_number_has_the_digits_of_its_error(value: float, error: float, text: str) -> None:
    assert by_error(value, error) == text


def test_cells_have_the_digits_of_their_error_or_three() -> None:
    names = ("x", "x_se", "y", "y_low", "y_high", "z")
    rows = table(names, (0.123456, 0.004, 0.123456, 0.1, 0.14, 0.123456))
    exact, rounded = Cells("t", rows), Cells("t", rows, rounded=True)
    shown = [plain(exact(0, column)) for column in "xyz"]
    assert shown == ["0.1235", "0.123", "0.123"]
    assert [plain(rounded(0, column)) for column in "xyz"] == ["0.123"] * 3
    assert plain(exact(0, "x", percent=True)) == "12.35%"
    assert plain(exact.interval(0, "y")) == "95% interval 0.100 to 0.140"
    assert plain(exact.interval(0, "y", percent=True)) == "95% interval 10.0% to 14.0%"


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
    with pytest.raises(GeometryError, match="column: expected one of a, b, c, got 'd'"):
        held.column("d")


def test_a_csv_is_plain_text_with_one_end_of_line(tmp_path: Path) -> None:
    held = table(("name", "x"), ("a,é", None), ('"', nan), ("line\nend", 0.0), (True, -3))
    write_csv(held, tmp_path / "t.csv")
    wanted = 'name,x\n"a,é",\n"""",\n"line\nend",0.0\nTrue,-3\n'
    assert (tmp_path / "t.csv").read_bytes() == wanted.encode()


def test_the_order_of_settings_does_not_matter_and_paths_count() -> None:
    assert digest({"a": 1, "b": (2, Path("c"))}) == digest({"b": (2, Path("c")), "a": 1})
    assert re.fullmatch("[0-9a-f]{16}", digest({"a": 1}))
    assert digest({"a": Path("b")}) != digest({"a": Path("c")})


def finding(said: str) -> Finding:
    return Finding(value="1", said=said, beside="é", figure="figure-f", clear=True)


def written(folder: Path) -> tuple[dict[str, Any], str]:
    """The record and the page."""
    return json.loads((folder / "run.json").read_text("utf-8")), (folder / "report.html").read_text(
        "utf-8"
    )


def test_the_record_of_a_report_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    made = Folder(out, "m", command=["x"], versions={"v": "1"}, names=("overview", "flow"))
    begun = {"written_by": "tl-geometry", "command": ["x"], "versions": {"v": "1"}}
    assert json.loads((out / "run.json").read_text()) == {
        **begun,
        "manifest": {},
        "finished": False,
        "files": {},
    }
    made.begin({"seed": 1})
    provenance = Provenance(model="m", sources=("song2023",))
    made.describe(provenance, notes=["a note"], lede="The lede.", caution="The caution.")
    record, page = written(out)
    assert record["notes"] == ["a note"]
    assert record["provenance"]["model"] == "m"
    assert record["finished"] is False
    assert "Being written: 0 of 2 sections are here, overview, flow to come." in page
    assert '<p class="lede">The lede. Each finding' in page
    assert '<p class="caution">The caution.</p>' in page
    cited = Table(names=("a",), cells=((1,),), provenance=Provenance(sources=("sarfati2025",)))
    card = Card(status="failed", what="this", why="KeyError: 'x'")
    left_out = Card(status="left out", what="that", why="no reason")
    blocks = ["text", TableBlock(name="flow", table=cited), left_out, card]
    made.add("flow", Section(title="T", blocks=blocks, findings=[finding("F")]), seconds=1.26)
    record, page = written(out)
    entry = {
        "title": "T",
        "settings": digest({"seed": 1}),
        "seconds": 1.3,
        "tables": ["flow.csv", "flow.safetensors"],
        "cards": [
            {"status": "left out", "what": "that", "why": "no reason"},
            {"status": "failed", "what": "this", "why": "KeyError: 'x'"},
        ],
        "failed": "KeyError: 'x'",
    }
    assert record["manifest"] == {"flow": entry}
    assert record["failed"] == {"flow": "KeyError: 'x'"}
    assert record["sections"] == ["T"]
    assert "Being written: 1 of 2 sections are here, overview to come." in page
    assert "Sarfati" in page
    assert "Song" in page
    made.add("overview", Section(title="O", blocks=["text"]))
    summary = made.finish()
    record, page = written(out)
    assert record["finished"] is True
    assert record["failed"] == {"flow": "KeyError: 'x'"}
    assert record["sections"] == ["O", "T"]
    assert record["kept"] == []
    assert 0 <= record["seconds"] < 60
    names = ["flow.csv", "flow.safetensors", "report.html"]
    names += ["sections/flow.json", "sections/overview.json"]
    assert list(record["files"]) == names
    assert "Being written" not in page
    assert page.index("<h2>T</h2>") < page.index("<h2>O</h2>")
    assert json.loads(json.dumps(summary)) == {
        **record,
        "tables": {"flow": {"columns": ["a"], "rows": [[1]]}},
    }


def section(**changed: Any) -> Section:
    return Section(**({"title": "é", "blocks": ["text é"], "findings": [finding("é")]} | changed))


def test_a_later_run_takes_over_what_it_may(tmp_path: Path) -> None:
    """Sections of the same settings that did not fail and that nobody changed."""
    names = ("overview", "flow", "heads")
    first = Folder(tmp_path / "first", "m", names=names)
    first.begin({"seed": 1})
    first.add("overview", section())
    first.add("flow", section(blocks=[Card(status="failed", what="w", why="y")]))
    first.add("heads", section())
    (tmp_path / "first" / "sections" / "heads.json").write_text("changed")
    (tmp_path / "first" / CHECKPOINT).write_bytes(b"")

    def later(seed: int, *, resume: bool) -> Folder:
        out = tmp_path / f"{seed} {resume}"
        shutil.copytree(tmp_path / "first", out)
        options: dict[str, Any] = {"resume": True} if resume else {}
        # a run that is stopped before it knows its settings loses nothing
        Folder(out, "m", names=names, force=True, **options)
        made = Folder(out, "m", names=names, force=True, **options)
        made.begin({"seed": seed})
        return made

    with pytest.raises(GeometryError, match="or --force to overwrite"):
        Folder(tmp_path / "first", "m", names=names, resume=True)
    for seed, resume, found in ((1, True, ["overview"]), (2, True, []), (1, False, [])):
        made = later(seed, resume=resume)
        assert made.finished() == found
        assert made.kept == []
        assert (made.out / CHECKPOINT).exists() == resume
        assert (made.out / "sections" / "overview.json").exists() == resume
        if found:
            assert made.parts["overview"].html == first.parts["overview"].html
            assert made.parts["overview"].findings == [finding("é")]


def test_files_are_utf8_in_every_locale(tmp_path: Path) -> None:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C")
        facts = TableBlock(name="overview", table=table(("é",), ("ü",)))
        made = Folder(tmp_path, "m", names=("overview",))
        made.begin({})
        made.add("overview", section(blocks=["text é", facts]))
        later = Folder(tmp_path, "m", names=("overview",), resume=True)
        later.begin({})
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert (tmp_path / "overview.csv").read_bytes() == "é\nü\n".encode()
    assert "text é" in (tmp_path / "report.html").read_text("utf-8")
    assert "text é" in later.parts["overview"].html


def test_a_figure_keeps_its_texts_unless_others_are_given() -> None:
    draft = Draft("Title")
    own = {"title": "Title", "caption": "How.", "null": "Null."}
    draft.draw(View(canvas()[0], **own), "a")
    draft.draw(View(canvas()[0], **own), how="Other how.", null="Other null.")
    first, second = draft.section().blocks
    assert (first.key, second.key) == ("figure-a", "figure-title")
    assert first.html().startswith('<div id="figure-a">')
    assert "How. Null." in first.text
    assert "Other how. Other null." in second.text


def test_a_section_is_named_in_any_bar() -> None:
    """Also in one without a total, of which no truth value can be asked."""
    bar = tqdm(disable=True)
    assert Draft("Title", bar).bar is bar
