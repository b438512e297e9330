"""One number, one origin: every measured number of the page's sentences stands in an element that
names a cell, and is the number of that cell in the CSV beside the page."""

from __future__ import annotations

import csv
import re
from html import unescape
from pathlib import Path

import pytest

from tl_geometry.base.results import Provenance, Result
from tl_geometry.report import build, origin, section

PLACED = re.compile(r'<span data-source="([\w-]+\.csv):(\d+):([\w-]+)">([^<]*)</span>')
VALUE = re.compile(r'<b data-source="([\w-]+\.csv)">([^<]*)</b>')
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]\d+)?")
SETTINGS = (
    r"Eq\. \d",  # of a paper
    r"(Zhong|Sarfati et al\.|\() ?20\d\d",
    r"[Ss]tates? \d+|L\d+H\d+",  # names
    r"95%|margin of 0\.1|largest 0\.1%",  # levels
    r"[\d,]+ (windows|chunks|tokens|prompts|draws?|dimensions|held-out|layers)|[\d,]+ and 1 draw",
)
"""Numbers that were chosen or that name something, and that no table measures."""
ELSEWHERE = (
    r"of [\d,]+ hold [\d.]+%",  # tokens of the largest norm, in the title of a figure
    r"(95% interval )?[\d.−]+ to [\d.−]+",  # bounds of a group's share
    r"[\d.−]+ with position\w* \w+",  # its null
    r"[\d.]+ nats (per token over random ones|more)",  # a paired difference of two rows
)
"""Measured numbers that stand in no CSV yet."""


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
    text = unescape(PLACED.sub("", paragraph))
    for pattern in SETTINGS + ELSEWHERE:
        text = re.sub(pattern, "", text)
    return NUMBER.findall(re.sub(r"<[^>]*>", "", text))


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small report of the embedded model."""
    out = tmp_path_factory.mktemp("origin") / "made"
    names = ("overview", "basis", "heads", "measures", "weights")
    build.build(build.Request(contexts=24, length=32, sections=names), out, progress=False)
    return out


def test_every_number_of_a_sentence_is_that_of_its_cell(folder: Path) -> None:
    page = (folder / "report.html").read_text("utf-8")
    found = PLACED.findall(page)
    assert len(found) >= 12
    assert {name for name, *_ in found} >= {"anova.csv", "positional.csv", "contextual.csv"}
    for name, row, column, text in found:
        cell = table(folder, name)[int(row)][column]
        assert agrees(text, cell), (name, row, column, text, cell)


def test_no_number_of_a_sentence_is_without_a_cell(folder: Path) -> None:
    page = (folder / "report.html").read_text("utf-8")
    text = page.partition("<footer>")[0]
    paragraphs = re.findall(r"<(p|li)>(.*?)</\1>", text, flags=re.DOTALL)
    paragraphs = [said for _, said in paragraphs]
    assert len(paragraphs) > 10
    assert not {p: loose(p) for p in paragraphs if loose(p)}


def test_the_number_of_a_finding_is_in_its_table(folder: Path) -> None:
    values = VALUE.findall((folder / "report.html").read_text("utf-8"))
    assert len(values) >= 3
    for name, text in values:
        cells = [v for row in table(folder, name) for v in row.values() if _is_number(v)]
        assert any(agrees(text, cell) for cell in cells), (name, text)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text) is not None


class Small(Result):
    """A table of one row."""

    def columns(self) -> tuple[str, ...]:
        return ("name", "share", "share_se", "share_null")

    def rows(self) -> list[tuple[object, ...]]:
        return [("a", 0.123456, 0.01, -0.5)]


def test_a_wrong_number_and_one_without_a_cell_are_seen() -> None:
    cell = origin.Cells("small", Small(provenance=Provenance()))
    said = f"It is {cell(0, 'share', percent=True)}, not {cell(0, 'share_null')} <b>."
    html = section.Section(title="T", blocks=(said,)).html()
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
    assert loose("<p>At state 2 it is 0.031, in 12 windows.</p>") == ["0.031"]
