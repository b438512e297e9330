"""What does an experiment return and write? An :class:`Outcome`: tables, figures, and findings
beside what was expected. The measures that the three experiments share are here too."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import tl_geometry as tlg
from benchmarks.training.setup import Setup

Rows = list[dict[str, Any]]
"""Rows of a table, all with the same keys."""
MEASURES = (
    *("rank", "stable_rank", "relative_norm", "relative_norm_reference"),
    *("low_frequency", "roughness", "fracture", "fracture_at"),
)
"""Measures of a positional basis that every experiment records. ``split_half`` is recorded beside
them: well below one, it says that they are in part sampling noise."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What an experiment checks: a statement, what was expected of it, what was found, and whether
    the expectation holds (``None``: reported, not judged)."""

    statement: str
    expected: str
    found: str
    holds: bool | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """Result of an experiment. ``findings`` compares it with what was expected or published,
    ``tables["curves"]`` has a row per measurement, ``figures`` are matplotlib figures by name and
    ``arrays`` further numbers."""

    name: str
    title: str
    setup: Setup
    seeds: tuple[int, ...]
    corpus: str
    findings: tuple[Claim, ...]
    tables: dict[str, Rows]
    figures: dict[str, Any]
    notes: tuple[str, ...] = ()
    arrays: dict[str, Tensor] = field(default_factory=dict)

    def text(self) -> str:
        """The findings, a line each."""
        verdicts = {True: "yes", False: "NO", None: "-"}
        seeds = ", ".join(map(str, self.seeds))
        lines = [
            f"  [{verdicts[claim.holds]:>3}] {claim.statement}: {claim.found} "
            f"(expected: {claim.expected})"
            for claim in self.findings
        ]
        return "\n".join([f"{self.title}, {self.setup.scale} scale, seeds {seeds}", *lines])

    def save(self, out: Path) -> None:
        """Write a CSV per table, a PNG per figure, ``arrays.safetensors``, ``findings.txt``, and
        ``run.json`` with the setup."""
        import pandas as pd
        from safetensors.torch import save_file

        out.mkdir(parents=True, exist_ok=True)
        for name, rows in self.tables.items():
            pd.DataFrame(rows).to_csv(out / f"{name}.csv", index=False)
        for name, figure in self.figures.items():
            figure.savefig(out / f"{name}.png", dpi=150, bbox_inches="tight")
        if self.arrays:
            save_file(self.arrays, out / "arrays.safetensors")
        text = "\n\n".join([self.text(), *self.notes])
        (out / "findings.txt").write_text(f"{text}\n", encoding="utf-8")
        record = {"experiment": self.name, "setup": dataclasses.asdict(self.setup)}
        record |= {"seeds": self.seeds, "corpus": self.corpus, "version": tlg.__version__}
        record["findings"] = [dataclasses.asdict(claim) for claim in self.findings]
        (out / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def bridge_of(model: nn.Module, name: str) -> Any:
    """A copy of a model in training, as a TransformerBridge."""
    # a copy, because a bridge puts hooks into the modules that it wraps
    device = next(model.parameters()).device
    return tlg.models.from_hf(copy.deepcopy(model).to(device), None, name=name)


def basis_of(
    bridge: Any, tokens: Int[Tensor, "context position"], corpus: str
) -> tlg.PositionContext:
    """Basis of a model on windows without BOS. Position 0 is left out of the statistics, as
    ``decompose`` does by default."""
    windows = tlg.TokenWindows(tokens=tokens, has_bos=False, corpus=corpus)
    return tlg.decompose(bridge, windows, progress=False)


def state_measures(basis: tlg.PositionContext, frequencies: int) -> Rows:
    """:data:`MEASURES`, the :func:`jump` and ``split_half`` of every state."""
    options: dict[str, Any] = {"jackknife": False, "nulls": False}
    report = tlg.positional_report(basis, frequencies=frequencies, **options)
    size, place = jump(basis.pos)
    # row of the window -> position in the context, which fracture_at is too
    jumps = {"jump": size, "jump_at": place + basis.window[0]}
    values = {name: report.column(name) for name in (*MEASURES, "split_half")} | jumps
    return [
        {"state": state, **{name: float(value[i]) for name, value in values.items()}}
        for i, state in enumerate(basis.states)
    ]


def jump(
    pos: Float[Tensor, "state position d_model"],
) -> tuple[Float[Tensor, " state"], Int[Tensor, " state"]]:
    """Largest step ``|pos_(t+1) - pos_t|`` over the median step, and the row t at which it starts.

    It stands beside the fracture score, which compares directions. A smooth curve whose mean is
    subtracted often passes near the origin in the middle. There its direction turns fast without
    any break, but its steps are no longer than elsewhere.

    >>> line = torch.arange(-3.5, 4.0).double()[None, :, None] * torch.tensor([1.0, 0.0]).double()
    >>> line[0, 5:, 1] = 2
    >>> size, place = jump(line)
    >>> round(float(size), 2), int(place)
    (2.24, 4)
    """
    step = torch.linalg.vector_norm(pos.diff(dim=1), dim=-1)
    largest, row = step.max(-1)
    return largest / step.median(-1).values, row


def column(rows: Rows, name: str, **where: object) -> list[Any]:
    """The values of one column, in the rows whose other columns have the given values."""
    return [row[name] for row in rows if where.items() <= row.items()]


def final(rows: Sequence[dict[str, Any]], setup: Setup) -> Rows:
    """The rows of the finished model."""
    return [row for row in rows if row["step"] == setup.steps]
