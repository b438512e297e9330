"""Frozen results: one base class that saves, loads, tabulates and shows itself, and one list of
provenance fields.

Files are safetensors with a JSON header (``schema``, then every field that is not a tensor, then
``checksum`` over all of it); nothing is pickled. A file is written next to its place and moved
there, so that a reader sees the old one or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tl_geometry.base import html, latex
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, listed, require

if TYPE_CHECKING:
    import pandas as pd

SOURCES = {
    "song2023": "Song & Zhong 2023, Uncovering hidden geometry in Transformers via disentangling "
    "position and context, arXiv:2310.04861",
    "sarfati2025": "Sarfati et al. 2025, Lines of Thought in Large Language Models, "
    "arXiv:2410.01545",
    "molina2023": "Molina 2023, Traveling Words: A Geometric Interpretation of Transformers, "
    "arXiv:2309.07315",
}
"""The works that results cite, by key."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a result was computed from. ``None`` where a field does not apply (an activation tensor
    has no model).

    ``fingerprint`` identifies the weights, ``token_hash`` the tokens in their order, ``processed``
    says whether weights were folded or centred by TransformerLens, ``hooks`` names the hook points
    at which somebody else's hook acted, ``normalized`` says that states were normed before they
    were decomposed, ``window`` is half-open in absolute positions, ``flags`` are remarks for the
    reader.
    """

    model: str | None = None
    fingerprint: str | None = None
    library: str | None = None
    processed: bool | None = None
    corpus: str | None = None
    token_hash: str | None = None
    has_bos: bool | None = None
    window: tuple[int, int] | None = None
    contexts: int | None = None
    preset: str = "exact"
    seed: int | None = None
    dtype: str = "float32"
    sources: tuple[str, ...] = ("song2023",)
    flags: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    normalized: bool = False

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Provenance:
        """Provenance from the fields of a file's header; fields that this version does not know are
        refused by name."""
        unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(Provenance)})
        require(
            not unknown,
            "provenance",
            expected="fields of this version",
            got=", ".join(unknown),
            instead="a newer tl_geometry",
        )
        return Provenance(**{k: _tuples(v) for k, v in fields.items()})

    def flagged(self, *flags: str) -> Provenance:
        """The same provenance with more flags (each once)."""
        return dataclasses.replace(self, flags=tuple(dict.fromkeys([*self.flags, *flags])))

    def line(self) -> str:
        """One line for captions."""
        shown = [
            self.model,
            self.library,
            "processed" if self.processed else None,
            self.corpus,
            f"{self.contexts} contexts" if self.contexts else None,
            f"window {self.window}" if self.window else None,
            f"preset {self.preset}" if self.preset != "exact" else None,
            "normalised states" if self.normalized else None,
            self.dtype,
            *self.flags,
        ]
        return ", ".join(s for s in shown if s)


def hash_tokens(tokens: Tensor, previous: str = "") -> str:
    """16 hex digits that identify token ids in their order: a sha256 chained over the rows, so that
    batches can be hashed one by one.

    >>> rows = torch.arange(6).view(3, 2)
    >>> hash_tokens(rows) == hash_tokens(rows[2:], hash_tokens(rows[:2]))
    True
    """
    for row in tokens.detach().to("cpu", torch.int64).contiguous().numpy():
        previous = hashlib.sha256(previous.encode() + row.tobytes()).hexdigest()[:16]
    return previous


LONG = 120
"""Characters of a path that a message shows."""
UNCHECKED = "no checksum (file of an earlier version)"
"""Flag of what was read from a file that cannot be checked."""


def row_hashes(tokens: Tensor) -> Tensor:
    """One 63-bit hash for each row of token ids, as int64 ``[context]``: the same window has the
    same hash anywhere.

    >>> a = row_hashes(torch.tensor([[1, 2], [3, 4], [1, 2]]))
    >>> bool(a[0] == a[2]), bool(a[0] == a[1])
    (True, False)
    """
    rows = tokens.detach().to("cpu", torch.int64).contiguous().numpy()
    return torch.tensor(
        [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little") >> 1 for row in rows],
        dtype=torch.int64,
    )


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """32 hex digits over every bit of the tensors (with names, dtypes and shapes) and every other
    field of the header."""
    digest = hashlib.sha256()
    for name, text in sorted(header.items()):
        digest.update(f"{name}={text}\0".encode() if name != "checksum" else b"")
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}\0".encode())
        digest.update(
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
    """Write a safetensors file so that ``path`` always holds a whole file: a temporary neighbour,
    synced, then renamed. Equal contents are equal bytes, and a link goes on leading to its file.

    Raises ``GeometryError`` where it cannot be written (a full disk, no permission); the file that
    was there stays.
    """
    held = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    metadata = {**header, "checksum": json.dumps(checksum(held, header))}
    part: Path | None = None
    try:
        # Path.resolve raises for a loop of links
        place = Path(os.path.realpath(path))  # noqa: TID251
        place.parent.mkdir(parents=True, exist_ok=True)
        # a part of the name: the whole may be as long as a name can be
        part = place.with_name(f".{place.name[:40]}.{secrets.token_hex(8)}.part")
        part.touch()
        # what the user's umask leaves; safetensors makes files that nobody else may read
        mode = stat.S_IMODE(part.stat().st_mode)
        save_file(held, part, metadata=metadata)
        part.chmod(mode)
        with part.open("r+b") as handle:
            _sort_header(handle)
            os.fsync(handle.fileno())
        part.replace(place)
    except (OSError, ValueError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        got = f"{type(error).__name__}: {reason or error}"
        fail(
            _named(path),
            expected="a file that can be written (what was there is unchanged)",
            got=got,
            instead="a folder with room",
        )
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _sort_header(handle: BinaryIO) -> None:
    """Put the metadata of a safetensors file in order: they are written in another one each time.

    The file is the length of the header (8 bytes), the header (JSON), and the numbers.
    """
    size = struct.unpack("<Q", handle.read(8))[0]
    found = json.loads(handle.read(size))
    found["__metadata__"] = dict(sorted(found["__metadata__"].items()))
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) <= size:  # blanks at the end are part of the format
        handle.seek(8)
        handle.write(text.ljust(size))


def read_file(path: str | Path, *schemas: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header (JSON-decoded) and tensors of a file written by :func:`write_atomically`, if its
    schema is one of ``schemas``.

    A file whose numbers or header do not have its checksum is refused; ``header["checksum"]`` is
    missing in files of before.
    """
    path = as_path(path, "file")
    try:
        there = path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    require(there, "file", expected="an existing safetensors file", got=_named(path))
    readable = os.access(path, os.R_OK)  # or safetensors says that there is no such file
    require(readable, "file", expected="a file that may be read", got=_named(path))
    try:
        with safe_open(path, framework="pt") as handle:
            texts = handle.metadata() or {}
            header = {k: json.loads(v) for k, v in texts.items()}
            # a copy: what is read shares memory with the file, which others may write over
            tensors = {k: handle.get_tensor(k).clone() for k in handle.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        fail(
            str(path),
            expected="a whole file written by tl_geometry",
            got=f"{type(error).__name__}: {error}",
        )
    schema = header.get("schema")
    instead = _other_version(str(schema), schemas)
    require(
        schema in schemas,
        str(path),
        expected=f"schema {schemas[0]}",
        got=f"{schema!r}",
        instead=instead,
    )
    whole = "checksum" not in header or header["checksum"] == checksum(tensors, texts)
    require(
        whole,
        str(path),
        expected="the numbers that were written (checksum)",
        got="altered ones",
        instead="a copy of the file",
    )
    return header, tensors


def _other_version(schema: str, schemas: Sequence[str]) -> str | None:
    """What to do about a file of another version of the same format."""
    name, _, version = schema.rpartition("/")
    known = [int(s.rpartition("/")[2]) for s in schemas if s.rpartition("/")[0] == name]
    if not known or not version.isdigit():
        return None
    return (
        "a newer tl_geometry"
        if int(version) > max(known)
        else "a new file: this one is of an earlier tl_geometry"
    )


def refuse_unknown(path: str | Path, found: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise where a file holds fields or tensors that this version does not know: they would be
    left out of the result."""
    unknown = sorted(set(found) - set(known))
    expected = f"{what} of this version"
    require(
        not unknown,
        str(path),
        expected=expected,
        got=", ".join(unknown[:8]),
        instead="the newer tl_geometry that wrote it",
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Base of every result. Fields are tensors (or ``None``), mappings from strings (or
    tuples of strings) to tensors, JSON values, and ``provenance``.

    A subclass is a dataclass with ``frozen=True, eq=False, kw_only=True`` and its own
    :meth:`columns` and :meth:`rows`; a changed field raises its ``version``.

    >>> @dataclass(frozen=True, eq=False, kw_only=True)
    ... class Norms(Result):
    ...     norms: Tensor
    ...     def columns(self): return ("state", "norm")
    ...     def rows(self): return list(enumerate(self.norms.tolist()))
    >>> Norms(norms=torch.tensor([1.0, 2.5]), provenance=Provenance(corpus="mine"))
    Norms(mine, float32)
      state  norm
      0      1
      1      2.5
    """

    provenance: Provenance
    version: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        if "__repr__" not in cls.__dict__:  # or the dataclass writes one of whole tensors
            cls.__repr__ = Result.__repr__

    @classmethod
    def schema(cls) -> str:
        """Identifier of the file format: class name and version."""
        return f"tl_geometry/{cls.__name__}/{cls.version}"

    def columns(self) -> Sequence[str]:
        """Column names of the table."""
        return ("field", "value")

    def rows(self) -> Sequence[Sequence[object]]:
        """Rows of the table, in the order of :meth:`columns`."""
        fields = [f for f in dataclasses.fields(self) if f.name != "provenance"]
        return [(f.name, _brief(getattr(self, f.name))) for f in fields]

    def readable(self, value: object) -> object:
        """How a cell or a column name of the table is shown to a reader (tables keep the key)."""
        return value

    def to_dataframe(self) -> pd.DataFrame:
        """The table as a pandas DataFrame (pandas is imported here and nowhere else)."""
        import pandas as pd

        return pd.DataFrame.from_records(
            [tuple(r) for r in self.rows()], columns=list(self.columns())
        )

    def to_latex(
        self,
        columns: Sequence[str] | None = None,
        *,
        rows: int | None = None,
        digits: int = 4,
        booktabs: bool = True,
    ) -> str:
        r"""The table as an escaped LaTeX ``tabular``: some ``columns`` (all), the first ``rows``
        (all), ``digits`` significant digits.

        Rules are those of the booktabs package, or ``\hline`` without it. A comment above says
        what the numbers were computed from.
        """
        names, table = list(self.columns()), list(self.rows())
        chosen = names if columns is None else list(columns)
        unknown = [c for c in chosen if c not in names]
        require(
            not unknown and chosen,
            "columns",
            expected=f"some of {listed(names, *unknown[:1])}",
            got=unknown or "none",
        )
        picked = [[row[names.index(c)] for c in chosen] for row in table[:rows]]
        return latex.table(
            chosen,
            picked,
            digits=digits,
            booktabs=booktabs,
            note=f"{type(self).__name__}: {self.provenance.line()}",
        )

    def save(self, path: str | Path) -> Path:
        """Write to one safetensors file and return its path."""
        path = as_path(path)
        tensors: dict[str, Tensor] = {}
        header = {"schema": json.dumps(self.schema())}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = value
            elif (
                isinstance(value, Mapping)
                and value
                and all(isinstance(v, Tensor) for v in value.values())
            ):
                tensors |= {f"{field.name}|{_key_text(k)}": v for k, v in value.items()}
            else:
                header[field.name] = json.dumps(
                    dataclasses.asdict(value) if isinstance(value, Provenance) else value
                )
        write_atomically(path, tensors, header)
        return path

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Read a file that :meth:`save` wrote."""
        header, tensors = read_file(path, cls.schema())
        names = {f.name for f in dataclasses.fields(cls)}
        refuse_unknown(path, header, names | {"schema", "checksum"}, "fields")
        refuse_unknown(path, (k.split("|", 1)[0] for k in tensors), names, "tensors")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            prefix = f"{field.name}|"
            if field.name in tensors:
                values[field.name] = tensors[field.name]
            elif any(k.startswith(prefix) for k in tensors):
                values[field.name] = {
                    _key(k.removeprefix(prefix)): v
                    for k, v in tensors.items()
                    if k.startswith(prefix)
                }
            elif field.name in header:
                values[field.name] = _tuples(header[field.name])
        provenance = Provenance.of(header["provenance"])
        values["provenance"] = provenance if "checksum" in header else provenance.flagged(UNCHECKED)
        return cls(**values)

    def text(self, limit: int | None = None) -> str:
        """The table as aligned plain text, at most ``limit`` rows."""
        table = self.rows()
        shown = [
            [html.plain(html.number(self.readable(v))) for v in row]
            for row in (self.columns(), *table[:limit])
        ]
        widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
        lines = [
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in shown
        ]
        left = len(table) + 1 - len(shown)
        more = [f"  ... {left} more rows"] if left else []
        return "\n".join([html.plain(self._caption(table)), *lines, *more])

    def _caption(self, table: Sequence[Sequence[object]]) -> str:
        """What it is, where it comes from, and how many NaN each column of the table has."""
        counts = [
            (name, sum(row[i] != row[i] for row in table))  # NaN alone is not itself
            for i, name in enumerate(self.columns())
        ]
        nans = ", ".join(f"{name} {n}" for name, n in counts if n)
        return f"{type(self).__name__}({self.provenance.line()})" + (
            f"; NaN: {nans}" if nans else ""
        )

    def __repr__(self) -> str:
        return self.text(limit=12)

    def _repr_html_(self) -> str:
        table = self.rows()
        names = [str(self.readable(c)) for c in self.columns()]
        cells = [[self.readable(v) for v in row] for row in table[: html.MOST_ROWS]]
        return html.table(names, cells, caption=self._caption(table), of=len(table))


R = TypeVar("R", bound=Result)


def _key_text(key: str | tuple[str, ...]) -> str:
    """A key of a mapping as the file has it: a string as it is, a tuple as a JSON list."""
    return key if isinstance(key, str) else json.dumps(key)


def _key(text: str) -> str | tuple[str, ...]:
    return tuple(json.loads(text)) if text.startswith("[") else text


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        nans = int(torch.isnan(value).sum()) if value.is_floating_point() else 0
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" + (
            f", {nans} NaN" if nans else ""
        )
    if isinstance(value, Mapping):
        return ", ".join(str(k) for k in value)
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
