"""How is a text file of any size read from any character without holding it? For
:func:`tl_geometry.windows` and the command line. A file is first read from beginning to end, which
checks it, and then from any place.

A file is decoded block by block, and the state of the decoder before each block is kept, so that in
any encoding a later reading can begin at a block. Places are counted in characters, as in a string.
"""

from __future__ import annotations

import bisect
import codecs
import io
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tl_geometry.base.errors import fail, require
from tl_geometry.base.printable import printable

BLOCK = 2**16
"""Bytes that are decoded at a time."""
ZEROS = ("utf-16", "utf-32", "utf_16", "utf_32", "utf16", "utf32")
"""Encodings whose text files can hold zero bytes; in any other a file with one is not text."""
BOM = "\ufeff"
"""The byte order mark, decoded."""
STRING = "a string, such as path.read_text(encoding=...)"
OPTIONS = "tl-geometry fit for a .npy file of token ids, or --encoding utf-16 if that is what it is"
"""What error messages advise in place of a file that is not text: in Python, and on the command
line."""


def check_encoding(encoding: str) -> None:
    """Refuse a name that Python does not know as an encoding of text."""
    try:
        valid = bool("a".encode(encoding))
    # ValueError: the codec "undefined", which always fails, or a zero byte in the name
    except (LookupError, ValueError):
        valid = False
    expected = "an encoding that Python knows, such as utf-8 or latin-1"
    require(valid, "--encoding", expected=expected, got=repr(encoding))


def existing(paths: Sequence[Path], what: str = "--corpus") -> None:
    """Refuse paths that are not files, and files without permission to read; ``what`` names the
    argument or option that gave them."""
    missing = [printable(str(p)) for p in paths if not p.is_file()]
    require(not missing, what, expected="existing text files", got=", ".join(missing))
    locked = [printable(str(p)) for p in paths if not os.access(p, os.R_OK)]
    require(not locked, what, expected="text files that may be read", got=", ".join(locked))


class _File:
    """A file that must not change after it was first read (by size, time of change and inode);
    ``what`` names the argument or option that gave it."""

    def __init__(self, path: Path, name: str | None, what: str) -> None:
        existing([path], what)
        self.path, self.what = path, what
        self.name = name or printable(path.name)
        with path.open("rb") as file:
            self._stamp = _stamp(file)

    def _opened(self) -> BinaryIO:
        """The file, opened; refused if it changed since it was first read."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            got = f"{self.name}, which cannot be read any more ({error.strerror})"
            fail(self.what, expected="files that stay while they are read", got=got)
        self._unchanged(file)
        return file

    def _unchanged(self, file: BinaryIO) -> None:
        if _stamp(file) != self._stamp:
            file.close()
            got = f"{self.name}, which changed meanwhile"
            fail(self.what, expected="files that stay as they are", got=got, instead="a copy of it")


def _stamp(file: BinaryIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino


class TextFile(_File):
    r"""One text in a file; line ends are read as ``"\n"``, and a byte order mark is left out.

    The constructor decodes the whole file. A file that is not text in ``encoding`` is refused, with
    the offset of the first wrong byte. ``blank`` says that it holds only whitespace.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.txt"
    ...     _ = path.write_bytes(b"one\r\ntwo")
    ...     TextFile(path).read(0, 2, 5)
    'e\nt'
    """

    def __init__(
        self, path: Path, encoding: str = "utf-8", *, name: str | None = None, what: str = "texts"
    ) -> None:
        super().__init__(path, name, what)
        self.encoding, self.blank, self._skip = encoding, True, 0
        self._marks: list[tuple[int, Any]] = []  # before each block: characters, decoder's state
        self._require_text(path.suffix != ".npy")
        with self._opened() as file:
            size = sum(self._blocks(file))
            self._unchanged(file)
        self.sizes = [size - self._skip]

    def read(self, document: int, start: int, stop: int) -> str:
        """Characters ``start`` to ``stop``, as a slice of a string; ``document`` is always 0."""
        start, stop = start + self._skip, stop + self._skip
        # the state of the decoder is known only at the beginnings of blocks
        block = bisect.bisect_right(self._marks, start, key=lambda mark: mark[0]) - 1
        before, state = self._marks[block]
        decoder, parts, decoded = self._decoder(), [], before
        decoder.setstate(state)
        with self._opened() as file:
            file.seek(block * BLOCK)
            while decoded < stop:
                raw = file.read(BLOCK)
                parts.append(decoder.decode(raw, final=not raw))
                decoded += len(parts[-1])
                if not raw:
                    break
        return "".join(parts)[start - before : stop - before]

    def _decoder(self) -> io.IncrementalNewlineDecoder:
        return io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder(self.encoding)(), translate=True
        )

    def _blocks(self, file: BinaryIO) -> Iterator[int]:
        """Decode the file from its beginning, set the marks, and yield the length of each block in
        characters."""
        # raw: anything but the empty block, which ends the loop
        size, decoder, raw = 0, self._decoder(), b"-"
        zeros = self.encoding.lower().startswith(ZEROS)
        while raw:
            self._marks.append((size, decoder.getstate()))
            raw = file.read(BLOCK)
            self._require_text(zeros or b"\0" not in raw)
            decoded = self._decoded(decoder, raw, file.tell())
            # elsewhere in a file the same code point is a character, not a mark
            if not size and decoded.startswith(BOM):
                self._skip = 1
            self.blank = self.blank and not decoded.removeprefix(BOM).strip()
            size += len(decoded)
            yield len(decoded)

    def _require_text(self, fits: bool) -> None:
        instead = OPTIONS if self.what.startswith("-") else STRING
        require(fits, self.what, expected="text files", got=self.name, instead=instead)

    def _decoded(self, decoder: io.IncrementalNewlineDecoder, raw: bytes, end: int) -> str:
        try:
            return decoder.decode(raw, final=not raw)
        except UnicodeError as error:
            place = "it"
            if isinstance(error, UnicodeDecodeError):
                # error.object may begin with undecoded bytes of the block before
                wrong = error.object[error.start]
                place = f"byte {end - len(error.object) + error.start} (0x{wrong:02x})"
            option = "--encoding latin-1 (or whichever it is), or iconv"
            got = f"{self.name}, where {place} is none"
            instead = option if self.what.startswith("-") else STRING
            fail(self.what, expected=f"text in {self.encoding}", got=got, instead=instead)


class JsonLines(_File):
    """Texts in a file whose lines are JSON objects in UTF-8: ``field`` of each line is a document.
    A line is read again when its text is needed; blank lines are skipped."""

    def __init__(
        self, path: Path, field: str, *, name: str | None = None, what: str = "texts"
    ) -> None:
        super().__init__(path, name, what)
        self._field, self._last = field, (-1, "")
        self._starts, self._numbers, self.sizes = array("q"), array("q"), array("q")
        start = 0
        with self._opened() as file:
            for number, line in enumerate(file, 1):
                if line.strip().strip(BOM.encode()):
                    self.sizes.append(len(self._text(line, number)))
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)
            self._unchanged(file)
        self.blank = not any(self.sizes)

    def read(self, document: int, start: int, stop: int) -> str:
        """Characters ``start`` to ``stop`` of one of the texts."""
        if self._last[0] != document:  # the last text is kept: a long one is read in pieces
            with self._opened() as file:
                file.seek(self._starts[document])
                self._last = document, self._text(file.readline(), self._numbers[document])
        return self._last[1][start:stop]

    def label(self, document: int) -> str:
        """Name of a document: file and line."""
        return f"{self.name}:{self._numbers[document]}"

    def _text(self, line: bytes, number: int) -> str:
        where = f"line {number} of {self.name}"
        try:
            record = json.loads(line.decode().removeprefix(BOM))
        except (ValueError, RecursionError):
            fail(self.what, expected="a JSON object in UTF-8 on each line", got=f"{where}, no JSON")
        if not isinstance(record, dict) or not isinstance(record.get(self._field), str):
            keys = ", ".join(map(printable, list(record)[:8])) if isinstance(record, dict) else ""
            got = f"{where} with {f'fields {keys}' if keys else type(record).__name__}"
            if isinstance(record, dict) and self._field in record:
                got = f"{where}, where it is {type(record[self._field]).__name__}"
            fail(self.what, expected=f"a text in the field {self._field!r} of each line", got=got)
        return record[self._field]


def text_file(
    path: Path,
    *,
    encoding: str = "utf-8",
    field: str | None = None,
    name: str | None = None,
    what: str = "texts",
) -> TextFile | JsonLines:
    """A file as one text, or, where ``field`` is given, as one text for each of its lines. A
    ``what`` that begins with "-" is an option of the command line, and errors advise options."""
    option = "--field text" if what.startswith("-") else "field='text'"
    if field is None:
        lines = path.suffix.lower() in (".jsonl", ".ndjson")
        instead = f"{option} (or whichever field holds the text)"
        require(not lines, what, expected="text", got=f"lines of JSON, {path}", instead=instead)
        return TextFile(path, encoding, name=name, what=what)
    utf8 = codecs.lookup(encoding).name == "utf-8"
    require(utf8, "--encoding", expected="utf-8 with lines of JSON", got=encoding)
    return JsonLines(path, field, name=name, what=what)


def text_names(paths: Sequence[Path], what: str = "--corpus") -> list[str]:
    """A name for each text file: its base name, preceded by as many folders as make all names
    differ. The same file twice is refused."""
    real = [p.resolve() for p in paths]
    twice = [str(p) for i, p in enumerate(paths) if real[i] in real[:i]]
    require(not twice, what, expected="each file once", got=f"{printable(', '.join(twice))} twice")
    deepest = max((len(r.parts) for r in real), default=0)
    for depth in range(1, 1 + deepest):
        # more parts of each path until no two names are equal
        names = [printable("/".join(r.parts[-depth:])) for r in real]
        if len(set(names)) == len(names):
            return names
    return [printable(str(r)) for r in real]


def text_files(
    paths: Sequence[Path],
    encoding: str = "utf-8",
    what: str = "--corpus",
    *,
    field: str | None = None,
) -> list[TextFile | JsonLines]:
    """Text files, each read once to check it. A file that is not text, not in ``encoding`` or
    empty is refused by name; no byte is replaced. ``field``: the texts are in that field of each
    line."""
    existing(paths, what)
    check_encoding(encoding)
    files = [
        text_file(path, encoding=encoding, field=field, name=name, what=what)
        for path, name in zip(paths, text_names(paths, what), strict=True)
    ]
    empty = [file.name for file in files if file.blank]
    require(not empty, what, expected="files with text in them", got=f"{', '.join(empty)} empty")
    return files


def read_texts(
    paths: Sequence[Path], encoding: str = "utf-8", what: str = "--corpus"
) -> tuple[list[str], list[str]]:
    """The whole texts of files, and their names, checked as by :func:`text_files`."""
    files = text_files(paths, encoding, what)
    return [f.read(0, 0, f.sizes[0]) for f in files], [f.name for f in files]
