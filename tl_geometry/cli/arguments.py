"""Can a command write where it is asked to, and is an exception an error of the file system or a
bug? Commands call :func:`folder` and :func:`file` before anything heavy is imported;
:mod:`tl_geometry.cli.ending` calls :func:`file_trouble`."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from tl_geometry.base.errors import fail, require
from tl_geometry.base.printable import printable

PLACES = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR),
    *(errno.ENOTDIR, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG),
}
"""Errors of a file system, which a user can correct. They are told in one line. Other errors are
bugs and keep their traceback."""
LONGEST_NAME = 180
"""Most bytes in the name of a file to write. File systems take 255, but a file has a longer name
while it is being written."""


def folder(path: Path) -> None:
    """Make the folder to write to, or say why not; the trial leaves no file behind."""
    _check_length(path)
    _make(path)


def _make(path: Path) -> None:
    """Make a folder with a name of any length that the file system allows."""
    existing = next((part for part in (path, *path.parents) if part.exists()), path)
    got, instead = f"the file {printable(str(existing))}", "another --out"
    is_folder = existing.is_dir() or not existing.exists()
    require(is_folder, "--out", expected="a folder", got=got, instead=instead)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        got = f"{printable(str(path))} ({error.strerror})"
        fail("--out", expected="a folder that can be written to", got=got)


def file(path: Path, *, suffix: str = "") -> None:
    """Make sure that a file can be written at ``path``."""
    _check_length(path)
    shown = printable(str(path))
    require(not path.is_dir(), "--out", expected="a file to write", got=f"the folder {shown}")
    expected = f"a name ending in {suffix}"
    require(path.name.endswith(suffix), "--out", expected=expected, got=shown)
    _make(path.parent)
    writable = not path.exists() or os.access(path, os.W_OK)
    require(writable, "--out", expected="a file that may be written", got=shown)


def _check_length(path: Path) -> None:
    # a folder's name may have 255 bytes; the last part gets the stricter limit (0 if path is empty)
    sizes = [len(part.encode(errors="surrogatepass")) for part in path.parts]
    fits = max(sizes, default=0) <= 255 and sum(sizes[-1:]) <= LONGEST_NAME
    expected = f"a name of at most {LONGEST_NAME} bytes"
    got = printable(f"{path.name[:40]}... ({len(path.name)} characters)")
    require(fits and "\0" not in str(path), "--out", expected=expected, got=got)


def file_trouble(error: BaseException) -> str | None:
    """What a file system says in an exception (safetensors wraps it in its own), or ``None``."""
    if isinstance(error, OSError) and error.errno in PLACES:
        return f"{error.strerror}: {error.filename or 'a file'}"
    text = str(error)
    of_file_system = any(os.strerror(number) in text for number in PLACES)
    return text if of_file_system and type(error).__name__ == "SafetensorError" else None
