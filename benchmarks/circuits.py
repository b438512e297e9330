"""How much of a behaviour do the best edges carry? ``python -m benchmarks --only circuits`` ranks
all edges of SmolLM2-135M-Instruct on some pairs of prompts, runs the model on the best of them over
other pairs, and writes ``benchmarks/faithfulness.md``.

Three tasks, each a prompt and a counterfactual of as many tokens that has another answer. The
rankings are the methods of :func:`tl_geometry.edge_scores`; random circuits of equal size are the
null. A ratio is the time of a ranking to that of the model's own passes over both prompts.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg
from benchmarks.harness import Row, made_on, synchronize
from tl_geometry.base.intervals import Interval

PAGE = Path(__file__).with_name("faithfulness.md")
FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the edges that are kept, as in Mueller et al. 2025."""
METHODS = ("contrast", "gradient", "integrated")
PAIRS = {"smoke": (2, 3), "cpu": (16, 48), "gpu": (48, 200)}
"""Pairs that rank the edges, and others on which they are judged."""
Pair = tuple[str, str, str, str]
"""A prompt, its counterfactual, the answer to each."""

WORDS = {
    "names": "Mary John Anna Paul James Emma Mark Peter David Alice Jack Kate Tom Sarah Luke Ben",
    "places": "store park school office station garden house hospital",
    "things": "drink book ring bag letter key",
    "numbers": "one two three four five six seven eight nine ten eleven twelve",
    "nouns": "boy girl dog car book key house tree picture author farmer student teacher",
    "near": "near_the_door on_the_left in_the_old_park next_to_the_river behind_the_wall",
}
NAMES, PLACES, THINGS, NUMBERS, NOUNS, NEAR = (
    [word.replace("_", " ") for word in words.split()] for words in WORDS.values()
)


def names(rng: random.Random) -> Pair:
    """Who is given something: the name that is not the giver's."""
    first, second = rng.sample(NAMES, 2)
    rest = f"gave a {rng.choice(THINGS)} to"
    start = f"When {first} and {second} went to the {rng.choice(PLACES)},"
    return f"{start} {second} {rest}", f"{start} {first} {rest}", f" {first}", f" {second}"


def series(rng: random.Random) -> Pair:
    """The number that follows three in their order."""
    a, b = rng.sample(range(len(NUMBERS) - 3), 2)
    said = [", ".join(NUMBERS[i : i + 3]) + "," for i in (a, b)]
    return said[0], said[1], f" {NUMBERS[a + 3]}", f" {NUMBERS[b + 3]}"


def agreement(rng: random.Random) -> Pair:
    """Singular or plural, by the noun in front of a phrase."""
    noun, where = rng.choice(NOUNS), rng.choice(NEAR)
    forms = [(f"The {noun} {where}", " is"), (f"The {noun}s {where}", " are")]
    rng.shuffle(forms)
    (clean, answer), (other, rival) = forms
    return clean, other, answer, rival


TASKS: dict[str, Callable[[random.Random], Pair]] = {
    "names": names,
    "series": series,
    "agreement": agreement,
}


def pairs(model: Any, task: str, numbers: tuple[int, int]) -> tuple[Any, Any]:
    """Prompts to rank the edges by, and others to judge them on. No pair is in both."""
    drawn = _fitting(model, TASKS[task], random.Random(0))
    both = list(itertools.islice(drawn, sum(numbers)))
    parts = both[: numbers[0]], both[numbers[0] :]
    found = []
    for part in parts:
        clean, other, answers, rivals = (list(column) for column in zip(*part, strict=True))
        answered = list(zip(answers, rivals, strict=True))
        found.append(tlg.corpus.prompts(model, clean, counterfactuals=other, answers=answered))
    return found[0], found[1]


def _fitting(
    model: Any, draw: Callable[[random.Random], Pair], rng: random.Random
) -> Iterator[Pair]:
    """Pairs of as many tokens each, whose answers are one token each; every pair once."""
    tokenize, seen = model.tokenizer.tokenize, set[Pair]()
    for _ in range(100_000):
        pair = draw(rng)
        lengths = [len(tokenize(text)) for text in pair]
        if pair not in seen and lengths[0] == lengths[1] and lengths[2:] == [1, 1]:
            seen.add(pair)
            yield pair


@dataclass(frozen=True)
class Found:
    """What one ranking gives on one task; ``seconds`` per pair of prompts."""

    task: str
    method: str
    f: list[float]
    cpr: Interval
    cmd: Interval
    seconds: float
    passes: float
    random: list[float]
    random_cpr: float


def judged(model: Any, task: str, numbers: tuple[int, int]) -> Iterator[Found]:
    """Every method on one task."""
    ranked, held_out = pairs(model, task, numbers)
    plain = _seconds(lambda: _plain(model, ranked))
    for method in METHODS:
        synchronize()
        start = time.perf_counter()
        scores = tlg.edge_scores(model, ranked, method=method)
        synchronize()
        spent = time.perf_counter() - start
        draws = 3 if method == METHODS[0] else 1  # random circuits are the same for all methods
        found = tlg.faithfulness(model, held_out, scores, fractions=FRACTIONS, draws=draws)
        yield Found(
            task,
            method,
            found.f.value.tolist(),
            found.cpr,
            found.cmd,
            spent / len(ranked),
            spent / plain,
            found.random_f.mean(0).tolist(),
            float(found.random_cpr.mean()),
        )


def _plain(model: Any, prompts: Any) -> None:
    """The model's own passes over prompts and counterfactuals."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        for group in prompts.groups():
            model(group.tokens.to(device))
            model(group.counterfactuals.to(device))


def _seconds(call: Callable[[], object]) -> float:
    """Time of a call, the faster of two."""
    times = []
    for _ in range(2):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def run(size: str) -> list[Row]:
    """All methods on all tasks; writes the page, but for ``smoke``."""
    from tl_geometry.zoo import smollm2

    device = "cuda" if size == "gpu" else "cpu"
    model, rows, found = smollm2(device=device), [], list[Found]()
    for task in TASKS:
        for each in judged(model, task, PAIRS[size]):
            found.append(each)
            note = f"CPR {each.cpr.value:.3f}, CMD {each.cmd.value:.3f}, {task}"
            name = f"edges by {each.method}"
            rows.append(Row("circuits", name, each.seconds, each.passes, note))
    if size != "smoke":
        PAGE.write_text(page(found, PAIRS[size]))
    return rows


ABOUT = """## How faithful are the best edges?

`python -m benchmarks --only circuits` wrote this page ({machine}).
All edges of SmolLM2-135M-**Instruct** are ranked on {ranked} pairs of prompts of each task and
judged on {judged} others: the model runs on the best of them alone, and the rest has its value in
the counterfactual. f = 1 is the whole difference. CPR is the area under f (high is good), CMD that
under abs(1 - f) (low is good), as Mueller et al. 2025 define them, with 95% intervals over the
pairs. The last column is the time of the ranking, in plain forward passes over both prompts.
"""


def page(found: list[Found], numbers: tuple[int, int]) -> str:
    """The page for the site."""
    heads = " | ".join(f"{100 * fraction:g}%" for fraction in FRACTIONS[:-1])
    lines = [
        ABOUT.format(machine=made_on(), ranked=numbers[0], judged=numbers[1]),
        f"| task | edges by | {heads} | CPR | CMD | time |",
        f"|---|---|{'---:|' * (len(FRACTIONS) + 2)}",
    ]
    for task, of_task in itertools.groupby(found, key=lambda each: each.task):
        methods = list(of_task)
        for each in methods:
            cpr, cmd = (f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]" for x in (each.cpr, each.cmd))
            row = f"| {task} | {each.method} | {_shares(each.f)} | {cpr} | {cmd}"
            lines.append(f"{row} | {each.passes:.1f} |")
        first = methods[0]  # random circuits are the same for all methods
        null = f"{_shares(first.random)} | {first.random_cpr:.3f}"
        lines.append(f"| {task} | random | {null} | | |")
    return "\n".join([*lines, ""])


def _shares(f: list[float]) -> str:
    """The curve as cells of a table, without its end at 1."""
    # "z": no zero has a sign
    return " | ".join(f"{value:z.2f}" for value in f[:-1])
