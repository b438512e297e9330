"""Which edges make the behaviour? Scores of all edges from writers to readers:
:func:`tl_geometry.edge_scores`.

For a prompt and its counterfactual, with u the write of a writer and x the input of a reader
(:mod:`tl_geometry.circuits.edge_layout`), both vectors of the stream at every position:

    score(u -> x) = sum_positions (u_clean - u_counterfactual) . d metric / d x

``method`` says which derivative. With ``"contrast"`` it is that of the linear network between the
two runs (:class:`~tl_geometry.circuits.arithmetic.Between`): the scores of all edges out of the
embedding, followed through, sum to the difference of the metric exactly. ``"gradient"`` is that of
the clean run (attribution patching; Syed et al. 2023). ``"integrated"`` is the mean over ``steps``
runs on first states between those of the two prompts, at the midpoints of equal steps, ``h_0 =
counterfactual + a (clean - counterfactual)``, ``a = (m + 1/2) / steps`` (Hanna et al. 2024).

A mixture of experts is one reader and one writer. Gradients pass through the experts chosen and the
weights that the router gives them; contrast refuses it by name, as the router may choose others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.checks import count
from tl_geometry.base.errors import ReconstructionError, choice, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.intervals import FEWEST, t_quantile
from tl_geometry.base.results import Result
from tl_geometry.base.tables import Table
from tl_geometry.circuits.arithmetic import Between, Live, difference, gauss_legendre
from tl_geometry.circuits.edge_layout import EdgeLayout
from tl_geometry.circuits.prompt_pairs import Batch, UserMetric, batches, pairs_of, share_of
from tl_geometry.circuits.runner import stream_at
from tl_geometry.circuits.streams import Stream
from tl_geometry.corpus.prompt_sets import as_prompts
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound

METHODS = ("contrast", "gradient", "integrated")
"""Which derivative is taken."""
METRIC_NODES = 24
"""Gauss-Legendre nodes for a metric of the user's between the logits of both runs: log-probability,
probability and entropy close to 1e-7 where logits move by 20 (16 nodes: to 1e-4)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeScores(Guarded, Result):
    """Scores of all edges of a model, means over pairs of prompts.

    ``layout`` names the edges (``layout.writers``, ``layout.readers``, ``layout.ends()``);
    ``errors`` are standard errors of the means (NaN below 10 prompts). ``node_scores`` are those of
    the writers as a whole, the sums over all edges out of each. ``clean`` and ``counterfactual``
    are the means of the metric. A positive score says that the clean write raises the metric.
    """

    layout: EdgeLayout
    scores: Float[Tensor, " edge"]
    errors: Float[Tensor, " edge"]
    node_scores: Float[Tensor, " writer"]
    node_errors: Float[Tensor, " writer"]
    prompts: int
    clean: float
    counterfactual: float
    method: str

    def names(self) -> tuple[str, ...]:
        """Every edge as it is given to :func:`tl_geometry.faithfulness`: ``"L0H3->L5H1<q>"``."""
        return self.layout.edge_names()

    def _about(self) -> str:
        return f"method {self.method}, {super()._about()}"

    def columns(self) -> Sequence[str]:
        return ("source", "target", "score", "low", "high")

    def rows(self) -> Sequence[Sequence[object]]:
        """The largest absolute score first."""
        return self._sorted(self.layout.pairs(), self.scores, self.errors)

    def nodes(self) -> Table:
        """Embedding, heads and MLPs as a whole: ``writer``, ``score``, ``low``, ``high`` (95% over
        prompts), the largest absolute score first."""
        labels = [(writer,) for writer in self.layout.writers]
        cells: Any = tuple(self._sorted(labels, self.node_scores, self.node_errors))
        names = ("writer", "score", "low", "high")
        return Table(names=names, cells=cells, provenance=self.provenance)

    def _sorted(
        self, labels: Sequence[tuple[str, ...]], values: Tensor, errors: Tensor
    ) -> list[tuple[str | float, ...]]:
        """Labels, scores and Student's 95% intervals over prompts, the largest score first."""
        # one degree of freedom at least, where the quantile exists: below 10 prompts errors are NaN
        reach = errors * float(t_quantile(torch.tensor(max(1.0, self.prompts - 1.0))))
        numbers = torch.stack([values, values - reach, values + reach], 1).tolist()
        return [(*labels[i], *numbers[i]) for i in _by_size(values).tolist()]

    def edges(self, fraction: float) -> list[str]:
        """Names of the edges of largest absolute score, ``fraction`` of all."""
        names = self.names()
        return [names[i] for i in largest(self.scores, fraction).nonzero()[:, 0].tolist()]


def edge_scores(
    model: ModelLike,
    prompts: Any,
    *,
    counterfactual: Any = None,
    answer: Any = None,
    other: Any = None,
    metric: UserMetric | None = None,
    method: str = "contrast",
    steps: int = 5,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> EdgeScores:
    """Attribution patching of edges, as an exact sum or by gradients (EAP, EAP-IG): how much each
    edge contributes to a behaviour. An edge leads from a writer (embedding, head, MLP) to a reader
    (query of a head, key and value of a group, MLP, output).

    ``sum_positions (u_clean - u_counterfactual) . d metric / d x``, the mean over pairs.

    Args:
        prompts: texts or token ids of any lengths, or :class:`~tl_geometry.corpus.Prompts`, which
            hold counterfactuals and answers.
        counterfactual: for each prompt another of as many tokens.
        answer, other: the tokens whose logits are compared at the last position, for each pair or
            for all, as ids or texts (``answer`` may be a list of pairs); by default the most likely
            token after the prompt and after its counterfactual.
        metric: in place of these a differentiable function of the logits ``[batch position
            d_vocab]`` of any batch, to one number for each prompt.
        method: ``"contrast"``, the exact linear network between both runs; ``"gradient"``, that of
            the clean run (attribution patching); ``"integrated"``, gradients averaged over
            ``steps`` runs whose first states lie between those of the two prompts.
        batch_size: most pairs in one pass.
        progress: shows a bar of the pairs that are done.

    Raises ``GeometryError`` for a pair of two lengths, and for a pair after which the same token is
    likeliest; ``UnsupportedModelError`` for an encoder; ``ReconstructionError`` where a pass by
    blocks does not give the model's own logits, or the contrast does not sum.

    A model in half precision is scored by its weights in float32, its own precision being too
    coarse to check.

    Sources: Syed et al. 2023, arXiv:2310.10348 (gradient); Hanna et al. 2024, arXiv:2403.17806
    (integrated); contrast is of this library.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=4).tokens
    >>> scores = tlg.edge_scores(
    ...     model, windows[:2], counterfactual=windows[2:], answer=(11, 12)
    ... )
    >>> len(scores.scores) == len(scores.names()), scores.layout.writers[:2]
    (True, ('embed', 'L0H0'))
    """
    choice(method, METHODS, "method")
    steps = count(steps, "steps")
    view = as_view(model)
    view.require_gradients()
    layout = EdgeLayout.of(view)
    options = {"counterfactuals": counterfactual, "answers": answer, "others": other}
    pairs = pairs_of(view, as_prompts(view, prompts, **options, prepend_bos=prepend_bos), metric)
    midpoints = [(m + 0.5) / steps for m in range(steps)] if method == "integrated" else [1.0]
    # float64 sums and squares of one row for each pair: edges, writers, the metric of both runs
    allowed, moments = layout.allowed, torch.zeros(2, 1, dtype=torch.float64)
    for batch in batches(view, layout, pairs, metric, batch_size, progress):
        contrast = method == "contrast"
        scores, metrics = _contrast(batch) if contrast else _gradients(batch, midpoints)
        scores = scores.double().cpu()
        columns = [scores[:, allowed], scores.sum(1), torch.stack(metrics, 1).double().cpu()]
        rows = torch.cat(columns, 1)
        moments = moments + torch.stack([rows.sum(0), rows.square().sum(0)])
    n = len(pairs)
    mean = moments[0] / n
    errors = ((moments[1] / n - mean.square()).clamp(min=0) / max(1, n - 1)).sqrt()
    errors = errors if n >= FEWEST else torch.full_like(mean, torch.nan)
    sizes = [int(allowed.sum()), len(layout.writers), 2]
    (edges, nodes, both), (edge_errors, node_errors, _) = (x.split(sizes) for x in (mean, errors))
    sources = {"contrast": (), "gradient": ("syed2023",), "integrated": ("hanna2024",)}[method]
    return EdgeScores(
        layout=layout,
        scores=edges,
        errors=edge_errors,
        node_scores=nodes,
        node_errors=node_errors,
        prompts=n,
        clean=float(both[0]),
        counterfactual=float(both[1]),
        method=method,
        provenance=view.provenance(pairs, sources=sources),
    )


# ---- scores of one batch

Scored = tuple[Float[Tensor, "pair reader writer"], list[Float[Tensor, " pair"]]]
"""Scores of each pair, and the metric of both runs."""


@torch.no_grad()
def _gradients(batch: Batch, midpoints: Sequence[float]) -> Scored:
    """Scores by gradients at some runs between both prompts."""
    states, change, values = batch.both_runs(Live, difference)
    clean = tuple(stream[: len(change)] for stream in states.streams)
    total, run = torch.zeros(()), batch.runner.run
    for a in midpoints:
        # the clean first state, moved towards the counterfactual's
        streams = clean if a == 1.0 else run(clean[0] - (1 - a) * change[:, 0], position=-1).streams
        with torch.enable_grad():
            last = streams[-1].detach().requires_grad_()
            adjoint = batch.slope(batch.read(last, Live()), last)
        total = total + _contracted(batch, streams, adjoint, Live, change)[0] / len(midpoints)
    return total, values


@torch.no_grad()
def _contrast(batch: Batch) -> Scored:
    """Scores by the linear network between both runs."""
    states, change, values = batch.both_runs(Between, difference)
    clean, other = states.logits.chunk(2)
    g, runner = torch.zeros_like(clean), batch.runner
    for t, weight in ((0.5, 1.0),) if batch.metric is None else gauss_legendre(METRIC_NODES):
        with torch.enable_grad():
            between = (other + t * (clean - other)).requires_grad_()
            g = g + weight * batch.slope(between, between)
    with torch.enable_grad():
        last = states.streams[-1].detach().requires_grad_()
        adjoint = torch.autograd.grad(batch.read(last, Between()), last, torch.cat([g, -g]))[0]
    scores, first = _contracted(batch, states.streams, adjoint, Between, change)
    total = (change[:, 0].double() * first[: len(change)].double()).sum((1, 2))
    # each run's logits round by their own size, which is that of the normed state times W_U
    normed = runner.head.norm.apply(stream_at(states.streams[-1], batch.place))
    size = float((normed.abs() @ runner.head.W_U.to(normed).abs()).max())
    size += float(scores.abs().sum((1, 2)).max())
    bound = len(runner.blocks) * reconstruction_bound(runner.view.roundoff, size)
    error = float((total - (values[0] - values[1]).to(total)).abs().max())
    fits, what = error <= bound, f"edges of {runner.view.name} between two runs"
    expected = f"a sum that is the difference of the metric, within {bound:.1e}"
    got, instead, kind = f"one that is off by {error:.1e}", 'method="gradient"', ReconstructionError
    require(fits, what, expected=expected, got=got, instead=instead, error=kind)
    return scores, values


def _contracted(
    batch: Batch,
    streams: Sequence[Stream],
    adjoint: Stream,
    arithmetic: Callable[[], Live],
    change: Float[Tensor, "pair writer position d_model"],
) -> tuple[Float[Tensor, "pair reader writer"], Stream]:
    """Walk back, and take the product of what every reader gets with what every writer that it
    sees wrote; also dT/d(first state)."""
    count, writes, layout = len(change), change.flatten(2), batch.layout
    scores = change.new_zeros(count, len(layout.readers), len(layout.writers))
    at = len(layout.readers) - 1
    scores[:, at] = torch.einsum("bwx,bx->bw", writes, adjoint[:count].flatten(1))
    for block in reversed(batch.runner.blocks):
        run = block.tracked(streams[block.number], arithmetic())
        adjoint = run.pull(adjoint)
        readers = run.to_readers(count).flatten(2)
        at -= readers.shape[1]
        most = layout.seen[at + readers.shape[1] - 1]
        scores[:, at : at + readers.shape[1], :most] = readers @ writes[:, :most].mT
    return scores * layout.allowed.to(scores), adjoint


def largest(scores: Float[Tensor, " row"], fraction: float) -> Bool[Tensor, " row"]:
    """The rows of largest absolute score, ``fraction`` of all, at least one."""
    kept, share = torch.zeros(len(scores), dtype=torch.bool), share_of(fraction, "fraction")
    kept[_by_size(scores)[: max(1, round(share * len(scores)))]] = True
    return kept


def _by_size(scores: Tensor) -> Tensor:
    """The order of absolute values, the largest first; of equals the first."""
    return scores.abs().argsort(descending=True, stable=True)
