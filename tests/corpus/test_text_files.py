"""Files of text and of lines of JSON, as they are read: marks, line ends, encodings, names, and the
sentence of each refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.refusals import refused
from tl_geometry.corpus import text_files
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.text_files import JsonLines, TextFile, read_texts, text_file

STRING = "Use a string, such as path.read_text(encoding=...)."
OPTIONS = (
    "Use tl-geometry fit for a .npy file of token ids, or --encoding utf-16 if that is what it is."
)


def written(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# ---- one text


@pytest.mark.parametrize("block", [1, 3, 2**16])
@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (b"one\r\ntwo\rthree\n", "utf-8", "one\ntwo\nthree\n"),
        ("\ufeffa\ufeffb".encode(), "utf-8", "a\ufeffb"),
        ("aé\ufeff".encode(), "utf-8", "aé\ufeff"),
        (b"\xe9t\xe9", "latin-1", "été"),
        ("été\r\nà".encode("utf-16"), "utf-16", "été\nà"),
        ("été".encode("utf-16-le"), "UTF-16-LE", "été"),
        ("a\U0001f9e0".encode("utf-32"), "utf32", "a\U0001f9e0"),
        (b"", "utf-8", ""),
    ],
)
def test_each_part_of_a_text_is_a_slice_of_it(
    data: bytes,
    encoding: str,
    text: str,
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Line ends are one character, a byte order mark counts only at the beginning, and blocks may
    end anywhere."""
    monkeypatch.setattr(text_files, "BLOCK", block)
    file = TextFile(written(tmp_path / "a.txt", data), encoding)
    assert file.sizes == [len(text)]
    for start in range(len(text) + 1):
        for stop in range(start, len(text) + 1):
            assert file.read(0, start, stop) == text[start:stop]


@pytest.mark.parametrize(
    ("text", "blank"),
    [("", True), (" \n\t", True), ("\ufeff \n", True), ("  a", False), ("a  ", False)],
)
def test_a_text_of_white_space_is_blank(
    text: str, blank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its blocks holds a letter."""
    monkeypatch.setattr(text_files, "BLOCK", 3)
    assert TextFile(written(tmp_path / "a.txt", text)).blank is blank


@pytest.mark.parametrize(
    ("data", "encoding", "place"),
    [
        (b"ab\xffcd", "utf-8", "byte 2 (0xff)"),
        (b"abcdefg\xffcd", "utf-8", "byte 7 (0xff)"),
        (b"abc\xc3(d", "utf-8", "byte 3 (0xc3)"),  # begins in one block, is wrong in the next
        (b"abcd\xc3", "utf-8", "byte 4 (0xc3)"),  # wrong only at the end
        (b"ab\xe9", "ascii", "byte 2 (0xe9)"),
    ],
)
def test_the_first_wrong_byte_is_named(
    data: bytes, encoding: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its offset in the file, with advice for Python or for the command line."""
    monkeypatch.setattr(text_files, "BLOCK", 4)
    path = written(tmp_path / "a.txt", data)
    got = f"expected text in {encoding}, got a.txt, where {place} is none."
    assert refused(lambda: TextFile(path, encoding)) == f"texts: {got} {STRING}"
    option = "Use --encoding latin-1 (or whichever it is), or iconv."
    call = lambda: TextFile(path, encoding, what="--corpus")
    assert refused(call) == f"--corpus: {got} {option}"


def test_files_that_are_no_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zero byte in any block, and an array of ids, by name."""
    monkeypatch.setattr(text_files, "BLOCK", 4)
    binary = written(tmp_path / "a.bin", b"abcdefg\0h")
    array = written(tmp_path / "a.npy", b"text")
    for path in (binary, array):
        got = f"expected text files, got {path.name}."
        assert refused(lambda p=path: TextFile(p)) == f"texts: {got} {STRING}"
        call = lambda p=path: TextFile(p, what="--corpus")
        assert refused(call) == f"--corpus: {got} {OPTIONS}"
    named = refused(lambda: TextFile(binary, name="other"))
    assert "got other." in named


def test_missing_and_locked_files_are_named(tmp_path: Path) -> None:
    """All that are missing, of any kind; the argument that gave them is named."""
    there = written(tmp_path / "a.txt", "a")
    text_files.existing([there])
    missing = [tmp_path / "b.txt", tmp_path]
    shown = f"expected existing text files, got {missing[0]}, {missing[1]}."
    assert refused(lambda: text_files.existing([there, *missing])) == f"--corpus: {shown}"
    assert refused(lambda: text_files.existing(missing, "texts")) == f"texts: {shown}"
    for kind in (lambda p: TextFile(p), lambda p: JsonLines(p, "text")):
        assert refused(lambda k=kind: k(missing[0])) == (
            f"texts: expected existing text files, got {missing[0]}."
        )


def test_a_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for reading, and for nothing else."""
    path = written(tmp_path / "a.txt", "a")
    asked: list[int] = []

    def access(_: Path, mode: int) -> bool:
        asked.append(mode)
        return False

    monkeypatch.setattr(os, "access", access)
    assert refused(lambda: text_files.existing([path], "texts")) == (
        f"texts: expected text files that may be read, got {path}."
    )
    assert asked == [os.R_OK]


@pytest.mark.parametrize("kind", [TextFile, lambda path: JsonLines(path, "text")])
def test_a_file_that_changed_or_went_is_refused(
    kind: Callable[[Path], TextFile | JsonLines], tmp_path: Path
) -> None:
    """Another text of the same length, at another time, is a change too."""
    path = written(tmp_path / "a.txt", '{"text": "a"}')
    file = kind(path)
    assert file.read(0, 0, 1) in ("{", "a")
    stamp = path.stat()
    fresh = kind(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    assert refused(lambda: fresh.read(0, 0, 1)) == (
        "texts: expected files that stay as they are, got a.txt, which changed meanwhile. "
        "Use a copy of it."
    )
    path.unlink()
    assert refused(lambda: fresh.read(0, 0, 1)) == (
        "texts: expected files that stay while they are read, got a.txt, which cannot be read any "
        "more (No such file or directory)."
    )


@pytest.mark.parametrize("name", ["utf-8", "latin-1", "cp1252", "UTF16"])
def test_encodings_are_those_of_python(name: str) -> None:
    """Known names pass."""
    text_files.check_encoding(name)


@pytest.mark.parametrize("name", ["nothing", "undefined", "a\0b", "rot13"])
def test_other_encodings_are_refused(name: str) -> None:
    """Unknown names, the codec that always fails, a zero byte, and what is no encoding of text."""
    assert refused(lambda: text_files.check_encoding(name)) == (
        f"--encoding: expected an encoding that Python knows, such as utf-8 or latin-1, "
        f"got {name!r}."
    )


# ---- lines of JSON


def test_lines_are_documents_with_their_numbers(tmp_path: Path) -> None:
    """Blank lines are skipped but counted; a mark at the beginning is left out."""
    lines = ["\ufeff" + json.dumps({"text": "one", "n": 1}), "", json.dumps({"text": "zwölf"}), " "]
    lines += [json.dumps({"text": ""}), json.dumps({"text": "three"}, ensure_ascii=False)]
    path = written(tmp_path / "a.jsonl", "\n".join(lines))
    file = JsonLines(path, "text")
    texts = ["one", "zwölf", "", "three"]
    assert list(file.sizes) == [3, 5, 0, 5]
    assert [file.read(d, 0, 9) for d in (3, 0, 1, 2, 1)] == [texts[d] for d in (3, 0, 1, 2, 1)]
    assert file.read(1, 1, 3) == "wö"
    assert [file.label(d) for d in range(4)] == [f"a.jsonl:{n}" for n in (1, 3, 5, 6)]
    assert not file.blank
    assert JsonLines(written(tmp_path / "b", '{"text": ""}\n'), "text").blank
    assert JsonLines(written(tmp_path / "c", "\ufeff\n\n"), "text").blank
    documents = Documents.of([path, written(tmp_path / "d.jsonl", '{"text": "x"}')], "text")
    assert [documents.name(d) for d in range(5)] == [
        *(f"a.jsonl:{n}" for n in (1, 3, 5, 6)),
        "d.jsonl:1",
    ]


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("{", "line 2 of a.jsonl, no JSON"),
        (b"\xff", "line 2 of a.jsonl, no JSON"),
        ("[" * 100_000, "line 2 of a.jsonl, no JSON"),
        ("[]", "line 2 of a.jsonl with list"),
        ("{}", "line 2 of a.jsonl with dict"),
        ('{"b": 1, "a\\u202e": 2}', "line 2 of a.jsonl with fields b, a\\u202e"),
        (
            json.dumps(dict.fromkeys("abcdefghij", 0)),
            "line 2 of a.jsonl with fields a, b, c, d, e, f, g, h",
        ),
        ('{"text": 3}', "line 2 of a.jsonl, where it is int"),
        ('{"text": null}', "line 2 of a.jsonl, where it is NoneType"),
    ],
)
def test_a_line_without_the_text_is_named(line: str | bytes, got: str, tmp_path: Path) -> None:
    """By its number in the file, with up to eight of its fields."""
    data = line if isinstance(line, bytes) else line.encode()
    path = written(tmp_path / "a.jsonl", b'{"text": "a"}\n' + data + b"\n")
    expected = "a text in the field 'text' of each line"
    if got.endswith("no JSON"):
        expected = "a JSON object in UTF-8 on each line"
    assert refused(lambda: JsonLines(path, "text")) == f"texts: expected {expected}, got {got}."


# ---- several files


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON"])
def test_lines_of_json_need_a_field(name: str, tmp_path: Path) -> None:
    """By the ending of the file, with advice for Python or for the command line."""
    path = written(tmp_path / name, '{"text": "a"}')
    for what, option in (("texts", "field='text'"), ("--corpus", "--field text")):
        assert refused(lambda w=what: text_file(path, what=w)) == (
            f"{what}: expected text, got lines of JSON, {path}. "
            f"Use {option} (or whichever field holds the text)."
        )
    assert isinstance(text_file(path, field="text"), JsonLines)
    assert text_file(path, field="text", encoding="UTF8").name == name
    assert refused(lambda: text_file(path, field="text", encoding="latin-1")) == (
        "--encoding: expected utf-8 with lines of JSON, got latin-1."
    )


def test_names_have_as_many_folders_as_tell_files_apart(tmp_path: Path) -> None:
    """Their own names where these differ, else one folder more, and so on."""
    paths = [tmp_path / p for p in ("a/x/1.txt", "b/x/1.txt", "b/y/1.txt", "b/y/2.txt")]
    assert text_files.text_names([paths[0], paths[3]]) == ["1.txt", "2.txt"]
    assert text_files.text_names([paths[0], paths[2]]) == ["x/1.txt", "y/1.txt"]
    assert text_files.text_names(paths) == ["a/x/1.txt", "b/x/1.txt", "b/y/1.txt", "b/y/2.txt"]
    assert text_files.text_names([]) == []
    twice = [paths[0], paths[3], tmp_path / "b/../a/x/1.txt"]
    assert refused(lambda: text_files.text_names(twice)) == (
        f"--corpus: expected each file once, got {twice[2]} twice."
    )
    assert refused(lambda: text_files.text_names(twice, "texts")).startswith("texts: ")


def test_files_of_white_space_are_refused_by_name(tmp_path: Path) -> None:
    """All of them, of either kind."""
    full = written(tmp_path / "a.txt", "text\r\n")
    empty = [written(tmp_path / name, " \n") for name in ("b.txt", "c.txt")]
    assert refused(lambda: text_files.text_files([full, *empty])) == (
        "--corpus: expected files with text in them, got b.txt, c.txt empty."
    )
    assert read_texts([full]) == (["text\n"], ["a.txt"])
    latin = written(tmp_path / "d.txt", b"\xe9")
    assert read_texts([latin, full], "latin-1") == (["é", "text\n"], ["d.txt", "a.txt"])
    assert refused(lambda: read_texts([latin], what="--text")).startswith("--text: expected text")
    assert refused(lambda: read_texts([full], "nothing")).startswith("--encoding: expected")
    lines = written(tmp_path / "e.jsonl", '{"t": "one"}')
    (file,) = text_files.text_files([lines], field="t")
    assert file.read(0, 0, 3) == "one"
