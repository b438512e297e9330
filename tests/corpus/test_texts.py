"""Windows of texts: large ones are tokenised in pieces and only where windows are drawn; short ones
are joined; files are read as what they are."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from typer.testing import CliRunner

import tl_geometry as tlg
from tl_geometry.base.errors import GeometryError
from tl_geometry.cli import app
from tl_geometry.corpus import pieces, text_files, window_sampler
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.pieces import Pieces
from tl_geometry.corpus.text_files import TextFile
from tl_geometry.models.model_view import ModelView
from tl_geometry.zoo import corpus

TEXT = "".join(corpus.held_out_documents().texts[:4])


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each call of the tokenizer."""
    found: list[int] = []
    encode = ModelView.encode

    def counting(self: ModelView, text: str) -> list[int]:
        found.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(ModelView, "encode", counting)
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, and places in which windows are drawn, of a small fraction of their size."""
    monkeypatch.setattr(window_sampler, "WHOLE", 20_000)
    monkeypatch.setattr(window_sampler, "PLACE", 256)
    monkeypatch.setattr(pieces, "REACH", 64)
    monkeypatch.setattr(pieces, "PIECE", 2000)
    monkeypatch.setattr(text_files, "BLOCK", 1000)


def written(path: Path, characters: int) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        for start in range(0, characters, 2**20):
            part = (TEXT[start // 2**20 % 99 :] + "é\n") * (2**20 // len(TEXT) + 2)
            file.write(part[: min(2**20, characters - start)])
    return path


# --- Large text -----------------------------------------------------------------------------------


def test_what_is_tokenised_for_n_windows_does_not_grow_with_the_file(
    model: Any, tokenised: list[int], tmp_path: Path
) -> None:
    counts, options = [], {"prepend_bos": True, "seed": 1}
    for megabytes in (5, 20):
        path = written(tmp_path / f"{megabytes}.txt", megabytes * 10**6)
        tokenised.clear()
        cut = tlg.windows(model, path, 32, n=40, **options)
        assert cut.tokens.shape == (40, 32)
        assert "windows drawn by place" in cut.notes[-1]
        counts.append(sum(tokenised))
    assert max(counts) < 1.1 * min(counts) < 200_000
    tokenised.clear()  # the twin: a choice of all windows tokenises all
    tlg.windows(model, written(tmp_path / "small.txt", 10**6), 32, n=40, **options)
    assert sum(tokenised) > 10**6


def test_drawn_windows_are_windows_of_the_text(model: Any, small: None, tmp_path: Path) -> None:
    text = TEXT[:150_000]
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"n": 400, "prepend_bos": True}
    drawn = tlg.windows(model, text, 16, seed=3, **options)
    assert "windows drawn by place" in drawn.notes[-1]
    bodies = ["".join(model.tokenizer.decode(row[1:])) for row in drawn.tokens]
    places = [text.find(body) for body in bodies]
    assert min(places) >= 0
    assert len(set(map(tuple, drawn.tokens.tolist()))) > 350  # the text says some things twice
    assert torch.equal(tlg.windows(model, path, 16, seed=3, **options).tokens, drawn.tokens)
    assert not torch.equal(tlg.windows(model, text, 16, seed=4, **options).tokens, drawn.tokens)
    places = [place for body, place in zip(bodies, places, strict=True) if text.count(body) == 1]
    assert places == sorted(places)
    assert all(b - a >= 16 for a, b in pairwise(places))


def test_each_part_of_a_text_is_as_likely_drawn(model: Any, small: None) -> None:
    texts = ["a b c d " * 5000, "x y z w " * 2500, "p q r s " * 2500]
    counts = torch.zeros(3)
    for seed in range(8):
        cut = tlg.windows(model, texts, 16, n=100, prepend_bos=False, seed=seed)
        assert cut.labels is not None
        counts += torch.bincount(cut.labels, minlength=3)
    assert (counts / counts.sum() - torch.tensor([0.5, 0.25, 0.25])).abs().max() < 0.04
    again = tlg.windows(model, texts, 16, n=100, prepend_bos=False, replace=True)
    assert again.tokens.shape == (100, 16)


def test_where_too_few_places_hold_a_window_all_are_tokenised(model: Any, small: None) -> None:
    texts = ["a b c d e f"] * 2000 + [TEXT[:3000]]
    cut = tlg.windows(model, texts, 16, n=12, prepend_bos=False)
    assert len(cut) == 12
    assert cut.labels is not None
    assert set(cut.labels.tolist()) == {2000}
    with pytest.raises(GeometryError, match=r"at least 16 tokens, got at most .* or pack=True"):
        tlg.windows(model, ["a b c d e f"] * 2000, 16, n=12, prepend_bos=False)


def prefixed(text: str) -> Any:
    """A tokenizer that begins every text with a space of its own and knows no words, as that of
    Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["?"])
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    tokenizer.pre_tokenizer = None  # now its pieces may reach across words, and do not
    return tokenizer


class Encoder(ModelView):
    """A view that is only a tokenizer."""

    bos_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        object.__setattr__(self, "tokenizer", tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]


BYTE_PAIRS = Encoder(tlg.zoo.tokenizer().backend_tokenizer)
PREFIXED = Encoder(prefixed(TEXT[:20_000]))


@pytest.mark.parametrize("view", [BYTE_PAIRS, PREFIXED], ids=["byte pairs", "prefixed"])
def test_tokens_of_pieces_are_those_of_the_whole(view: Encoder, small: None) -> None:
    text = TEXT[:60_000]
    found = Pieces(view, Documents.of(text), None)
    ids = list(chain.from_iterable(found.all_ids(0)))
    assert ids == view.encode(text)
    assert found.notes == ()
    cut = [i for start in range(0, 60_000, 2000) for i in view.encode(text[start : start + 2000])]
    assert cut != ids  # the twin: cut anywhere


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.lists(words, max_size=200), st.sampled_from([" ", "\n", "  ", ". ", "", " \n"]))
def test_tokens_of_pieces_of_odd_texts(parts: list[str], between: str) -> None:
    view = BYTE_PAIRS
    text = between.join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 200)
        patch.setattr(pieces, "REACH", 100)
        found = Pieces(view, Documents.of([text]), None)
        ids = list(chain.from_iterable(found.all_ids(0)))
    assert ids == view.encode(text) or found.cut_words


def test_the_end_of_a_document_ends_a_piece() -> None:
    near = Pieces(BYTE_PAIRS, Documents.of(["def function"]), None)
    assert [near.border(0, at) for at in (0, 1, 6, 12)] == [0, 3, 12, 12]
    assert near.notes == ()


def test_text_without_spaces_is_cut_and_said(model: Any, small: None) -> None:
    cut = tlg.windows(model, "abcdefgh" * 2000, 16, prepend_bos=True)
    assert "pieces of text end inside a word" in cut.notes[0]
    assert "\ufffd" not in "".join(tlg.windows(model, "日本語" * 3000, 16, prepend_bos=True).notes)


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


def lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: t}) + "\n" for t in texts))
    return path


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("n", [None, 40])
def test_lines_of_a_file_are_as_a_list_of_texts(
    n: int | None, pack: bool, model: Any, small: None, tmp_path: Path
) -> None:
    texts = [TEXT[i * 300 : i * 300 + 20 + 7 * (i % 40)] for i in range(400)]
    path = lines(tmp_path / "a.jsonl", texts)
    options: dict[str, Any] = {"n": n, "prepend_bos": True, "pack": pack}
    a, b = (
        tlg.windows(model, path, 16, field="text", **options),
        tlg.windows(model, texts, 16, **options),
    )
    assert torch.equal(a.tokens, b.tokens)
    assert a.labels is not None
    assert b.labels is not None
    assert [a.names[i] for i in a.labels] == [f"a.jsonl:{1 + int(i)}" for i in b.labels]
    named = tlg.windows(model, [path], 16, field="text", labels=["wiki"], **options)
    assert named.names == ("wiki",)
    assert named.labels is not None
    assert not named.labels.any()


def test_the_command_line_reads_fields_and_joins(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["def f(x): return x", "y = 3"] * 60, "content")
    words = ["fit", "--corpus", str(path), "--length", "16", "--quiet"]
    out = ["--out", str(tmp_path / "basis.safetensors")]
    run = lambda *more: CliRunner().invoke(app, [*words, *out, *more])
    done = run("--field", "content", "--pack")
    assert done.exit_code == 0, done.output
    basis = tlg.PositionContext.load(tmp_path / "basis.safetensors")
    assert basis.names[0] == "a.jsonl:1"
    assert "or pack=True (--pack)" in str(run("--field", "content").exception)
    assert "field 'body' of each line" in str(run("--field", "body").exception)
    assert "Use --field text" in str(run().exception)


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be", "latin-1", "shift_jis", "gb18030"]
)
def test_any_part_of_a_file_is_that_of_its_text(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK", 7)
    text = "one\ntwo\n\nthree " + ("é" * 20 if encoding == "latin-1" else "日本語ab" * 9) + "\n"
    if encoding in ("utf-8", "gb18030"):
        text += "🎉 é"
    path = tmp_path / "a.txt"
    path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    file = TextFile(path, encoding)
    assert file.sizes == [len(text)]
    for start in range(len(text)):
        for stop in (start, start + 1, start + 9, len(text)):
            assert file.read(0, start, stop) == text[start:stop]


def test_a_file_is_not_held(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", 10**6)
    tracemalloc.start()
    try:
        file = TextFile(path)
        assert len(file.read(0, 900_000, 900_100)) == 100
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


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


@pytest.mark.parametrize("what", ["changes", "grows", "vanishes"])
def test_a_file_that_does_not_stay_is_refused(what: str, model: Any, tmp_path: Path) -> None:
    for path, field in (
        (written(tmp_path / "a.txt", 10**5), None),
        (lines(tmp_path / "a.jsonl", [TEXT[:9000]]), "text"),
    ):
        documents = Documents.of(path, field)
        assert documents.read(0, 5, 9) == documents.read(0, 4, 9)[1:]
        if what == "vanishes":
            path.unlink()
        else:
            size = path.stat().st_size + (what == "grows")
            path.write_bytes(b"a" * size)
            os.utime(path, ns=(1, 1))
        fresh = Documents([*documents.origins])
        fresh.origins[0].__dict__["_last"] = (-1, "")
        with pytest.raises(GeometryError, match=r"texts: expected files that stay .*, got a\.\w+,"):
            tlg.windows(model, fresh, 16, prepend_bos=True)


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


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux with /proc"
)
def test_two_gigabytes_fit_into_flat_memory(model: Any, tmp_path: Path) -> None:
    path, part = tmp_path / "large.txt", (TEXT * 4)[: 2**20].encode()
    with path.open("wb") as file:
        for _ in range(2 * 10**9 // len(part) + 1):
            file.write(part)
    sizes = ["--corpus", str(path), "--contexts", "64", "--length", "64", "--quiet"]
    run = lambda *words: CliRunner().invoke(app, [*words, *sizes]).exit_code
    calls = {
        "windows": lambda: len(tlg.windows(model, path, 64, n=500, prepend_bos=True)) - 500,
        "fit": lambda: run("fit", "--out", str(tmp_path / "basis.safetensors")),
        "report": lambda: run("report", "--sections", "overview", "--out", str(tmp_path / "out")),
    }
    for name, call in calls.items():
        before = memory("VmRSS", reset=True)
        assert call() == 0, name
        assert memory("VmHWM") - before < 500e6, name
    path.unlink()


def memory(what: str, *, reset: bool = False) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since a reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = Path("/proc/self/status").read_text().split(f"{what}:")[1].split()
    return 1024 * int(line[0])
