"""What is found where the answer is known? ``python -m benchmarks --only known`` runs every measure
on the models of ``benchmarks.known_models`` and writes the page ``docs/known.md``."""

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
        ranked = "| | |"
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


HEAD = "| measure | model | seeds | recovered | missed | false | by chance | AUROC | null |\n"
HEAD += "|---|---|---|---|---|---|---|---|---|"


def page(rows: Sequence[Summary]) -> str:
    """The page: what is judged and how, the table, and where the library loses."""
    judged = [row for row in rows if RIVAL not in row.measure]
    lost = [row for row in judged if row.lost]
    counts = {"rows": len(judged), "right": len(judged) - len(lost)}
    table = "\n".join([HEAD, *(row.cells() for row in rows)])
    losses = "\n".join(f"- {row.measure}; {row.model}: {said(row)}" for row in lost)
    return f"{INTRODUCTION.format(**counts)}\n{table}\n\n{LOSSES}\n{losses}\n"


def said(row: Summary) -> str:
    """The counts of a row in words, and what it ranks by."""
    c = row.counts
    text = f"{c.recovered} recovered, {c.missed} missed, {c.false} false"
    return text + (f", AUROC {mean(row.aurocs):.2f}." if row.aurocs else ".")


RIVAL = "(rival)"
INTRODUCTION = """# What is found where the answer is known

Made by `python -m benchmarks --only known` (about two minutes on one core), on the models of
`benchmarks.known_models`:

- **heads**: one layer of nine heads planted by hand. Six attend in one way each: at one offset, by
  position, by token identity, by a random table of tokens, by the key's token, and evenly. One
  attends by offset and identity with equal energy (the right label is "unclear"). One attends by
  position and identity so that position has more of the covariance and identity more of the gain
  ("unclear", with both named). The ninth attends by query position times key token if positions are
  learned. If they are rotary, its scores (`query`) depend on the query's token alone (the right
  label is "uniform");
- **retrieval**: one layer of heads planted by hand. They match both attributes of a token (colour
  and shape), or one of the two, and one head attends evenly;
- **circuit**: an induction circuit of two layers planted by hand, among heads that look alike and
  do not matter for the output;
- **idle**: the same, but all heads of the first layer except one are idle: their weights connect
  them to later heads, yet they write next to nothing, because what they read has not been written;
- **induction**: two layers of attention that were trained on repeated random tokens. Their heads
  are named by where they attend, which none of the measures below looks at;
- **sum**: one layer of attention and an MLP, trained to add a key to seven digits (modulo 10).
  Attention brings digit and key together and the MLP adds them: if the output of the MLP is
  replaced by its mean, the model can only guess. Heads are named by where they attend.

Each comes with learned positions (GPT-2) and rotary ones (Qwen2, Llama), and with three seeds. In
planted models the seed draws directions, order and strength of heads, gains, biases and added
noise; in trained models it is the seed of the training.

**How it is judged.** A label is *recovered* if it is the planted one, *missed* if there is no clear
label where there should be one, *false* otherwise. Of a ranking, as many items are taken from the
top as there are true ones: true items that are not taken are missed, taken items that are not true
are false. *By chance* is how many would be recovered if the same labels or ranks were dealt out at
random. Numbers are sums over seeds; in brackets stand the least and the most of one seed (one
number if they are equal). AUROC is the mean over seeds (least to most); *null* is the AUROC that
95% of random orders stay below.
Planes, composition and edges are ranked by absolute value.

**Edges.** A prompt repeats seven tokens. Its counterfactual repeats seven others ("all tokens
changed"), or differs in the last token alone ("last token changed"). A prompt of **sum** ends
before the last sum; its counterfactual has another key and other digits ("all tokens changed"), or
another key alone ("key changed"). True edges of the planted circuit are those planted edges that
carry something else in the counterfactual. True edges of a trained model are found in live runs in
which one edge alone has the counterfactual's write: each carries more than 10% of the difference
between prompt and counterfactual.

**Rivals** are other methods, run on the same models and judged in the same way: attribution
patching of whole writers (each edge gets the score of its writer), composition scores of the
weights alone (Frobenius ratio, Elhage et al. 2021; for edges from head to head), and the label by
covariance alone (same margins). Plain attribution patching of edges (Syed et al. 2023) is
`edge_scores(method="gradient")`.

In {right} of {rows} rows, rivals apart, everything is recovered and nothing is false.
"""
LOSSES = """## Where the library loses

- **Edges of queries and keys are missed where attention is certain and does not change.** With all
  tokens changed, heads attend to the same places in prompt and counterfactual, in the planted
  circuit with near certainty. Gradients of the softmax are then close to zero, along the whole path
  of `method="integrated"` too, because it moves queries and keys together. Yet a single edge that
  carries the counterfactual's write breaks the match and costs 40% of the difference. There is one
  true edge from head to head there: gradients rank it worse than chance, and the composition scores
  of weights alone rank it better. Live runs, one edge at a time, find every planted edge. Use them
  where the model is small, and check a ranking that matters with `faithfulness`. With only the last
  token changed, `"integrated"` recovers every planted edge, the gradient half of them.
- **On the planted circuit the weights alone find which head reads which as well as shares on data
  do**: both are right everywhere. They differ where heads are idle: there the weights rank every
  idle head above every true one.
- **A label by covariance alone does as well as the library's label, which also asks for gain**,
  except on the head that was planted so that the two disagree.
- **The label need not name the term whose removal costs most.** In **sum** with learned positions
  six heads fetch a digit. In two of them position leads by covariance and by gain, yet removing the
  terms of position with content ("mixed") costs more. All six attend by position, as the label
  says.
- **Where an MLP adds (sum), not every true edge is found**: `"integrated"` ranks most of them
  first, the gradient fewer.
- **A head whose attention is even to within 2% still gets a label.** The rotary head `query` has
  scores that are constant in each row, except for a rotation of at most 0.03 radians. Shares are
  ratios: however little is left, it is divided by itself. The label is "uniform" only where nothing
  above rounding is left.
- **An odd layer among few layers is seldom flagged.** With 12 states, one that is off by five
  standard deviations ranks high (AUROC near 1), but only in about one map of four does it exceed
  the limit that 5% of null runs exceed.

Every row in which something is missed or false:
"""
