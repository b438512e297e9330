"""Does a circuit do what the model does? Live runs of which only some edges are left:
:func:`tl_geometry.faithfulness`.

In a pruned run every reader gets the stream of the counterfactual, plus (running - counterfactual)
of the writers that the circuit keeps for it; norms, patterns and MLPs are live. With m the mean of
the metric over prompts

    f(C) = (m(C) - m(nothing kept)) / (m(all kept) - m(nothing kept))

is how faithful the circuit C is: nothing kept is the run on the counterfactual, all kept that on
the prompt. Over circuits of growing size, ``CPR`` is the area under f over the share of edges kept,
``CMD`` the area under ``|1 - f|`` (Mueller et al. 2025): a good ranking has CPR near or above 1 and
CMD near 0. Random circuits of equal size are the null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import check_seed, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.intervals import Interval, paired_interval
from tl_geometry.base.results import Result
from tl_geometry.circuits.arithmetic import Live
from tl_geometry.circuits.edge_layout import EdgeLayout
from tl_geometry.circuits.prompt_pairs import Batch, UserMetric, batches, pairs_of
from tl_geometry.circuits.scored_edges import EdgeScores, largest
from tl_geometry.circuits.streams import Reads, Shared, Stream
from tl_geometry.corpus.prompt_sets import as_prompts
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the edges that are kept, as in Mueller et al. 2025."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Faithfulness(Guarded, Result):
    """The metric of pruned runs for each pair of prompts, and f from it.

    ``unit`` is what circuits are made of: ``"edges"`` or ``"heads"`` (the embedding and MLPs are
    always kept, yet f = 0 is the run that keeps nothing at all). There are ``total`` of these, of
    which ``kept`` are kept at each level. ``clean`` and ``counterfactual`` are the metric of whole
    runs, ``metrics`` that of the circuits, ``random`` that of random circuits of equal size. A
    ``chosen`` set has one level.
    """

    unit: str
    total: int
    kept: Int[Tensor, " level"]
    clean: Float[Tensor, " context"]
    counterfactual: Float[Tensor, " context"]
    metrics: Float[Tensor, "level context"]
    random: Float[Tensor, "sample level context"]
    chosen: bool

    @property
    def fractions(self) -> Float[Tensor, " level"]:
        """Share of the edges (or heads) that are kept."""
        return self.kept.double() / self.total

    @property
    def f(self) -> Interval:
        """Faithfulness f at each level, with a 95% interval over pairs of prompts (of a ratio of
        means by its linearisation; NaN below 10 pairs)."""
        return paired_interval(self._linearised(self.metrics))

    @property
    def random_f(self) -> Float[Tensor, "sample level"]:
        """Faithfulness f of each random circuit."""
        return self._share(self.random)

    @property
    def cpr(self) -> Interval:
        """Area under f over the share kept, by trapezoids, from (0, 0) to (1, 1)."""
        weights, end = self._weights()
        return paired_interval(self._linearised(self.metrics) @ weights + end)

    @property
    def cmd(self) -> Interval:
        """Area under ``|1 - f|`` over the share kept, by trapezoids."""
        weights, _ = self._weights()
        above = self._linearised(self.metrics) - 1
        start = 0.5 * float(self.fractions.min())  # |1 - f| is 1 where nothing is kept
        return paired_interval((above * above.mean(0).sign()) @ weights + start)

    @property
    def random_cpr(self) -> Float[Tensor, " sample"]:
        """CPR of each series of random circuits."""
        weights, end = self._weights()
        return self.random_f @ weights + end

    def _weights(self) -> tuple[Float[Tensor, " level"], float]:
        """The weight of each level in an area by trapezoids over shares from 0 to 1, and what the
        end adds, where everything is kept and f is 1."""
        expected, got = "a curve of rankings", "a chosen set"
        require(not self.chosen, "CPR and CMD", expected=expected, got=got, instead=".f")
        order = self.fractions.argsort()
        at = torch.cat([torch.zeros(1), self.fractions[order], torch.ones(1)]).double()
        weights = torch.empty_like(self.fractions)
        weights[order] = (at[2:] - at[:-2]) / 2
        return weights, 0.5 * float(1 - at[-2])

    def _share(self, metrics: Float[Tensor, "*batch context"]) -> Float[Tensor, "*batch"]:
        whole = (self.clean - self.counterfactual).mean()
        return (metrics - self.counterfactual).mean(-1) / whole

    def _linearised(
        self, metrics: Float[Tensor, "level context"]
    ) -> Float[Tensor, "context level"]:
        """Faithfulness as a mean over pairs of prompts, ``f + (x - f y) / mean(y)`` for the ratio
        of the means of x and y."""
        whole, f = self.clean - self.counterfactual, self._share(metrics).unsqueeze(1)
        return (f + (metrics - self.counterfactual - f * whole) / whole.mean()).mT

    table_axes = ("level",)

    def _about(self) -> str:
        return f"circuits of {self.unit}, {super()._about()}"

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        """Levels are named by the share that they keep."""
        return {"fraction": self.fractions.tolist()}

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        random = self.random_f
        ends = {"random_low": random.amin(0), "random_high": random.amax(0)}
        columns = {"kept": self.kept, **self.f.columns("f"), "random": random.mean(0), **ends}
        return {name: (values, ("level",)) for name, values in columns.items()}


def faithfulness(
    model: ModelLike,
    prompts: Any,
    circuit: EdgeScores | Any,
    *,
    counterfactual: Any = None,
    answer: Any = None,
    other: Any = None,
    metric: UserMetric | None = None,
    fractions: Iterable[float] | float = FRACTIONS,
    draws: int = 3,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Faithfulness:
    """Faithfulness of a circuit, by ablation of all else: how much of a behaviour is left when only
    a circuit runs, beside random circuits.

    ``f(C) = (m(C) - m(nothing)) / (m(all) - m(nothing))``, m the mean of the metric over prompts;
    what is not kept has its value in the counterfactual.

    Args:
        prompts, counterfactual, answer, other, metric, batch_size, progress: as in
            :func:`tl_geometry.edge_scores`.
        circuit: :class:`EdgeScores`, whose edges are kept by absolute score, ``fractions`` of
            them; or a chosen set: heads (``"L5H1"``, ``(5, 1)``), the embedding and all MLPs then
            being kept too, or edges (``"L0H3->L5H1<q>"``). Given all edges outside of a set, f near
            0 says that the set is complete.
        fractions: one share of the edges, or several.
        draws: random circuits of each size.

    Raises ``GeometryError`` for scores of other edges than the model has, for unknown heads or
    edges, and where prompts and counterfactuals have the same mean metric.

    Sources: Mueller et al. 2025, arXiv:2504.13151 (f, CPR, CMD).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=4).tokens
    >>> pairs = {"counterfactual": windows[2:], "answer": (11, 12)}
    >>> result = tlg.faithfulness(model, windows[:2], ["L0H0", "L1H1"], **pairs, draws=2)
    >>> result.unit, result.kept.tolist(), result.random_f.shape
    ('heads', [2], torch.Size([2, 1]))
    """
    draws, seed, view = checks.count(draws, "draws"), check_seed(seed, "seed"), as_view(model)
    layout = EdgeLayout.of(view)
    if isinstance(circuit, EdgeScores):
        unit, sets = "edges", _ranked_sets(circuit, layout, checks.several(fractions))
    else:
        expected, got = "EdgeScores, of which they are shares", "a chosen set"
        require(fractions is FRACTIONS, "fractions", expected=expected, got=got)
        unit, sets = _chosen_set(circuit, layout, view)
    # the circuit of each level, then the random ones
    circuits = torch.cat([sets.unsqueeze(0), _random_sets(sets, draws, seed)])
    options = {"counterfactuals": counterfactual, "answers": answer, "others": other}
    pairs = pairs_of(view, as_prompts(view, prompts, **options, prepend_bos=prepend_bos), metric)
    values = torch.empty(2 + circuits.shape[:2].numel(), len(pairs), dtype=torch.float64)
    for batch in batches(view, layout, pairs, metric, batch_size, progress):
        values[:, batch.pairs.rows] = metrics_of_batch(batch, circuits.flatten(0, 1), unit)
    clean, without = values[:2]
    differ = float((clean - without).mean().abs()) > 0
    expected, got = "one that prompts and counterfactuals differ in", f"{float(clean.mean()):.4g}"
    require(differ, "metric", expected=expected, got=f"a mean of {got} for both")
    of_circuits = values[2:].unflatten(0, circuits.shape[:2])
    return Faithfulness(
        unit=unit,
        total=sets.shape[1],
        kept=sets.sum(1),
        clean=clean,
        counterfactual=without,
        metrics=of_circuits[0],
        random=of_circuits[1:],
        chosen=not isinstance(circuit, EdgeScores),
        provenance=view.provenance(pairs, sources=("mueller2025",), seed=seed),
    )


def _ranked_sets(
    scores: EdgeScores, layout: EdgeLayout, fractions: Sequence[float]
) -> Bool[Tensor, "level row"]:
    """The edges of largest score, for each fraction."""
    same = scores.layout == layout
    expected, got = "scores of this model's edges", f"{len(scores.scores)} edges of another"
    require(same, "circuit", expected=expected, got=got, instead="edge_scores(model, ...)")
    require(len(fractions) > 0, "fractions", expected="at least one share", got="none")
    return torch.stack([largest(scores.scores, fraction) for fraction in fractions])


def _chosen_set(
    circuit: Any, layout: EdgeLayout, view: ModelView
) -> tuple[str, Bool[Tensor, "level row"]]:
    """A set of heads or edges as one level."""
    listed, expected = isinstance(circuit, Iterable), "EdgeScores, heads, or edges"
    require(listed, "circuit", expected=expected, got=checks.describe(circuit))
    given = [circuit] if isinstance(circuit, str) else list(circuit)
    if given and all(isinstance(name, str) and "->" in name for name in given):
        number = {name: at for at, name in enumerate(layout.edge_names())}
        unknown = [name for name in given if name not in number]
        expected = 'edges of this model, such as "embed->L0H0<q>"'
        require(not unknown, "circuit", expected=expected, got=unknown[:3])
        rows, size, unit = [number[name] for name in given], len(number), "edges"
    else:
        pairs = checks.heads(given, view.n_layers, view.n_heads)
        rows = [layer * view.n_heads + head for layer, head in pairs]
        size, unit = view.n_layers * view.n_heads, "heads"
    chosen = torch.zeros(1, size, dtype=torch.bool)
    chosen[0, rows] = True
    return unit, chosen


def _random_sets(
    sets: Bool[Tensor, "level row"], draws: int, seed: int
) -> Bool[Tensor, "sample level row"]:
    """Random sets as large as those of each level; the smaller lie within the larger."""
    generator = checks.seeded(seed)
    ranks = torch.stack([torch.randperm(sets.shape[1], generator=generator) for _ in range(draws)])
    return ranks.unsqueeze(1) < sets.sum(1).unsqueeze(1)


class Pruned(Shared):
    """Each reader gets the counterfactual's stream, plus (running - counterfactual) of the writers
    that are kept for it. ``layer`` is the block that runs."""

    def __init__(
        self,
        layout: EdgeLayout,
        first: Stream,
        counterfactual: Float[Tensor, "batch writer position d_model"],
        kept: Bool[Tensor, "row writer"],
    ) -> None:
        super().__init__(torch.zeros_like(first))
        self.layout, self.layer, self.written = layout, 0, 0
        self.counterfactual, self.kept = counterfactual, kept.to(first)
        self.differences = torch.empty_like(counterfactual)
        self.add(first.unsqueeze(0))

    def read(self, which: str) -> Reads:
        """What each reader of a kind gets."""
        return self.of(self.layout.of_block(self.layer, which))

    def of(self, readers: slice) -> Reads:
        """What some readers get."""
        kept, differences = self.kept[readers, : self.written], self.differences[:, : self.written]
        return self.total.unsqueeze(2) + einsum(kept, differences, "r w, b w i d -> b i r d")

    def add(self, writes: Float[Tensor, "writer batch position d_model"]) -> None:
        """Add the counterfactual writes of these writers; keep how the running ones differ."""
        writers = slice(self.written, self.written + len(writes))
        self.differences[:, writers] = writes.transpose(0, 1) - self.counterfactual[:, writers]
        self.total = self.total + self.counterfactual[:, writers].sum(1)
        self.written = writers.stop


@torch.no_grad()
def metrics_of_batch(
    batch: Batch, sets: Bool[Tensor, "row edge"], unit: str
) -> Float[Tensor, "condition batch"]:
    """The metric of the clean run, of the counterfactual's, and of each pruned run."""
    states, writes, values = batch.both_runs(Live, lambda x: x[len(x) // 2 :])
    first, layout = states.streams[0][: len(writes)], batch.layout
    for chosen in sets:
        stream = Pruned(layout, first, writes, _mask(layout, chosen, unit))
        for block in batch.runner.blocks:
            stream.layer = block.number
            block.run(stream, Live())
        logits = batch.read(stream.of(slice(-1, None))[:, :, 0], Live())
        values.append(batch.measured(logits))
    return torch.stack(values).double().cpu()


def _mask(layout: EdgeLayout, chosen: Tensor, unit: str) -> Bool[Tensor, "row writer"]:
    """The writers that a set of edges or heads keeps for each reader."""
    if unit == "edges":
        return layout.kept(chosen)
    writers = torch.ones(len(layout.writers), dtype=torch.bool)
    writers[[i for i, name in enumerate(layout.writers) if name[0] == "L"]] = chosen
    return layout.allowed & writers
