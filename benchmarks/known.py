"""What is found where the answer is known? ``python -m benchmarks --only known`` runs every measure
on the models of ``benchmarks.known_models`` and writes ``benchmarks/known.md``, which the page of
evidence includes."""

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
from benchmarks.harness import Row, made_on
from benchmarks.known_judging import Counts, Finding

SEEDS = {"smoke": (0,), "cpu": (0, 1, 2), "gpu": (0, 1, 2)}
PAGE = Path(__file__).with_name("known.md")
POSITIONS = ("learned", "rotary")


@dataclass(frozen=True)
class Summary:
    """One measure on one model, all seeds together (or on several models, all together)."""

    measure: str
    model: str
    counts: Counts
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
        numbers = f"{c.recovered} of {total} | {c.missed} | {c.false} | {self.chance:.1f}"
        ranked = "| | |"
        if self.aurocs:
            low, high = min(self.aurocs), max(self.aurocs)
            ranked = f"| {mean(self.aurocs):.2f} ({low:.2f} to {high:.2f}) | {mean(self.nulls):.2f}"
            ranked += " |"
        return f"| {self.measure} | {self.model} | {numbers} {ranked}"


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
        rows.append(Summary(measure, model, counts, chance, aurocs, nulls, seconds))
    return rows


def by_measure(rows: Iterable[Summary]) -> list[Summary]:
    """One row for each measure, all models together."""
    groups: dict[str, list[Summary]] = {}
    for row in rows:
        groups.setdefault(row.measure, []).append(row)
    return [
        Summary(
            measure,
            str(len(of)),
            sum((row.counts for row in of), Counts(0, 0, 0)),
            sum(row.chance for row in of),
            tuple(x for row in of for x in row.aurocs),
            tuple(x for row in of for x in row.nulls),
            sum(row.seconds for row in of),
        )
        for measure, of in groups.items()
    ]


def questions(size: str) -> Iterator[Callable[[], Iterator[Finding]]]:
    """Every measure on every model, seed by seed; in the small size with rotary positions."""
    kinds = POSITIONS[size == "smoke" :]
    for seed in SEEDS[size]:
        for positions in kinds:
            for name in ("heads", "retrieval", "circuit", "induction", "sum"):
                yield partial(measures.labels, name, positions, seed)
            yield partial(measures.planes, positions, seed)
            for name in ("circuit", "idle"):
                yield partial(measures.composed, name, positions, seed)
            for name in ("circuit", "induction", "sum"):
                yield partial(measures.edges, name, positions, seed)
        for name, positions in (("heads", "learned"), *(("retrieval", p) for p in kinds)):
            yield partial(measures.features, name, positions, seed)
        for ask in (measures.ranks, measures.separated, measures.anomalous):
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


HEAD = "| measure | models | recovered | missed | false | by chance | AUROC | null |\n"
HEAD += "|---|---|---|---|---|---|---|---|"


def page(rows: Sequence[Summary]) -> str:
    """What is judged and how, the table, and where the library loses."""
    judged = [row for row in rows if RIVAL not in row.measure]
    lost = [row for row in judged if row.lost]
    counts = {"rows": len(judged), "right": len(judged) - len(lost), "machine": made_on()}
    table = "\n".join([HEAD, *(row.cells() for row in by_measure(rows))])
    losses = "\n".join(f"- {row.measure}: {said(row)}" for row in by_measure(lost))
    return f"{INTRODUCTION.format(**counts)}\n{table}\n\n{LOSSES}\n{losses}\n"


def said(row: Summary) -> str:
    """The counts of a row in words."""
    c = row.counts
    models = "1 model" if row.model == "1" else f"{row.model} models"
    return f"on {models} {c.recovered} recovered, {c.missed} missed, {c.false} false."


RIVAL = "(rival)"
INTRODUCTION = """## What is found where the answer is known

Made by `python -m benchmarks --only known` ({machine}), on the models of `benchmarks.known_models`,
each with learned positions (GPT-2) and rotary ones (Qwen2, Llama), and three seeds:

- **heads**, **retrieval**: one layer, planted by hand: heads that attend by offset, position, token
  identity, attributes of tokens, evenly, and by two of these at once (the right label is then
  "unclear");
- **circuit**: an induction circuit of two layers, planted among heads that look alike and do not
  matter; **idle**: the same, most heads of the first layer write next to nothing;
- **induction**: two layers of attention trained on repeated random tokens; **sum**: one layer and
  an MLP trained to add a key to digits. Heads are named by where they attend.

A label is *missed* if there is none where there should be one, *false* if it is another. Of a
ranking, as many items are taken as there are true ones: what is not taken is missed, what is taken
and not true is false. *By chance*: labels or ranks dealt out at random; *null*: the AUROC that 95%
of random orders stay below. True edges are planted ones that carry something else in the
counterfactual, or, in trained models, those that carry more than 10% of the difference when one
edge alone is changed in a live run. *Rivals* are other methods on the same models.

In {right} of {rows} questions (a measure on a model; rivals apart) everything is recovered and
nothing is false.
"""
LOSSES = """**Where the library loses**

- Edges of queries and keys are missed where attention is certain and does not change between the
  prompts: no gradient and no contrast sees what does not change. Live runs, one edge at a time,
  find every planted edge; check a ranking that matters with `faithfulness`.
- On the planted circuit the weights alone find which head reads which as well as shares on data do;
  where heads are idle, they rank every idle head above every true one.
- A label by covariance alone does as well as the library's, except on the head that was planted so
  that covariance and gain disagree.
- A head whose attention is even to within 2% still gets a label, because shares are ratios.
- An odd layer among few layers ranks high, but seldom exceeds the limit of null runs.

Measures in which something is missed or false:
"""
