"""Training formats character by character, masks by hand, training that resumes exactly, and each
experiment at smoke scale."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tl_geometry import cli, papers
from tl_geometry.base.errors import GeometryError
from tl_geometry.papers import (
    answers,
    arithmetic,
    characters,
    experiments,
    formats,
    prediction,
    random_tokens,
)
from tl_geometry.papers.contents import EXPERIMENTS
from tl_geometry.papers.figures import training_curves
from tl_geometry.papers.formats import (
    ALPHABET,
    Problem,
    answer_batch,
    encode,
    longest,
    problems,
    randomise,
    shifted,
)
from tl_geometry.papers.setup import Setup, Training, run_training
from tl_geometry.zoo.trainer import IGNORE, sequence_loss

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


def test_the_alphabet_is_sorted_and_its_places_are_the_ids() -> None:
    assert "".join(sorted("0123456789=+\n")) == ALPHABET
    assert encode("\n+0123456789=") == list(range(13))
    with pytest.raises(GeometryError, match=r"text: expected characters of .*, got \['-'\]"):
        encode("1-2")


def test_a_line_is_written_as_published() -> None:
    line = Problem("00123", "98765", "98888")
    assert (line.prompt, line.answer, line.text) == ("00123+98765=", "88889", "00123+98765=88889\n")
    assert Problem("99", "9", "108").text == "99+9=801\n"  # the sum alone is reversed


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


def test_lines_without_carry_are_built_and_not_filtered() -> None:
    made = problems("no-carry", 4000, low=5, high=10, seed=3)
    for p in made:
        sums = column_sums(p.a, p.b)
        assert all(s <= 9 for s in sums)
        assert p.c == "".join(map(str, reversed(sums)))
        assert len(p.c) == max(len(p.a), len(p.b))
        assert all(5 <= len(x) <= 10 for x in (p.a, p.b))
    shorter = Counter(min(len(p.a), len(p.b)) for p in made)
    assert all(near(shorter[n], 4000, 1 / 6) for n in range(5, 11))  # n1 uniform on 5..10
    longer = Counter(max(len(p.a), len(p.b)) for p in made if min(len(p.a), len(p.b)) == 8)
    assert all(near(longer[n], shorter[8], 1 / 3) for n in (8, 9, 10))  # n2 uniform on n1..10
    unequal = [p for p in made if len(p.a) != len(p.b)]
    assert near(
        sum(len(p.a) < len(p.b) for p in unequal), len(unequal), 0.5
    )  # swapped with probability one half
    digits = Counter(d for p in unequal for d in min(p.a, p.b, key=len))
    total = sum(digits.values())
    assert all(near(digits[d], total, 0.1) for d in "0123456789")  # the first operand is uniform...
    assert not near(
        digits["9"], total, 1 / 55
    )  # ...which filtered examples are not: nine allows one partner of 55
    assert any(p.a.startswith("0") for p in made)
    assert any(p.c.startswith("0") for p in made)


@pytest.mark.parametrize("task", formats.TASKS)
def test_lines_are_a_function_of_the_seed_and_can_be_aligned(task: str) -> None:
    assert problems(task, 20, low=2, high=4, seed=5) == problems(task, 20, low=2, high=4, seed=5)
    assert problems(task, 20, low=2, high=4, seed=5) != problems(task, 20, low=2, high=4, seed=6)
    for p in problems(task, 50, low=4, high=4):
        assert [len(x) for x in p] == [4, 4, 4]
        assert (p.text[4], p.text[9], p.text[14]) == ("+", "=", "\n")
    with pytest.raises(GeometryError, match="1 <= low <= high"):
        problems(task, 1, low=3, high=2)


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


class Oracle(torch.nn.Module):
    """Stands in for a model: knows the sums, and says what it is asked to; sees nothing but prompts
    and its own answers."""

    def __init__(self, answer: Any = lambda p: p.answer) -> None:
        super().__init__()
        self.answer = answer
        self.anywhere = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor) -> Any:
        logits = torch.zeros(*tokens.shape, 13)
        for row, ids in enumerate(tokens.tolist()):
            text = "".join(ALPHABET[i] for i in ids)
            match = re.match(r"(\d+)\+(\d+)=", text)
            assert match is not None
            a, b = match.groups()
            answer, start = (
                self.answer(Problem(a, b, str(int(a) + int(b)).zfill(max(len(a), len(b))))),
                match.end(),
            )
            written = re.match(r"\d*", text[start:])
            assert written is not None
            assert answer.startswith(
                written.group()[: len(answer)]
            )  # its own answers, never the true line
            for k, character in enumerate(answer):
                if start + k - 1 < tokens.shape[1]:
                    logits[row, start + k - 1, encode(character)[0]] = 1.0
        return SimpleNamespace(logits=logits)


def test_exact_match_of_right_and_wrong_answers() -> None:
    lines = problems("carry", 60, low=1, high=4, seed=1) + problems(
        "no-carry", 60, low=1, high=4, seed=1
    )
    positions = longest(4) - 1
    assert answers.score(Oracle(), lines, positions, batch=50) == (1.0, 1.0)
    last_wrong = lambda p: p.answer[:-1] + str((int(p.answer[-1]) + 1) % 10)
    exact, digits = answers.score(Oracle(last_wrong), lines, positions)
    total = sum(len(p.c) for p in lines)
    assert exact == 0
    assert math.isclose(digits, (total - len(lines)) / total)
    forwards = answers.score(Oracle(lambda p: p.c), lines, positions)
    assert forwards.exact == sum(p.c == p.answer for p in lines) / len(lines) < 0.5


def test_a_guess_beats_no_model_that_adds() -> None:
    lines = problems("no-carry", 2000, low=1, high=1, seed=1)
    nine = sum(
        1 / (10 * (10 - a)) for a in range(10)
    )  # a uniform, b uniform on 0..9 - a, so that nine is the likeliest sum
    found = answers.guess(lines)
    assert found.exact == found.digits
    assert near(round(2000 * found.exact), 2000, nine)
    inside, outside = arithmetic.asked_problems(arithmetic.SETUPS["cpu"], "no-carry")
    assert {len(p.c) for p in outside} == {1, 2}
    assert {len(p.c) for p in inside} == {3, 4, 5, 6}
    assert (
        answers.guess(outside).exact > 5 * answers.guess(inside).exact
    )  # short sums are easily guessed


def test_answers_do_not_depend_on_the_batch() -> None:
    setup = arithmetic.SETUPS["smoke"]
    model = setup.model(13, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    lines = problems("no-carry", 12, low=1, high=4, seed=2)
    positions = longest(4) - 1
    together = answers.answers(model, lines, positions)
    assert together == [answers.answers(model, [line], positions)[0] for line in lines]
    assert [len(x) for x in together] == [len(line.c) for line in lines]
    assert len(set("".join(together))) > 1


def test_digit_fracture_leaves_the_signs_out() -> None:
    length, d = 4, 6
    positions = 3 * length + 2
    angle = 0.1 * torch.arange(positions, dtype=torch.float64)
    curve = torch.stack([angle.cos(), angle.sin(), *[torch.zeros_like(angle)] * (d - 2)], dim=-1)
    signs = curve.clone()
    signs[length, 2], signs[2 * length + 1, 3] = 5.0, 5.0
    broken = curve.clone()
    broken[2 * length + 4 :, 4] = 5.0  # within the answer
    score = lambda x: float(arithmetic.digit_fracture(x[None, 1:], length, 1))
    assert score(curve) == pytest.approx(1.0)
    assert score(signs) == pytest.approx(1.0)
    assert score(broken) > 20
    one_digit = curve[None, 1:5]  # of "1+1=2": no digit stands beside another
    assert arithmetic.digit_fracture(one_digit, 1, 1).isnan().all()
    assert float(random_tokens.positional.fracture_score(signs[1:]).score) > 20


def test_prediction_needs_more_than_a_common_trend() -> None:
    names = dict.fromkeys(prediction.PREDICTORS, 0.0)
    up = [99.0, 1, 3, 4, 8, 9]  # the first is that of the untrained model; then changes 2 1 4 1
    rows = [
        {
            "task": "carry",
            "seed": 0,
            "step": i,
            **names,
            "fracture": u,
            "roughness": 10 * i - u,
            "digits_out": u,
        }
        for i, u in enumerate(up)
    ]
    found = {r["measure"]: r for r in prediction.prediction(rows)}
    assert [found["fracture"][k] for k in ("levels", "changes")] == pytest.approx([1.0, 1.0])
    assert found["roughness"]["levels"] == pytest.approx(1.0)  # the trend
    assert found["roughness"]["changes"] == pytest.approx(-1.0)
    assert math.isnan(found["wpe_fracture"]["levels"])
    assert {r["points"] for r in found.values()} == {5}


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


@pytest.mark.parametrize(("random_share", "holds"), [(0.4, True), (0.41, False)])
def test_half_of_a_share_is_the_bound_in_every_seed(random_share: float, holds: bool) -> None:
    text, trained = [[0.1, 0.8, 0.4]] * 2, [[0.9, 0.4, 0.2], [0.9, random_share, 0.2]]
    claim = random_tokens._low_frequency(text, trained, "full", "the other states", slice(1, None))
    assert claim.holds is holds


def test_one_colour_is_one_position_in_every_panel() -> None:
    from matplotlib import pyplot as plt

    from tl_geometry.papers.figures import _draw_plane

    _, axis = plt.subplots()
    pos = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).double()
    dots = _draw_plane(axis, pos - pos.mean(0), half=8, start=1)
    plt.close("all")
    assert (dots.norm.vmin, dots.norm.vmax) == (1, 12)
    offsets: list[Any] = [each.get_offsets() for each in axis.collections]
    assert [len(each) for each in offsets] == [7, 5]


def test_halves_are_measured_apart() -> None:
    angle = torch.linspace(0, 3, 32, dtype=torch.float64)
    smooth = torch.stack([angle.cos(), angle.sin(), angle, angle**2], dim=-1)
    noise = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pos = torch.cat([smooth, noise + 40])[
        None
    ]  # far away: together the noisy half would look like one direction
    found = random_tokens.halves(pos, 32, 4)
    assert found["roughness_first"] < 0.05 < 1 < found["roughness_second"]
    assert found["low_frequency_first"] > 0.9
    assert found["low_frequency_second"] < 0.5
    assert (
        int(random_tokens.positional.fracture_score(pos - pos.mean(1, keepdim=True)).argmax) == 31
    )
    assert (
        float(random_tokens.positional.roughness(pos[:, 32:])) < 0.01
    )  # not centred: the twin that would be deceived
    joined = random_tokens.halves(
        torch.cat([smooth, smooth[:1], smooth])[None], 33, 4
    )  # the row before the second half is in neither
    assert joined["roughness_second"] == pytest.approx(float(joined["roughness_first"]))


def test_more_groups_than_colours_are_drawn() -> None:
    rows = [{"seed": 0, "step": s, "task": str(t), "rank": t} for s in (0, 1) for t in range(8)]
    figure = training_curves(rows, ["rank"], by="task", caption="").figure
    lines: Any = figure.axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == list(range(8))
    assert lines[0].get_color() == lines[6].get_color() != lines[1].get_color()


def test_a_tokenizer_that_cannot_be_had_is_said_so() -> None:
    with pytest.raises(
        GeometryError,
        match=r"tokenizer: expected one that can be loaded, got '/absent' .*--set "
        "tokenizer=DIRECTORY",
    ):
        papers.randomisation(
            random_tokens.SETUPS["smoke"].changed({"tokenizer": "/absent"}), ["text"]
        )


def test_windows_of_a_stream() -> None:
    stream = torch.arange(100)
    drawn = random_tokens.text_windows(stream, 7, 500, seed=0)
    assert torch.equal(drawn - drawn[:, :1], torch.arange(7).expand(500, 7))
    assert int(drawn.max()) == 99
    apart = random_tokens.held_out_windows(stream, 7, 50, seed=0)
    assert len(apart.flatten().unique()) == apart.numel() == 14 * 7
    orders = [random_tokens.held_out_windows(stream, 7, 5, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    with pytest.raises(GeometryError, match="more than 100 tokens, got 100"):
        random_tokens.text_windows(stream, 100, 1, seed=0)


# --- settings and training


def test_paper_scale_is_the_published_one_and_ambiguities_are_options() -> None:
    common = {
        "steps": 100_000,
        "warmup": 1000,
        "batch": 64,
        "learning_rate": 5e-5,
        "final_learning_rate": 5e-6,
        "betas": (0.9, 0.99),
    }
    common |= {"weight_decay": 0.1, "clip": 1.0, "dropout": 0.1, "bias": False}
    sizes = {
        "randomisation": (8, 8, 512, 256),
        "addition": (8, 8, 512, 32),
        "nanogpt": (6, 6, 384, 128),
    }
    assert tuple(experiments.MODULES) == EXPERIMENTS
    for name, module in experiments.MODULES.items():
        setup = module.SETUPS["paper"]
        assert {k: getattr(setup, k) for k in common} == common
        assert (setup.layers, setup.heads, setup.d_model, setup.context) == sizes[name]
        assert set(module.SETUPS) == set(experiments.SCALES)
    adding = arithmetic.SETUPS["paper"]
    assert (adding.low, adding.high, adding.examples) == (5, 10, 100_000)
    other = adding.changed(
        {"warmup": "200", "batch": "16", "examples": "1000000", "bias": "true", "betas": "0.9,0.95"}
    )
    assert (other.warmup, other.batch, other.examples, other.bias, other.betas) == (
        200,
        16,
        1_000_000,
        True,
        (0.9, 0.95),
    )
    shown = random_tokens.SETUPS["smoke"].changed({"shown": "0,2"})
    assert [(type(s), s) for s in shown.shown] == [(int, 0), (int, 2)]
    with pytest.raises(GeometryError, match=r"shown: expected a state of 0 to 2, got \(9,\)"):
        papers.randomisation(shown.changed({"shown": "9"}), ["a b c"])
    with pytest.raises(GeometryError, match=r"--set: expected names among .*warmup.*, got warm_up"):
        adding.changed({"warm_up": "1"})
    with pytest.raises(GeometryError, match="--set warmup: expected a value of type int, got 'x'"):
        adding.changed({"warmup": "x"})


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


def test_training_is_a_function_of_the_seed_alone() -> None:
    losses = []
    for seed, state in ((0, 5), (0, 6), (1, 5)):
        # neither the model nor its dropout looks at the caller's generator
        torch.manual_seed(state)
        losses.append(run(seed).losses)
    assert TINY.dropout > 0
    assert losses[0] == losses[1] != losses[2]


def test_a_model_without_biases_has_none_after_training() -> None:
    for bias in (False, True):
        model = run(setup=TINY.changed({"bias": str(bias).lower()})).model
        assert (
            any(bool(p.any()) for n, p in model.named_parameters() if n.endswith(".bias")) is bias
        )


# --- the experiments


def page_of(out: Path) -> str:
    html = (out / "report.html").read_text()
    script = (files("tl_geometry.report") / "assets" / "report.js").read_text("utf-8")
    assert re.findall("<script>(.*?)</script>", html, re.DOTALL) == [script], "its own alone"
    assert html.count("<script") == 1
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", html)
    return html


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


def test_characters_outside_the_alphabet_are_left_out() -> None:
    assert characters.character_ids("a\u00e9b", "ab").tolist() == [0, 1]
