"""Training formats character by character, a trainer that resumes exactly, and each experiment of
``python -m benchmarks.training`` at its smallest."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training import __main__ as command
from benchmarks.training import embedded
from benchmarks.training.formats import Problem, answer_batch, problems, randomise, shifted
from benchmarks.training.setup import Setup, Training, run_training
from benchmarks.training.trainer import IGNORE, TrainSettings, sequence_loss
from tl_geometry.base.errors import GeometryError

pytestmark = pytest.mark.once

TINY = Setup(
    scale="test",
    layers=1,
    heads=2,
    d_model=16,
    context=8,
    batch=4,
    steps=9,
    warmup=2,
    learning_rate=1e-2,
    final_learning_rate=1e-3,
    measurements=3,
)


def near(count: int, n: int, share: float) -> bool:
    """Within five standard deviations of a binomial count."""
    return abs(count - n * share) <= 5 * math.sqrt(n * share * (1 - share))


def test_lines_with_carry_follow_the_rules() -> None:
    made = problems("carry", 4000, low=5, high=10, seed=3)
    for p in made:
        assert int(p.a) + int(p.b) == int(p.c)
        assert all(5 <= len(x) <= 10 and x[0] != "0" for x in p)
        assert p.text == f"{p.a}+{p.b}={p.c[::-1]}\n"
    pairs = Counter((len(p.a), len(p.b)) for p in made)
    assert set(pairs) == {(i, j) for i in range(5, 11) for j in range(5, 11)}
    # sums of eleven digits are drawn again with the same lengths: were the lengths drawn again,
    # this pair would be half as frequent
    assert near(pairs[10, 10], 4000, 1 / 36)
    assert not near(pairs[10, 10] // 2, 4000, 1 / 36)
    places = lambda p: zip(p.a.zfill(11)[::-1], p.b.zfill(11)[::-1], strict=True)
    carries = lambda p: any(int(x) + int(y) > 9 for x, y in places(p))
    assert any(map(carries, made))
    assert not any(map(carries, problems("no-carry", 500, low=5, high=10, seed=3)))


def test_the_mask_and_the_loss_by_hand() -> None:
    inputs, targets = answer_batch([Problem("12", "7", "19"), Problem("5", "4", "9")], 8)
    # "12+7=91\n": the input is "12+7=91", the target after "=" is "9", after "9" is "1", after "1"
    # the newline
    assert inputs.tolist() == [[3, 4, 1, 9, 12, 11, 3, 0], [7, 1, 6, 12, 11, 0, 0, 0]]
    X = IGNORE
    assert targets.tolist() == [[X, X, X, X, 11, 3, 0, X], [X, X, X, 11, 0, X, X, X]]
    with pytest.raises(GeometryError, match="positions: expected at least 7, got 6"):
        answer_batch([Problem("12", "7", "19")], 6)
    logits, even = torch.zeros(2, 8, 13), math.log(13)
    assert float(sequence_loss(logits, targets)) == pytest.approx(even)
    logits[0, :4], logits[:, 7] = torch.randn(4, 13), 9.0
    assert float(sequence_loss(logits, targets)) == pytest.approx(even), "prompt or padding counts"
    logits[1, 3, 11] = 100.0  # the first of the two targets of the second line
    assert float(sequence_loss(logits, targets)) == pytest.approx((even + even / 2) / 2)


def test_formats_column_by_column() -> None:
    rows = torch.arange(600 * 10).view(600, 10) + 1000
    assert torch.equal(randomise(rows, "baseline", 50, half=4), rows)
    partial = randomise(rows, "partial", 50, half=4, seed=1)
    assert torch.equal(partial[:, :4], rows[:, :4])
    full = randomise(rows, "full", 50, half=4, seed=1)
    assert torch.equal(full[:, 4:], partial[:, 4:])
    counts = torch.bincount(full.flatten(), minlength=50)
    assert len(counts) == 50
    assert all(near(int(c), 6000, 1 / 50) for c in counts)
    assert not torch.equal(full, randomise(rows, "full", 50, half=4, seed=2))
    inputs, targets = shifted(partial)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])  # a random input is the target before it
    with pytest.raises(GeometryError, match="one of 'baseline', 'partial', 'full'"):
        randomise(rows, "half", 50, half=4)


def test_schedule_by_hand() -> None:
    settings = TrainSettings(steps=10, learning_rate=1.0, final_learning_rate=0.1, warmup=2)
    assert [settings.rate(s) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert math.isclose(settings.rate(6), 0.55)


def batch_at(step: int) -> tuple[Tensor, Tensor]:
    return shifted(torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step)))


def measure(_: int, model: Any) -> list[dict[str, Any]]:
    return [{"size": float(model.transformer.wpe.weight.detach().norm()), "gap": math.nan}]


def run(seed: int = 0, measure: Any = measure, **options: Any) -> Training:
    options |= {"name": "run", "seed": seed, "progress": False}
    return run_training(TINY, 11, batch_at, measure, **options)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run()
    assert [r["step"] for r in whole.records] == [0, 1, 4, 9]

    def stops(step: int, model: Any) -> list[dict[str, Any]]:
        if step == 4:
            raise KeyboardInterrupt
        return measure(step, model)

    with pytest.raises(KeyboardInterrupt):
        run(measure=stops, out=tmp_path)
    again = run(out=tmp_path)
    assert (again.losses, str(again.records)) == (whole.losses, str(whole.records))
    weights = dict(whole.model.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in again.model.named_parameters())
    finished = run(measure=lambda step, model: pytest.fail("measured again"), out=tmp_path)
    assert finished.losses == whole.losses
    with pytest.raises(GeometryError, match=r"expected a checkpoint of this run, got other seed"):
        run(seed=1, out=tmp_path)


def test_the_embedded_models_rows_hide_the_unpredictable_first_copy() -> None:
    stream = torch.randint(1, 2048, (5000,), generator=torch.Generator().manual_seed(0))
    make = embedded.batches(stream)
    for step in (0, embedded.REPEAT_STEPS):
        inputs, targets = make(step)
        assert torch.equal(inputs, make(step)[0])
        assert (inputs[:, 0] == 0).all()
        shown = targets != IGNORE
        assert torch.equal(inputs[:, 1:][shown[:, :-1]], targets[:, :-1][shown[:, :-1]])
    hidden = (make(embedded.REPEAT_STEPS)[1] == IGNORE).any(1)
    assert hidden.tolist() == [False] * 20 + [True] * 6 + [False] * 6
    assert not set(map(str, embedded.training_files())) & {
        str(embedded.corpus.stdlib() / name) for name in embedded.corpus.HELD_OUT
    }


def test_stored_weights_are_rounded() -> None:
    fresh = embedded.new_model()
    before = {name: weight.clone() for name, weight in fresh.named_parameters()}
    embedded.round_weights(fresh)
    for name, weight in fresh.named_parameters():
        assert torch.allclose(weight, before[name], rtol=2.0**-14, atol=0)
    assert not torch.equal(fresh.transformer.wte.weight, before["transformer.wte.weight"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("experiment", "changes", "tables", "holds"),
    [
        ("addition", ["examples=50", "problems=8"], {"curves": 4, "prediction": 12}, 1),
        ("randomisation", [], {"final": 27}, 9),
        ("nanogpt", [], {"summary": 6, "curves": 12}, 1),
    ],
)
def test_each_command_runs_and_resumes(
    tmp_path: Path, experiment: str, changes: list[str], tables: dict[str, int], holds: int
) -> None:
    text, out = tmp_path / "u.txt", tmp_path / "made"
    words = random.Random(0).choices(["def", "return", "x", "for", "in", "(", ")", "="], k=6000)
    text.write_text(" ".join(words))
    given = [experiment, "--scale", "smoke", "--out", str(out), "--quiet", "--set", "steps=4"]
    given += [*changes, *([] if experiment == "addition" else ["--text", str(text)])]
    found, again = (command.run(command.arguments(given)) for _ in range(2))
    assert str(again.tables) == str(found.tables)
    assert sum(claim.holds is not None for claim in found.findings) == holds
    for name, rows in tables.items():
        assert len(found.tables[name]) == rows
        assert (out / f"{name}.csv").read_text().count("\n") == 1 + rows
    assert (out / "findings.txt").read_text().startswith(found.text())
    assert {f"{name}.png" for name in found.figures} <= {p.name for p in out.iterdir()}
    assert command.main([*given, "--set", "no=1"]) == 2
