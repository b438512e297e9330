"""Writes the library's files and reads its safetensors files. A file is whole or absent: it is
written beside its place and renamed. Results, checkpoints, training states and figures use it.

A safetensors file has a checksum over every bit. Its header is JSON: ``schema`` (what the file
holds), then every value that is no tensor, then ``checksum``. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require

LONG = 120
"""Most characters of a path that a message shows."""


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """32 hex digits over every bit of the tensors (with names, dtypes and shapes) and every other
    field of the header."""
    digest = hashlib.sha256()
    for name, text in sorted(header.items()):
        digest.update(f"{name}={text}\0".encode() if name != "checksum" else b"")
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}\0".encode())
        digest.update(
            # bytes, so that every bit counts and NaN equals itself
            value.contiguous().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
        )
    return digest.hexdigest()[:32]


def as_path(path: str | Path, what: str = "path") -> Path:
    """A path from what was given for one."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        fail(what, expected="a path", got=describe(path), instead=f"{what}='name.safetensors'")
    return Path(path)


def _named(path: Path) -> str:
    """A path as a message shows it: the end of a long one."""
    text = str(path)
    return text if len(text) <= LONG else f"...{text[-LONG:]}"


def write_atomically(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file (see :func:`replaced`). Equal contents are equal bytes."""
    # cloned: safetensors refuses tensors that share memory
    copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    metadata = {**header, "checksum": json.dumps(checksum(copies, header))}
    with replaced(path) as part:
        # the mode that the user's umask leaves; safetensors lets nobody else read its files
        mode = stat.S_IMODE(part.stat().st_mode)
        save_file(copies, part, metadata=metadata)
        part.chmod(mode)
        with part.open("r+b") as handle:
            _sort_header(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write any other file (see :func:`replaced`)."""
    with replaced(path) as part:
        part.write_bytes(data)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary neighbour to write to, which is then synced and renamed: ``path`` always holds a
    whole file, and a link goes on leading to its file.

    Raises ``GeometryError`` where it cannot be written (a full disk, no permission); the file that
    was there stays.
    """
    part: Path | None = None
    try:
        # Path.resolve raises for a loop of links
        place = Path(os.path.realpath(path))  # noqa: TID251
        place.parent.mkdir(parents=True, exist_ok=True)
        # 40 characters of the name: all of them with the suffix may be too long for a file name
        part = place.with_name(f".{place.name[:40]}.{secrets.token_hex(8)}.part")
        part.touch()
        yield part
        with part.open("r+b") as handle:
            # on the disk before the new name is: a crash leaves the old file or the whole new one
            os.fsync(handle.fileno())
        part.replace(place)
    except (OSError, ValueError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        got = f"{type(error).__name__}: {reason or error}"
        expected = "a file that can be written (what was there is unchanged)"
        fail(_named(path), expected=expected, got=got, instead="a folder with room")
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _sort_header(handle: BinaryIO) -> None:
    """Sort the metadata of a safetensors file, which safetensors writes in an order that changes.

    The file is the length of the header (8 bytes), the header (JSON), and the numbers.
    """
    size = struct.unpack("<Q", handle.read(8))[0]
    header = json.loads(handle.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # a longer text would move the numbers that follow: then the order stays
    if len(text) <= size:  # the format allows blanks at the end of the header
        handle.seek(8)
        handle.write(text.ljust(size))


def read_file(path: str | Path, *schemas: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header (JSON-decoded) and tensors of a file written by :func:`write_atomically`, if its
    schema is one of ``schemas``.

    A file whose numbers or header do not have its checksum is refused.
    """
    path = as_path(path, "file")
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        exists = False
    require(exists, "file", expected="an existing safetensors file", got=_named(path))
    readable = os.access(path, os.R_OK)  # else safetensors says that there is no such file
    require(readable, "file", expected="a file that may be read", got=_named(path))
    try:
        with safe_open(path, framework="pt") as handle:
            texts = handle.metadata() or {}
            header = {k: json.loads(v) for k, v in texts.items()}
            # a copy: what is read shares memory with the file, which others may write over
            tensors = {k: handle.get_tensor(k).clone() for k in handle.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        expected = "a whole file written by tl_geometry"
        fail(str(path), expected=expected, got=f"{type(error).__name__}: {error}")
    got = repr(header.get("schema"))
    require(header.get("schema") in schemas, str(path), expected=f"schema {schemas[0]}", got=got)
    intact = header.get("checksum") == checksum(tensors, texts)
    expected = "the numbers that were written (checksum)"
    require(intact, str(path), expected=expected, got="altered ones", instead="a copy of the file")
    return header, tensors


def refuse_unknown(path: str | Path, found: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse a file with fields or tensors (``what`` says which) that this version does not know,
    and would drop."""
    unknown = ", ".join(sorted(set(found) - set(known))[:8])
    instead = "the newer tl_geometry that wrote it"
    require(
        not unknown, str(path), expected=f"{what} of this version", got=unknown, instead=instead
    )
