"""What classifiers of two ensembles are told, and between which times a path is known: settings,
names and limits, without a model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.flow import separation
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.geodesic import NODES, WEIGHTS, GeodesicPath
from tl_geometry.flow.separation import (
    ensembles_apart,
    resampled_t_reach,
    separability,
    true_against_extrapolated,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def ensemble(n: int = 40, states: tuple[int, ...] = (1, 2, 4), seed: int = 0) -> Trajectories:
    """Random trajectories of three coordinates, enough for every map."""
    X = draw(n, len(states), 3, seed=seed).cumsum(1)
    provenance = Provenance(model="drawn", flags=("made up",))
    return Trajectories(X=X, states=states, position=-1, provenance=provenance)


class Recorder:
    """In the place of a classifier: notes its settings and says that all rows are of class 1."""

    settings: list[dict[str, Any]]

    def __init__(self, **options: Any) -> None:
        Recorder.settings.append(options)

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Nothing to learn."""

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Class 1 for each row."""
        return np.ones(len(x))


@pytest.mark.parametrize(
    ("classifier", "settings"),
    [("svm", {"dual": "auto", "max_iter": 20_000, "C": 0.01}), ("perceptron", {})],
)
def test_classifiers_are_as_published_with_a_seed_for_each_split(
    classifier: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two classifiers in each split (true and shuffled labels), with the same seed."""
    name = {"svm": "LinearSVC", "perceptron": "Perceptron"}[classifier]
    module = pytest.importorskip(
        {"svm": "sklearn.svm", "perceptron": "sklearn.linear_model"}[classifier],
        reason="needs the ml extra",
    )
    monkeypatch.setattr(module, name, Recorder)
    Recorder.settings = []
    found = separability(draw(20, 2), draw(10, 2), classifier=classifier, repeats=3, seed=5)
    expected = [settings | {"random_state": 5 + repeat} for repeat in range(3) for _ in range(2)]
    assert Recorder.settings == expected
    assert found.test == 6 + 3
    assert found.accuracy == pytest.approx(6 / 9)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_the_interval_of_a_mean_over_splits_by_hand() -> None:
    """``t_(J-1) sqrt((1/J + n_test / n_train) var)``; none where all splits agree."""
    values = torch.tensor([0.4, 0.5, 0.55, 0.7], dtype=torch.float64)
    variance = np.var(values.numpy(), ddof=1) * (1 / 4 + 0.2 / 0.8)
    assert resampled_t_reach(values, 0.2) == pytest.approx(3.182446 * variance**0.5, rel=1e-6)
    assert math.isnan(resampled_t_reach(torch.full((4,), 0.5), 0.2))


def test_a_table_of_extrapolation_asks_for_every_later_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each later state against the map from the start, both of the held-out half, in pairs; the
    options reach the classifier."""
    asked: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
    answers = iter([separation.Accuracy(0.5 + i / 10, 0.4, 0.6, 0.45, 7) for i in range(9)])

    def answer(a: Tensor, b: Tensor, **options: Any) -> Any:
        asked.append((a, b, options))
        return next(answers)

    monkeypatch.setattr(separation, "separability", answer)
    whole = ensemble()
    table = true_against_extrapolated(
        whole, start=2, map_type="identity", classifier="perceptron", seed=3, repeats=4
    )
    ((true, moved, options),) = asked
    _, test = whole.split(seed=3)
    assert torch.equal(true, test.X[:, 2])
    assert torch.equal(moved, test.X[:, 1])
    assert options == {"paired": True, "classifier": "perceptron", "seed": 3, "repeats": 4}
    assert table.columns() == ("comparison", "accuracy", "low", "high", "shuffled", "test")
    assert table.rows() == [("2->4", 0.5, 0.4, 0.6, 0.45, 7.0)]
    assert (table.classifier, table.provenance.flags) == ("perceptron", ("made up",))
    asked.clear()
    table = true_against_extrapolated(whole, start=1)
    assert table.names == ("1->2", "1->4")
    assert table.classifier == "svm"
    assert [x[2]["classifier"] for x in asked] == ["svm", "svm"]
    assert [x[2]["seed"] for x in asked] == [0, 0]
    for i, (_, moved, _) in enumerate(asked, start=1):
        train, test = whole.split(seed=0)
        flow = separation.flow_map(train.aligned_bases(), 0, i)
        torch.testing.assert_close(moved, flow(test.X[:, 0]))


@pytest.mark.parametrize(
    ("map_type", "flagged"),
    [("flow", True), ("linear", True), ("ridge", True), ("shift", False), ("identity", False)],
)
def test_maps_of_few_trajectories_are_flagged_where_they_fit_a_matrix(
    map_type: str, flagged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten trajectories in twelve dimensions."""
    monkeypatch.setattr(
        separation, "separability", lambda *_, **options: separation.Accuracy(1, 1, 1, 1, 1)
    )
    X = draw(20, 2, 12)
    few = Trajectories(X=X, states=(1, 2), position=-1, provenance=Provenance())
    table = true_against_extrapolated(few, start=1, map_type=map_type)
    flag = "maps fitted on 10 trajectories, fewer than the 12 dimensions"
    assert table.provenance.flags == ((flag,) if flagged else ())


def test_states_that_cannot_be_compared_are_refused() -> None:
    """The last state has nothing after it; two ensembles need the same states."""
    with pytest.raises(GeometryError, match="start: expected a state before 4, got 4"):
        true_against_extrapolated(ensemble(), start=4)
    with pytest.raises(GeometryError, match=r"state: expected one of \(1, 2, 4\), got 3"):
        true_against_extrapolated(ensemble(), start=3)
    with pytest.raises(GeometryError, match="map_type: expected one of"):
        true_against_extrapolated(ensemble(), start=1, map_type="straight")
    text = r"ensembles: expected the same states \(1, 2, 4\), got \(1, 2, 3\)"
    with pytest.raises(GeometryError, match=text):
        ensembles_apart(ensemble(), ensemble(states=(1, 2, 3)))


def test_two_ensembles_are_told_apart_at_every_state_by_the_perceptron(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their rows need not be as many; options reach the classifier."""
    asked: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    def answer(a: Tensor, b: Tensor, **options: Any) -> Any:
        asked.append((a, b, options))
        return separation.Accuracy(0.75, 0.7, 0.8, 0.5, len(asked))

    monkeypatch.setattr(separation, "separability", answer)
    a, b = ensemble(), ensemble(30, seed=1)
    table = ensembles_apart(a, b)
    assert table.names == ("state 1", "state 2", "state 4")
    assert table.accuracy[:, -1].tolist() == [1, 2, 3]
    assert (table.classifier, table.provenance) == ("perceptron", a.provenance)
    for i, (x, y, options) in enumerate(asked):
        assert torch.equal(x, a.X[:, i])
        assert torch.equal(y, b.X[:, i])
        assert options == {"classifier": "perceptron", "seed": 0}
    asked.clear()
    assert ensembles_apart(a, b, classifier="svm", seed=2, repeats=3).classifier == "svm"
    assert asked[0][2] == {"classifier": "svm", "seed": 2, "repeats": 3}


# ---- paths


def path(times: list[float], rank: int = 2) -> GeodesicPath:
    """A path through random rotations, with random stretches."""
    U = torch.linalg.qr(draw(len(times), rank, rank)).Q
    U[..., 0] *= torch.linalg.det(U).unsqueeze(-1)
    S = draw(len(times), rank, seed=1).exp()
    return GeodesicPath(U, S, torch.tensor(times, dtype=torch.float64))


@pytest.mark.parametrize(
    ("times", "slack"),
    [([0.125, 0.25], 1e-9), ([0.25, 0.5, 1.0], 1e-9), ([1.0, 50.0, 100.0], 1e-7)],
)
def test_rounding_is_allowed_for_at_both_ends_of_a_path(times: list[float], slack: float) -> None:
    """A billionth of the last time, or of one layer if that is more, and no more than that."""
    whole = path(times)
    last = len(times) - 2
    for ask in (whole.sigma, whole.rotation, whole.locate, whole.stretch_rate):
        ask(times[0] - 0.9 * slack)
        ask(times[-1] + 0.9 * slack)
        for outside in (times[0] - 1.2 * slack, times[-1] + 1.2 * slack):
            expected = rf"time: expected {times[0]:g} to {times[-1]:g} \(layers\), got "
            with pytest.raises(GeometryError, match=expected):
                ask(outside)
    assert whole.locate(times[0] - 0.9 * slack)[0] == 0
    assert whole.locate(times[-1] + 0.9 * slack)[0] == last


def test_times_of_a_path_may_be_equal_but_not_run_backward() -> None:
    """Both times have to lie on the path."""
    whole = path([1.0, 2.0, 4.0])
    whole.require_ordered(1.5, 1.5)
    whole.require_ordered(1.0, 4.0)
    with pytest.raises(GeometryError, match=r"times: expected start <= end, got 1.75 and 1.5"):
        whole.require_ordered(1.75, 1.5)
    for start, end in ((0.5, 2.0), (2.0, 4.5)):
        with pytest.raises(GeometryError, match=r"time: expected 1 to 4 \(layers\)"):
            whole.require_ordered(start, end)


def test_stretches_are_splines_of_logarithms_by_scipy() -> None:
    """Values and rates between states, over times that are not evenly spaced."""
    times = [1.0, 2.0, 4.0, 5.0]
    whole = path(times, 3)
    spline = CubicSpline(times, np.log(whole.S.numpy()), axis=0)
    for t in (1.0, 1.3, 2.9, 4.0, 4.8):
        assert whole.sigma(t).tolist() == pytest.approx(np.exp(spline(t)).tolist())
        h = 1e-6
        rate = (spline(t + h) - spline(t - h)) / (2 * h)
        assert whole.stretch_rate(t).tolist() == pytest.approx(rate.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("start", "end"), [(1.0, 5.0), (1.3, 4.8), (2.0, 4.0), (2.2, 2.9)])
def test_integrals_of_noise_by_small_steps(start: float, end: float) -> None:
    """``e^(rate u) / sigma(u)^2`` summed at the middles of a hundred thousand steps."""
    times = [1.0, 2.0, 4.0, 5.0]
    whole = path(times, 3)
    spline = CubicSpline(times, np.log(whole.S.numpy()), axis=0)
    steps = 100_000
    u = start + (np.arange(steps) + 0.5) * (end - start) / steps
    values = np.exp(0.7 * u)[:, None] * np.exp(-2 * spline(u))
    expected = values.sum(0) * (end - start) / steps
    assert whole.integral(start, end, 0.7).tolist() == pytest.approx(expected.tolist(), rel=1e-7)
    assert len(NODES) == len(WEIGHTS) == 16


def test_a_path_turns_at_one_rate_within_an_interval() -> None:
    """``R' R^T`` by finite differences, in an interval of two layers."""
    whole = path([1.0, 2.0, 4.0], 3)
    for k, t in ((0, 1.4), (1, 2.2), (1, 3.7)):
        h = 1e-5
        slope = (whole.rotation(t + h) - whole.rotation(t - h)) / (2 * h)
        torch.testing.assert_close(
            slope @ whole.rotation(t).mT, whole.turning(k), atol=1e-6, rtol=0
        )
    assert whole.length(1) == 2.0
    still = dataclasses.replace(whole, U=whole.U[:1].expand(3, -1, -1))
    assert torch.allclose(still.rotation(3.1), whole.U[0])
