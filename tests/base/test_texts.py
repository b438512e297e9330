"""What messages and tables say where there is much to say, and the hashes by which files of other
versions are known."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_geometry import GeometryError, Provenance, Result
from tl_geometry.base import checks, files
from tl_geometry.base.errors import BudgetError, check_seed, listed, within_budget
from tl_geometry.base.html import table
from tl_geometry.base.results import hash_tokens, row_hashes
from tl_geometry.base.run_files import file_hash


def test_long_values_are_cut_in_messages() -> None:
    assert checks.describe("x" * 78) == repr("x" * 78)  # 80 characters with the quotes
    assert checks.describe("x" * 79) == "str '" + "x" * 59 + "..."
    names = [f"n{i:02}" for i in range(17)]
    assert listed(names[:16]) == ", ".join(map(repr, names[:16]))
    assert listed(names, "n03").startswith("17 names, such as 'n03', ")
    assert listed(names, "n03").count("'") == 6  # the three nearest
    assert listed(names, "qqqqqq") == "17 names, such as " + ", ".join(map(repr, names[:6]))
    assert listed(names, most=17) == ", ".join(map(repr, names))


def test_unknown_fields_of_a_file_are_named_up_to_eight() -> None:
    found = [f"f{i}" for i in range(9)]
    with pytest.raises(GeometryError, match=r"got f0, f1, f2, f3, f4, f5, f6, f7\. Use"):
        files.refuse_unknown("a", found, (), "fields")
    files.refuse_unknown("a", found, [*found, "g"], "fields")


def test_long_paths_show_their_end(tmp_path: Path) -> None:
    for length in (120, 121):
        path = "/" + "d" * (length - 1)
        with pytest.raises(GeometryError) as raised:
            files.read_file(path, "any")
        shown = path if length == 120 else "..." + path[-120:]
        assert f"got {shown}." in str(raised.value)


@dataclass(frozen=True, eq=False, kw_only=True)
class Note(Result):
    """A result without a table."""

    note: str


def test_long_fields_are_cut_in_tables() -> None:
    for size in (80, 81):
        ((name, text),) = Note(note="y" * size, provenance=Provenance()).rows()
        assert name == "note"
        assert text == ("y" * 80 if size == 80 else "y" * 77 + "...")


def test_a_page_shows_sixty_rows_and_says_of_how_many() -> None:
    assert "first 60" not in table(["n"], [(i,) for i in range(60)])
    assert "(first 60 of 61 rows)" in table(["n"], [(i,) for i in range(61)])
    assert "(first 60 of 70 rows)" in table(["n"], [(i,) for i in range(60)], of=70)
    sides = table(["n", "word"], [(1, 2), (3, "a")])
    assert sides.index("text-align:right") < sides.index("text-align:left")
    assert "text-align:right" not in table(["n"], [])


def test_sizes_and_seeds_are_taken_up_to_their_ends() -> None:
    within_budget(10, 10, "this", of="rows", instead="less")
    text = r"this: expected at most memory_budget=1,000 bytes, got 1,001 bytes for rows\. Use less"
    with pytest.raises(BudgetError, match=text):
        within_budget(1001, 1000, "this", of="rows", instead="less")
    for seed in (None, 0, 2**32 - 1, torch.tensor(3)):
        check_seed(seed)


def test_numbers_that_overflow_in_their_sum_are_finite() -> None:
    large = torch.full((4,), 3e38)
    assert checks.finite(large, "x") is large
    large[1:3] = torch.tensor([torch.nan, -torch.inf])
    with pytest.raises(GeometryError, match="got 2 NaN or infinite of 4"):
        checks.finite(large, "x")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("l1h2", ((1, 2),)),
        ("1.2", ((1, 2),)),
        ((1, 2), ((1, 2),)),
        ([(1, 2), "L0H0", [1, 2]], ((1, 2), (0, 0))),
        (torch.tensor([[1, 2], [0, 1]]), ((1, 2), (0, 1))),
        (None, tuple((l, h) for l in (0, 1) for h in (0, 1, 2))),
    ],
)
def test_heads_are_named_in_many_ways(given: Any, found: tuple[tuple[int, int], ...]) -> None:
    assert checks.heads(given, 2, 3) == found


@pytest.mark.parametrize(
    "given", ["12", "L1", "x1h2", "1.2.3", "L2H0", "L0H3", [1, 2, 3], 5, [], ""]
)
def test_heads_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(GeometryError, match="head"):
        checks.heads(given, 2, 3)


def test_heads_of_other_layers_are_refused() -> None:
    assert checks.heads(["L1H0"], 2, 3, layers=1) == ((1, 0),)
    assert checks.heads(None, 2, 3, layers=[1]) == ((1, 0), (1, 1), (1, 2))
    with pytest.raises(GeometryError, match=r"heads of layers \[1\], got \[\(0, 2\)\]"):
        checks.heads(["L1H0", "L0H2"], 2, 3, layers=1)


def test_windows_lie_inside_the_positions() -> None:
    assert checks.window(None, 1, 1) == (0, 1)  # all positions rather than none
    assert checks.window(None, 2, 1) == (1, 2)
    assert checks.window((0, 8), 8, 1) == (0, 8)
    for bad in ((0, 9), (-1, 3), (3, 3), (4, 3)):
        with pytest.raises(GeometryError, match=r"0 <= start < end <= 8 \(positions"):
            checks.window(bad, 8, 1)
    for bad in ((1.5, 3), (True, 3)):
        with pytest.raises(GeometryError, match="whole numbers"):
            checks.window(bad, 8, 1)
    for bad in ((1, 2, 3), "ab", (1, float("inf")), 3):
        with pytest.raises(GeometryError, match=r"expected \(start, end\) in positions"):
            checks.window(bad, 8, 1)


def test_hashes_of_tokens_are_those_that_stored_bases_have() -> None:
    """By hand: sha256 over little-endian int64, 16 digits chained over the rows, and the first 8
    bytes without the sign for each row alone."""
    rows = [[5, 1, 70_000], [2, 0, 3]]
    chained = ""
    for row in rows:
        packed = struct.pack("<3q", *row)
        chained = hashlib.sha256(chained.encode() + packed).hexdigest()[:16]
    assert hash_tokens(torch.tensor(rows, dtype=torch.int32)) == chained
    alone = [
        struct.unpack("<Q", hashlib.sha256(struct.pack("<3q", *row)).digest()[:8])[0] // 2
        for row in rows
    ]
    assert row_hashes(torch.tensor(rows)).tolist() == alone


def test_checksums_of_files_are_those_of_other_versions(tmp_path: Path) -> None:
    """By hand: sha256 over the other fields of the header in the order of their names, then over
    the tensors in the order of theirs; 32 digits."""
    numbers = torch.tensor([1.5, -2.0])
    text = b"a=1\0b=2\0m|torch.int64|(0,)\0n|torch.float32|(2,)\0" + struct.pack("<2f", 1.5, -2.0)
    tensors = {"n": numbers, "m": torch.zeros(0, dtype=torch.int64)}
    found = files.checksum(tensors, {"b": "2", "checksum": "x", "a": "1"})
    assert found == hashlib.sha256(text).hexdigest()[:32]
    path = tmp_path / "file"
    path.write_bytes(text)
    assert file_hash(path) == hashlib.sha256(text).hexdigest()[:32]
