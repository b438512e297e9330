"""Writes the library's files and reads its safetensors files. A file is whole or absent: it is
written beside its place and renamed.

A safetensors file has one text beside its tensors, JSON with ``schema`` (what the file holds), the
values that are no tensors, and a checksum over every bit. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """32 hex digits over every bit of the tensors (with names, dtypes and shapes) and of the
    header."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}\0".encode())
        # bytes, so that every bit counts and NaN equals itself
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def as_path(path: str | Path, what: str = "path") -> Path:
    """A path from what was given for one; ``~`` is the user's home."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        fail(what, expected="a path", got=describe(path))
    return Path(path).expanduser()


def write_atomically(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file (see :func:`write_bytes`). Equal contents are equal bytes."""
    # cloned: safetensors refuses tensors that share memory
    copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    text = json.dumps({**header, "checksum": checksum(copies, header)})
    # one entry: safetensors writes several in an order that changes
    write_bytes(path, save(copies, metadata={"header": text}))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file to a temporary neighbour, which is then synced and renamed: ``path`` always
    holds a whole file, and a link goes on leading to its file.

    Raises ``GeometryError`` where it cannot be written (a full disk, no permission); the file that
    was there stays.
    """
    # Path.resolve raises for a loop of links
    place = Path(os.path.realpath(path))  # noqa: TID251
    # 40 characters of the name: all of them with the suffix may be too long for a file name
    part = place.with_name(f".{place.name[:40]}.{secrets.token_hex(8)}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as handle:
            handle.write(data)
            handle.flush()
            # on the disk before the new name is: a crash leaves the old file or the whole new one
            os.fsync(handle.fileno())
        part.replace(place)
    except (OSError, ValueError) as error:
        got = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        expected = "a file that can be written (what was there is unchanged)"
        fail(str(path), expected=expected, got=got, instead="a folder with room")
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def read_file(path: str | Path, schema: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file written by :func:`write_atomically`, of ``schema`` if that is
    given. A file whose numbers or header do not have its checksum is refused."""
    path = as_path(path)
    try:
        path.open("rb").close()  # else safetensors says of any file that there is none
        with safe_open(path, framework="pt") as handle:
            header = json.loads((handle.metadata() or {})["header"])
            # a copy: what is read shares memory with the file, which others may write over
            tensors = {k: handle.get_tensor(k).clone() for k in handle.keys()}  # noqa: SIM118
            digits = header.pop("checksum", None)
    except (SafetensorError, KeyError, AttributeError, ValueError, OSError) as error:
        expected = "an existing safetensors file written by tl_geometry"
        fail("file", expected=expected, got=f"{path} ({type(error).__name__}: {error})")
    found = header.get("schema")
    fits = found == schema if schema else str(found).startswith("tl_geometry/")
    require(fits, str(path), expected=f"schema {schema or 'of tl_geometry'}", got=repr(found))
    intact = digits == checksum(tensors, header)
    expected = "the numbers that were written (checksum)"
    require(intact, str(path), expected=expected, got="altered ones", instead="a copy of the file")
    return header, tensors
