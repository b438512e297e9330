"""Which nodes and edges carry a logit in all prompts of a template, and not in one prompt only? The
mean of their graphs.

Researchers call :func:`average_graphs` on graphs of :func:`tl_geometry.trace_logit`. Node values
are complete in every graph, so their means are exact. An edge counts as 0 in a prompt whose graph
does not keep it; what that leaves out is in the rest of its target, so that the mean of T is still
the sum of the mean edges into the logit and its rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.intervals import Interval, paired_interval
from tl_geometry.base.results import Provenance, Result, hash_tokens
from tl_geometry.circuits.graph_places import PlacedGraphs, Positions, place_graphs
from tl_geometry.circuits.logit_graph import CONSTANTS, EDGE_TYPES, VALUE, LogitGraph


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanTable(Result):
    """Means over prompts with 95% intervals (NaN below 10 prompts), under the names of
    ``labels``; ``prompts`` says in how many prompts' graphs a row is."""

    label_names: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    mean: Float[Tensor, " row"]
    low: Float[Tensor, " row"]
    high: Float[Tensor, " row"]
    prompts: Int[Tensor, " row"]

    def columns(self) -> Sequence[str]:
        return (*self.label_names, "mean", "low", "high", "prompts")

    def rows(self) -> Sequence[Sequence[object]]:
        numbers = (self.mean, self.low, self.high, self.prompts)
        cells = zip(*(of.tolist() for of in numbers), strict=True)
        return [(*names, *row) for names, row in zip(self.labels, cells, strict=True)]


@dataclass(frozen=True, eq=False, kw_only=True)
class AverageGraph(Result):
    """A logit's graph averaged over prompts (of :func:`average_graphs`).

    ``value`` is the mean of T, ``value_low`` and ``value_high`` its 95% interval, as for every
    mean here (NaN below 10 prompts). Nodes are those that any prompt's graph has, a component
    (``names``; ``layers`` and ``heads_of`` are -1 where it has none) at a place (``places``,
    ``positions`` their numbers, ``place_tokens`` the texts there, where they are one or two).
    ``values`` and ``moved`` are means over all prompts, ``node_prompts`` says in how many graphs
    the node is. Edges run between nodes; the value edges into a node and its ``rest`` sum to its
    value. The table has a row for each node, the largest first.
    """

    prompts: int
    value: float
    value_low: float
    value_high: float
    names: tuple[str, ...]
    places: tuple[str, ...]
    layers: Int[Tensor, " node"]
    heads_of: Int[Tensor, " node"]
    positions: Int[Tensor, " node"]
    place_tokens: tuple[str, ...]
    values: Float[Tensor, " node"]
    values_low: Float[Tensor, " node"]
    values_high: Float[Tensor, " node"]
    moved: Float[Tensor, " node"]
    moved_low: Float[Tensor, " node"]
    moved_high: Float[Tensor, " node"]
    node_prompts: Int[Tensor, " node"]
    rest: Float[Tensor, " node"]
    sources: Int[Tensor, " edge"]
    targets: Int[Tensor, " edge"]
    edge_types: Int[Tensor, " edge"]
    weights: Float[Tensor, " edge"]
    weights_low: Float[Tensor, " edge"]
    weights_high: Float[Tensor, " edge"]
    edge_prompts: Int[Tensor, " edge"]
    token_places: tuple[str, ...]
    token_values: Float[Tensor, " position"]
    token_values_low: Float[Tensor, " position"]
    token_values_high: Float[Tensor, " position"]

    def tokens(self) -> MeanTable:
        """T by place, the constants last: the means sum to the mean of T."""
        return MeanTable(
            provenance=self.provenance,
            label_names=("place",),
            labels=tuple((place,) for place in self.token_places),
            mean=self.token_values,
            low=self.token_values_low,
            high=self.token_values_high,
            prompts=torch.full((len(self.token_places),), self.prompts),
        )

    def edges(self) -> MeanTable:
        """All edges, the largest first."""
        order = self.weights.abs().argsort(descending=True, stable=True)
        label = [(name, place) for name, place in zip(self.names, self.places, strict=True)]
        ends = zip(self.sources[order].tolist(), self.targets[order].tolist(), strict=True)
        types = self.edge_types[order].tolist()
        return MeanTable(
            provenance=self.provenance,
            label_names=("source", "source_place", "target", "target_place", "edge_type"),
            labels=tuple(
                (*label[source], *label[target], EDGE_TYPES[edge_type])
                for (source, target), edge_type in zip(ends, types, strict=True)
            ),
            mean=self.weights[order],
            low=self.weights_low[order],
            high=self.weights_high[order],
            prompts=self.edge_prompts[order],
        )

    def columns(self) -> Sequence[str]:
        return (
            *("writer", "place", "value", "value_low", "value_high"),
            *("moved", "moved_low", "moved_high", "rest", "prompts"),
        )

    def rows(self) -> Sequence[Sequence[object]]:
        # not by what nodes move, which is first order (as in LogitGraph.rows)
        order = self.values.abs().argsort(descending=True, stable=True).tolist()
        numbers = [
            *(self.values, self.values_low, self.values_high),
            *(self.moved, self.moved_low, self.moved_high, self.rest, self.node_prompts),
        ]
        cells = list(zip(*(of.tolist() for of in numbers), strict=True))
        return [(self.names[i], self.places[i], *cells[i]) for i in order]


def average_graphs(
    graphs: Sequence[LogitGraph], *, positions: Positions | None = None
) -> AverageGraph:
    """Graphs of several prompts of one template, averaged node by node and edge by edge.

    Args:
        graphs: of :func:`tl_geometry.trace_logit`, one model with the same settings; targets may
            differ (the name that is right in each prompt).
        positions: names for positions of each prompt, such as ``{"subject": 2, "end": -1}``, where
            prompts have different lengths; positions without a name are summed as "elsewhere". By
            default all prompts have as many tokens, and positions keep their numbers.

    Returns an :class:`AverageGraph`: means with 95% intervals over prompts (Student's t; NaN below
    10 prompts), and in how many prompts' graphs each node and edge is. An edge counts as 0 where a
    graph does not have it: compare it with its ``edge_prompts``, or trace with a larger ``keep=``.

    Raises ``GeometryError`` for fewer than two graphs, for graphs of different models or settings,
    and where positions do not align.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=3)
    >>> graphs = [tlg.trace_logit(model, windows[i : i + 1], 5, keep=0.3) for i in range(3)]
    >>> average = average_graphs(graphs)
    >>> abs(float(average.tokens().mean.sum()) - average.value) < 1e-4
    True
    """
    expected, got = "two or more graphs of trace_logit", f"{len(graphs)}"
    several = len(graphs) > 1 and all(isinstance(graph, LogitGraph) for graph in graphs)
    require(several, "graphs", expected=expected, got=got)
    models = {(g.provenance.fingerprint, g.keep, g.log_probability) for g in graphs}
    expected, got = "one model, keep= and log_probability=", f"{len(models)} combinations"
    require(len(models) == 1, "graphs", expected=expected, got=got, instead="graph.compare(other)")
    placed = place_graphs(graphs, positions)
    nodes, node_prompts = torch.cat([of.nodes for of in placed.kept]).unique(return_counts=True)
    keys, edge_prompts = torch.cat([of.keys for of in placed.kept]).unique(return_counts=True)
    weights = torch.zeros(len(graphs), len(keys), dtype=torch.float64)
    for row, of in zip(weights, placed.kept, strict=True):
        row[torch.searchsorted(keys, of.keys)] = of.weights
    sources, targets, edge_types = placed.ends(keys)
    of_nodes, of_moved = (paired_interval(of[:, nodes]) for of in (placed.values, placed.moved))
    of_edges = paired_interval(weights)
    sources, targets = (torch.searchsorted(nodes, ends) for ends in (sources, targets))
    logit = int(torch.searchsorted(nodes, torch.tensor(placed.size - 2)))
    names, places = zip(*map(placed.name, nodes.tolist()), strict=True)
    return AverageGraph(
        provenance=_provenance(graphs),
        prompts=len(graphs),
        value=float(of_nodes.value[logit]),
        value_low=float(of_nodes.low[logit]),
        value_high=float(of_nodes.high[logit]),
        names=names,
        places=places,
        **placed.where(nodes),
        place_tokens=placed.place_tokens,
        **of_nodes.columns("values"),
        **of_moved.columns("moved"),
        node_prompts=node_prompts,
        rest=_rest(placed, nodes, of_nodes.value, targets, edge_types, of_edges.value, graphs[0]),
        sources=sources,
        targets=targets,
        edge_types=edge_types,
        **of_edges.columns("weights"),
        edge_prompts=edge_prompts,
        token_places=(*placed.places, CONSTANTS),
        **_by_place(placed, graphs[0]).columns("token_values"),
    )


def _rest(
    placed: PlacedGraphs,
    nodes: Int[Tensor, " node"],
    values: Float[Tensor, " node"],
    targets: Int[Tensor, " edge"],
    edge_types: Int[Tensor, " edge"],
    weights: Float[Tensor, " edge"],
    graph: LogitGraph,
) -> Float[Tensor, " node"]:
    """What the value edges of each node leave out of its value; 0 for a node that reads nothing."""
    of_values = edge_types == VALUE
    rest = values.index_add(0, targets[of_values], -weights[of_values])
    places, leaves = len(placed.places), len(graph.leaf_names)
    heads = graph.head_values.shape[0] * graph.head_values.shape[1]
    unread = (nodes < leaves * places) | (nodes == placed.size - 1)
    if graph.mlp == "leaf":
        unread |= (nodes >= (leaves + heads) * places) & (nodes < placed.size - 2)
    return rest.masked_fill(unread, 0.0)


def _by_place(placed: PlacedGraphs, graph: LogitGraph) -> Interval:
    """T by place: the leaves (MLPs among them where they are leaves), and the constants."""
    places = len(placed.places)
    components = placed.values[:, :-2].unflatten(1, (-1, places))
    leaves = components[:, : len(graph.leaf_names)].sum(1)
    if graph.mlp == "leaf":
        leaves = leaves + components[:, -graph.mlp_values.shape[0] :].sum(1)
    return paired_interval(torch.cat([leaves, placed.values[:, -1:]], 1))


def _provenance(graphs: Sequence[LogitGraph]) -> Provenance:
    """That of the first graph, over as many contexts as there are graphs."""
    hashed = ""
    for graph in graphs:
        hashed = hash_tokens(torch.tensor([graph.token_ids]), hashed)
    return replace(graphs[0].provenance, contexts=len(graphs), token_hash=hashed)
