"""Which nodes and edges do the graphs of two prompts (or of two models of one shape) share, and how
many would they share by chance? :meth:`tl_geometry.circuits.LogitGraph.compare` calls
:func:`compare_graphs`.

The Jaccard index of two sets is what they share over what either has. Its value by chance:

- nodes: as many as each graph has are drawn at random from all components at all places;
- edges, which are compared between nodes that both graphs have: into each of these nodes, as many
  sources of each edge type as each graph has there are drawn at random from those that it can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.circuits.graph_places import PlacedGraphs, Positions, place_graphs
from tl_geometry.circuits.logit_graph import EDGE_TYPES, QUERY, LogitGraph


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgePairs(Result):
    """Edges of two graphs side by side; NaN where a graph does not have the edge."""

    labels: tuple[tuple[str, ...], ...]
    weights: Float[Tensor, "edge side"]

    def columns(self) -> Sequence[str]:
        names = ("source", "source_place", "target", "target_place", "edge_type")
        return (*names, "weight", "other_weight")

    def rows(self) -> Sequence[Sequence[object]]:
        weights = self.weights.tolist()
        return [(*names, *pair) for names, pair in zip(self.labels, weights, strict=True)]


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphComparison(Result):
    """What two graphs share (of :meth:`LogitGraph.compare`); the table has a row for each node that
    either has, the largest first.

    ``layers``, ``heads_of``, ``positions`` and ``place_tokens`` are as in
    :class:`~tl_geometry.circuits.graph_means.AverageGraph`. ``values`` and ``moved`` are those of
    both graphs, complete whether a graph has the node (``kept``) or not; ``value_correlation`` and
    ``moved_correlation`` are Pearson's over the components among them. ``sources``, ``targets``,
    ``edge_types`` are the edges of either graph, ``weights`` NaN where a graph does not have the
    edge; ``edge_correlation`` is over those that both have. ``node_jaccard`` and ``edge_jaccard``
    (edges between nodes that both have) stand beside ``*_by_chance``. NaN where there is nothing to
    compare.
    """

    names: tuple[str, ...]
    places: tuple[str, ...]
    layers: Int[Tensor, " node"]
    heads_of: Int[Tensor, " node"]
    positions: Int[Tensor, " node"]
    place_tokens: tuple[str, ...]
    values: Float[Tensor, "node side"]
    moved: Float[Tensor, "node side"]
    kept: Bool[Tensor, "node side"]
    sources: Int[Tensor, " edge"]
    targets: Int[Tensor, " edge"]
    edge_types: Int[Tensor, " edge"]
    weights: Float[Tensor, "edge side"]
    node_jaccard: float
    node_jaccard_by_chance: float
    edge_jaccard: float
    edge_jaccard_by_chance: float
    value_correlation: float
    moved_correlation: float
    edge_correlation: float

    def edges(self) -> EdgePairs:
        """All edges of both graphs, the largest first."""
        size = self.weights.abs().nan_to_num().amax(1)
        order = size.argsort(descending=True, stable=True)
        label = [(name, place) for name, place in zip(self.names, self.places, strict=True)]
        ends = (self.sources[order].tolist(), self.targets[order].tolist())
        types = self.edge_types[order].tolist()
        return EdgePairs(
            provenance=self.provenance,
            labels=tuple(
                (*label[s], *label[t], EDGE_TYPES[e]) for s, t, e in zip(*ends, types, strict=True)
            ),
            weights=self.weights[order],
        )

    def columns(self) -> Sequence[str]:
        numbers = ("value", "other_value", "moved", "other_moved", "kept", "other_kept")
        return ("writer", "place", *numbers)

    def rows(self) -> Sequence[Sequence[object]]:
        cells = [
            (name, place, *value, *moved, *kept)
            for name, place, value, moved, kept in zip(
                self.names,
                self.places,
                self.values.tolist(),
                self.moved.tolist(),
                self.kept.tolist(),
                strict=True,
            )
        ]
        # not by what nodes move, which is first order (as in LogitGraph.rows)
        size = self.values.abs().amax(1)
        return [cells[i] for i in size.argsort(descending=True, stable=True).tolist()]


def compare_graphs(
    graph: LogitGraph, other: LogitGraph, *, positions: Positions | None = None
) -> GraphComparison:
    """See :meth:`LogitGraph.compare`."""
    expected, got = "a graph of trace_logit", type(other).__name__
    require(isinstance(other, LogitGraph), "other", expected=expected, got=got)
    placed = place_graphs((graph, other), positions)
    components = placed.size - 2  # the logit and the constants are in every graph
    sets = [of.nodes[of.nodes < components] for of in placed.kept]
    nodes = torch.cat([of.nodes for of in placed.kept]).unique()
    kept = torch.stack([torch.isin(nodes, of.nodes) for of in placed.kept], 1)
    values, moved = placed.values[:, nodes].T.contiguous(), placed.moved[:, nodes].T.contiguous()
    is_component = nodes < components
    keys = torch.cat([of.keys for of in placed.kept]).unique()
    weights = torch.full((len(keys), 2), torch.nan, dtype=torch.float64)
    for side, of in enumerate(placed.kept):
        weights[torch.searchsorted(keys, of.keys), side] = of.weights
    has = ~weights.isnan()
    shared = kept.all(1) & is_component
    edge_jaccard, by_chance = _edge_jaccard(placed, nodes[shared], keys, has)
    sources, targets, edge_types = placed.ends(keys)
    named = [placed.name(row) for row in nodes.tolist()]
    return GraphComparison(
        provenance=graph.provenance,
        names=tuple(name for name, _ in named),
        places=tuple(place for _, place in named),
        **placed.where(nodes),
        place_tokens=placed.place_tokens,
        values=values,
        moved=moved,
        kept=kept,
        sources=torch.searchsorted(nodes, sources),
        targets=torch.searchsorted(nodes, targets),
        edge_types=edge_types,
        weights=weights,
        node_jaccard=_ratio(float(shared.sum()), float(is_component.sum())),
        node_jaccard_by_chance=jaccard_by_chance(len(sets[0]), len(sets[1]), components),
        edge_jaccard=edge_jaccard,
        edge_jaccard_by_chance=by_chance,
        value_correlation=_correlation(values[is_component]),
        moved_correlation=_correlation(moved[is_component]),
        edge_correlation=_correlation(weights[has.all(1)]),
    )


def jaccard_by_chance(first: int, second: int, all_of: int) -> float:
    """The expected Jaccard index of two random sets of ``first`` and ``second`` out of ``all_of``:
    the size of their intersection is hypergeometric.

    >>> round(jaccard_by_chance(2, 2, 4), 4)  # 0, 1/3 or 1, with probability 1/6, 4/6, 1/6
    0.3889
    """
    if not first + second:
        return float("nan")
    shared = torch.arange(min(first, second) + 1, dtype=torch.float64)
    chance = torch.from_numpy(stats.hypergeom.pmf(shared.numpy(), all_of, first, second))
    return float((chance * shared / (first + second - shared)).sum())


def _ratio(part: float, whole: float | int) -> float:
    return part / whole if whole else float("nan")


def _correlation(pairs: Float[Tensor, "row side"]) -> float:
    """Pearson's of two columns; NaN for fewer than three rows, or a constant column."""
    centred = pairs - pairs.mean(0)
    sizes = centred.square().sum(0).prod().sqrt()
    return float(centred.prod(1).sum() / sizes) if len(pairs) > 2 and sizes > 0 else float("nan")


def _edge_jaccard(
    placed: PlacedGraphs,
    shared: Int[Tensor, " node"],
    keys: Int[Tensor, " edge"],
    has: Bool[Tensor, "edge side"],
) -> tuple[float, float]:
    """Jaccard index of the edges between nodes that both graphs have, and by chance: the expected
    intersection over the expected union, with ``n m / sources`` expected in both where n and m
    random ones of the possible sources of a target are drawn."""
    ends = torch.cat([shared, torch.tensor([placed.size - 2])])  # the logit reads too
    sources, targets, _ = placed.ends(keys)
    inside = torch.isin(sources, shared) & torch.isin(targets, ends)
    keys, has = keys[inside], has[inside]
    sources, targets, edge_types = placed.ends(keys)
    parallel = not _mlps_read_their_heads(placed, sources, targets)
    into, place = (targets * 3 + edge_types).unique(return_inverse=True)
    counts = torch.zeros(len(into), 2, dtype=torch.float64).index_add_(0, place, has.double())
    possible = _possible_sources(placed, shared, into, parallel)
    expected = (counts.prod(1) / possible.clamp(min=1)).sum()
    by_chance = _ratio(float(expected), float(counts.sum() - expected))
    return _ratio(float(has.all(1).sum()), len(keys)), by_chance


def _steps(placed: PlacedGraphs, rows: Int[Tensor, " node"]) -> Int[Tensor, " node"]:
    """When the component of a row writes; the logit comes last."""
    components = (rows // len(placed.places)).clamp(max=len(placed.components) - 1)
    return torch.where(rows < placed.size - 2, placed.steps[components], placed.steps.max() + 1)


def _mlps_read_their_heads(
    placed: PlacedGraphs, sources: Int[Tensor, " edge"], targets: Int[Tensor, " edge"]
) -> bool:
    """Whether any MLP reads a head of its own block: never in parallel blocks."""
    to = _steps(placed, targets)
    return bool(((to % 2 == 0) & (to == _steps(placed, sources) + 1)).any())


def _possible_sources(
    placed: PlacedGraphs, shared: Int[Tensor, " node"], into: Int[Tensor, " row"], parallel: bool
) -> Int[Tensor, " row"]:
    """How many of the shared nodes could be sources of each (target, edge type): those that write
    before it reads, at its own position, or for values and keys of a head at an earlier one too."""
    targets, edge_types = into // 3, into % 3
    is_logit, reads = targets == placed.size - 2, _steps(placed, targets)
    is_mlp = (reads % 2 == 0) & ~is_logit
    source_place, place = shared[:, None] % len(placed.places), targets % len(placed.places)
    place = torch.where(is_logit, placed.logit_place, place)
    any_earlier = ~is_mlp & ~is_logit & (edge_types != QUERY)
    fits = torch.where(
        any_earlier,
        placed.spans[source_place, 0] <= placed.spans[place, 1],
        source_place == place,
    )
    # a parallel MLP reads when the heads of its block do
    before = _steps(placed, shared)[:, None] < reads - (is_mlp & parallel).long()
    return (fits & before).sum(0)
