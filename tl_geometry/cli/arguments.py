"""Arguments of the command line, checked before anything heavy is imported: numbers, choices, files
to read and places to write."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.printable import printable
from tl_geometry.corpus.text_files import TOKENS, text_files
from tl_geometry.models.names import CLASSES, DTYPES
from tl_geometry.report.contents import SECTIONS

PLACES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EFBIG,
    errno.EIO,
    errno.ENAMETOOLONG,
}
"""Errors of a file system, which a user can mend: one line. Others are ours and keep their
traceback."""
LONGEST_NAME = 180
"""Bytes of a file name: file systems take 255, and what is written aside adds to it."""


def at_least(value: int | None, low: int, what: str, *, instead: str | None = None) -> None:
    """Refuse a number below ``low``; ``None`` is the default and passes."""
    require(
        value is None or value >= low, what, expected=f"{low} or more", got=value, instead=instead
    )


def sections(text: str | None) -> tuple[str, ...] | None:
    """Names of sections separated by commas, in reading order; ``None`` for all.

    >>> sections("weights, heads")
    ('heads', 'weights')
    """
    if text is None:
        return None
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in SECTIONS]
    known = f"some of {', '.join(SECTIONS)}"
    require(wanted and not unknown, "--sections", expected=known, got=", ".join(unknown) or "none")
    return tuple(name for name in SECTIONS if name in wanted)


def model_options(name: str | None, *, model_class: str, dtype: str, device: str) -> None:
    """Check class, dtype, device and, where the model is a path, that there is a model."""
    choice(model_class, CLASSES, "--class")
    choice(dtype, DTYPES, "--dtype")
    check_device(device)
    if name is None:
        return
    require(
        name.strip(),
        "model",
        expected="a name, a directory, or nothing for the embedded model",
        got=repr(name),
    )
    place = Path(name).expanduser()
    looks_like_path = name.startswith(("/", ".", "~", "\\")) or place.is_dir() or place.is_file()
    if looks_like_path and not (place / "config.json").is_file():
        if place.is_dir():
            got = f"{printable(place.name or str(place))} without one"
        else:
            got = f"{'a file' if place.is_file() else 'no directory'} {printable(name)}"
        expected = "a Hugging Face directory with config.json, or a name that TransformerLens knows"
        fail("model", expected=expected, got=got)


def check_device(device: str) -> None:
    """Refuse what is no device, and a GPU that is not there (only then torch is imported)."""
    known = re.fullmatch(r"cpu|mps|cuda(:\d+)?", device) is not None
    require(known, "--device", expected="cpu, cuda, cuda:1 or mps", got=repr(device))
    if device == "cpu":
        return
    import torch

    if device == "mps":
        require(
            torch.backends.mps.is_available(),
            "--device",
            expected="a machine with MPS",
            got="none",
            instead="--device cpu",
        )
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    got = f"{count} CUDA devices" if count else "no CUDA device"
    require(
        index < count,
        "--device",
        expected=f"a machine with {device}",
        got=got,
        instead="--device cpu",
    )


def check_corpus(
    paths: Sequence[Path] | None,
    encoding: str,
    *,
    field: str | None = None,
    pack: bool = False,
    tokens: bool = False,
) -> None:
    """Read all text files once, so that what cannot be read is said at once; ``tokens``: one
    ``.npy`` file of ids will do."""
    ids = tokens and bool(paths) and any(p.suffix == ".npy" for p in paths or ())
    told = " ".join(["--field"] * (field is not None) + ["--pack"] * pack)
    require(not (ids and told), told, expected="text files in --corpus", got="token ids")
    require(
        paths or field is None,
        "--field",
        expected="files of JSON lines in --corpus",
        got="none",
    )
    if not paths:
        return
    if ids:
        expected = "one existing .npy file"
        require(
            len(paths) == 1 and paths[0].is_file(),
            "--corpus",
            expected=expected,
            got=printable(", ".join(map(str, paths))),
        )
        return
    text_files(paths, encoding, field=field, binary=TOKENS)


def folder(path: Path, what: str = "--out") -> None:
    """Make a folder to write to, or say why not; nothing is left behind by trying."""
    _no_file_in_the_way(path, what)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        fail(
            what,
            expected="a folder that can be written to",
            got=f"{printable(str(path))} ({error.strerror})",
        )


def file(path: Path, what: str = "--out", *, suffix: str | None = None) -> None:
    """Make sure that a file can be written at ``path``."""
    _short(path, what)
    require(
        not path.is_dir(),
        what,
        expected="a file to write",
        got=f"the folder {printable(str(path))}",
    )
    if suffix is not None:
        require(
            path.suffix == suffix,
            what,
            expected=f"a name ending in {suffix}",
            got=printable(str(path)),
        )
    folder(path.parent, what)
    if path.exists():
        require(
            os.access(path, os.W_OK),
            what,
            expected="a file that may be written",
            got=printable(str(path)),
        )


def _short(path: Path, what: str) -> None:
    sizes = [len(part.encode(errors="surrogatepass")) for part in path.parts]
    require(
        "\0" not in str(path) and max(sizes, default=0) <= 255 and sum(sizes[-1:]) <= LONGEST_NAME,
        what,
        expected=f"a name of at most {LONGEST_NAME} bytes",
        got=printable(f"{path.name[:40]}... ({len(path.name)} characters)"),
    )


def _no_file_in_the_way(path: Path, what: str) -> None:
    _short(path, what)
    for part in (path, *path.parents):
        if part.exists():
            require(
                part.is_dir(),
                what,
                expected="a folder",
                got=f"the file {printable(str(part))}",
                instead="another --out",
            )
            return


def file_trouble(error: BaseException) -> str | None:
    """What a file system says in an exception (safetensors wraps it in its own), or ``None``."""
    if isinstance(error, OSError) and error.errno in PLACES:
        return f"{error.strerror}: {error.filename or 'a file'}"
    text = str(error)
    known = [os.strerror(number) for number in PLACES if os.strerror(number) in text]
    return text if known and type(error).__name__ == "SafetensorError" else None
