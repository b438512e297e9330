"""Which files of a folder did this library write, and which process writes them now? Reports,
experiments and the command line ask, so that they overwrite no file of the user.

A folder of results holds ``run.json``, its record: that this library wrote the folder, and a list
of the other files with their hashes. A file that is not listed, or has another hash, belongs to the
user: it is never deleted, and overwritten only with ``--force``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tl_geometry.base.errors import fail, require
from tl_geometry.base.printable import printable

RECORD, WRITER = "run.json", "tl-geometry"
"""The record of a folder, and its entry ``written_by``."""
PAGE = "report.html"
LOCK = ".tl-geometry.lock"
"""Another name in a folder: the lock of the process that writes now."""
FORCE = "another --out, or --force to overwrite"
"""What a message advises where files are in the way."""
PIECE = 2**22
"""Bytes that are hashed at a time, so that no file is held in memory as a whole."""


def _there(path: Path) -> bool:
    """Whether a name is taken, by a broken link too."""
    return path.exists() or path.is_symlink()


def file_hash(path: Path) -> str:
    """32 hex digits of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()[:32]


def schema(path: Path) -> str:
    """The schema in the header of a safetensors file, read without its tensors; empty where there
    is none.

    >>> schema(Path("nothing.safetensors"))
    ''
    """
    try:
        with path.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            # the first bytes of another kind of file may read as an enormous length
            if size > path.stat().st_size:
                return ""
            header = json.loads(handle.read(size))["__metadata__"]["header"]
            return str(json.loads(header)["schema"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return ""


def read_record(folder: Path, *, force: bool = False) -> dict[str, Any]:
    """``run.json`` of a folder, empty where there is none. One that this library did not write is
    refused; with ``force`` it counts as none."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        problem = _problem(record)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        record, problem = {}, f"one that is no JSON ({type(error).__name__})"
    what, expected = printable(str(path)), "the record of a run of tl-geometry"
    require(not problem or force, what, expected=expected, got=problem, instead=FORCE)
    return {} if problem else record


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``run.json`` so that it always holds the old text or the new one, whole."""
    part = folder / f".{RECORD}.{os.getpid()}.part"
    text = json.dumps(record, indent=2, default=str) + "\n"
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(folder / RECORD)
    finally:
        part.unlink(missing_ok=True)


def _problem(record: Any) -> str:
    """Why a value is no record of this library; empty where it is one."""
    if not isinstance(record, dict) or record.get("written_by") != WRITER:
        return "one of another program"
    files, manifest = record.get("files", {}), record.get("manifest", {})
    listed = isinstance(files, dict) and all(
        isinstance(hashes, list) and all(isinstance(h, str) for h in hashes)
        for hashes in files.values()
    )
    if not listed:
        return "one whose 'files' are no lists of hashes"
    if not isinstance(manifest, dict) or not all(isinstance(e, dict) for e in manifest.values()):
        return "one whose 'manifest' is no table of sections"
    return ""


class OwnFiles:
    """The files of a folder that this library has written, each with its last two hashes: a run may
    be stopped between the record and the file."""

    def __init__(
        self, folder: Path, listed: Mapping[str, list[str]], *, force: bool = False
    ) -> None:
        self.folder, self.force = folder, force
        self.hashes = {name: list(hashes) for name, hashes in listed.items() if self._inside(name)}

    def _inside(self, name: str) -> bool:
        """Whether a listed name stays in the folder: anybody may have made the record."""
        path = self.folder / name
        return (
            "\0" not in name
            and path.name not in ("", RECORD)
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            and path.parent.resolve().is_relative_to(self.folder.resolve())
        )

    def unchanged(self, name: str) -> bool:
        """Whether a file is as this library left it."""
        path = self.folder / name
        is_file = name in self.hashes and path.is_file() and not path.is_symlink()
        return is_file and file_hash(path) in self.hashes[name]

    def free(self, name: str) -> bool:
        """Whether a file may be written: nothing stands there (nor a file in the place of its
        folder), or a file that this library left."""
        path = self.folder / name
        if _there(path.parent) and not path.parent.is_dir():
            return False
        return self.force or not _there(path) or self.unchanged(name)

    def changed(self) -> list[str]:
        """Listed files that were changed since."""
        return [
            name for name in self.hashes if _there(self.folder / name) and not self.unchanged(name)
        ]

    def clear(self) -> None:
        """Delete the listed files that nobody changed since."""
        for name in self.hashes:
            if self.unchanged(name):
                (self.folder / name).unlink()
        self.hashes = {}

    def write(
        self, name: str, save: Callable[[Path], object], record: Callable[[], object]
    ) -> None:
        """Write a file aside, list its hash, write the record, and only then move it into place."""
        path = self.folder / name
        part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
        try:
            path.parent.mkdir(exist_ok=True)
            save(part)
            # the hash before stays listed, in case the run stops before the file is moved
            self.hashes[name] = [*self.hashes.get(name, [])[-1:], file_hash(part)]
            record()
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def check_folder(
    folder: Path, owner: str, names: Iterable[str], *, force: bool = False
) -> dict[str, Any]:
    """The record of the folder to which ``owner`` (``"report"`` or an experiment's name) will write
    the files ``names``. Refused: results of another owner, and files of the user in the way."""
    record = read_record(folder, force=force)
    last_owner = record.get("experiment", "report") if record else owner
    expected, got = "a folder of its own", f"{printable(str(folder))} with results of {last_owner}"
    require(last_owner == owner or force, "--out", expected=expected, got=got, instead=FORCE)
    record = record if last_owner == owner else {}  # --force deletes nothing of another owner
    files = OwnFiles(folder, record.get("files", {}), force=force)
    taken = [name for name in names if not files.free(name)]
    expected = "a folder without files of these names that others wrote or changed"
    got = f"{printable(str(folder))} with {', '.join(taken[:8])}{' ...' * (len(taken) > 8)}"
    require(not taken, "--out", expected=expected, got=got, instead=FORCE)
    return record


def check_file(path: Path, kind: str = "", *, force: bool = False) -> None:
    """Refuse to overwrite a file unless its header says that it is a result of class ``kind``. A
    CSV has no header (``kind=""``): any file in its place is refused."""
    same_class = bool(kind) and schema(path).startswith(f"tl_geometry/{kind}/")
    expected = f"a new file, or one that holds a {kind}" if kind else "a new file"
    require(
        force or same_class or not _there(path),
        "--out",
        expected=f"{expected} of tl_geometry" if kind else expected,
        got=f"{printable(str(path))}, which is there already"
        + (f" and holds {_result_class(path)}" if kind else ""),
        instead=FORCE,
    )


def _result_class(path: Path) -> str:
    """Name of the class in a file's schema, for a message."""
    return schema(path).removeprefix("tl_geometry/").partition("/")[0] or "something else"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file of an output, or refuse because another process holds it. The system frees
    it when its process ends, however it ends; a file that was left behind blocks nobody."""
    try:
        import fcntl
    except ImportError:  # Windows: no such locks
        yield
        return
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 20).decode(errors="replace").strip() or "another"
            os.close(handle)
            expected = "a place that no other run is writing to"
            got = f"{printable(str(path.parent))}, where process {holder} is at work"
            fail("--out", expected=expected, got=got, instead="another --out, or wait for it")
        except OSError:  # a file system without locks
            pass
        # the lock counts only while the file that is locked is the one at this path
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                break
        os.close(handle)  # its holder has just ended and taken the file away
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        # before the lock is freed: afterwards the file may be another process's
        path.unlink(missing_ok=True)
        os.close(handle)
