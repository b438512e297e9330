"""Arguments of the command line, checked before anything heavy is imported: numbers, choices, files
to read and places to write."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from tl_geometry.base.errors import choice, fail, require

CLASSES = ("bridge", "hooked")
DTYPES = ("float32", "float64", "bfloat16", "float16")
SECTIONS = ("overview", "basis", "heads", "measures", "weights", "flow")
"""Sections of a report in reading order; each is a module of :mod:`tl_geometry.report` with a
``section`` function."""
EXPERIMENTS = ("randomisation", "addition", "nanogpt")
SCALES = ("smoke", "cpu", "paper")
"""Names and scales of the experiments; each is a function of :mod:`tl_geometry.experiments`."""
WORKS = ("song-zhong", "lines-of-thought", "traveling-words")
"""Published works that :func:`tl_geometry.reproduce.run` knows."""
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
}
"""Errors of a file system, which a user can mend: one line. Others are ours and keep their
traceback."""
UNITS = {"s": 1, "m": 60, "h": 3600}
ZEROS = ("utf-16", "utf-32", "utf_16", "utf_32", "utf16", "utf32")
"""Encodings whose files hold zero bytes; in any other such a file is no text."""


def at_least(value: int | None, low: int, what: str, *, instead: str | None = None) -> None:
    """Refuse a number below ``low``; ``None`` is the default and passes."""
    require(
        value is None or value >= low, what, expected=f"{low} or more", got=value, instead=instead
    )


def seconds(text: str) -> float:
    """A length of time as seconds: ``"90s"``, ``"10m"``, ``"1.5h"``; a bare number is seconds.

    >>> seconds("10m"), seconds("90s"), seconds("1.5h"), seconds("45")
    (600.0, 90.0, 5400.0, 45.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        fail("--budget", expected="a length of time such as 90s, 10m or 1h", got=repr(text))
    return float(match[1]) * UNITS[match[2] or "s"]


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


def printable(text: str) -> str:
    r"""A file name as text that every output can hold: bytes that are no UTF-8, control and
    direction marks as escapes.

    >>> print(printable("a\udce9\u202e.txt"))
    a\xe9\u202e.txt
    """
    text = os.fsencode(text).decode("utf-8", "backslashreplace") if _encodable(text) else text
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(c if unicodedata.category(c) not in hidden else f"\\u{ord(c):04x}" for c in text)


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return False
    return True


def text_names(paths: Sequence[Path], what: str = "--corpus") -> list[str]:
    """A name for each text file: its base name, with as many folders before it as tell them apart;
    the same file twice is refused."""
    real = [p.resolve() for p in paths]
    twice = [str(p) for i, p in enumerate(paths) if real[i] in real[:i]]
    require(not twice, what, expected="each file once", got=f"{printable(', '.join(twice))} twice")
    deepest = max((len(r.parts) for r in real), default=0)
    for depth in range(1, 1 + deepest):
        names = [printable("/".join(r.parts[-depth:])) for r in real]
        if len(set(names)) == len(names):
            return names
    return [printable(str(r)) for r in real]


def existing(paths: Sequence[Path], what: str = "--corpus") -> None:
    """Refuse names of no text file, and files that may not be read."""
    missing = [printable(str(p)) for p in paths if not p.is_file()]
    require(not missing, what, expected="existing text files", got=", ".join(missing))
    locked = [printable(str(p)) for p in paths if not os.access(p, os.R_OK)]
    require(not locked, what, expected="text files that may be read", got=", ".join(locked))


def read_texts(
    paths: Sequence[Path],
    encoding: str = "utf-8",
    what: str = "--corpus",
    *,
    binary: str = "--encoding utf-16 if that is what it is",
) -> tuple[list[str], list[str]]:
    """Texts and names of files; what is no text, or not in ``encoding``, is refused by name rather
    than mended."""
    existing(paths, what)
    try:
        "".encode(encoding)
    except LookupError:
        fail(
            "--encoding",
            expected="an encoding that Python knows, such as utf-8 or latin-1",
            got=repr(encoding),
        )
    texts: list[str] = []
    names = text_names(paths, what)
    for path, name in zip(paths, names, strict=True):
        raw = path.read_bytes()
        nul = b"\0" in raw and not encoding.lower().startswith(ZEROS)
        text = path.suffix != ".npy" and not nul
        require(text, what, expected="text files", got=name, instead=binary)
        try:
            decoded = raw.decode(encoding).removeprefix("\ufeff")
            texts.append(decoded.replace("\r\n", "\n").replace("\r", "\n"))
        except UnicodeError as error:
            at = (
                f"byte {error.start} (0x{raw[error.start]:02x})"
                if isinstance(error, UnicodeDecodeError)
                else "it"
            )
            instead = "--encoding latin-1 (or whichever it is), or iconv"
            fail(
                what,
                expected=f"text in {encoding}",
                got=f"{name}, where {at} is none",
                instead=instead,
            )
    empty = [name for name, text in zip(names, texts, strict=True) if not text.strip()]
    require(not empty, what, expected="files with text in them", got=f"{', '.join(empty)} empty")
    return texts, names


def check_corpus(paths: Sequence[Path] | None, encoding: str, *, tokens: bool = False) -> None:
    """Read all text files once, so that what cannot be read is said at once; ``tokens``: one
    ``.npy`` file of ids will do."""
    if not paths:
        return
    if tokens and any(p.suffix == ".npy" for p in paths):
        expected = "one existing .npy file"
        require(
            len(paths) == 1 and paths[0].is_file(),
            "--corpus",
            expected=expected,
            got=printable(", ".join(map(str, paths))),
        )
        return
    read_texts(paths, encoding, binary="tl-geometry fit for a .npy file of token ids")


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


def _no_file_in_the_way(path: Path, what: str) -> None:
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


def own_folder(path: Path, wanted: str) -> None:
    """Refuse a folder that holds another command's results: an experiment of another name, or a
    report."""
    record = path / "run.json"
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    held = found.get("experiment", "report") if isinstance(found, dict) else wanted
    expected = "a folder of its own"
    require(
        held == wanted,
        "--out",
        expected=expected,
        got=f"{printable(str(path))} with results of {held}",
        instead="another --out",
    )


def printable_lines(text: str) -> str:
    """:func:`printable` for text of several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


def file_trouble(error: BaseException) -> str | None:
    """What a file system says in an exception (safetensors wraps it in its own), or ``None``."""
    if isinstance(error, OSError) and error.errno in PLACES:
        return f"{error.strerror}: {error.filename or 'a file'}"
    text = str(error)
    known = [os.strerror(number) for number in PLACES if os.strerror(number) in text]
    return text if known and type(error).__name__ == "SafetensorError" else None
