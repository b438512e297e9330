"""Whole sentences and short texts of the base: checks of arguments, cells of tables, captions, file
names, and what a caption says of provenance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests.refusals import refused
from tl_geometry.base import checks, files, html
from tl_geometry.base.axes import axes_of
from tl_geometry.base.errors import BudgetError, fail, message, require
from tl_geometry.base.printable import printable, printable_lines, unicode_escape
from tl_geometry.base.records import decode, encode, references
from tl_geometry.base.results import Provenance, Result, hash_tokens
from tl_geometry.base.sums import Sums
from tl_geometry.base.transfer import floats, on_cpu

# ---- errors and checks


def test_a_message_has_one_form() -> None:
    """With and without advice, whose full stop is not doubled; of the class that is asked for."""
    assert message("a", expected=1, got="b") == "a: expected 1, got b."
    assert message("a", expected=1, got="b", instead="c...") == "a: expected 1, got b. Use c."
    assert refused(lambda: fail("a", expected=1, got=2)) == "a: expected 1, got 2."
    assert refused(lambda: require(0, "a", expected=1, got=2, instead="3")) == (
        "a: expected 1, got 2. Use 3."
    )
    require([0], "a", expected=1, got=2)
    for call in (fail, lambda *a, **k: require(False, *a, **k)):
        with pytest.raises(BudgetError):
            call("a", expected=1, got=2, error=BudgetError)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: checks.index(3, 3, "layer"), "layer: expected an index from 0 to 2, got 3."),
        (lambda: checks.index(-1, 3, "layer"), "layer: expected an index from 0 to 2, got -1."),
        (lambda: checks.index(1.0, 3, "layer"), "layer: expected an index from 0 to 2, got 1.0."),
        (lambda: checks.indices([], 3, "x"), "x: expected at least one index, got none."),
        (lambda: checks.indices([1, 1], 3, "x"), "x: expected each index once, got (1, 1)."),
        (lambda: checks.heads([], 2, 2), "heads: expected at least one head, got none."),
        (
            lambda: checks.heads(["L0H0", (1, 0)], 2, 2, layers=[0]),
            "heads: expected heads of layers [0], got [(1, 0)]. Use either heads= or layers=.",
        ),
        (
            lambda: checks.heads("51", 9, 9),
            'heads: expected (layer, head) pairs or "L5H1", got \'51\'. Use (5, 1) or "L5H1".',
        ),
        (
            lambda: checks.heads("L5H1", 5, 9),
            "layer of head 'L5H1': expected an index from 0 to 4, got 5.",
        ),
        (lambda: checks.heads("L5H1", 6, 1), "head 'L5H1': expected an index from 0 to 0, got 1."),
        (
            lambda: checks.head_rows("L1H1", [(1, 0), (2, 1)], "other heads"),
            "heads: expected a head of layers [1, 2] that the result has, got [(1, 1)]. "
            "Use other heads.",
        ),
        (
            lambda: checks.window((0, 9), 8, 1),
            "window: expected 0 <= start < end <= 8 (positions of the input), got (0, 9).",
        ),
        (
            lambda: checks.window((0.5, 3), 8, 1),
            "window: expected whole numbers (start, end), got (0.5, 3).",
        ),
        (
            lambda: checks.window("all", 8, 1),
            "window: expected (start, end) in positions, got 'all'.",
        ),
        (
            lambda: checks.finite(torch.tensor([1.0, torch.nan]), "h"),
            "h: expected finite numbers, got 1 NaN or infinite of 2. Use inputs without NaN.",
        ),
        (lambda: checks.choice("c", ("a", "b"), "x"), "x: expected one of 'a', 'b', got 'c'."),
        (
            lambda: files.as_path("a\0b", "out"),
            "out: expected a path, got 'a\\x00b'. Use out='name.safetensors'.",
        ),
    ],
)
def test_refusals_are_whole_sentences(call: Callable[[], object], text: str) -> None:
    """What was expected, what came, and what to call instead."""
    assert refused(call) == text


def test_indices_and_heads_keep_the_order_in_which_they_were_given() -> None:
    """One number, tensors and nothing at all are taken too."""
    assert checks.indices(torch.tensor([2, 0]), 3, "x") == (2, 0)
    assert checks.indices(torch.tensor(1), 3, "x") == (1,)
    assert checks.indices(None, 2, "x") == (0, 1)
    assert checks.index(torch.tensor(2), 3, "x") == 2
    assert checks.heads([(1, 0), "L0H1", (1, 0)], 2, 2) == ((1, 0), (0, 1))
    assert checks.head_rows(None, [(1, 0), (2, 1)]) == [0, 1]
    assert checks.head_rows([(2, 1), (1, 0)], [(1, 0), (2, 1)]) == [1, 0]
    assert checks.head_name((3, 11)) == "L3H11"
    assert checks.window((1, 2.0), 3, 0) == (1, 2)


@pytest.mark.parametrize(
    ("value", "text", "plain", "integers"),
    [
        (torch.zeros(2, 3), "float32 tensor of shape (2, 3)", True, False),
        (torch.zeros(2).long(), "int64 tensor of shape (2,)", True, True),
        (torch.zeros(2).bool(), "bool tensor of shape (2,)", True, False),
        (torch.zeros(2).to(torch.complex64), "complex64 tensor of shape (2,)", True, False),
        (torch.zeros(2).long().to_sparse(), "sparse int64 tensor of shape (2,)", False, False),
        (torch.zeros(2, device="meta").int(), "meta int32 tensor of shape (2,)", False, False),
    ],
)
def test_tensors_are_described_by_layout_dtype_and_shape(
    value: Tensor, text: str, plain: bool, integers: bool
) -> None:
    """And only dense ones with values are plain."""
    assert checks.describe(value) == text
    assert checks.is_plain(value) is plain
    assert checks.holds_integers(value) is integers


# ---- texts


def test_a_table_of_a_page_is_this_text() -> None:
    """Words to the left, numbers to the right, headings as their columns, all escaped."""
    assert html.MOST_ROWS == 60
    style, cell, head = html.STYLE
    found = html.table(["<t>", "n"], [("a&b", 0.123456), ("", None)], caption='"x"')
    left, right = (f'<td style="{cell}{side}">' for side in ("left", "right"))
    assert found == (
        f'<div style="{html.NOTE}">&quot;x&quot;</div><table style="{style}"><tr>'
        f'<th style="{head}left">&lt;t&gt;</th><th style="{head}right">n</th></tr>'
        f"<tr>{left}a&amp;b</td>{right}0.1235</td></tr>"
        f"<tr>{left}</td>{right}–</td></tr></table>"
    )
    assert f'<th style="{head}left">n</th>' in html.table(["n"], [])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5678, "1235"),
        (1e-7, "1e-07"),
        (12345, "12345"),
        (math.nan, "–"),
        (None, "–"),
        (True, "True"),
        (math.inf, "inf"),
        ("nan", "nan"),
        (0.5, "0.5"),
    ],
)
def test_cells_have_four_digits(value: object, text: str) -> None:
    """Of floats; what is missing is a dash."""
    assert html.number(value) == text


def test_numbers_in_sentences_have_two_decimals_and_a_minus_sign() -> None:
    """By default."""
    assert html.signed(-1.2345) == "−1.23"
    assert html.signed(-12.345, ".1e") == "−1.2e+01"


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (" a", "␣a"),
        ("\u0120a\u010a", "␣a⏎"),
        ("\t\n", "⇥⏎"),
        ("", "∅"),
        ("\x07", "\\u0007"),
        ("\U000e0001", "\\U000e0001"),
        ("é", "é"),
    ],
)
def test_tokens_are_made_visible(token: str, text: str) -> None:
    """Each character that is not seen has a sign or an escape."""
    assert html.token_text(token) == text


def test_what_acts_unseen_is_written_out() -> None:
    """In pages all but tabs and line ends, in terminals these too, in file names each bad byte."""
    assert html.visible("a\tb\nc\x00\u200bd\u2028") == "a\tb\nc\\u0000\\u200bd\\u2028"
    assert html.plain("a\tb\nc\u200b") == "a\\tb\\nc\\u200b"
    assert html.escape("<\u202e'") == "&lt;\\u202e&#x27;"
    assert printable("a\udcff\ud800\u2028\U000e0001 b") == "a\\xff\\ud800\\u2028\\U000e0001 b"
    assert printable_lines("a\x07\nb") == "a\\u0007\nb"
    assert [unicode_escape(c) for c in ("\uffff", "\U00010000")] == ["\\uffff", "\\U00010000"]


def test_a_caption_says_what_there_is_to_say() -> None:
    """Fields that do not apply are left out; flags come once, at the end."""
    assert Provenance().line() == "float32"
    full = Provenance(
        model="m",
        library="l",
        processed=True,
        corpus="c",
        contexts=3,
        window=(0, 4),
        preset="reference",
        normalized=True,
        dtype="float64",
    )
    flagged = full.flagged("one", "two").flagged("one", "three")
    assert flagged.line() == (
        "m, l, processed, c, 3 contexts, window (0, 4), preset reference, normalised states, "
        "float64, one, two, three"
    )
    assert Provenance(processed=False, contexts=0, preset="exact").line() == "float32"
    empty = Provenance()
    assert (empty.preset, empty.sources, empty.hooks, empty.normalized) == (
        "exact",
        ("song2023",),
        (),
        False,
    )


def test_tables_of_terminals_show_twelve_rows() -> None:
    """Or as many as are asked for, and how many more there are."""

    class Numbers(Result):
        def columns(self) -> tuple[str, ...]:
            return ("n", "x")

        def rows(self) -> list[tuple[int, float]]:
            return [(i, math.nan if i < 2 else 0.5) for i in range(14)]

    shown = Numbers(provenance=Provenance(corpus="c"))
    lines = repr(shown).splitlines()
    assert lines[:3] == ["Numbers(c, float32); NaN: x 2", "  n   x", "  0   –"]
    assert lines[-2:] == ["  11  0.5", "  ... 2 more rows"]
    assert shown.text(14).splitlines()[-1] == "  13  0.5"
    assert shown.text() == shown.text(14)
    assert shown.text(13).splitlines()[-1] == "  ... 1 more row"
    assert Numbers.schema() == "tl_geometry/Numbers/1"


# ---- records, sums and copies


def test_records_become_json_and_come_back() -> None:
    """Dtypes, tensors in lists, mappings by strings and by tuples; what refers to tensors is
    found."""
    tensors: dict[str, Tensor] = {}
    value = {
        "a": [torch.ones(1), {"b": torch.zeros(2)}],
        "c": {("x", 1): torch.full((1,), 2.0), ("y", 2): None},
        "d": torch.bfloat16,
        "e": 0.5,
    }
    encoded = encode(value, "top", tensors)
    assert list(tensors) == ["top|a|0", "top|a|1|b", "top|c|0"]
    assert sorted(references(encoded)) == sorted(tensors)
    assert encoded["c"] == {"$mapping": [[["x", 1], {"$tensor": "top|c|0"}], [["y", 2], None]]}
    again = decode(encoded, tensors, {})
    assert again["a"][0] is tensors["top|a|0"]
    assert again["a"][1]["b"] is tensors["top|a|1|b"]
    assert list(again["c"]) == [("x", 1), ("y", 2)]
    assert (again["d"], again["e"], type(again["a"])) == (torch.bfloat16, 0.5, tuple)
    assert refused(lambda: decode({"$record": "Other"}, {}, {"A": Provenance})) == (
        "record: expected one of A, got 'Other'."
    )
    unknown = {"$record": "A", "dtype": "x", "z": 1, "b": 2}
    assert refused(lambda: decode(unknown, {}, {"A": Provenance})) == (
        "A: expected fields of this version, got b, z."
    )


def test_hashes_of_tokens_depend_on_their_order_and_not_on_their_type() -> None:
    """Chained from one batch to the next, from nothing by default."""
    rows = torch.arange(6).view(3, 2)
    whole = hash_tokens(rows)
    assert whole == hash_tokens(rows[1:].int(), hash_tokens(rows[:1], ""))
    assert whole != hash_tokens(rows.flip(0))
    assert hash_tokens(rows[:0]) == ""
    assert len(whole) == 16


@pytest.mark.parametrize("values", [[], [torch.tensor(2.5)], [torch.ones(2, 2), torch.tensor(3)]])
def test_copies_on_the_cpu_are_detached_and_in_order(values: list[Tensor]) -> None:
    """Those that are there already are the same memory."""
    given = [v.requires_grad_() if v.is_floating_point() else v for v in values]
    found = on_cpu(given)
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in given]
    assert not any(x.requires_grad for x in found)
    numbers = dict(zip("ab", (torch.tensor(True), torch.tensor(2)), strict=True))
    assert floats(numbers) == {"a": 1.0, "b": 2.0}


def test_axes_follow_annotations_of_fields_and_properties() -> None:
    """A subclass has the last word; what is no tensor has none."""

    class First:
        a: Float[Tensor, "head  part"]
        b: int

        @property
        def c(self) -> Float[Tensor, " layer"]:
            raise NotImplementedError

    class Second(First):
        a: Float[Tensor, " state"]

    assert axes_of(First) == {"a": ("head", "part"), "b": (), "c": ("layer",)}
    assert axes_of(Second)["a"] == ("state",)


def test_sums_of_other_names_do_not_add() -> None:
    """The sentence names both."""

    class Other(Sums):
        def tensors(self) -> dict[str, Any]:
            return {"a": torch.ones(1)}

    class Another(Sums):
        def tensors(self) -> dict[str, Any]:
            return {"b": torch.ones(1), "c": torch.ones(1)}

    pair: list[Sums] = [Other(), Another()]
    assert refused(lambda: pair[0] + pair[1]) == "sums: expected sums of a, got b, c."
