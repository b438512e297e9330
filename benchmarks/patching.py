"""Do scores of heads and MLPs say what patching them does? ``python -m benchmarks --only patching``
takes the scores of whole writers (:meth:`tl_geometry.circuits.EdgeScores.nodes`) from some pairs of
prompts of the tasks of :mod:`benchmarks.circuits`, gives every head and MLP its value from the
counterfactual in a live run over other pairs, and writes ``benchmarks/patching.md``.

A score is a share of the difference of two runs, and patching a question of what one change does to
one of them, so that they need not be equal; a ranking that is to choose what is patched should
still find what matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.circuits import METHODS, TASKS, pairs
from benchmarks.harness import Row, made_on, synchronize

PAGE = Path(__file__).with_name("patching.md")
PAIRS = {"smoke": (2, 2), "cpu": (16, 16), "gpu": (48, 48)}
"""Pairs whose scores are taken, and others that are patched."""
BLOCKS = {"smoke": 2}
"""How many blocks are patched, the last ones; all of them in the other sizes."""
LARGEST = 12
"""How many of the writers that change most are looked for among as many of the largest scores."""


@dataclass(frozen=True)
class Found:
    """How one method's scores agree with patching on one task."""

    task: str
    method: str
    pearson: float
    rank: float
    among: int
    seconds: float
    ratio: float


def distinct(prompts: Any) -> Any:
    """One pair of each prompt: an edit finds the counterfactual of a prompt by its tokens."""
    first: dict[tuple[int, ...], int] = {}
    for row in range(len(prompts)):
        first.setdefault(tuple(prompts[[row]].tokens[0].tolist()), row)
    return prompts[list(first.values())]


def patched(model: Any, prompts: Any, names: list[str]) -> Tensor:
    """What each writer adds to the difference of logits: how much is lost with its counterfactual
    value."""
    edits = tlg.interventions.each(model, names, by="counterfactual")
    found = tlg.effects(model, prompts, edits, metric="difference", progress=False)
    return torch.tensor([-found.change(name).value for name in names], dtype=torch.float64)


def timed(call: Callable[[], Any], size: str) -> tuple[Any, float]:
    """What a call gives, and its processor time; on a GPU, whose work is none, its time."""
    clock = time.perf_counter if size == "gpu" else time.process_time
    synchronize()
    start = clock()
    given = call()
    synchronize()
    return given, clock() - start


def compared(model: Any, task: str, size: str) -> list[Found]:
    """Every method on one task, the patching first."""
    scored, others = pairs(model, task, PAIRS[size])
    first = model.cfg.n_layers - BLOCKS.get(size, model.cfg.n_layers)
    names = [
        name
        for layer in range(first, model.cfg.n_layers)
        for name in (*(f"L{layer}H{head}" for head in range(model.cfg.n_heads)), f"mlp{layer}")
    ]
    truth, patching = timed(lambda: patched(model, distinct(others), names), size)
    rows = [Found(task, "patching", 1.0, 1.0, LARGEST, patching, 1.0)]
    for method in METHODS:
        edges = partial(tlg.edge_scores, model, scored, method=method, progress=False)
        found, spent = timed(edges, size)
        nodes = found.nodes()
        score = dict(zip(nodes.column("writer"), nodes.column("score"), strict=True))
        scores = torch.tensor([score[name] for name in names], dtype=torch.float64)
        largest = [set(x.abs().topk(LARGEST).indices.tolist()) for x in (truth, scores)]
        both = torch.stack([truth, scores])
        ranks = both.argsort(-1).argsort(-1).double()
        pearson, rank = (float(torch.corrcoef(x)[0, 1]) for x in (both, ranks))
        among = len(largest[0] & largest[1])
        rows.append(Found(task, method, pearson, rank, among, spent, spent / patching))
    return rows


def run(size: str) -> list[Row]:
    """All methods on all tasks; writes the page, but for ``smoke``."""
    from tl_geometry.zoo import smollm2

    model, found = smollm2(device="cuda" if size == "gpu" else "cpu"), list[Found]()
    for task in TASKS:
        found += compared(model, task, size)
    if size != "smoke":
        PAGE.write_text(page(found, size))
    return [
        Row(
            f"patching, {each.task}",
            each.method,
            each.seconds,
            each.ratio,
            f"correlation {each.pearson:.2f}, {each.among} of {LARGEST}",
        )
        for each in found
    ]


ABOUT = """## Do scores of heads and MLPs say what patching does?

`python -m benchmarks --only patching` wrote this page ({machine}). Each head and MLP of
SmolLM2-135M-**Instruct** has a score, the sum over all edges out of it, from {scored} pairs of
prompts of each task above. On {others} other pairs (one of each prompt) each has its value from the
counterfactual in a live run. Correlations are over all heads and MLPs; *among* counts the {largest}
that change the difference most among the {largest} of largest score; {time} is in multiples
of that of patching.

| task | scores by | correlation | of ranks | among | time |
|---|---|---:|---:|---:|---:|
"""


def page(found: list[Found], size: str) -> str:
    """The page for the site."""
    (scored, others), clock = PAIRS[size], "time" if size == "gpu" else "processor time"
    about = {"machine": made_on(), "scored": scored, "others": others, "time": clock}
    text = ABOUT.format(largest=LARGEST, **about)
    for each in found:
        if each.method != "patching":
            numbers_of = f"{each.pearson:.2f} | {each.rank:.2f} | {each.among}"
            text += f"| {each.task} | {each.method} | {numbers_of} | {each.ratio:.2f} |\n"
    return text
