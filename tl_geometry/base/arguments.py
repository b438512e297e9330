"""Arguments of the command line, checked before anything heavy is imported: numbers, choices, files
to read and places to write."""

from __future__ import annotations

import errno
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.text_files import (
    JsonLines,
    TextFile,
    check_encoding,
    existing,
    printable,
    text_file,
)

CLASSES = ("bridge", "hooked")
DTYPES = ("float32", "float64", "bfloat16", "float16")
SECTIONS = ("overview", "basis", "heads", "measures", "weights", "flow")
"""Sections of a report in reading order; each is a module of :mod:`tl_geometry.report` with a
``section`` function."""
TABLES = {
    "overview": ("overview",),
    "basis": ("anova", "massive_tokens"),
    "heads": ("heads", "bands", "planes", "dominant_only"),
    "measures": ("positional", "contextual"),
    "weights": ("weights_qk", "weights_ov", "readout_ov", "paths", "surrogates"),
    "flow": ("flow", "flow_nulls", "truncation", "skipped_layers"),
}
"""Section -> the tables that it may write, each to a CSV and a safetensors file."""
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
    errno.ENAMETOOLONG,
}
"""Errors of a file system, which a user can mend: one line. Others are ours and keep their
traceback."""
BUDGETS = {"quick": 120.0, "default": 540.0, "full": math.inf}
"""Words of ``--budget``, and seconds that a report may take at the prices of
:mod:`tl_geometry.report.work`."""
LARGEST_SEED = 2**32 - 1
"""The largest seed that every generator takes (numpy's legacy one has 32 bits)."""
LONGEST_NAME = 180
"""Bytes of a file name: file systems take 255, and what is written aside adds to it."""


def at_least(value: int | None, low: int, what: str, *, instead: str | None = None) -> None:
    """Refuse a number below ``low``; ``None`` is the default and passes."""
    require(
        value is None or value >= low, what, expected=f"{low} or more", got=value, instead=instead
    )


def check_seed(value: int | None, what: str = "--seed") -> None:
    """Refuse a seed that some generator would not take."""
    require(
        value is None or 0 <= value <= LARGEST_SEED,
        what,
        expected=f"0 or more, at most {LARGEST_SEED}",
        got=value,
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


TOKENS = "tl-geometry fit for a .npy file of token ids"
"""What takes ids."""


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
