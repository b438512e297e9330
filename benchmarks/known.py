"""What is found where the answer is known? ``python -m benchmarks --only known`` runs every measure on
the models of ``tl_geometry.zoo.known`` and writes the page ``docs/known.md``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks import known_measures as measures
from benchmarks.harness import Row
from benchmarks.known_judging import Counts, Finding

SEEDS = {"smoke": (0,), "cpu": (0, 1, 2), "gpu": (0, 1, 2)}
PAGE = Path(__file__).parents[1] / "docs" / "known.md"
POSITIONS = ("learned", "rotary")


@dataclass(frozen=True)
class Summary:
    """One measure on one model, all seeds together."""

    measure: str
    model: str
    seeds: int
    counts: Counts
    least: int
    most: int
    chance: float
    aurocs: tuple[float, ...]
    nulls: tuple[float, ...]
    seconds: float

    @property
    def lost(self) -> bool:
        """Whether anything was missed or false."""
        return self.counts.missed + self.counts.false > 0

    def cells(self) -> str:
        """A row of the table."""
        c, total = self.counts, self.counts.recovered + self.counts.missed
        total = max(total, c.recovered + c.false) if not self.aurocs else total
        spread = f"{self.least} to {self.most}" if self.least < self.most else f"{self.least}"
        numbers = f"{c.recovered} of {total} ({spread}) | {c.missed} | {c.false}"
        numbers += f" | {self.chance:.1f}"
        ranked = "| |"
        if self.aurocs:
            low, high = min(self.aurocs), max(self.aurocs)
            ranked = f"| {mean(self.aurocs):.2f} ({low:.2f} to {high:.2f}) | {mean(self.nulls):.2f}"
            ranked += " |"
        return f"| {self.measure} | {self.model} | {self.seeds} | {numbers} {ranked}"


def summarised(found: Iterable[tuple[Finding, float]]) -> list[Summary]:
    """Findings of several seeds, in the order in which they first came."""
    groups: dict[tuple[str, str], list[tuple[Finding, float]]] = {}
    for each in found:
        groups.setdefault((each[0].measure, each[0].model), []).append(each)
    rows = []
    for (measure, model), of in groups.items():
        counts = Counts(0, 0, 0)
        for finding, _ in of:
            counts += finding.counts
        aurocs = tuple(f.auroc for f, _ in of if f.auroc is not None)
        nulls = tuple(f.null for f, _ in of if f.null is not None)
        chance, seconds = sum(f.chance for f, _ in of), sum(s for _, s in of)
        right = [f.counts.recovered for f, _ in of]
        spread = (min(right), max(right))
        rows.append(
            Summary(measure, model, len(of), counts, *spread, chance, aurocs, nulls, seconds)
        )
    return rows


def questions(size: str) -> Iterator[Callable[[], Iterator[Finding]]]:
    """Every measure on every model, seed by seed."""
    seeds = SEEDS[size]
    for seed in seeds:
        for positions in POSITIONS:
            for name in ("heads", "circuit", "induction"):
                yield partial(measures.labels, name, positions, seed)
            yield partial(measures.planes, positions, seed)
            yield partial(measures.composed, positions, seed)
            for name in ("circuit", "induction"):
                yield partial(measures.edges, name, positions, seed)
        for ask in (measures.features, measures.ranks, measures.separated, measures.anomalous):
            yield partial(ask, seed)


def answers(size: str) -> Iterator[tuple[Finding, float]]:
    """Findings and the seconds that each took."""
    for ask in questions(size):
        start = time.perf_counter()
        found = list(ask())
        seconds = (time.perf_counter() - start) / len(found)
        for finding in found:
            sys.stderr.write(f"{finding} {seconds:.1f} s\n")
            yield finding, seconds


def run(size: str) -> list[Row]:
    """Rows of the benchmark, with AUROC (or the share recovered) in place of the ratio; every size
    but the smallest writes the page."""
    rows = sorted(summarised(answers(size)), key=lambda row: order(row.measure))
    if size != "smoke":
        PAGE.write_text(page(rows), encoding="utf-8")
    return [
        Row("known", f"{r.measure}: {r.model}", r.seconds, share(r), f"{r.counts}") for r in rows
    ]


def share(row: Summary) -> float:
    """AUROC, or the share of the answers that are right."""
    if row.aurocs:
        return mean(row.aurocs)
    total = sum(row.counts)
    return row.counts.recovered / total if total else math.nan


ORDER = ("label", "dominant", "rotary", "peak", "writers", "composition", "edges", "features")


def order(measure: str) -> int:
    """Where a measure stands on the page."""
    return next((i for i, word in enumerate(ORDER) if measure.startswith(word)), len(ORDER))


HEAD = "| measure | model | seeds | recovered | missed | false | by chance | AUROC | null |\n"
HEAD += "|---|---|---|---|---|---|---|---|---|"


def page(rows: Sequence[Summary]) -> str:
    """The page: what is judged and how, the table, and where the library loses."""
    lost = [row for row in rows if row.lost and "rival" not in row.measure]
    right = [row for row in rows if not row.lost and "rival" not in row.measure]
    text = INTRODUCTION.format(right=len(right), rows=len(right) + len(lost))
    table = "\n".join([HEAD, *(row.cells() for row in rows)])
    losses = "\n".join(f"- {row.measure}, {row.model}: {_said(row)}" for row in lost)
    return f"{text}\n{table}\n\n{REASONS}\n{losses}\n"


def _said(row: Summary) -> str:
    c = row.counts
    said = f"{c.recovered} recovered, {c.missed} missed, {c.false} false"
    return said + (f" (AUROC {mean(row.aurocs):.2f})." if row.aurocs else ".")


INTRODUCTION = """# What is found where the answer is known

INTRO {right} {rows}
"""
REASONS = """## Where the library loses

Every row in which something is missed or false:
"""
