"""The page of known circuits is judged rightly: AUROC, misses and false findings, chance; and what
it says of the library is what the measures give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks import known, known_measures
from benchmarks.known_judging import (
    Counts,
    Finding,
    auroc,
    auroc_by_chance,
    first,
    judge_labels,
    judge_set,
    labels_by_chance,
)

pytestmark = pytest.mark.once


@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_that_of_scikit_learn_with_ties(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (40,), generator=g).double()
    truth = torch.rand(40, generator=g) < 0.3
    assert auroc(scores, truth) == pytest.approx(roc_auc_score(truth.numpy(), scores.numpy()))


def test_auroc_by_hand_and_its_null() -> None:
    truth = torch.tensor([True, False, True, False])
    assert auroc(torch.tensor([4.0, 3.0, 2.0, 1.0]), truth) == 0.75
    assert auroc(torch.tensor([1.0, 2.0, 0.0, 3.0]), truth) == 0
    assert auroc(torch.ones(4), truth) == 0.5
    many = torch.arange(200) < 50
    null = auroc_by_chance(torch.rand(200, generator=torch.Generator().manual_seed(0)), many)
    # 0.5 + 1.645 sqrt((n1 + n2 + 1) / (12 n1 n2))
    assert null == pytest.approx(0.5 + 1.645 * (201 / (12 * 50 * 150)) ** 0.5, abs=0.03)


def test_a_planted_miss_and_a_planted_false_label_are_counted() -> None:
    truth = {1: "position", 2: "content", 3: "unclear", 4: "uniform"}
    assert judge_labels(truth, truth, "unclear") == Counts(4, 0, 0)
    missed = truth | {1: "unclear"}
    assert judge_labels(missed, truth, "unclear") == Counts(3, 1, 0)
    false = truth | {2: "position", 3: "content"}
    assert judge_labels(false, truth, "unclear") == Counts(2, 0, 2)


def test_sets_and_rankings_are_counted() -> None:
    assert judge_set({"a", "b"}, {"b", "c", "d"}) == Counts(1, 2, 1)
    scores = torch.tensor([0.9, 0.1, 0.8, 0.2])
    assert first(scores, torch.tensor([True, False, True, False])) == Counts(2, 0, 0)
    assert first(scores, torch.tensor([True, True, False, False])) == Counts(1, 1, 1)


def test_chance_is_the_mean_over_all_deals() -> None:
    truth, given = dict(enumerate("aabc")), dict(enumerate("abbc"))
    g, n = torch.Generator().manual_seed(0), 4000
    hits = 0
    for _ in range(n):
        order = torch.randperm(4, generator=g).tolist()
        hits += sum(given[order[i]] == truth[i] for i in truth)
    assert labels_by_chance(given, truth) == pytest.approx(hits / n, abs=0.06)


def test_what_a_ranking_does_not_score_is_left_out() -> None:
    scores = torch.tensor([0.9, torch.nan, 0.5])
    found = Finding.of_ranking("m", "model", scores, torch.tensor([True, True, False]))
    assert (found.counts, found.auroc) == (Counts(1, 0, 0), 1.0)


def test_seeds_and_models_are_added_up() -> None:
    each = [
        Finding("m", "model", Counts(3, 0, 0), 1.0, 1.0, 0.6),
        Finding("m", "model", Counts(1, 2, 2), 1.0, 0.5, 0.7),
    ]
    (row,) = known.summarised((finding, 1.0) for finding in each)
    assert row.cells() == "| m | model | 4 of 6 | 2 | 2 | 2.0 | 0.75 (0.50 to 1.00) | 0.65 |"
    assert row.lost
    other = known.summarised([(replace(each[0], model="other"), 1.0)])
    text = known.page([row, *other])
    assert "| m | 2 | 7 of 9 | 2 | 2 | 3.0 | 0.83 (0.50 to 1.00) | 0.63 |" in text
    assert "In 1 of 2 questions" in text
    assert "- m: on 1 model 4 recovered, 2 missed, 2 false." in text
    rival = Finding("m (rival)", "model", Counts(0, 1, 1), 0.0)
    text = known.page(known.summarised([(each[0], 1.0), (rival, 1.0)]))
    assert "In 1 of 1 questions" in text
    assert "- m" not in text.split("missed or false:")[1], "a rival's loss is not the library's"


@pytest.mark.parametrize("positions", known.POSITIONS)
def test_labels_and_writers_of_planted_models_are_found(positions: str) -> None:
    found = {f.measure: f for f in known_measures.labels("heads", positions, 3)}
    even = 1 if positions == "rotary" else 0  # the head that is even to within 2%
    assert found["label of a head"].counts == Counts(9 - even, 0, even)
    assert found["dominant term"].counts[1:] == (0, 0)
    for finding in known_measures.composed("circuit", positions, 3):
        assert finding.counts[1:] == (0, 0)
        assert (finding.auroc or 0) == 1 > (finding.null or 1)


@pytest.mark.parametrize("positions", known.POSITIONS)
def test_covariance_alone_is_wrong_where_gain_disagrees(positions: str) -> None:
    """The disputed head: no label, and both groups named; by covariance alone it is position's."""
    found = {f.measure: f for f in known_measures.labels("heads", positions, 3)}
    both = found["both groups named where covariance and gain disagree"]
    assert both.counts == Counts(1, 0, 0)
    alone, label = (
        found[f"label {x}"].counts for x in ("by covariance alone (rival)", "of a head")
    )
    assert (alone.recovered, alone.false) == (label.recovered - 1, label.false + 1)


@pytest.mark.parametrize("positions", known.POSITIONS)
def test_weights_alone_take_idle_heads_for_writers(positions: str) -> None:
    shares = {f.measure: f for f in known_measures.composed("idle", positions, 3)}
    weights = shares.pop("composition scores of weights alone (rival)")
    assert all(found.counts[1:] == (0, 0) for found in shares.values())
    assert weights.counts == Counts(0, 3, 3)


def test_the_page_is_the_one_that_the_benchmark_writes() -> None:
    """Its prose; the numbers are compared where the benchmark runs."""
    stored = known.PAGE.read_text(encoding="utf-8")
    prose = known.INTRODUCTION.split("In {right}")[0]
    assert prose.replace("{{", "{").replace("}}", "}") in stored
    assert known.LOSSES in stored
    assert known.HEAD in stored
