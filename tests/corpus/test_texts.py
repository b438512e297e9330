"""Texts as they come: joined, in files, as columns of data sets and from generators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tl_geometry.base.errors import GeometryError
from tl_geometry.zoo import corpus

pytestmark = pytest.mark.once

TEXT = "".join(corpus.held_out_documents().texts[:4])


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


# --- Large text -----------------------------------------------------------------------------------


# --- Joined documents -----------------------------------------------------------------------------


def test_joined_documents_are_those_tokens_with_a_blank_line_between(model: Any) -> None:
    view = tlg.view(model)
    texts = ["def f(x): return x", "", "y = 3", "class A: pass", "import os"]
    cut = tlg.windows(model, texts, 4, prepend_bos=False, pack=True)
    ids: list[int] = []
    owners: list[int] = []
    for number, text in enumerate(texts):
        joined = view.encode("\n\n" * bool(ids)) + view.encode(text) if text else []
        ids, owners = ids + joined, owners + [number] * len(joined)
    rows = len(ids) // 4
    assert cut.tokens.flatten().tolist() == ids[: 4 * rows]
    assert cut.labels is not None
    assert cut.labels.tolist() == owners[: 4 * rows : 4]  # where the window starts
    named = tlg.windows(model, texts, 4, prepend_bos=False, pack="; ", labels=list("abcde"))
    assert named.names == tuple("abcde")
    assert "; " in "".join(view.decode(named.tokens.flatten().tolist()))
    with pytest.raises(GeometryError, match=r"texts: expected .*, or pack=True \(--pack\)"):
        tlg.windows(model, texts, 19, prepend_bos=False)
    assert len(tlg.windows(model, texts, 19, prepend_bos=False, pack=True)) == 1


# --- Files ----------------------------------------------------------------------------------------


def test_a_byte_that_is_no_text_is_named_by_its_offset(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    good = "caf\xe9 ".encode() * 50_000
    for bad, name in ((b"\xe9 ", "0xe9"), (b"\xff", "0xff")):
        path.write_bytes(good[:123_456] + bad + good)
        with pytest.raises(GeometryError, match=rf"a\.txt, where byte 123456 \({name}\) is none"):
            tlg.windows(model, path, 16, n=4, prepend_bos=True)
    path.write_bytes(good[:-2])  # half a character at the end
    with pytest.raises(GeometryError, match=rf"byte {len(good) - 3} \(0xc3\) is none"):
        tlg.windows(model, path, 16, prepend_bos=True)


def test_forms_of_files(model: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prepend_bos": True}
    plain = tlg.windows(model, TEXT[:20_000], 16, **options)
    path = tmp_path / "a.txt"
    for form in (
        TEXT[:20_000].encode(),
        b"\xef\xbb\xbf" + TEXT[:20_000].encode(),
        TEXT[:20_000].replace("\n", "\r\n").encode(),
        TEXT[:20_000].replace("\n", "\r").encode(),
    ):
        path.write_bytes(form)
        assert torch.equal(tlg.windows(model, path, 16, **options).tokens, plain.tokens)
    one_line = TEXT[:300_000].replace("\n", " ")
    path.write_text(one_line)
    assert torch.equal(
        tlg.windows(model, path, 16, **options).tokens,
        tlg.windows(model, one_line, 16, **options).tokens,
    )


def test_other_columns_of_data_sets(model: Any) -> None:
    rows = {"body": [TEXT[:500]] * 3, "n": [1, 2, 3]}
    cut = tlg.windows(model, rows, 16, prepend_bos=True, field="body")
    assert cut.names == ("0", "1", "2")
    with pytest.raises(GeometryError, match="field: expected None, but for files"):
        tlg.windows(model, [TEXT], 16, prepend_bos=True, field="body")


def generated() -> Iterator[str]:
    yield from (TEXT[:400], TEXT[400:900])


def test_a_generator_of_texts_is_a_list_of_them(model: Any) -> None:
    a = tlg.windows(model, generated(), 16, prepend_bos=True)
    b = tlg.windows(model, list(generated()), 16, prepend_bos=True)
    assert torch.equal(a.tokens, b.tokens)


# --- Two gigabytes --------------------------------------------------------------------------------
