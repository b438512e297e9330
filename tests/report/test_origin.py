"""One number, one origin: every measured number of the page's findings, sentences and captions
stands in an element that names a cell, and is the number of that cell in the CSV beside the
page."""

from __future__ import annotations

import csv
import re
from html import unescape
from pathlib import Path

import pytest
from scipy import stats

from tl_geometry.base.results import Provenance, Result
from tl_geometry.report import origin, section

PLACED = re.compile(r'<span data-source="([\w-]+\.csv):(\d+):([\w:-]+)">([^<]*)</span>')
SAID = (
    r"<(p|li)[ >].*?</\1>",
    r"<figcaption[ >].*?</figcaption>",
    r'<div class="find[^"]*">.*?</div></div>',
)
"""What the page says outside tables and pictures."""
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]\d+)?")
SETTINGS = (
    r"[\d,]+ of (the )?[\d,]+ (tokens|trajectories|questions|states)",
    r"Eq\. \d",  # of a paper
    r"(Zhong|Sarfati et al\.|\() ?20\d\d",
    r"[Ss]tates? \d+|L\d+H\d+",  # names
    r"95%|margin of 0\.1|largest 0\.1%|0% is expected by chance|none below 10|pattern from 0 to 1",
    r"[\d,]+ (windows|chunks|tokens|prompts|draws|dimensions|held-out|layers|trajectories)",
    r"[\d,]+ (blocks|heads|states|maps|rows|columns|sampled|frequencies|contexts|groups)",
    r"Block \d+|[Rr]ank 1,|error of 1 ",
    r"(position|content) drives \d+|[\d,]+ more",  # counts of the rows of a table
    r"cosine of 0 ± 0\.\d+",  # known exactly
    r"full colour at [\d.]+|float16: rounded by at most [\d.]+",
    r"error [\d.e−-]+ \([\w ]+; allowed [\d.e−-]+\)",
    r"which hold \d+% of their variance",  # the axes of a picture
)
"""Numbers that were chosen, that name or count something, or that say how a picture was drawn."""


def printed(text: str) -> float:
    """The number of a text such as ``"−3.2%"``."""
    value = float(text.strip().replace("−", "-").replace(",", "").rstrip("%×"))
    return value / 100 if text.rstrip().endswith("%") else value


def agrees(text: str, cell: str) -> bool:
    """Whether a printed number is that of a cell, to its last digit."""
    bare = text.strip().rstrip("%×").replace(",", "")
    decimals = len(bare.partition(".")[2].partition("e")[0])
    last = 10.0**-decimals / (100 if text.rstrip().endswith("%") else 1)
    if "." not in bare:
        last = max(last, 0.005 * abs(printed(text)))  # three digits of a large number
    return abs(printed(text) - float(cell)) <= 0.501 * last


def loose(paragraph: str) -> list[str]:
    """Numbers of a paragraph that name no cell and are no setting."""
    text = unescape(re.sub(r"<[^>]*>", "", PLACED.sub("", paragraph)))
    for pattern in SETTINGS:
        text = re.sub(pattern, "", text)
    return NUMBER.findall(text)


def cell(table: list[dict[str, str]], row: int, place: str) -> str:
    """A cell, or the end of the interval that its standard error gives."""
    column, *end = place.split(":")
    value = table[row][column]
    if not end:
        return value
    reach = float(stats.t.ppf(0.975, int(end[1]) - 1)) * float(table[row][f"{column}_se"])
    return str(float(value) + {"low": -reach, "high": reach}[end[0]])


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_number_of_a_sentence_is_that_of_its_cell(folder: Path) -> None:
    page = (folder / "report.html").read_text("utf-8")
    found = PLACED.findall(page)
    assert len(found) >= 60
    named = {"anova", "anova_untrained", "positional", "contextual", "heads", "dominant_only"}
    named |= {"weights_qk", "surrogates", "skipped_layers"}
    assert {name for name, *_ in found} >= {f"{name}.csv" for name in named}
    for name, row, place, text in found:
        value = cell(table(folder, name), int(row), place)
        assert agrees(text, value), (name, row, place, text, value)


def test_no_number_of_a_sentence_is_without_a_cell(folder: Path) -> None:
    page = (folder / "report.html").read_text("utf-8")
    text = re.sub(r"<iframe.*?</iframe>", "", page.partition("<footer>")[0], flags=re.DOTALL)
    said = [m[0] for pattern in SAID for m in re.finditer(pattern, text, flags=re.DOTALL)]
    assert sum("find" in part for part in said) >= 8
    assert sum("figcaption" in part for part in said) >= 15
    assert not [[*loose(part), re.sub("<[^>]*>", "", part)] for part in said if loose(part)]


def test_a_baseline_has_one_value_on_a_page(folder: Path) -> None:
    """Edits of heads and of W_QK start from the loss on the same windows."""
    losses = [table(folder, f"{name}.csv")[0]["loss"] for name in ("dominant_only", "surrogates")]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)


class Small(Result):
    """A table of one row."""

    def columns(self) -> tuple[str, ...]:
        return ("name", "share", "share_se", "share_null")

    def rows(self) -> list[tuple[object, ...]]:
        return [("a", 0.123456, 0.01, -0.5)]


def test_a_wrong_number_and_one_without_a_cell_are_seen() -> None:
    cells = origin.Cells("small", Small(provenance=Provenance()))
    said = f"It is {cells(0, 'share', percent=True)}, not {cells(0, 'share_null')} <b>."
    html = section.Section(title="T", blocks=(said,)).part("t").html
    assert PLACED.findall(html) == [
        ("small.csv", "0", "share", "12.3%"),
        ("small.csv", "0", "share_null", "−0.500"),
    ]
    assert "&lt;b&gt;" in html
    assert section.Section(title="T", blocks=(said,)).text == ["It is 12.3%, not −0.500 <b>."]
    assert agrees("12.3%", "0.123456")
    assert not agrees("12.4%", "0.123456")
    assert not agrees("12.3", "0.123456")
    assert loose(html) == []
    framed = section.FigureBlock(key="f", text=origin.linked(f'<img alt="{said}"><b>{said}</b>'))
    assert framed.html().count("data-source") == 2, "in the title, not in the attribute"
    assert loose("<p>At state 2 it is 0.031, in 12 windows.</p>") == ["0.031"]
