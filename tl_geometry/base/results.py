"""What public functions return: a frozen :class:`Result`, which saves and loads itself, derives its
table from the axes of its fields, shows itself in a notebook, and says what it was computed from
(:class:`Provenance`); and a :class:`Table`, a DataFrame that does so."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.axes import axes_of
from tl_geometry.base.errors import check_seed, choice, count, require
from tl_geometry.base.files import as_path, read_file, write_atomically
from tl_geometry.base.records import decode, encode

if TYPE_CHECKING:
    import pandas as pd

    from tl_geometry.base.tables import Table

SOURCES = {
    "song2023": "Song & Zhong 2023, Uncovering hidden geometry, arXiv:2310.04861",
    "sarfati2025": "Sarfati et al. 2025, Lines of Thought, arXiv:2410.01545",
    "molina2023": "Molina 2023, Traveling Words, arXiv:2309.07315",
    "wang2022": "Wang et al. 2022, Interpretability in the Wild, arXiv:2211.00593",
    "goldowskydill2023": "Goldowsky-Dill et al. 2023, Path Patching, arXiv:2304.05969",
    "syed2023": "Syed et al. 2023, Attribution Patching, arXiv:2310.10348",
    "hanna2024": "Hanna et al. 2024, Have Faith in Faithfulness, arXiv:2403.17806",
    "mueller2025": "Mueller et al. 2025, MIB, arXiv:2504.13151",
}
"""The works that results cite, by key."""
MOST_COLUMNS = 16
"""Columns of a table that are printed: a terminal of 200 characters holds them."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a result was computed from. ``None`` where a field does not apply (an activation tensor
    has no model).

    ``fingerprint`` identifies the weights, ``token_hash`` the tokens in their order, ``library`` is
    the model's class and the version of TransformerLens, ``processed`` says whether weights were
    folded or centred by TransformerLens, ``hooks`` names the hook points at which user hooks acted,
    ``normalized`` says that states were normed before they were decomposed, ``window`` is half-open
    in absolute positions, ``sources`` are keys of :data:`SOURCES`, ``flags`` are remarks for the
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
    sources: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    normalized: bool = False

    def __post_init__(self) -> None:
        if self.seed is not None:  # an integer of any type, and JSON holds Python's alone
            object.__setattr__(self, "seed", check_seed(self.seed, "seed"))

    def flagged(self, *flags: str, **others: Any) -> Provenance:
        """The same provenance with more flags (each once), and ``others`` of its fields."""
        flags = tuple(dict.fromkeys([*self.flags, *flags]))
        return dataclasses.replace(self, flags=flags, **others)

    def line(self) -> str:
        """One line for captions.

        >>> Provenance(corpus="mine", contexts=8, preset="paper", flags=("few",)).line()
        'mine, 8 contexts, preset paper, float32, few'
        """
        shown = [self.model, self.library, "processed" if self.processed else None, self.corpus]
        shown.append(f"{self.contexts} contexts" if self.contexts else None)
        shown.append(f"window {self.window}" if self.window else None)
        shown.append(f"preset {self.preset}" if self.preset != "exact" else None)
        shown.append("normalised states" if self.normalized else None)
        return ", ".join(s for s in (*shown, self.dtype, *self.flags) if s)


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


def row_hashes(tokens: Tensor) -> Tensor:
    """One 63-bit hash for each row of token ids, as int64 ``[context]``: the same window has the
    same hash anywhere.

    >>> a = row_hashes(torch.tensor([[1, 2], [3, 4], [1, 2]]))
    >>> bool(a[0] == a[2]), bool(a[0] == a[1])
    (True, False)
    """
    rows = tokens.detach().to("cpu", torch.int64).contiguous().numpy()
    return torch.tensor(
        # without the last bit, as int64 has a sign
        [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little") >> 1 for row in rows],
        dtype=torch.int64,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Base of every result. Fields are tensors, mappings of tensors, records (dataclasses and named
    tuples) of these, JSON values, and ``provenance``.

    A subclass is a dataclass with ``frozen=True, eq=False, kw_only=True``. ``table_axes`` are the
    axes that its rows run over and ``table_values`` the fields and properties that are its columns,
    each over some of these axes; a table of another shape has its own :meth:`columns` and
    :meth:`rows`.

    >>> from jaxtyping import Float
    >>> @dataclass(frozen=True, eq=False, kw_only=True)
    ... class Norms(Result):
    ...     norms: Float[Tensor, " state"]
    ...     table_axes, table_values = ("state",), ("norms",)
    >>> Norms(norms=torch.tensor([1.0, 2.5]), provenance=Provenance(corpus="mine"))
    Norms(mine, float32)
      state  norms
      0      1
      1      2.5
    """

    provenance: Provenance
    table_axes: ClassVar[tuple[str, ...]] = ()
    table_values: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "__repr__" not in cls.__dict__:  # else dataclass makes one that prints tensors
            cls.__repr__ = Result.__repr__

    @classmethod
    def schema(cls) -> str:
        """Identifier of the file format: class name and version of the format."""
        return f"tl_geometry/{cls.__name__}/1"

    # ---- the table

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        """Columns that name the entries of an axis: layer and head of ``heads``, else the field
        named as the plural of the axis (``states``, ``parts``), else numbers."""
        if axis == "head" and hasattr(self, "heads"):
            return dict(zip(("layer", "head"), zip(*self.heads, strict=True), strict=True))  # type: ignore[attr-defined]
        numbers = self.table_numbers().values()
        sizes = (value.shape[axes.index(axis)] for value, axes in numbers if axis in axes)
        named = getattr(self, f"{axis}s", None)
        return {axis: range(next(sizes, 0)) if named is None else named}

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        """Columns of numbers: each tensor with the axes that it has."""
        axes = axes_of(type(self))
        return {name: (getattr(self, name), axes[name]) for name in self.table_values}

    def table_mask(self) -> Tensor | None:
        """Which rows the table has, a mask over ``table_axes``; ``None`` for all."""
        return None

    def columns(self) -> Sequence[str]:
        """Column names of the table."""
        if not self.table_axes:
            return ("field", "value")
        labels = [name for axis in self.table_axes for name in self.axis_labels(axis)]
        return (*labels, *self.table_numbers())

    def rows(self) -> Sequence[Sequence[object]]:
        """Rows of the table, in the order of :meth:`columns`: labels repeated along the other axes,
        values broadcast to all."""
        if not self.table_axes:
            fields = [f for f in dataclasses.fields(self) if f.name != "provenance"]
            return [(f.name, _brief(getattr(self, f.name))) for f in fields]
        labels = {axis: self.axis_labels(axis) for axis in self.table_axes}
        mask = self.table_mask()
        if mask is None:
            mask = torch.ones([len(next(iter(names.values()))) for names in labels.values()])
        at = dict(zip(labels, mask.cpu().nonzero(as_tuple=True), strict=True))
        columns = [[c[i] for i in at[a].tolist()] for a in labels for c in labels[a].values()]
        for value, axes in self.table_numbers().values():
            cells = value.detach().cpu()[tuple(at[axis] for axis in axes)]
            columns.append(cells.expand(len(at[self.table_axes[0]])).tolist())
        return list(zip(*columns, strict=True))

    def readable(self, value: object) -> object:
        """How a cell or a column name of the table is shown to a reader (tables keep the key)."""
        return value

    def to_dataframe(self) -> pd.DataFrame:
        """The table as a pandas DataFrame."""
        import pandas as pd

        rows = [tuple(row) for row in self.rows()]
        return pd.DataFrame.from_records(rows, columns=list(self.columns()))

    def top(self, column: str | int | None = None, n: int | None = None) -> Table:
        """The ``n`` rows of the largest absolute values in a ``column`` of numbers, NaN last:
        ``.top("cs", 5)``, 10 by default. ``.top(5)`` takes the first rows."""
        from tl_geometry.base.tables import Table  # which is a result itself

        by, most = wanted(column, n)
        rows: Any = self.rows()
        keys, names = self.columns(), [str(self.readable(name)) for name in self.columns()]
        if by is not None:
            by = names[keys.index(by)] if by in keys else by
            number = lambda i: all(isinstance(row[i], int | float) for row in rows)  # noqa: E731
            numbers = [name for i, name in enumerate(names) if number(i)]
            at = names.index(choice(by, numbers, "column"))
            rows = sorted(rows, key=lambda row: math.inf if row[at] != row[at] else -abs(row[at]))
        cells: Any = tuple(tuple(map(self.readable, row)) for row in rows[:most])
        chance = getattr(self, "chance", "")
        return Table(provenance=self.provenance, names=tuple(names), cells=cells, chance=chance)

    # ---- files

    def save(self, path: str | Path) -> Path:
        """Write to one safetensors file and return its path."""
        path, tensors = as_path(path), {}
        header = {"schema": self.schema(), "result": encode(self, "result", tensors)}
        write_atomically(path, tensors, header)
        return path

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Read a file that :meth:`save` wrote."""
        header, tensors = read_file(path, cls.schema())
        return decode(header["result"], tensors, cls)

    def text(self, limit: int | None = None) -> str:
        """The table as aligned plain text; with ``limit`` so many rows, and the first
        :data:`MOST_COLUMNS` columns."""
        table, most = self.rows(), None if limit is None else MOST_COLUMNS
        shown = [
            [html.plain(html.number(self.readable(v))) for v in row[:most]]
            for row in (self.columns(), *table[:limit])
        ]
        widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
        cells = [map(str.ljust, row, widths) for row in shown]
        lines = ["  " + "  ".join(row).rstrip() for row in cells]
        if hidden := len(table) + 1 - len(shown):
            lines.append(f"  ... {hidden} more row{'s' * (hidden > 1)}")
        if hidden := len(self.columns()) - len(shown[0]):
            lines.append(f"  ... {hidden} more column{'s' * (hidden > 1)} (all: .to_dataframe())")
        return "\n".join([html.plain(self._caption(table)), *lines])

    def _about(self) -> str:
        """How it was made, in one line."""
        return self.provenance.line()

    def _caption(self, table: Sequence[Sequence[object]]) -> str:
        """What it is, where it comes from, and how many NaN each column of the table has."""
        # only NaN differs from itself
        counts = {n: sum(row[i] != row[i] for row in table) for i, n in enumerate(self.columns())}
        nans = ", ".join(f"{name} {n}" for name, n in counts.items() if n)
        return f"{type(self).__name__}({self._about()})" + (f"; NaN: {nans}" * bool(nans))

    def __repr__(self) -> str:
        return self.text(limit=13)  # a split of one head has as many

    def _repr_html_(self) -> str:
        table = self.rows()
        names = [str(self.readable(c)) for c in self.columns()]
        cells = [[self.readable(v) for v in row] for row in table[: html.MOST_ROWS]]
        return html.table(names, cells, caption=self._caption(table), of=len(table))


R = TypeVar("R", bound=Result)


def wanted(column: str | int | None, n: int | None) -> tuple[str | None, int]:
    """The column that :meth:`Result.top` sorts by, if any, and the number of rows.

    >>> wanted("cs", 5), wanted(5, None), wanted(None, None)
    (('cs', 5), (None, 5), (None, 10))
    """
    by = column if isinstance(column, str) else None
    one = by is not None or column is None or n is None
    require(one, "column", expected="the name of a column", got=repr(column))
    first = n if by is not None or column is None else column
    return by, count(10 if first is None else first, "n")


def load(path: str | Path) -> Any:
    """Any result of the library, from the file that it was saved to."""
    header, tensors = read_file(path)
    return decode(header.get("result"), tensors)


def _brief(value: Any) -> str:
    """A field in one line: shape, dtype and NaN of a tensor, keys of a mapping, else its text."""
    if isinstance(value, Tensor):
        nans = f", {int(value.isnan().sum())} NaN" if bool(value.isnan().any()) else ""
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{nans}"
    text = ", ".join(map(str, value)) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
