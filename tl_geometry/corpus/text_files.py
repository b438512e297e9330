"""Reads text files of any size for windows and for the command line: first from beginning to end,
which checks them, and then from any place.

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
"""Encodings whose files hold zero bytes; in any other such a file is no text."""
BOM = "\ufeff"
"""The byte order mark, decoded."""
STRING = "a string, such as path.read_text(encoding=...)"
"""What a message advises to pass in place of a file that is no text."""


def check_encoding(encoding: str) -> None:
    """Refuse what is no encoding of text that Python knows."""
    try:
        valid = bool("a".encode(encoding))
    # ValueError: "undefined", which always fails, or a zero byte in the name
    except (LookupError, ValueError):
        valid = False
    expected = "an encoding that Python knows, such as utf-8 or latin-1"
    require(valid, "--encoding", expected=expected, got=repr(encoding))


def existing(paths: Sequence[Path], what: str = "--corpus") -> None:
    """Refuse paths that are no files, and files that may not be read."""
    missing = [printable(str(p)) for p in paths if not p.is_file()]
    require(not missing, what, expected="existing text files", got=", ".join(missing))
    locked = [printable(str(p)) for p in paths if not os.access(p, os.R_OK)]
    require(not locked, what, expected="text files that may be read", got=", ".join(locked))


class _File:
    """A file that must stay as it was when it was first read; ``what`` names the argument that gave
    it."""

    def __init__(self, path: Path, name: str | None, what: str) -> None:
        existing([path], what)
        self.path, self.what = path, what
        self.name = name or printable(path.name)
        with path.open("rb") as file:
            self._stamp = _stamp(file)

    def _opened(self) -> BinaryIO:
        """The file, opened, if it is still as it was when it was first read."""
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
    r"""One text in a file; line ends are ``"\n"``, a byte order mark is left out.

    The constructor decodes the whole file: what is no text in ``encoding`` is refused by the offset
    of the first wrong byte. ``blank`` says that there are only spaces and line ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.txt"
    ...     _ = path.write_bytes(b"one\r\ntwo")
    ...     TextFile(path).read(0, 2, 5)
    'e\nt'
    """

    def __init__(
        self,
        path: Path,
        encoding: str = "utf-8",
        *,
        name: str | None = None,
        what: str = "texts",
        binary: str = STRING,
    ) -> None:
        super().__init__(path, name, what)
        self.encoding, self.blank, self._skip = encoding, True, 0
        self._binary = binary
        self._marks: list[tuple[int, Any]] = []  # before each block: characters, decoder's state
        require(path.suffix != ".npy", what, expected="text files", got=self.name, instead=binary)
        with self._opened() as file:
            size = sum(self._blocks(file))
            self._unchanged(file)
        self.sizes = [size - self._skip]

    def read(self, document: int, start: int, stop: int) -> str:
        """Characters ``start`` to ``stop``, as of a string."""
        start, stop = start + self._skip, stop + self._skip
        # where a block begins the decoder's state is known, whatever the encoding
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
        """Decode the file from its beginning, set the marks, and give the length of each block."""
        size, decoder, raw = 0, self._decoder(), b"-"  # anything but empty, which ends the loop
        zeros = self.encoding.lower().startswith(ZEROS)
        while raw:
            self._marks.append((size, decoder.getstate()))
            raw = file.read(BLOCK)
            text = zeros or b"\0" not in raw
            require(text, self.what, expected="text files", got=self.name, instead=self._binary)
            decoded = self._decoded(decoder, raw, file.tell())
            # only at the beginning of a file is it a mark, not a character
            if not size and decoded.startswith(BOM):
                self._skip = 1
            self.blank = self.blank and not decoded.removeprefix(BOM).strip()
            size += len(decoded)
            yield len(decoded)

    def _decoded(self, decoder: io.IncrementalNewlineDecoder, raw: bytes, end: int) -> str:
        try:
            return decoder.decode(raw, final=not raw)
        except UnicodeError as error:
            place = "it"
            if isinstance(error, UnicodeDecodeError):
                # error.object begins with bytes of the last block
                wrong = error.object[error.start]
                place = f"byte {end - len(error.object) + error.start} (0x{wrong:02x})"
            option = "--encoding latin-1 (or whichever it is), or iconv"
            got = f"{self.name}, where {place} is none"
            instead = option if self.what.startswith("-") else STRING
            fail(self.what, expected=f"text in {self.encoding}", got=got, instead=instead)


class JsonLines(_File):
    """Texts in a file whose lines are JSON objects in UTF-8: one field of each line. A line is read
    again whenever its text is wanted; blank lines do not count."""

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
        if self._last[0] != document:  # a long text is read in pieces
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
    binary: str = STRING,
) -> TextFile | JsonLines:
    """A file as one text, or, where ``field`` is given, as one text for each of its lines."""
    option = "--field text" if what.startswith("-") else "field='text'"
    if field is None:
        lines = path.suffix.lower() in (".jsonl", ".ndjson")
        instead = f"{option} (or whichever field holds the text)"
        require(not lines, what, expected="text", got=f"lines of JSON, {path}", instead=instead)
        return TextFile(path, encoding, name=name, what=what, binary=binary)
    utf8 = codecs.lookup(encoding).name == "utf-8"
    require(utf8, "--encoding", expected="utf-8 with lines of JSON", got=encoding)
    return JsonLines(path, field, name=name, what=what)


def text_names(paths: Sequence[Path], what: str = "--corpus") -> list[str]:
    """A name for each text file: its base name, with as many folders before it as tell them apart;
    the same file twice is refused."""
    real = [p.resolve() for p in paths]
    twice = [str(p) for i, p in enumerate(paths) if real[i] in real[:i]]
    require(not twice, what, expected="each file once", got=f"{printable(', '.join(twice))} twice")
    deepest = max((len(r.parts) for r in real), default=0)
    for depth in range(1, 1 + deepest):
        # so many parts of each path, until no two names are alike
        names = [printable("/".join(r.parts[-depth:])) for r in real]
        if len(set(names)) == len(names):
            return names
    return [printable(str(r)) for r in real]


TOKENS = "tl-geometry fit for a .npy file of token ids"
"""What a message advises for a file of token ids."""


def text_files(
    paths: Sequence[Path],
    encoding: str = "utf-8",
    what: str = "--corpus",
    *,
    field: str | None = None,
    binary: str = "--encoding utf-16 if that is what it is",
) -> list[TextFile | JsonLines]:
    """Text files, read once; what is no text, or not in ``encoding``, is refused by name rather
    than mended. ``field``: the texts are in that field of each line."""
    existing(paths, what)
    check_encoding(encoding)
    options = {"encoding": encoding, "field": field, "what": what, "binary": binary}
    names = text_names(paths, what)
    files = [text_file(p, name=n, **options) for p, n in zip(paths, names, strict=True)]
    empty = [file.name for file in files if file.blank]
    require(not empty, what, expected="files with text in them", got=f"{', '.join(empty)} empty")
    return files


def read_texts(
    paths: Sequence[Path], encoding: str = "utf-8", what: str = "--corpus"
) -> tuple[list[str], list[str]]:
    """Texts and names of files, as :func:`text_files`, whole."""
    files = text_files(paths, encoding, what)
    return [f.read(0, 0, f.sizes[0]) for f in files], [f.name for f in files]
