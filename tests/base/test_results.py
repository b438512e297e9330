"""What every result shows: escaped tables with NaN counts and provenance, as HTML, text and LaTeX;
and the files it is saved to."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests.browser import HOSTILE
from tl_geometry import GeometryError, Provenance, Result
from tl_geometry.base import html
from tl_geometry.base.errors import check_seed
from tl_geometry.base.files import read_file, write_atomically
from tl_geometry.base.records import encode
from tl_geometry.base.sums import Sums

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
        tlg.measures.compare_bases(basis, basis, rank=2),
    ]
    for result in shown:
        cells = Cells(result._repr_html_())
        assert set(cells.tags) == {"div", "table", "tr", "th", "td"}, type(result)
        assert "hand-built" in cells.cells[0], type(result)
        assert {len(row) for row in result.rows()} == {len(result.columns())}, type(result)
        assert repr(result).splitlines()[0].startswith(type(result).__name__)
        lines = [line for line in result.to_latex().splitlines() if line.endswith(r"\\")]
        separators = {len(re.findall(r"(?<!\\)&", line)) for line in lines}
        assert separators == {len(result.columns()) - 1}
    assert Cells(basis._repr_html_()).cells[0].startswith("Anova(")


def test_latex_is_escaped_and_says_where_it_comes_from() -> None:
    table = (("a_b & 5%", -0.5, 3), ("{$x$}^~#\\", float("nan"), 4))
    lines = Planted(provenance=WHERE, table=table).to_latex().splitlines()
    # one line, whatever the corpus is called
    assert lines[0].startswith("% Planted: a<b>_model, 50% & more lines, 3 contexts")
    assert lines[1:5] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"token & value & count \\",
        r"\midrule",
    ]
    assert lines[5] == r"a_b \& 5\% & -0.5 & 3 \\".replace("a_b", r"a\_b")
    assert " & -- & 4 " in lines[6]
    assert "{$x$}" not in lines[6]


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
    text = hostile().to_latex(["count", "value"], rows=2, digits=2)
    assert "0 & -- \\\\\n1 & 0.12 \\\\\n" in text
    with pytest.raises(GeometryError, match=r"some of 'token', 'value', 'count', got \['tokens'\]"):
        hostile().to_latex(["tokens"])


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


# ---- records inside results, and tables from axes


class Pair(NamedTuple):
    """A record of tensors."""

    left: Tensor
    right: Tensor | None


@dataclass(frozen=True)
class Held:
    """A record that holds another."""

    pair: Pair
    dtype: torch.dtype
    name: str = "held"


@dataclass(frozen=True, eq=False, kw_only=True)
class Nested(Result):
    """Records, mappings by pairs of names, and a table over three axes."""

    held: Held
    terms: dict[tuple[str, str], Tensor]
    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    share: Float[Tensor, "head side part"]
    mass: Float[Tensor, " head"]
    table_axes = ("head", "side", "part")
    table_values = ("share", "mass", "double")

    @property
    def double(self) -> Float[Tensor, "part head"]:
        """A property in another order of axes."""
        return 2 * self.share[:, 0].T


def nested() -> Nested:
    return Nested(
        provenance=WHERE,
        held=Held(Pair(torch.ones(2), None), torch.float16),
        terms={("a", "b-c"): torch.zeros(1), ("a-b", "c"): torch.ones(1)},
        heads=((0, 1), (3, 2)),
        parts=("pos", "cvec", "bias"),
        share=torch.arange(12.0).view(2, 2, 3),
        mass=torch.tensor([0.25, 0.5]),
    )


def test_records_inside_a_result_are_saved_with_it(tmp_path: Path) -> None:
    made = nested()
    again = Nested.load(made.save(tmp_path / "nested.safetensors"))
    assert again.provenance == WHERE
    assert isinstance(again.held, Held)
    assert isinstance(again.held.pair, Pair)
    assert torch.equal(again.held.pair.left, made.held.pair.left)
    assert again.held.pair.right is None
    assert (again.held.dtype, again.held.name) == (torch.float16, "held")
    assert [float(v) for v in again.terms.values()] == [0.0, 1.0]
    assert list(again.terms) == list(made.terms)
    assert again.heads == made.heads


def test_a_file_cannot_choose_what_is_built(tmp_path: Path) -> None:
    path = nested().save(tmp_path / "nested.safetensors")
    header, tensors = read_file(path, Nested.schema())
    for name, text in (("Provenance", "fields of this version"), ("Popen", "expected one of")):
        header["held"]["$record"] = name
        texts = {k: json.dumps(v) for k, v in header.items() if k != "checksum"}
        write_atomically(path, tensors, texts)
        with pytest.raises(GeometryError, match=text):
            Nested.load(path)


def test_tables_follow_the_axes_of_their_fields() -> None:
    made = nested()
    assert list(made.columns()) == ["layer", "head", "side", "part", "share", "mass", "double"]
    expected = [
        (l, h, s, p, 6.0 * i + 3 * s + j, (0.25, 0.5)[i], 2 * (6.0 * i + j))
        for i, (l, h) in enumerate(made.heads)
        for s in range(2)
        for j, p in enumerate(made.parts)
    ]
    assert made.rows() == expected
    frame = made.to_dataframe()
    assert [tuple(row) for row in frame.itertuples(index=False)] == expected


# ---- sums


@dataclass(frozen=True, eq=False, kw_only=True)
class Totals(Sums):
    """Two sums, one with a head axis, and a setting."""

    total: Float[Tensor, "*context head"]
    rows: Float[Tensor, "*context"]
    extra: Float[Tensor, "*context head part"] | None = None
    window: tuple[int, int] = (0, 4)


def test_sums_add_pool_select_and_join() -> None:
    draws = torch.Generator().manual_seed(0)
    make = lambda n: Totals(total=torch.randn(n, 3, generator=draws), rows=torch.ones(n))
    a, b = make(2), make(5)
    both = Totals.cat([a, b])
    assert torch.allclose((a.pooled() + b.pooled()).total, both.pooled().total)
    assert float(both.pooled().rows) == 7
    assert both.pooled().extra is None
    assert torch.equal(both.select(slice(2, 7)).total, b.total)
    assert torch.equal(both.select(1, "head").total, both.total[:, 1])
    heads = Totals.cat([a.pooled(), b.pooled()], "head")
    assert heads.total.shape == (6,)
    assert float(heads.rows) == 2  # tensors without the axis are those of the first
    assert torch.equal(Totals.stack([a.pooled(), a.pooled()]).total[1], a.pooled().total)
    assert list(a.tensors()) == ["total", "rows"]
    more = dataclasses.replace(a, extra=torch.zeros(2, 3, 1))
    with pytest.raises(GeometryError, match="expected sums of total, rows, got total, rows, extra"):
        _ = a + more


def test_keys_of_mappings_are_strings_or_tuples() -> None:
    with pytest.raises(GeometryError, match="values: expected keys that are all strings or all"):
        encode({1: torch.zeros(2)}, "values", {})


@pytest.mark.parametrize("seed", [1.5, 2.0, True, -1, 2**32])
def test_seeds_are_whole_numbers(seed: float) -> None:
    with pytest.raises(GeometryError, match=r"--seed: expected (a whole number|0 or more)"):
        check_seed(seed)
