"""How is a measure judged where the answer is known? Recovered, missed and false, AUROC and its
null; and what one edge does, by live runs. :mod:`benchmarks.known` and the tests call it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.known_models import TokenPairs
from tl_geometry.circuits.edge_layout import EdgeLayout
from tl_geometry.circuits.kept_edges import metrics_of_batch
from tl_geometry.circuits.prompt_pairs import batches, pairs_of
from tl_geometry.corpus.prompt_sets import as_prompts
from tl_geometry.models.reader import as_view

DRAWS = 200
"""Random orders that a null is taken from."""


class Counts(NamedTuple):
    """What of the truth was named, what was not, and what was named without being true."""

    recovered: int
    missed: int
    false: int

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts)
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def judge_labels(labels: Mapping[Any, str], truth: Mapping[Any, str], none: str) -> Counts:
    """Labels against the true ones: equal ones are recovered (where ``none``, "no clear answer", is
    true it is right to give it), ``none`` elsewhere is a miss, another label is false.

    >>> judge_labels({1: "a", 2: "b", 3: "?"}, {1: "a", 2: "a", 3: "a"}, "?")
    Counts(recovered=1, missed=1, false=1)
    """
    recovered = sum(labels[at] == label for at, label in truth.items())
    missed = sum(labels[at] == none != label for at, label in truth.items())
    return Counts(recovered, missed, len(truth) - recovered - missed)


def labels_by_chance(labels: Mapping[Any, str], truth: Mapping[Any, str]) -> float:
    """How many labels are right on average where the same labels are dealt to the heads at
    random: ``sum_c n_c m_c / n``.

    >>> labels_by_chance({1: "a", 2: "b"}, {1: "a", 2: "b"})
    1.0
    """
    given = [labels[at] for at in truth]
    return sum(given.count(label) for label in truth.values()) / len(truth)


def judge_set(named: Set[Hashable], truth: Set[Hashable]) -> Counts:
    """A set that was named against the true one.

    >>> judge_set({1, 2}, {2, 3, 4})
    Counts(recovered=1, missed=2, false=1)
    """
    return Counts(len(named & truth), len(truth - named), len(named - truth))


def first(scores: Float[Tensor, " item"], truth: Bool[Tensor, " item"]) -> Counts:
    """The items of largest score, as many as are true."""
    order = scores.argsort(descending=True, stable=True)[: int(truth.sum())]
    return judge_set(set(order.tolist()), set(truth.nonzero()[:, 0].tolist()))


def auroc(scores: Float[Tensor, " item"], truth: Bool[Tensor, " item"]) -> float:
    """The probability that a true item has a larger score than another; half for equal scores.

    >>> auroc(torch.tensor([3.0, 1.0, 1.0, 0.0]), torch.tensor([True, True, False, False]))
    0.875
    """
    return float(roc_auc_score(truth.numpy(), scores.numpy()))


def auroc_by_chance(
    scores: Float[Tensor, " item"], truth: Bool[Tensor, " item"], *, seed: int = 0
) -> float:
    """The AUROC that 95% of random orders of the scores stay below."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(scores), generator=generator) for _ in range(DRAWS)]
    return float(torch.tensor([auroc(scores[order], truth) for order in orders]).quantile(0.95))


@dataclass(frozen=True)
class Finding:
    """What one measure found in one model: counts, and AUROC with the null where it ranks."""

    measure: str
    model: str
    counts: Counts
    chance: float
    auroc: float | None = None
    null: float | None = None

    @classmethod
    def of_labels(
        cls,
        measure: str,
        model: str,
        labels: Mapping[Any, str],
        truth: Mapping[Any, str],
        none: str = "unclear",
    ) -> Finding:
        """A measure that gives labels."""
        chance = labels_by_chance(labels, truth)
        return cls(measure, model, judge_labels(labels, truth, none), chance)

    @classmethod
    def of_ranking(
        cls,
        measure: str,
        model: str,
        scores: Float[Tensor, " item"],
        truth: Bool[Tensor, " item"],
    ) -> Finding:
        """A measure that ranks; what it does not score (NaN) is left out."""
        scored = ~scores.isnan()
        scores, truth = scores[scored], truth[scored]
        chance = float(truth.sum()) ** 2 / len(truth)
        null = auroc_by_chance(scores, truth)
        return cls(measure, model, first(scores, truth), chance, auroc(scores, truth), null)


@torch.no_grad()
def exact_effects(model: Any, pairs: TokenPairs) -> tuple[tuple[str, ...], Float[Tensor, " edge"]]:
    """Names of all edges, and the share of the difference between prompts and counterfactuals that
    is lost where this edge alone carries the counterfactual's write, in a live run."""
    view = as_view(model)
    layout = EdgeLayout.of(view)
    names = layout.edge_names()
    options = {"counterfactuals": pairs.counterfactuals, "answers": pairs.targets}
    given = pairs_of(view, as_prompts(view, pairs.prompts, **options), None)
    batch = next(batches(view, layout, given, None, len(given)))
    all_but_one = ~torch.eye(len(names), dtype=torch.bool)
    found = metrics_of_batch(batch, all_but_one, "edges").mean(1)
    clean, other, without = found[0], found[1], found[2:]
    return names, (clean - without) / (clean - other)


def by_name(names: Sequence[str], chosen: Set[str]) -> Bool[Tensor, " item"]:
    """Which of the names are chosen."""
    return torch.tensor([name in chosen for name in names])
