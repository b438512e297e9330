"""Can a linear classifier tell two clouds apart: true from extrapolated states, or language from
gibberish? For the reproduction of Sarfati et al. 2025 (:mod:`tl_geometry.papers`); needs
scikit-learn (``pip install "tl-geometry[ml]"``)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, count, fail, require
from tl_geometry.base.intervals import t_quantile


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
    cannot, and with sides of unequal size the share of the larger one.

    ``paired=True``: row i of ``a`` and row i of ``b`` belong to one trajectory and stay on one side
    of every split. Coordinates are standardised on the training side only. ``"svm"`` is a linear
    support vector machine, ``"perceptron"`` Rosenblatt's. Sarfati et al. 2025 report 50 to 51%
    (true against extrapolated one layer on) and about 60% (ten layers on) for GPT-2-medium, without
    saying how trajectories were split. Needs the ``ml`` extra.
    """
    try:
        from sklearn import linear_model, model_selection, pipeline, preprocessing, svm
    except ImportError:
        instead = 'pip install "tl-geometry[ml]"'
        fail("separability", expected="scikit-learn", got="not installed", instead=instead)

    choice(classifier, ("svm", "perceptron"), "classifier")
    expected = "equally many with paired=True"
    require(not paired or len(a) == len(b), "rows", expected=expected, got=f"{len(a)} and {len(b)}")
    expected, got = "at least 10 each", f"{describe(a)} and {describe(b)}"
    require(min(len(a), len(b)) >= 10, "rows", expected=expected, got=got)
    repeats = count(repeats, "repeats", 2)
    points = torch.cat([a, b]).double().cpu().numpy()
    classes = np.repeat([1, 0], [len(a), len(b)])
    # one group for each trajectory
    groups = np.concatenate([np.arange(len(a)), np.arange(len(b))]) if paired else None
    Splits = model_selection.GroupShuffleSplit if paired else model_selection.StratifiedShuffleSplit
    splitter: Any = Splits(n_splits=repeats, test_size=test_share, random_state=seed)
    splits = list(splitter.split(points, classes, groups))
    learner: Any = linear_model.Perceptron(random_state=seed)
    if classifier == "svm":
        learner = svm.LinearSVC(random_state=seed, dual="auto", max_iter=20_000, C=0.01)
    learner = pipeline.make_pipeline(preprocessing.StandardScaler(), learner)

    run = partial(model_selection.cross_val_score, learner, points)
    generator, scores = np.random.default_rng(seed), torch.from_numpy(run(classes, cv=splits))
    shuffled = [run(generator.permutation(classes), cv=[split]).item() for split in splits]
    mean, reach = float(scores.mean()), resampled_t_reach(scores, test_share)
    return Accuracy(mean, mean - reach, mean + reach, sum(shuffled) / repeats, len(splits[0][1]))


def resampled_t_reach(values: Float[Tensor, " sample"], test_share: float) -> float:
    """Half-width of the 95% interval of a mean over J splits whose training sets overlap,
    ``t_(J-1) sqrt((1/J + n_test / n_train) var)`` (Nadeau & Bengio 2003); NaN without variance.

    >>> round(resampled_t_reach(torch.tensor([0.5, 0.6, 0.7]), 0.3), 3)
    0.376
    """
    j = len(values)
    spread = float(values.var() * (1 / j + test_share / (1 - test_share))) ** 0.5
    return float(t_quantile(torch.tensor(j - 1.0))) * spread if spread > 0 else float("nan")
