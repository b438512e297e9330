"""Can a linear classifier tell two ensembles apart: true from extrapolated states, or language from
gibberish? For the reproduction of Sarfati et al. 2025 (:mod:`tl_geometry.papers`); needs
scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.intervals import t_quantile
from tl_geometry.base.results import Provenance, Result
from tl_geometry.flow.ensemble import Trajectories, too_few
from tl_geometry.flow.residuals import MAPS, VECTOR_MAPS, MapsFrom, flow_map

CLASSIFIERS = ("svm", "perceptron")
"""Classifiers of :func:`separability`."""


class Accuracy(NamedTuple):
    """Mean test accuracy of a linear classifier over repeated splits, the same with ``shuffled``
    labels, and the ``test`` rows of one split."""

    accuracy: float
    low: float
    high: float
    """95% interval by the corrected resampled t of Nadeau & Bengio 2003 (``repeats`` - 1 degrees of
    freedom); NaN where all splits have one accuracy."""
    shuffled: float
    test: int


def separability(
    a: Float[Tensor, "row d_model"],
    b: Float[Tensor, "column d_model"],
    *,
    paired: bool = False,
    classifier: str = "svm",
    test_share: float = 0.3,
    repeats: int = 10,
    seed: int = 0,
) -> Accuracy:
    """Accuracy with which a linear classifier tells rows of ``a`` from rows of ``b``: 0.5 where it
    cannot.

    ``paired=True``: row i of ``a`` and row i of ``b`` belong to one trajectory and stay on one side
    of every split.
    Coordinates are standardised on the training side only. ``"svm"`` is a linear support vector
    machine, ``"perceptron"`` Rosenblatt's. Sarfati et al. 2025 report 50 to 51% (true against
    extrapolated one layer on) and about 60% (ten layers on) for GPT-2-medium, without saying how
    trajectories were split. Needs the ``ml`` extra.
    """
    try:
        from sklearn.linear_model import Perceptron
        from sklearn.svm import LinearSVC
    except ImportError:
        instead = 'pip install "tl-geometry[ml]"'
        fail("separability", expected="scikit-learn", got="not installed", instead=instead)

    choice(classifier, CLASSIFIERS, "classifier")
    expected = "equally many with paired=True"
    require(not paired or len(a) == len(b), "rows", expected=expected, got=f"{len(a)} and {len(b)}")
    expected, got = "at least 10 each", f"{describe(a)} and {describe(b)}"
    require(min(len(a), len(b)) >= 10 and repeats >= 2, "rows", expected=expected, got=got)
    points = torch.cat([a, b]).double().cpu().numpy()
    classes = torch.cat([torch.ones(len(a)), torch.zeros(len(b))]).long().numpy()
    generator = torch.Generator().manual_seed(seed)
    scores: dict[bool, list[float]] = {False: [], True: []}
    tested = 0
    for repeat in range(repeats):
        is_test = _held_out(len(a), len(b), paired, test_share, generator).numpy()
        mean, sd = points[~is_test].mean(0), points[~is_test].std(0)
        standardized = (points - mean) / (sd + (sd == 0))  # a constant coordinate stays constant
        for shuffled in (False, True):
            labels = (
                classes[torch.randperm(len(classes), generator=generator).numpy()]
                if shuffled
                else classes
            )
            learner: Any = (
                Perceptron(random_state=seed + repeat)
                if classifier == "perceptron"
                else LinearSVC(random_state=seed + repeat, dual="auto", max_iter=20_000, C=0.01)
            )
            learner.fit(standardized[~is_test], labels[~is_test])
            scores[shuffled].append(
                float((learner.predict(standardized[is_test]) == labels[is_test]).mean())
            )
        tested = int(is_test.sum())
    accuracies = torch.tensor(scores[False], dtype=torch.float64)
    reach = resampled_t_reach(accuracies, test_share)
    mean_accuracy, shuffled = float(accuracies.mean()), float(torch.tensor(scores[True]).mean())
    return Accuracy(mean_accuracy, mean_accuracy - reach, mean_accuracy + reach, shuffled, tested)


def resampled_t_reach(values: Float[Tensor, " sample"], test_share: float) -> float:
    """Half-width of the 95% interval of a mean over J splits whose training sets overlap,
    ``t_(J-1) sqrt((1/J + n_test / n_train) var)`` (Nadeau & Bengio 2003); NaN without variance.

    >>> round(resampled_t_reach(torch.tensor([0.5, 0.6, 0.7]), 0.3), 3)
    0.376
    """
    j = len(values)
    spread = float(values.var() * (1 / j + test_share / (1 - test_share))) ** 0.5
    return float(t_quantile(torch.tensor(j - 1.0))) * spread if spread > 0 else float("nan")


def _held_out(
    n_first: int, n_second: int, paired: bool, share: float, generator: torch.Generator
) -> Tensor:
    """Which rows are held out for the test, ``share`` of each class: those of the first class, then
    those of the second."""

    def draw(rows: int) -> Tensor:
        is_test = torch.zeros(rows, dtype=torch.bool)
        is_test[torch.randperm(rows, generator=generator)[: max(1, round(share * rows))]] = True
        return is_test

    first_is_test = draw(n_first)
    return torch.cat([first_is_test, first_is_test if paired else draw(n_second)])


@dataclass(frozen=True, eq=False, kw_only=True)
class SeparationTable(Result):
    """Accuracies ``[row column]``: a row per comparison (a pair of states, or a state), the columns
    are the fields of :class:`Accuracy`."""

    names: tuple[str, ...]
    accuracy: Float[Tensor, "row column"]
    classifier: str

    def columns(self) -> tuple[str, ...]:
        return ("comparison", *Accuracy._fields)

    def rows(self) -> list[tuple[object, ...]]:
        return [(n, *(float(x) for x in v)) for n, v in zip(self.names, self.accuracy)]


def true_against_extrapolated(
    ensemble: Trajectories,
    *,
    start: int,
    map_type: str = "flow",
    classifier: str = "svm",
    seed: int = 0,
    **options: Any,
) -> SeparationTable:
    """Linear separability of true states from those extrapolated from state ``start``, at every
    later state.

    Maps are fitted on one half of the trajectories and compared on the other, because in-sample
    true and extrapolated states have the same second moments by construction. A trajectory and its
    extrapolation stay on one side of every split. ``map_type`` is the map: the published flow, or
    any other of :data:`tl_geometry.flow.residuals.MAPS`. ``options`` go to :func:`separability`.
    """
    choice(map_type, MAPS, "map_type")
    train, test = ensemble.split(seed=seed)
    start_row = ensemble.row(start)
    maps = MapsFrom(train.X[:, start_row])
    accuracies: dict[str, Accuracy] = {}
    for end in range(start_row + 1, len(ensemble.states)):
        if map_type == "flow":  # the published one
            move = flow_map(train.aligned_bases(), start_row, end)
        else:
            move = maps.to(train.X[:, end], map_type)
        true, moved = test.X[:, end].double(), move(test.X[:, start_row].double())
        accuracies[f"{start}->{ensemble.states[end]}"] = separability(
            true, moved, paired=True, classifier=classifier, seed=seed, **options
        )
    require(bool(accuracies), "start", expected=f"a state before {ensemble.states[-1]}", got=start)
    fits_matrix = map_type not in VECTOR_MAPS
    few = too_few(len(train), train.X.shape[-1], "maps") if fits_matrix else ()
    return _table(accuracies, classifier, ensemble.provenance.flagged(*few))


def ensembles_apart(
    a: Trajectories,
    b: Trajectories,
    *,
    classifier: str = "perceptron",
    seed: int = 0,
    **options: Any,
) -> SeparationTable:
    """Linear separability of two ensembles (language and gibberish) at every state; Sarfati et al.
    2025 find them separable at all layers. ``options`` go to :func:`separability`."""
    require(a.states == b.states, "ensembles", expected=f"the same states {a.states}", got=b.states)
    accuracies = {
        f"state {state}": separability(
            a.X[:, i], b.X[:, i], classifier=classifier, seed=seed, **options
        )
        for i, state in enumerate(a.states)
    }
    return _table(accuracies, classifier, a.provenance)


def _table(
    by_name: Mapping[str, Accuracy], classifier: str, provenance: Provenance
) -> SeparationTable:
    accuracy = torch.tensor(
        [tuple(accuracy_row) for accuracy_row in by_name.values()], dtype=torch.float64
    )
    return SeparationTable(
        names=tuple(by_name), accuracy=accuracy, classifier=classifier, provenance=provenance
    )
