"""Additions: the answers of a model on a device of its own, problems and lines, the measures at a
step against other routes, and their means by step."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.modules import copy_of
from tl_geometry.base.errors import GeometryError
from tl_geometry.measures import positional
from tl_geometry.papers import answers, arithmetic, formats, outcome
from tl_geometry.papers.formats import ALPHABET, Problem, problems
from tl_geometry.papers.prediction import PREDICTORS, by_step, prediction
from tl_geometry.scores.split import split_scores


class Next(nn.Module):
    """Writes the character after the one that it read, and notes how much it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.anywhere = nn.Parameter(torch.zeros(1, device="cpu"))
        self.widths: list[int] = []

    def forward(self, tokens: Tensor) -> Any:
        self.widths.append(tokens.shape[1])
        following = (tokens + 1) % len(ALPHABET)
        return SimpleNamespace(logits=nn.functional.one_hot(following, len(ALPHABET)).float())


LINES = [Problem("1", "2", "3"), Problem("12", "30", "142"), Problem("5", "4", "09")]


def test_answers_are_made_on_the_device_of_the_model() -> None:
    """Not on the default one: "=" is followed by the newline, the newline by "+", "+" by "0"."""
    with torch.device("meta"):
        written = answers.answers(Next(), LINES, 100)
    assert written == ["\n", "\n+0", "\n+"]


@pytest.mark.parametrize(
    ("positions", "widths"), [(100, [6, 7, 8]), (8, [6, 7, 8]), (7, [6, 7, 7]), (6, [6, 6, 6])]
)
def test_a_model_is_given_no_more_than_it_reads(positions: int, widths: list[int]) -> None:
    """One character more for each that is written, up to the longest input of the model."""
    model = Next()
    written = answers.answers(model, LINES[:2], positions)
    assert model.widths == widths
    assert written[0] == "\n"


def test_a_score_is_taken_over_all_problems_in_batches() -> None:
    """Answers "\\n" and "\\n+0" beside sums that have some of these characters."""
    sums = [Problem("1", "2", "\n"), Problem("1", "2", "0+\n"), Problem("1", "2", "1+\n")]
    model = Next()
    found = answers.score(model, sums, 100, batch=2)
    assert found == (2 / 3, 6 / 7)
    assert len(model.widths) == 3 + 3, "two batches"


def test_the_problems_that_are_asked() -> None:
    """Of the trained lengths and of shorter ones, the same at every step, with seeds far from those
    of training."""
    setup = arithmetic.SETUPS["smoke"].changed({"problems": "6", "low": "3", "high": "5"})
    for task in formats.TASKS:
        inside, outside = arithmetic.asked_problems(setup, task)
        assert inside == problems(task, 6, low=3, high=5, seed=90_001)
        assert outside == problems(task, 6, low=1, high=2, seed=90_002)


def test_aligned_lines_have_numbers_of_one_length() -> None:
    """As many lines as asked for, without their newline."""
    for task in formats.TASKS:
        rows = arithmetic.aligned_tokens(task, 5, 2, seed=3)
        texts = ["".join(ALPHABET[i] for i in row) for row in rows.tolist()]
        lines = problems(task, 5, low=2, high=2, seed=3)
        assert texts == [f"{p.a}+{p.b}={p.c[::-1]}" for p in lines]


def test_digit_fracture_is_the_largest_turn_over_the_median_one() -> None:
    """Steps between digits alone, by hand: of "12+34=64", the steps from and to the signs, at 2 and
    5, are left out."""
    cosines = [0.9, 0.1, 0.2, 0.8, 0.3, 0.4, 0.5]
    angles = torch.tensor([0.0, *np.cumsum(np.arccos(cosines))])
    pos = torch.stack([angles.cos(), angles.sin()], -1)[None]
    for start in (0, 1):
        kept = [1 - cosines[i] for i in (0, 3, 6) if i >= start]
        median = sorted(kept)[(len(kept) - 1) // 2]
        found = arithmetic.digit_fracture(pos[:, start:], 2, start)
        assert found.tolist() == pytest.approx([max(kept) / median])
    assert arithmetic.digit_fracture(pos[:, :4], 1, 0).shape == (1,)


def test_measures_of_a_table_are_of_its_rows_less_their_mean() -> None:
    """Roughness and the share of low frequencies by numpy, and the same of a table moved away."""
    table = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)) + 5
    x = table.double().numpy()
    x = x - x.mean(0)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    n = np.arange(12)
    cosines = np.cos(np.pi * (2 * n + 1) * n[:4, None] / 24)
    cosines /= np.linalg.norm(cosines, axis=1, keepdims=True)
    turns = 1 - (unit[1:] * unit[:-1]).sum(1)
    found = arithmetic.table_measures(table, 4)
    wanted = {
        "wpe_fracture": turns.max() / np.median(turns),
        "wpe_roughness": (np.diff(x, axis=0) ** 2).sum() / (x**2).sum(),
        "wpe_low_frequency": ((cosines @ unit) ** 2).sum() / 12,
    }
    assert found == pytest.approx(wanted)
    assert arithmetic.table_measures(table + 100, 4) == pytest.approx(found, rel=1e-4)


def small(**changes: str) -> arithmetic.AdditionSetup:
    """A model of one block, and few lines."""
    sizes = {"layers": "1", "contexts": "12", "problems": "4", "examples": "8", "steps": "1"}
    return arithmetic.SETUPS["smoke"].changed(sizes | {"low": "2", "high": "3"} | changes)


def test_the_rows_of_a_step() -> None:
    """Scores and the table of positions in every row of a state; shares of the terms in every row
    of a head; measures of lines of each length."""
    setup = small(contexts="70", high="2")
    model = setup.model(len(ALPHABET), 0)
    rows = arithmetic._measure(setup, model, "carry", 8)
    states = [row for row in rows if row["row_of"] == "state"]
    heads = [row for row in rows if row["row_of"] == "head"]
    assert rows == states + heads
    assert [(r["length"], r["state"]) for r in states] == [(n, s) for n in (1, 2) for s in (0, 1)]
    assert [(r["length"], r["layer"], r["head"]) for r in heads] == [
        (n, 0, head) for n in (1, 2) for head in (0, 1)
    ]
    asked = zip(("in", "out"), arithmetic.asked_problems(setup, "carry"), strict=True)
    scores = {}
    for where, lines in asked:
        scores[f"exact_{where}"], scores[f"digits_{where}"] = answers.score(model, lines, 8)
    wpe = arithmetic.table_measures(model.transformer.wpe.weight.detach(), 2)
    assert all(row.items() >= (scores | wpe).items() for row in states)
    bridge = outcome.bridge_of(model, "m")
    for length in (1, 2):
        ids = arithmetic.aligned_tokens("carry", 70, length, seed=7)
        basis = outcome.basis_of(bridge, ids, "lines")
        digits = arithmetic.digit_fracture(basis.pos, length, 1)
        own = [row for row in states if row["length"] == length]
        for i, measured in enumerate(outcome.state_measures(basis, 2)):
            wanted = measured | {"fracture_digits": float(digits[i])}
            assert {name: own[i][name] for name in wanted} == pytest.approx(wanted, nan_ok=True)
        split = split_scores(bridge, ids[:64], basis)
        mean = split.terms["pos", "pos"].double().mean(0)
        fracture, shares = positional.fracture_score(mean).score, split.shares()
        for i, row in enumerate(row for row in heads if row["length"] == length):
            assert row["pos_pos_fracture"] == float(fracture[i])
            terms = dict(zip(shares.terms, shares.cs[i].tolist(), strict=True))
            assert {n.removeprefix("cs_"): v for n, v in row.items() if n[:3] == "cs_"} == terms


def test_a_run_for_each_task_and_seed() -> None:
    """In their order, with the options of the caller; rows by kind, and the first seed's model for
    the figures."""
    module: Any = copy_of(arithmetic)
    asked: list[Any] = []

    def run(setup: Any, task: str, seed: int, positions: int, training: Any) -> Any:
        asked.append((task, seed, positions, training))
        records = [{"row_of": kind, "step": 0} for kind in ("state", "head", "state")]
        return SimpleNamespace(records=records, model=f"{task} {seed}")

    module._train = run
    module._outcome = lambda setup, states, heads, models, seeds: (states, heads, models, seeds)
    options = {"out": "folder", "device": "meta", "progress": False}
    found = module.addition(
        small_copy(module), tasks=["no-carry", "carry"], seeds=[4, 2], **options
    )
    runs = [(task, seed) for task in ("no-carry", "carry") for seed in (4, 2)]
    assert asked == [(*run, 11, options) for run in runs]
    rows = [{"task": task, "seed": seed, "step": 0} for task, seed in runs]
    assert found[0] == [row for row in rows for _ in range(2)]
    assert found[1] == rows
    assert found[2:] == ({"no-carry": "no-carry 4", "carry": "carry 4"}, (4, 2))
    asked.clear()
    module.addition("smoke")
    assert asked == [
        (task, 0, 14, {"out": None, "device": "cpu", "progress": True})
        for task in ("carry", "no-carry")
    ]


def small_copy(module: Any) -> Any:
    """The setup of :func:`small` in the classes of a copy of the module."""
    return module.SETUPS["smoke"].changed({"low": "2", "high": "3"})


def test_sizes_that_addition_cannot_use_are_refused() -> None:
    """Shorter numbers need a digit less than the shortest; lines need their positions."""
    with pytest.raises(GeometryError, match="low: expected at least 2 digits, got 1"):
        arithmetic.addition(small(low="1"), progress=False)
    with pytest.raises(GeometryError) as short:
        arithmetic.addition(small(context="10"), progress=False)
    assert str(short.value).startswith("context: expected at least 11, got 10. Use context=11")
    with pytest.raises(GeometryError, match="tasks: expected one of 'carry', 'no-carry', got 'c'"):
        arithmetic.addition(small(), tasks=["c"], progress=False)


@pytest.mark.parametrize("seed", [0, 3])
def test_training_lines_follow_the_seed(seed: int) -> None:
    """The lines, and those of each step; the run is named by task and seed."""
    module: Any = copy_of(arithmetic)
    module.run_training = lambda *given, **options: (given, options)
    module._measure = lambda setup, model, task, positions: [(model, task, positions)]
    setup = small()
    given, options = module._train(setup, "carry", seed, 11, {"device": "meta"})
    assert options == {"name": f"carry-{seed}", "seed": seed, "device": "meta"}
    assert given[:2] == (setup, 13)
    lines = problems("carry", 8, low=2, high=3, seed=seed)
    for step in (0, 5):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(8, (16,), generator=generator).tolist()
        wanted = formats.answer_batch([lines[i] for i in rows], 11)
        assert all(a.equal(b) for a, b in zip(given[2](step), wanted, strict=True))
    assert given[3](7, "model") == [("model", "carry", 11)]


# --- means by step, and their correlations


def test_means_by_step_are_over_states_above_zero_and_over_heads() -> None:
    """Of lines of one length, for each task, seed and step in the order of the rows."""
    names = ("fracture", "fracture_digits", "roughness", "low_frequency")
    steps = [("no-carry", 4, 0), ("no-carry", 4, 9), ("carry", 1, 9)]
    keys = ("task", "seed", "step")
    states = [
        dict(zip(keys, step, strict=True))
        | {"length": length, "state": state, "exact_in": i, "digits_out": i / 4, "wpe_fracture": 7}
        | {name: 100 * i + 10 * length + state**2 + k for k, name in enumerate(names)}
        for i, step in enumerate(steps)
        for length in (2, 3)
        for state in (0, 1, 2)
    ]
    heads = [
        dict(zip(keys, step, strict=True))
        | {"length": length, "pos_pos_fracture": i + length + head}
        for i, step in enumerate(steps)
        for length in (3, 2)
        for head in (0, 3)
    ]
    for length in (2, 3):
        wanted = [
            dict(zip(keys, step, strict=True))
            | {"exact_in": i, "digits_out": i / 4, "wpe_fracture": 7}
            | {name: 100 * i + 10 * length + 2.5 + k for k, name in enumerate(names)}
            | {"pos_pos_fracture": i + length + 1.5}
            for i, step in enumerate(steps)
        ]
        assert by_step(states, heads, length) == wanted


def test_three_steps_make_a_correlation_of_levels_and_four_one_of_changes() -> None:
    """Step 0 does not count, and each run has its own rows."""
    falling = dict.fromkeys(PREDICTORS, 0.0)
    counts = {("carry", 1): 3, ("carry", 0): 4, ("no-carry", 1): 2}
    rows = [
        falling
        | {"task": task, "seed": seed, "step": step, "fracture": -(step**2), "digits_out": step**3}
        for (task, seed), count in counts.items()
        for step in range(count + 1)
    ]
    found = prediction(rows)
    assert [(r["task"], r["seed"], r["measure"]) for r in found] == [
        (*run, name) for run in counts for name in PREDICTORS
    ]
    assert {r["score"] for r in found} == {"digits_out"}
    assert [r["points"] for r in found if r["measure"] == "fracture"] == [3, 4, 2]
    levels, changes = (
        [round(r[name], 6) for r in found if r["measure"] == "fracture"]
        for name in ("levels", "changes")
    )
    assert levels[:2] == [-1, -1]
    assert changes[1] == -1
    assert all(math.isnan(x) for x in (levels[2], changes[0], changes[2]))


# --- problems


def test_problems_and_rows_that_cannot_be_made_are_refused() -> None:
    """The bounds of lengths, halves and positions, with what came."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for half in (1, 3):
        formats.randomise(ids, "partial", 5, half=half)
    for half in (0, 4):
        with pytest.raises(GeometryError, match=f"half: expected 1 to 3, got {half}"):
            formats.randomise(ids, "partial", 5, half=half)
    assert len(problems("carry", 2, low=1, high=1)) == 2
    for low, high in ((0, 2), (3, 2)):
        with pytest.raises(GeometryError) as wrong:
            problems("carry", 1, low=low, high=high)
        assert str(wrong.value).startswith(
            f"lengths: expected 1 <= low <= high, got ({low}, {high})"
        )
    with pytest.raises(GeometryError, match="task: expected one of 'carry', 'no-carry', got 'add'"):
        problems("add", 1, low=1, high=2)
    inputs, targets = formats.answer_batch([Problem("1", "2", "3")], 5)
    assert inputs.shape == targets.shape == (1, 5)
    with pytest.raises(GeometryError, match="positions: expected at least 5, got 4"):
        formats.answer_batch([Problem("1", "2", "3")], 4)


def test_random_tokens_follow_the_seed() -> None:
    """Ids below the size of the vocabulary, with seed 0 by default."""
    ids = torch.full((3, 6), 99)
    noise = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(0))
    assert formats.randomise(ids, "full", 7, half=2).equal(noise)
    partial = formats.randomise(ids, "partial", 7, half=2)
    assert partial.tolist() == torch.cat([ids[:, :2], noise[:, 2:]], 1).tolist()


def test_numbers_of_one_digit_without_a_carry() -> None:
    """Every sum of at most nine occurs, in both orders, and nothing else."""
    made = Counter((p.a, p.b) for p in problems("no-carry", 4000, low=1, high=1, seed=2))
    pairs = {(str(a), str(b)) for a in range(10) for b in range(10) if a + b <= 9}
    assert set(made) == pairs
    sums = Counter(p.a for p in problems("carry", 4000, low=1, high=1, seed=2))
    assert set(sums) == set("12345678")
