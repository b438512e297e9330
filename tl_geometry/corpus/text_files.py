"""What text is in a file? Whole files (:func:`read_texts`) and one piece of a file of any size
(:func:`read_piece`), for :func:`tl_geometry.windows` and the command line, which checks its files
before torch is imported."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tl_geometry.base.errors import fail, require
from tl_geometry.base.printable import printable

NO_TEXT = (".npy", ".jsonl", ".ndjson")
"""Endings of files that hold token ids, or texts in lines of JSON."""
INSTEAD = "numpy.load, a column of datasets.load_dataset, or path.read_text(encoding=...)"


def require_files(paths: Sequence[Path], what: str = "texts") -> None:
    """Refuse paths that are not files of text that may be read."""
    wrong = [
        printable(str(path))
        for path in paths
        if path.suffix.lower() in NO_TEXT or not (path.is_file() and os.access(path, os.R_OK))
    ]
    expected, got = "existing text files that may be read", ", ".join(wrong)
    require(not wrong, what, expected=expected, got=got, instead=INSTEAD)


def read_piece(path: Path, start: int, stop: int, what: str = "texts") -> str:
    """The text in bytes ``start`` to ``stop`` of a UTF-8 file, without characters that are cut at
    the two ends; line ends are read as a newline, and a byte order mark is left out."""
    require_files([path], what)
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    # bytes 0x80 to 0xBF continue a character that begins before the piece
    data = re.sub(rb"\A[\x80-\xbf]{1,3}", b"", data) if start else data
    encoding = "utf-8" if start else "utf-8-sig"
    return _decoded(data, encoding, path, what, final=stop >= path.stat().st_size)


def read_texts(
    paths: Sequence[Path], encoding: str = "utf-8", what: str = "--corpus"
) -> tuple[list[str], list[str]]:
    """The whole texts of files, and a name for each. A file that is not text in ``encoding``, or
    empty, is refused by name."""
    require_files(paths, what)
    codec = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding
    texts = [_decoded(path.read_bytes(), codec, path, what) for path in paths]
    empty = ", ".join(printable(path.name) for path, text in zip(paths, texts) if not text.strip())
    require(not empty, what, expected="files with text in them", got=f"{empty} empty")
    return texts, file_names(paths)


def file_names(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with its folders where two files have one name; a file that is given
    twice is refused."""
    places = [path.resolve() for path in paths]
    twice = [printable(str(p)) for p, at in zip(paths, places) if places.count(at) > 1]
    require(not twice, "--corpus", expected="each file once", got=", ".join(twice))
    unique = len({path.name for path in paths}) == len(paths)
    return [printable(path.name if unique else str(path)) for path in paths]


def _decoded(data: bytes, encoding: str, path: Path, what: str, *, final: bool = True) -> str:
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data, final=final)
        reason = "which holds zero bytes" if "\0" in text else ""
    except (UnicodeError, LookupError) as error:
        text, reason = "", f"which is none ({error})"
    if reason:
        got = f"{printable(path.name)}, {reason}"
        fail(what, expected=f"text in the encoding {encoding}", got=got, instead=INSTEAD)
    return text.replace("\r\n", "\n").replace("\r", "\n")
