"""What every result shows: escaped tables with NaN counts and provenance, as HTML, text and LaTeX;
and the files it is saved to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.browser import HOSTILE
from tl_geometry import GeometryError, Provenance, Result
from tl_geometry.base import html

WHERE = Provenance(
    model="a<b>_model",
    corpus="50% & more\nlines",
    contexts=3,
    flags=("<script>window.planted=1</script>",),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Planted(Result):
    """Rows as given."""

    table: tuple[tuple[object, ...], ...]
    names: tuple[str, ...] = ("token", "value", "count")

    def columns(self) -> Sequence[str]:
        return self.names

    def rows(self) -> Sequence[Sequence[object]]:
        return self.table


@dataclass(frozen=True, eq=False, kw_only=True)
class Fields(Result):
    """A result without a table of its own."""

    values: Tensor
    parts: dict[str, Tensor]
    note: str = "x" * 100


class Cells(HTMLParser):
    """Tags, and the text of each cell of a table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("td", "th", "div"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def hostile() -> Planted:
    values = [torch.nan, 0.123456, -2.5e-7, float("inf")]
    return Planted(
        provenance=WHERE, table=tuple((t, values[i % 4], i) for i, t in enumerate(HOSTILE))
    )


def test_html_is_an_escaped_table_with_nan_counts_and_provenance() -> None:
    seen = Cells(hostile()._repr_html_())
    assert set(seen.tags) == {"div", "table", "tr", "th", "td"}
    assert seen.cells[1:4] == ["token", "value", "count"]
    assert seen.cells[4::3] == [html.visible(t) for t in HOSTILE]
    assert any(
        a != b for a, b in zip(seen.cells[4::3], HOSTILE, strict=True)
    )  # direction marks are written out
    assert seen.cells[5:12:3] == ["–", "0.1235", "-2.5e-07"]
    about = "a<b>_model, 50% & more\nlines, 3 contexts, float32"
    planted = "<script>window.planted=1</script>"
    assert seen.cells[0] == f"Planted({about}, {planted}); NaN: value 4"
    twin = Cells(
        f"<table><td>{''.join(HOSTILE)}</td></table>"
    )  # unescaped, the same texts make tags
    assert {"img", "script"} & set(twin.tags)


def test_text_says_the_same() -> None:
    first, *rest = repr(hostile()).replace("more\nlines", "more lines").splitlines()
    assert first.endswith("NaN: value 4")
    assert rest[-1].strip().startswith("...")
    assert "NaN" not in repr(Planted(provenance=WHERE, table=(("a", 1.0, 2),)))


class Counted(str):
    """A cell that counts how often it is made into text."""

    formatted = 0

    def __str__(self) -> str:
        Counted.formatted += 1
        return super().__str__()


def test_only_the_rows_that_are_shown_are_formatted() -> None:
    rows = tuple((Counted(i), float(i % 7), i) for i in range(3000))
    many = Planted(provenance=WHERE, table=rows)
    for show, shown in ((lambda: repr(many), 12), (many._repr_html_, 60), (many.text, 3000)):
        Counted.formatted = 0
        text = show()
        assert shown <= Counted.formatted <= 3 * shown, show  # text and width
    assert repr(many).endswith("... 2988 more rows")
    assert "(first 60 of 3000 rows)" in many._repr_html_()
    assert "more rows" not in text


def test_results_without_a_table_count_their_own_nans() -> None:
    values = torch.tensor([1.0, torch.nan, torch.nan])
    shown = Fields(provenance=WHERE, values=values, parts={"<p>": torch.zeros(2)})
    html = shown._repr_html_()
    assert "(3,) float32, 2 NaN" in html
    assert "&lt;p&gt;" in html
    assert "<p>" not in html
    assert "x" * 81 not in html


def test_every_result_of_a_run_shows_itself() -> None:
    """Real results, none of which has rows that differ in length from their columns."""
    import tl_geometry as tlg
    from tests.induction import corpus, induction_model, prompts

    model, tokens = induction_model(), corpus()
    basis = tlg.decompose(model, tokens, progress=False)
    split = tlg.split_scores(model, prompts(1), basis)
    shown = [
        tlg.check_model(model),
        basis.anova(),
        split,
        split.shares(),
        tlg.sweep_heads(model, tokens, basis, progress=False),
        tlg.positional_report(basis, jackknife=False),
        tlg.split_values(model, prompts(1), basis),
        tlg.compare_bases(basis, basis, rank=2),
    ]
    for result in shown:
        cells = Cells(result._repr_html_())
        assert set(cells.tags) == {"div", "table", "tr", "th", "td"}, type(result)
        assert "hand-built" in cells.cells[0], type(result)
        assert {len(row) for row in result.rows()} == {len(result.columns())}, type(result)
        assert repr(result).splitlines()[0].startswith(type(result).__name__)
        latex = result.to_latex()
        assert {
            len(re.findall(r"(?<!\\)&", line))
            for line in latex.splitlines()
            if line.endswith(r"\\")
        } == {len(result.columns()) - 1}
    assert Cells(basis._repr_html_()).cells[0].startswith("Anova(")


def test_latex_is_escaped_and_aligned() -> None:
    table = (
        ("a_b & 5%", -0.5, 3),
        ("\u2423<s>\\{$x$}^~#|\n", float("nan"), None),
        ("c", 1.5e-7, 4),
        ("d", -float("inf"), 5),
    )
    lines = Planted(provenance=WHERE, table=table).to_latex().splitlines()
    assert lines[0].startswith(
        "% Planted: a<b>_model, 50% & more lines, 3 contexts"
    )  # one line, whatever the corpus is called
    assert lines[1:5] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"token & value & count \\",
        r"\midrule",
    ]
    assert lines[5] == r"a\_b \& 5\% & $-0.5$ & 3 \\"
    odd = r"\textvisiblespace{}\textless{}s\textgreater{}\textbackslash{}\{\$x\$\}"
    odd += r"\textasciicircum{}\textasciitilde{}\#\textbar{} "
    assert lines[6] == rf"{odd} & -- & -- \\"
    assert lines[7:] == [
        r"c & $1.5 \times 10^{-7}$ & 4 \\",
        r"d & $-\infty$ & 5 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_latex_is_ascii_whatever_the_tokens_are() -> None:
    tokens = [
        "\ufffd",
        "\u65e5",
        "caf\u00e9",
        "\ud800",
        "\u202e",
        "\x07",
        "[x]",
        "*",
        "\u2423the \u2423of",
        "\U0001f600",
        "\u00e4\u0301",
    ]
    text = Planted(provenance=WHERE, table=tuple((t, 1.0, 1) for t in tokens)).to_latex()
    assert text.isascii()
    assert set(text) - {"\n"} <= set(map(chr, range(32, 127)))
    rows = text.split(r"\midrule")[1].splitlines()[1:]
    assert rows[0].startswith(r"\texttt{U+FFFD} & ")
    assert rows[2].startswith(r"caf\'{e} & ")
    assert not any(row.startswith(("[", "*")) for row in rows)  # an argument of the line end before
    assert rows[8].startswith(r"\textvisiblespace{}the \textvisiblespace{}of & ")


def test_text_has_no_control_characters_and_pages_no_surrogates() -> None:
    shown = Planted(
        provenance=Provenance(model="m\x1b[31m", corpus="\u202eevil\ud800"),
        table=(("\x1b]0;title\x07", 1.0, 1), ("\u2066a\u202e", 2.0, 2)),
    )
    for text in (shown.text(), repr(shown)):
        assert all(line.isprintable() for line in text.splitlines())
    page = shown._repr_html_()
    page.encode("utf-8")
    assert r"\ud800" in page


def test_latex_of_some_columns_and_rows() -> None:
    text = hostile().to_latex(["count", "value"], rows=2, digits=2, booktabs=False)
    assert text.count(r"\hline") == 3
    assert "booktabs" not in text
    assert "0 & -- \\\\\n1 & 0.12 \\\\\n" in text
    with pytest.raises(GeometryError, match=r"some of 'token', 'value', 'count', got \['tokens'\]"):
        hostile().to_latex(["tokens"])
    empty = Planted(provenance=WHERE, table=()).to_latex()
    assert r"\begin{tabular}{lll}" in empty


def test_a_file_that_may_not_be_read_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions stop nobody who runs tests as root."""
    made = Fields(provenance=WHERE, values=torch.zeros(2), parts={})
    path = made.save(tmp_path / "a.safetensors")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(GeometryError, match=r"a file that may be read, got .*a\.safetensors"):
        Fields.load(path)


def test_files_round_trip(tmp_path: Path) -> None:
    made = Fields(
        provenance=WHERE, values=torch.tensor([1.0, torch.nan]), parts={"a": torch.ones(2)}
    )
    again = Fields.load(made.save(tmp_path / "a.safetensors"))
    assert again.provenance == WHERE
    assert torch.equal(again.values, made.values) or torch.isnan(again.values[1])
    assert torch.equal(again.parts["a"], made.parts["a"])
    with pytest.raises(GeometryError, match="schema"):
        Planted.load(tmp_path / "a.safetensors")
