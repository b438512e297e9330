"""The benchmarks run and say what they promise; models whose circuit is known do what they say, and
the library finds it; intervals cover and nulls are null, in small sizes; experiments run.

By day: that planted labels are found, where rivals are wrong. What the planted models
themselves do, and all that runs long, is asked at night."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from benchmarks import known_measures
from benchmarks.calibration_effects import paired_effects
from benchmarks.calibration_flow import flow_reports
from benchmarks.calibration_outcomes import AT_MOST, SIZE, Origin, outcome
from benchmarks.calibration_scores import (
    permuted_positions,
    position_null,
    share_settings,
    sweep_intervals,
)
from benchmarks.harness import Row
from benchmarks.known_judging import Counts, auroc, exact_effects, judge_labels
from benchmarks.known_models import POSITIONS, trained
from benchmarks.known_models import known as known_model
from benchmarks.planted import World
from benchmarks.training import __main__ as command

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("positions", POSITIONS)

# ---- the benchmarks


@pytest.mark.nightly
def test_every_benchmark_runs_in_its_small_size() -> None:
    words = [sys.executable, "-m", "benchmarks", "--size", "smoke", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"torch", "transformer-lens", "python", "cores", "device"} <= set(found["machine"])
    rows = [Row(**row) for row in found["rows"]]
    names = "decompose sweep weights measures trajectories langevin scaling processes soak peak"
    for name in (*names.split(), "calibration", "known", "costs", "large"):
        assert any(row.benchmark.startswith(name) for row in rows), name
    assert all(row.seconds > 0 or math.isnan(row.seconds) for row in rows)
    shares = ("calibration", "known")
    assert all(row.ratio > 0 for row in rows if row.benchmark not in shares), "a share may be 0"


# ---- circuits that are known


def pattern(truth: Any, tokens: Tensor) -> Tensor:
    return truth.model.run_with_cache(tokens)[1]["pattern", 0]


def causal(truth: Any) -> Tensor:
    return torch.ones(truth.length, truth.length).tril().bool()


@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_that_of_scikit_learn_with_ties(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (40,), generator=g).double()
    truth = torch.rand(40, generator=g) < 0.3
    assert auroc(scores, truth) == pytest.approx(roc_auc_score(truth.numpy(), scores.numpy()))


def test_a_planted_miss_and_a_planted_false_label_are_counted() -> None:
    truth = {1: "position", 2: "content", 3: "unclear", 4: "uniform"}
    assert judge_labels(truth, truth, "unclear") == Counts(4, 0, 0)
    missed = truth | {1: "unclear"}
    assert judge_labels(missed, truth, "unclear") == Counts(3, 1, 0)
    false = truth | {2: "position", 3: "content"}
    assert judge_labels(false, truth, "unclear") == Counts(2, 0, 2)


@BOTH
def test_labels_and_writers_of_planted_models_are_found(positions: str) -> None:
    found = {f.measure: f for f in known_measures.labels("heads", positions, 3)}
    even = 1 if positions == "rotary" else 0  # the head that is even to within 2%
    assert found["label of a head"].counts == Counts(9 - even, 0, even)
    assert found["dominant term"].counts[1:] == (0, 0)
    for finding in known_measures.composed("circuit", positions, 3):
        assert finding.counts[1:] == (0, 0)
        assert (finding.auroc or 0) == 1 > (finding.null or 1)


@BOTH
def test_covariance_alone_is_wrong_where_gain_disagrees(positions: str) -> None:
    """The disputed head: no label, and both groups named; by covariance alone it is position's."""
    found = {f.measure: f for f in known_measures.labels("heads", positions, 3)}
    both = found["both groups named where covariance and gain disagree"]
    assert both.counts == Counts(1, 0, 0)
    alone, label = (
        found[f"label {x}"].counts for x in ("by covariance alone (rival)", "of a head")
    )
    assert (alone.recovered, alone.false) == (label.recovered - 1, label.false + 1)


@BOTH
def test_weights_alone_take_idle_heads_for_writers(positions: str) -> None:
    shares = {f.measure: f for f in known_measures.composed("idle", positions, 3)}
    weights = shares.pop("composition scores of weights alone (rival)")
    assert all(found.counts[1:] == (0, 0) for found in shares.values())
    assert weights.counts == Counts(0, 3, 3)


@BOTH
@pytest.mark.nightly
def test_planted_heads_attend_where_they_should(positions: str) -> None:
    for seed in (0, 4):
        truth = known_model("heads", seed=seed, positions=positions)
        tokens = truth.random_tokens(16, seed=3)
        by_name = {does: pattern(truth, tokens)[:, head] for (_, head), does in truth.does.items()}
        assert truth.offset is not None
        rows = range(truth.offset + 2, truth.length)
        peak = by_name["offset"][:, list(rows), 2:].argmax(-1) + 2
        assert bool((peak == torch.tensor(rows) - truth.offset).all())
        equal = (tokens[:, :, None] == tokens[:, None]) & torch.ones(
            truth.length, truth.length
        ).tril().bool()
        on_equal = (by_name["identity"] * equal).sum(-1)[:, 1:].mean()
        evenly = (by_name["uniform"] * equal).sum(-1)[:, 1:].mean()
        assert float(on_equal) > 0.7 > 3 * float(evenly)
        last = by_name["uniform"][:, -1]
        assert float((last - 1 / truth.length).abs().max()) < 1e-6


@BOTH
@pytest.mark.parametrize("name", ["circuit", "idle"])
@pytest.mark.nightly
def test_planted_edges_and_no_other_carry_the_next_token(name: str, positions: str) -> None:
    """One edge at a time from the counterfactual, in live runs."""
    truth = known_model(name, seed=2, positions=positions)
    for changed in ("all", "last"):
        pairs = truth.pairs(4, changed=changed, seed=1)
        assert bool((truth.model(pairs.prompts)[:, -1].argmax(-1) == pairs.targets[:, 0]).all())
        names, effects = exact_effects(truth.model, pairs)
        assert truth.edges[changed] < set(names)
        for name, effect in zip(names, effects.tolist(), strict=True):
            needed = name in truth.edges[changed]
            assert effect > 0.3 if needed else abs(effect) < 0.05, (name, effect)


@BOTH
@pytest.mark.parametrize("seed", trained.SEEDS)
@pytest.mark.nightly
def test_a_trained_mlp_adds(positions: str, seed: int) -> None:
    """With its mean in place of what it writes sums are no better than guessed; the twin: with what
    it writes they are right. Without what an attention head brings there is nothing to add."""
    truth = known_model("sum", seed=seed, positions=positions)
    tokens, counted = trained.sums(200, torch.Generator().manual_seed(11))
    replaced = lambda value, hook: value.mean((0, 1), keepdim=True).expand_as(value)

    def right(*hooks: str) -> float:
        with torch.no_grad(), truth.model.hooks(fwd_hooks=[(name, replaced) for name in hooks]):
            hits = truth.model(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]
        return float(hits[counted[:, 1:]].double().mean())

    assert right() > 0.99
    assert right("blocks.0.hook_mlp_out") < 0.3
    assert right("blocks.0.hook_attn_out") < 0.2
    assert truth.heads("summand")


@BOTH
@pytest.mark.parametrize("seed", trained.SEEDS)
@pytest.mark.nightly
def test_trained_circuits_have_learnt_induction(positions: str, seed: int) -> None:
    truth = known_model("induction", seed=seed, positions=positions)
    tokens, counted = trained.repeats(32, torch.Generator().manual_seed(11))
    with torch.no_grad():
        losses = F.cross_entropy(truth.model(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    assert float(losses[counted[:, 1:]].mean()) < 0.35
    assert float(losses[~counted[:, 1:]].mean()) > math.log(truth.vocab) - 0.5, "unpredictable"
    assert truth.heads("offset")
    assert truth.heads("induction")
    assert all(layer == 0 for layer, _ in truth.heads("offset"))
    assert all(layer == 1 for layer, _ in truth.heads("induction"))


# ---- intervals cover and nulls are null


@pytest.mark.nightly
def test_intervals_of_a_sweep_cover() -> None:
    for new in sweep_intervals("C = 32", World(), 32, 24):
        assert 0.9 <= new.value <= 1.0
        assert new.kept


@pytest.mark.nightly
def test_intervals_cover_where_windows_come_in_topics() -> None:
    topics = [x for x in share_settings() if x["world"].topics]
    assert {x["contexts"] for x in topics} == {32, 64}
    score, gain = sweep_intervals(repeats=40, **topics[0])
    assert min(score.worst, gain.worst) >= 0.85


@pytest.mark.nightly
@pytest.mark.parametrize(("rotary", "stay"), [(False, 0.95), (True, 0.5)])
def test_the_null_of_position_is_null_and_permuted_positions_are_not(
    rotary: bool, stay: float
) -> None:
    nothing = World(position=0.0, stay=stay, rotary=rotary)
    found = position_null(nothing, 32, 24, "tokens that stay")
    assert found.value <= 0.05 + 3 * max(found.error, 0.03)
    if rotary:
        planted = position_null(nothing, 32, 4, "planted", query=3.0, key=3.0)
    else:
        planted = position_null(World(position=1.5), 32, 4, "planted")
        before = permuted_positions(World(position=0.0, along=0.9), 32, 16, "AR 0.9")
        assert before.value > 0.2
    assert planted.value >= 0.9, "and it finds what is there"


@pytest.mark.nightly
def test_effects_of_edits_are_calibrated() -> None:
    assert all(found.kept for found in paired_effects(600) if found.promised)


@pytest.mark.nightly
def test_a_flow_that_is_one_has_no_anomalies_and_gaussian_residuals() -> None:
    anomalous, normal, round_ = flow_reports(100, 6, 12)
    assert anomalous.kept
    assert normal.kept
    assert not round_.kept


SOME = Origin("made up", "none", "200 contexts")


def test_a_promise_that_is_not_kept_is_said() -> None:
    hits = torch.ones(200, 4).double()
    hits[:60, 0] = 0
    assert not outcome("one term below 85%", hits, 0.0, SOME).kept
    assert not outcome("too wide", torch.ones(400, 4).double(), 0.0, SOME).kept
    every = {n: (torch.arange(500) % n == 0).double()[:, None] for n in (5, 20, 500)}
    assert not outcome("size 0.2", every[5], 0, SOME, goal=SIZE).kept
    assert outcome("size 0.05", every[20], 0, SOME, goal=SIZE).kept
    assert not outcome("size 0.002", every[500], 0, SOME, goal=SIZE).kept
    assert outcome("at most 0.05", every[500], 0, SOME, goal=AT_MOST).kept
    assert not outcome("at most 0.05", every[5], 0, SOME, goal=AT_MOST).kept


# ---- training


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
