"""What does an experiment return and write? An :class:`Outcome`: tables, figures, and findings
beside what was expected. The measures that the three experiments share are here too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_geometry.base.results import SOURCES, Provenance, Result
from tl_geometry.base.run_files import PAGE, WRITER, OwnFiles, check_folder, write_record
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import positional_report
from tl_geometry.models import from_hf
from tl_geometry.papers.setup import Setup
from tl_geometry.report import page
from tl_geometry.report.analysis import versions
from tl_geometry.report.folder import write_csv
from tl_geometry.report.section import Section
from tl_geometry.report.tables import Table, TableBlock

MEASURES = (
    "rank",
    "stable_rank",
    "relative_norm",
    "relative_norm_reference",
    "low_frequency",
    "roughness",
    "fracture",
    "fracture_at",
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
    ``tables["curves"]`` has a row per measurement, and ``figures`` are views by name."""

    name: str
    title: str
    setup: Setup
    seeds: tuple[int, ...]
    corpus: str
    findings: tuple[Claim, ...]
    tables: dict[str, Result]
    figures: dict[str, Any]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The findings, a line each."""
        verdict_words = {True: "yes", False: "NO", None: "-"}
        seeds = ", ".join(map(str, self.seeds))
        lines = [
            f"  [{verdict_words[claim.holds]:>3}] {claim.statement}: {claim.found} "
            f"(expected: {claim.expected})"
            for claim in self.findings
        ]
        return "\n".join([f"{self.title}, {self.setup.scale} scale, seeds {seeds}", *lines])

    def sections(self) -> list[Section]:
        """The outcome as sections of a report: the findings, then figures and tables."""
        verdict_words = {True: "yes", False: "no", None: "not judged"}
        claims = Table(
            names=("claim", "expected", "found", "holds"),
            cells=tuple(
                (claim.statement, claim.expected, claim.found, verdict_words[claim.holds])
                for claim in self.findings
            ),
            provenance=Provenance(corpus=self.corpus),
        )
        setup, seeds = self.setup, ", ".join(map(str, self.seeds))
        scale = (
            f"Scale {setup.scale}: {setup.layers} blocks, {setup.heads} heads, "
            f"d_model {setup.d_model}, context {setup.context}, {setup.steps} steps of "
            f"{setup.batch} rows; seeds {seeds}; data: {self.corpus}."
        )
        tables = [TableBlock(name=name, table=table) for name, table in self.tables.items()]
        claim_blocks = (scale, *self.notes, TableBlock(name="findings", table=claims))
        return [
            Section(title="Claims", blocks=claim_blocks),
            Section(title="Figures and tables", blocks=(*self.figures.values(), *tables)),
        ]

    def save(self, out: Path, *, command: Sequence[str] = (), force: bool = False) -> Path:
        """Write ``report.html``, a safetensors file per table (and a CSV where it is a plain
        :class:`~tl_geometry.report.tables.Table`), a PNG per figure and ``run.json``; return
        the page's path. Raises GeometryError rather than overwrite a file that no earlier run
        wrote, unless ``force`` is set."""
        out.mkdir(parents=True, exist_ok=True)
        sections = self.sections()
        tables = [item for section in sections for item in section.tables.items()]
        files: dict[str, Callable[[Path], object]] = {}
        for name, table in tables:
            if isinstance(table, Table):
                files[f"{name}.csv"] = partial(write_csv, table)
            files[f"{name}.safetensors"] = table.save
        files |= {f"{name}.png": figure.save for name, figure in self.figures.items()}
        page_parts = [section.part(section.title) for section in sections]
        text = page.document(self.title, page_parts, [SOURCES["song2023"]])
        files[PAGE] = partial(Path.write_text, data=text, encoding="utf-8")
        record = check_folder(out, self.name, files, force=force)
        run_files = OwnFiles(out, record.get("files", {}), force=force)
        # run.json is written again with every file, so that it lists the files of a stopped run
        for name, save in files.items():
            run_files.write(name, save, partial(self._record, out, run_files, command))
        return out / PAGE

    def _record(self, out: Path, run_files: OwnFiles, command: Sequence[str]) -> None:
        """Write ``run.json``."""
        summary = {
            "written_by": WRITER,
            "command": list(command),
            "experiment": self.name,
            "setup": dataclasses.asdict(self.setup),
            "seeds": self.seeds,
            "corpus": self.corpus,
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "versions": versions(),
            "files": run_files.hashes,
        }
        write_record(out, summary)


def bridge_of(model: nn.Module, name: str) -> Any:
    """A copy of a model in training, as a TransformerBridge."""
    # a copy, because a bridge puts hooks into the modules that it wraps
    return from_hf(copy.deepcopy(model), None, name=name, device=next(model.parameters()).device)


def basis_of(bridge: Any, tokens: Int[Tensor, "context position"], corpus: str) -> PositionContext:
    """Basis of a model on windows without BOS. Position 0 is left out of the statistics, as
    ``decompose`` does by default."""
    return decompose(
        bridge, TokenWindows(tokens=tokens, has_bos=False, corpus=corpus), progress=False
    )


def state_measures(basis: PositionContext, frequencies: int) -> list[dict[str, Any]]:
    """:data:`MEASURES`, the :func:`jump` and ``split_half`` of every state."""
    report = positional_report(basis, frequencies=frequencies, jackknife=False, nulls=False)
    size, place = jump(basis.pos)
    # row of the window -> position in the context, which fracture_at is too
    jumps = {"jump": size, "jump_at": place + basis.window[0]}
    values = {name: report[name] for name in (*MEASURES, "split_half")} | jumps
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

    >>> from tl_geometry.measures.positional import fracture_score
    >>> line = torch.arange(-3.5, 4.0).double()[None, :, None] * torch.tensor([1.0, 0.0]).double()
    >>> line[0, 5:, 1] = 2
    >>> size, place = jump(line)
    >>> round(float(size), 2), int(place), int(fracture_score(line).argmax)
    (2.24, 4, 3)
    """
    step = torch.linalg.vector_norm(pos.diff(dim=1), dim=-1)
    largest, row = step.max(-1)
    return largest / step.median(-1).values, row


def table_of(rows: Sequence[Mapping[str, Any]], provenance: Provenance) -> Table:
    """A table from rows with the same keys."""
    names = tuple(rows[0])
    cells = tuple(tuple(row[name] for name in names) for row in rows)
    return Table(names=names, cells=cells, provenance=provenance)
