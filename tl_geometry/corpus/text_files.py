"""What text is in a file? One piece of a file of any size, or all of it (:func:`read_text`), for
:func:`tl_geometry.windows` and the command line, which checks its files before torch is
imported."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from pathlib import Path

from tl_geometry.base.errors import require
from tl_geometry.base.html import plain

NO_TEXT = (".npy", ".jsonl", ".ndjson")
"""Endings of files that hold token ids, or texts in lines of JSON."""
INSTEAD = "numpy.load, a column of datasets.load_dataset, or path.read_text(encoding=...)"


def require_files(paths: Sequence[Path], what: str = "texts") -> None:
    """Refuse paths that are not files of text."""
    wrong = [str(p) for p in paths if p.suffix.lower() in NO_TEXT or not p.is_file()]
    expected, got = "existing text files that may be read", plain(", ".join(wrong))
    require(not wrong, what, expected=expected, got=got, instead=INSTEAD)


def read_text(path: Path, start: int = 0, stop: int | None = None, *, what: str = "texts") -> str:
    """The text in bytes ``start`` to ``stop`` of a file (by default all of it), without UTF-8
    characters that are cut at the two ends; line ends are read as a newline, and a byte order mark
    is left out. A file that is not text in UTF-8 is refused by name."""
    require_files([path], what)
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(-1 if stop is None else stop - start)
    # bytes 0x80 to 0xBF continue a character that begins before the piece
    data = re.sub(rb"\A[\x80-\xbf]{1,3}", b"", data) if start else data
    whole = stop is None or stop >= path.stat().st_size
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeError:
        text = "\0"
    expected, got = "text in UTF-8", f"{plain(path.name)}, which is none"
    require("\0" not in text, what, expected=expected, got=got, instead=INSTEAD)
    return text.replace("\r\n", "\n").replace("\r", "\n")
