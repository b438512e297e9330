"""Large text and its forms: files of bytes that are no text, lines of JSON, short documents,
encodings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tl_geometry as tlg
from tests.bad_inputs.cases import TEXT, Call, Command, World, fit

CODE = "def f(x):\n    return x + 1\n" * 40


def cut(world: World, texts: Any, length: int = 8, **options: Any) -> tlg.TokenWindows:
    return tlg.windows(world.model, texts, length, **{"prepend_bos": True, **options})


def of_file(content: bytes, name: str = "a.txt", **options: Any) -> Callable[[World], Any]:
    """Windows of a file with this content."""
    return lambda w: cut(w, w.path(name, content), **options)


def of_lines(*lines: Any, **options: Any) -> Callable[[World], Any]:
    """Windows of a file with a line of JSON for each of these."""
    content = "".join(json.dumps(line) + "\n" for line in lines)
    return of_file(content.encode(), "a.jsonl", **{"field": "text", **options})


def as_code(world: World, found: tlg.TokenWindows) -> bool:
    return found.tokens.equal(cut(world, CODE).tokens)


LINE = {"text": CODE}
CALLS: list[Call] = [
    Call("a file with a byte order mark", of_file(b"\xef\xbb\xbf" + CODE.encode()), check=as_code),
    Call(
        "a file with Windows line ends", of_file(CODE.replace("\n", "\r\n").encode()), None, as_code
    ),
    Call("a file with Mac line ends", of_file(CODE.replace("\n", "\r").encode()), None, as_code),
    Call("an empty file", of_file(b""), "at most 0"),
    Call("a file of spaces", of_file(b" \n" * 3), "at least 7 tokens"),
    Call("a file with zero bytes", of_file(b"abc\0" * 99), "text files"),
    Call(
        "a wrong byte far in a file",
        of_file(b"abc def " * 20_000 + b"\xff" + b"abc " * 999),
        r"byte 160000 \(0xff\)",
    ),
    Call("a file that ends in half a character", of_file(CODE.encode() + b"\xe2\x82"), "byte 1080"),
    Call("a file in UTF-16", of_file(CODE.encode("utf-16")), "text files|utf-8"),
    Call("a folder as text", lambda w: cut(w, w.folder), "existing text files"),
    Call("a file of ids as text", of_file(b"\x93NUMPY", "a.npy"), "text files"),
    Call(
        "one line without spaces",
        of_file(b"abcdefgh" * 20_000, n=3),
        check=lambda w, v: "inside a word" in v.notes[0],
    ),
    Call(
        "one line of another script",
        of_file("日本語、".encode() * 30_000, n=3),
        check=lambda w, v: len(v) == 3,
    ),
    Call("half of a pair of UTF-16", lambda w: cut(w, "abc \ud800 " * 99), "surrogate U.D800"),
    Call("half of a pair in a line", of_lines({"text": "abc \ud800" * 99}), "surrogate U.D800"),
    Call("bytes as text", lambda w: cut(w, CODE.encode()), "string"),
    Call("a text among numbers", lambda w: cut(w, [CODE, 7]), "string"),
    Call("a text and a file", lambda w: cut(w, [CODE, w.path("a.txt", CODE)])),
    Call("lines without a field", of_lines(LINE, field=None), "lines of JSON.* field='text'"),
    Call("lines with a field", of_lines(LINE), check=as_code),
    Call(
        "lines with blank ones, a mark and Windows ends",
        of_file(f"\ufeff{json.dumps(LINE)}\r\n\r\n \n".encode(), "a.jsonl", field="text"),
        check=as_code,
    ),
    Call("lines of another field", of_lines(LINE, {"body": "x"}), "line 2 of a.jsonl with .*body"),
    Call("a field that is a number", of_lines(LINE, {"text": 7}), "line 2 .* it is int"),
    Call("a field that is null", of_lines(LINE, {"text": None}), "line 2 .* it is NoneType"),
    Call("lines that are lists", of_lines(["a", "b"]), "line 1 of a.jsonl with list"),
    Call(
        "a line that is cut",
        of_file(f'{json.dumps(LINE)}\n{{"text": "de'.encode(), "a.jsonl", field="text"),
        "line 2 of a.jsonl, no JSON",
    ),
    Call("a line in Latin-1", of_file(b'{"text": "\xe9"}', field="text"), "line 1 .* no JSON"),
    Call("a line of many brackets", of_file(b"[" * 99_999, field="text"), "line 1 .* no JSON"),
    Call("no lines", of_file(b"\n\n", "a.jsonl", field="text"), "text"),
    Call("a field of a string", lambda w: cut(w, CODE, field="text"), "field: expected None"),
    Call(
        "a column that is not there",
        lambda w: cut(w, {"text": [CODE]}, field="body"),
        "a column named 'body'",
    ),
    Call("short texts", lambda w: cut(w, ["x = 1"] * 99), r"pack=True \(--pack\)"),
    Call("short texts, joined", lambda w: cut(w, ["x = 1"] * 99, pack=True)),
    Call("too short, joined", lambda w: cut(w, ["x"] * 3, 64, pack=True), "Use a shorter length="),
    Call("empty texts, joined", lambda w: cut(w, [""] * 3, pack=True), "at most 0"),
    Call("pack that is a number", lambda w: cut(w, CODE, pack=2), "pack: expected True, False"),
    Call("half a window", lambda w: cut(w, CODE, n=2.5), "n: expected a number of windows"),
    Call("no windows", lambda w: cut(w, CODE, n=0), "n: expected 1 to"),
    Call("a seed of 2**70", lambda w: cut(w, CODE, n=2, seed=2**70), "seed: expected a whole"),
    Call("a label that is a number", lambda w: cut(w, CODE, labels=5), "labels: expected one"),
    Call("a label for each line", of_lines(LINE, LINE, labels=["a", "b"]), "each of 1 texts"),
    Call("prepend_bos in words", lambda w: cut(w, CODE, prepend_bos="no"), "True or False"),
]


def vanished(world: World) -> Any:
    from tl_geometry.corpus.documents import Documents

    documents = Documents.of(world.path("a.txt", CODE))
    Path(world.folder / "a.txt").unlink()
    return cut(world, documents)


def changed(world: World) -> Any:
    from tl_geometry.corpus.documents import Documents

    documents = Documents.of(world.path("a.txt", CODE))
    world.path("a.txt", CODE + "more")
    return cut(world, documents)


CALLS += [
    Call("a file that vanishes", vanished, "a.txt, which cannot be read any more"),
    Call("a file that changes", changed, "a.txt, which changed meanwhile"),
]
LINES = (("a.jsonl", json.dumps(LINE).encode()),)
SHORT = (("a.jsonl", b'{"text": "x = 1"}\n' * 99),)


def lines(*words: str) -> tuple[str, ...]:
    return ("fit", "--corpus", "a.jsonl", "--length", "16", "--quiet", *words)


COMMANDS: list[Command] = [
    Command("the encoding undefined", fit("--encoding", "undefined"), "encoding.*undefined", TEXT),
    Command("an encoding of bytes", fit("--encoding", "hex"), "--encoding: expected", TEXT),
    Command("an encoding of letters", fit("--encoding", "rot13"), "--encoding: expected", TEXT),
    Command("an encoding that is empty", fit("--encoding", ""), "--encoding: expected", TEXT),
    Command("lines without --field", lines(), "Use --field text", LINES),
    Command("lines of another field", lines("--field", "body"), "field 'body'", LINES),
    Command("lines that are text", fit("--field", "text"), "line 1 of a.txt, no JSON", TEXT),
    Command("a field without files", ("report", "--field", "text"), "--field: expected files"),
    Command(
        "lines in Latin-1",
        lines("--field", "text", "--encoding", "latin-1"),
        "utf-8 with lines of JSON",
        LINES,
    ),
    Command(
        "ids that are joined",
        ("fit", "--corpus", "t.npy", "--pack"),
        "--pack: expected text",
        (("t.npy", b"\x93NUMPY"),),
    ),
    Command("short lines", lines("--field", "text"), r"pack=True \(--pack\)", SHORT),
    Command(
        "a wrong byte far in a corpus",
        fit(),
        r"byte 80000 \(0xe9\)",
        (("a.txt", b"abc def " * 10_000 + b"\xe9 " + b"abc " * 999),),
    ),
]
