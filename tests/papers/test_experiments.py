"""Training formats character by character, training that resumes exactly, and each experiment at
smoke scale."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tl_geometry import cli, papers
from tl_geometry.base.errors import GeometryError
from tl_geometry.papers import (
    arithmetic,
    formats,
    random_tokens,
)
from tl_geometry.papers.formats import (
    Problem,
    answer_batch,
    longest,
    problems,
    randomise,
    shifted,
)
from tl_geometry.papers.setup import Setup, Training, run_training
from tl_geometry.zoo.trainer import IGNORE, sequence_loss

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


def column_sums(a: str, b: str) -> list[int]:
    """Digit sums of the columns, rightmost first."""
    width = max(len(a), len(b))
    return [
        int(x) + int(y)
        for x, y in zip(reversed(a.zfill(width)), reversed(b.zfill(width)), strict=True)
    ]


def near(count: int, n: int, share: float) -> bool:
    """Within five standard deviations of a binomial count."""
    return abs(count - n * share) <= 5 * math.sqrt(n * share * (1 - share))


# --- addition: the strings


def test_lines_with_carry_follow_the_rules() -> None:
    made = problems("carry", 4000, low=5, high=10, seed=3)
    for p in made:
        match = re.fullmatch(r"(\d+)\+(\d+)=(\d+)\n", p.text)
        assert match is not None
        a, b, reverse = match.groups()
        assert int(a) + int(b) == int(reverse[::-1])
        assert all(5 <= len(x) <= 10 for x in (a, b, reverse))
        assert not any(x.startswith("0") for x in (a, b, reverse[::-1]))
        assert len(p.text) <= longest(10) == 33
    assert {len(str(int(p.a) + int(p.b))) for p in made} == set(range(5, 11))
    pairs = Counter((len(p.a), len(p.b)) for p in made)
    assert set(pairs) == {(i, j) for i in range(5, 11) for j in range(5, 11)}
    # sums of eleven digits are drawn again with the same lengths: were the lengths drawn again,
    # this pair would be half as frequent
    assert near(pairs[10, 10], 4000, 1 / 36)
    assert not near(pairs[10, 10] // 2, 4000, 1 / 36)
    assert any(s > 9 for p in made for s in column_sums(p.a, p.b))


# --- addition: the loss and the evaluation


def test_the_mask_by_hand() -> None:
    inputs, targets = answer_batch([Problem("12", "7", "19"), Problem("5", "4", "9")], 8)
    # "12+7=91\n": the input is "12+7=91", the target after "=" is "9", after "9" is "1", after "1"
    # the newline
    assert inputs.tolist() == [[3, 4, 1, 9, 12, 11, 3, 0], [7, 1, 6, 12, 11, 0, 0, 0]]
    X = IGNORE
    assert targets.tolist() == [[X, X, X, X, 11, 3, 0, X], [X, X, X, 11, 0, X, X, X]]
    with pytest.raises(GeometryError, match="positions: expected at least 7, got 6"):
        answer_batch([Problem("12", "7", "19")], 6)


def test_the_loss_is_the_mean_over_sequences_of_the_mean_over_answers() -> None:
    _, targets = answer_batch([Problem("12", "7", "19"), Problem("5", "4", "9")], 8)
    logits = torch.zeros(2, 8, 13)
    even = math.log(13)
    assert math.isclose(float(sequence_loss(logits, targets)), even, rel_tol=1e-6)
    prompt = logits.clone()
    prompt[0, :4] = torch.randn(4, 13)
    prompt[:, 7] = 50 * torch.eye(13)[:2]
    assert float(sequence_loss(prompt, targets)) == float(
        sequence_loss(logits, targets)
    )  # neither prompt nor padding counts
    sure = logits.clone()
    sure[1, 3, 11] = 100.0  # the first of the two targets of the second line
    assert math.isclose(float(sequence_loss(sure, targets)), (even + even / 2) / 2, rel_tol=1e-5)


# --- randomised text


def test_formats_column_by_column() -> None:
    rows = torch.arange(600 * 10).view(600, 10) + 1000
    assert torch.equal(randomise(rows, "baseline", 50, half=4), rows)
    partial = randomise(rows, "partial", 50, half=4, seed=1)
    assert torch.equal(partial[:, :4], rows[:, :4])
    assert bool(((partial[:, 4:] >= 0) & (partial[:, 4:] < 50)).all())
    full = randomise(rows, "full", 50, half=4, seed=1)
    assert torch.equal(full[:, 4:], partial[:, 4:])
    counts = torch.bincount(full.flatten(), minlength=50)
    assert len(counts) == 50
    assert all(near(int(c), 6000, 1 / 50) for c in counts)
    assert not torch.equal(full, randomise(rows, "full", 50, half=4, seed=2))
    inputs, targets = shifted(partial)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])  # a random input is the target before it
    assert torch.equal(inputs[:, 3], rows[:, 3])
    assert torch.equal(targets[:, 3], partial[:, 4])
    assert bool((targets[:, 3] < 50).all())
    with pytest.raises(
        GeometryError, match="format: expected one of 'baseline', 'partial', 'full'"
    ):
        randomise(rows, "half", 50, half=4)


# --- settings and training


def batch_at(step: int) -> tuple[Tensor, Tensor]:
    return shifted(torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step)))


def measure(_: int, model: Any) -> list[dict[str, Any]]:
    return [{"size": float(model.transformer.wpe.weight.detach().norm()), "gap": math.nan}]


def run(seed: int = 0, setup: Setup = TINY, measure: Any = measure, **options: Any) -> Training:
    return run_training(
        setup, 11, batch_at, measure, name="run", seed=seed, progress=False, **options
    )


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
    assert (finished.losses, str(finished.records)) == (whole.losses, str(whole.records))
    last = load_file(tmp_path / "run" / "step-000009.safetensors")
    assert set(last) == set(weights)
    assert all(torch.equal(last[n], p) for n, p in weights.items())
    assert not torch.equal(
        load_file(tmp_path / "run" / "step-000001.safetensors")["transformer.wpe.weight"],
        weights["transformer.wpe.weight"],
    )
    with pytest.raises(GeometryError, match=r"expected a checkpoint of this run, got other seed"):
        run(seed=1, out=tmp_path)


# --- the experiments


def page_of(out: Path) -> str:
    html = (out / "report.html").read_text()
    script = (files("tl_geometry.report") / "assets" / "report.js").read_text("utf-8")
    assert re.findall("<script>(.*?)</script>", html, re.DOTALL) == [script], "its own alone"
    assert html.count("<script") == 1
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", html)
    return html


@pytest.mark.nightly
def test_addition_at_smoke_scale(tmp_path: Path) -> None:
    outcome = papers.addition("smoke", tasks=["no-carry"], out=tmp_path, progress=False)
    outcome.save(tmp_path)
    assert {f.statement for f in outcome.findings} >= {
        "no-carry: exact match, 3 to 4 digits",
        "no-carry: exact match, 1 to 2 digits",
    }
    curves: Any = outcome.tables["curves"]
    assert curves.column("step") == [0, 30]
    assert all(0 <= v <= 1 for n in ("exact_in", "digits_out") for v in curves.column(n))
    states: Any = outcome.tables["states"]
    assert set(states.column("length")) == {2, 3, 4}
    assert set(states.column("state")) == {0, 1, 2}
    heads: Any = outcome.tables["heads"]
    terms = [n for n in heads.names if n.startswith("cs_")]
    assert set(heads.column("step")) == {30}, "heads of the finished model alone"
    for row in heads.cells:
        assert sum(row[heads.names.index(n)] for n in terms) == pytest.approx(1.0, abs=1e-4)
    html = page_of(tmp_path)
    assert html.count('src="data:image/') == len(outcome.figures) == 4
    assert all(v.caption and v.null and v.source for v in outcome.figures.values())
    assert (tmp_path / "curves.csv").read_text().count("\n") == 3
    again = papers.addition(
        "smoke", tasks=["no-carry"], out=tmp_path, progress=False
    )  # nothing is trained again
    assert str(again.tables["states"].rows()) == str(states.rows())
    with pytest.raises(GeometryError, match="context: expected at least 14, got 13"):
        papers.addition(arithmetic.SETUPS["smoke"].changed({"context": "13"}))


@pytest.mark.nightly
def test_randomisation_at_smoke_scale(tmp_path: Path) -> None:
    text = " ".join(
        random.Random(0).choices(
            ["def", "return", "x", "y", "for", "in", "(", ")", ":", "="], k=6000
        )
    )
    outcome = papers.randomisation("smoke", [text], progress=False)
    outcome.save(tmp_path)
    final: Any = outcome.tables["final"]
    assert len(final.cells) == 3 * 3 * 3
    assert Counter(
        zip(final.column("trained"), final.column("measured"), strict=True)
    ) == dict.fromkeys([(a, b) for a in formats.FORMATS for b in formats.FORMATS], 3)
    grids: Any = outcome.tables["bases"]
    assert grids.pos["full", "partial"].shape == (3, 23, 32)
    assert [f.holds is not None for f in outcome.findings].count(True) == 9
    assert page_of(tmp_path).count('src="data:image/') == 3
    assert all(v.caption and v.null and v.source for v in outcome.figures.values())
    loaded = random_tokens.FormatBases.load(tmp_path / "bases.safetensors")
    assert torch.equal(loaded.pos["full", "partial"], grids.pos["full", "partial"])
    # the break of the tokens is seen in the bases of every model, as random tokens have another
    # mean than text
    assert {int(p) + 1 for p in final.column("jump_at", measured="partial", state=0)} == {12}


@pytest.mark.nightly
def test_the_command_runs_nanogpt_on_a_named_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "<u>.txt", tmp_path / "made"
    source.write_text("a rose is a rose is a rose.\n" * 400)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tl-geometry", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0  # type: ignore[return-value]

    arguments = [
        "experiment",
        "nanogpt",
        "--scale",
        "smoke",
        "--text",
        str(source),
        "--out",
        str(out),
        "--set",
        "steps=10",
        "--quiet",
    ]
    assert call(*arguments) == 0
    shown = capsys.readouterr().out
    assert "7.86(1.96) published" in shown
    assert "report.html" in shown
    run = json.loads((out / "run.json").read_text())
    assert run["setup"]["steps"] == 10
    assert run["command"][:2] == ["tl-geometry", "experiment"]
    table = (out / "summary.csv").read_text().splitlines()
    assert len(table) == 1 + 2 * 3
    assert "<u>" not in page_of(out)
    for bad, text in (
        (
            ["experiment", "nothing"],
            "experiment: expected one of 'randomisation', 'addition', 'nanogpt', got 'nothing'",
        ),
        (
            ["experiment", "addition", "--scale", "big"],
            "--scale: expected one of 'smoke', 'cpu', 'paper', got 'big'",
        ),
        (
            ["experiment", "nanogpt", "--text", "absent"],
            "--text: expected existing text files, got absent",
        ),
        (["experiment", "addition", "--text", str(source)], "--text: expected none for addition"),
        (["experiment", "nanogpt", "--set", "steps"], "--set: expected NAME=VALUE, got steps"),
    ):
        assert call(*bad) == 2
        assert text in capsys.readouterr().err
