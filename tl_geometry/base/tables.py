"""A table of numbers that says where it comes from and what chance gives: :class:`Table`, a pandas
DataFrame with provenance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tl_geometry.base import checks, html
from tl_geometry.base.results import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd

Cell = str | int | float | bool | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Table(Result):
    """A DataFrame with provenance, and ``chance``, one sentence on what chance gives.

    ``names`` are the columns, ``cells`` the rows. ``.df`` is the DataFrame, ``.save`` and ``.load``
    write and read one file, ``.top(n)`` keeps the first rows, ``.top("change", n)`` those of the
    largest absolute value in a column.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"head": ["L0H1", "L1H0"], "change": [0.5, -1.0]})
    >>> table = Table.of(frame, Provenance(corpus="mine"), chance="0 by chance")
    >>> table.top("change", 1)
    Table(mine, float32); 0 by chance
      head  change
      L1H0  -1
    """

    names: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    chance: str = ""

    @staticmethod
    def of(frame: Any, provenance: Provenance, *, chance: str = "") -> Table:
        """A table of a DataFrame, without its index, or of what makes one: columns by name, or rows
        of cells by name."""
        import pandas as pd

        frame = pd.DataFrame(frame)
        columns = [frame[name].tolist() for name in frame]  # plain numbers, of each column's type
        cells = tuple(zip(*columns, strict=True))
        names = tuple(map(str, frame.columns))
        return Table(provenance=provenance, names=names, cells=cells, chance=chance)

    @property
    def df(self) -> pd.DataFrame:
        """The table as a pandas DataFrame."""
        return self.to_dataframe()

    def columns(self) -> Sequence[str]:
        return self.names

    def rows(self) -> Sequence[Sequence[object]]:
        return self.cells

    def column(self, name: str, **where: object) -> list[Any]:
        """The values of one column, in the rows whose other columns have the given values."""
        for asked in (name, *where):
            checks.choice(asked, self.names, "column")
        rows = [dict(zip(self.names, cells, strict=True)) for cells in self.cells]
        return [row[name] for row in rows if where.items() <= row.items()]

    def _caption(self, table: Sequence[Sequence[object]]) -> str:
        said = super()._caption(table)
        return f"{said}; {html.plain(self.chance)}" if self.chance else said
