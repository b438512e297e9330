"""What does the page of a graph draw? This file brings the graph of one logit, an average over
prompts, and a comparison of two graphs into one form, :class:`DrawnGraph`, which
:mod:`tl_geometry.render.graph_view` draws as a page and as an image.

Node 0 is the logit. A comparison is drawn as the mean of its two graphs. An edge that one of them
lacks counts as 0 there, and the style of each mark and line says which graph has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.errors import require
from tl_geometry.circuits.graph_comparison import GraphComparison
from tl_geometry.circuits.graph_means import AverageGraph
from tl_geometry.circuits.logit_graph import EDGE_TYPES, LOGIT, NOWHERE, VALUE, LogitGraph

LONGEST = 24
"""Most characters of a token in the graph; longer ones are cut."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DrawnGraph:
    """Nodes and edges as in :class:`~tl_geometry.circuits.LogitGraph`, and what a page adds.

    - ``lookups``: code that gives the number of each node in ``graph``.
    - ``node_numbers``, ``edge_numbers``: what stands beside a node and an edge. An average has low,
      high and the number of prompts (of ``prompts``); a comparison has both values, and a node's
      mark as its third number.
    - ``node_marks``, ``edge_marks``: 0 for none, else one more than the index of the line style in
      ``dashes``.
    - ``reached``: the share at which each node appears.
    - ``written``: the sum of absolute values; ``whole`` says in words what is summed.
    - ``columns``: token and place of each position.

    The other texts are sentences of the page.
    """

    names: tuple[str, ...]
    lookups: tuple[str, ...]
    layers: Int[Tensor, " node"]
    heads_of: Int[Tensor, " node"]
    positions: Int[Tensor, " node"]
    values: Float[Tensor, " node"]
    moved: Float[Tensor, " node"]
    totals: Float[Tensor, "node side"]
    attention: Float[Tensor, "node position"]
    sources: Int[Tensor, " edge"]
    targets: Int[Tensor, " edge"]
    edge_types: Int[Tensor, " edge"]
    weights: Float[Tensor, " edge"]
    node_numbers: Float[Tensor, "node row"]
    edge_numbers: Float[Tensor, "edge column"]
    node_marks: Int[Tensor, " node"]
    edge_marks: Int[Tensor, " edge"]
    dashes: tuple[tuple[int, int], ...] = ()
    prompts: int = 0
    blocks: int
    reached: Float[Tensor, " node"]
    written: float
    whole: str
    columns: tuple[tuple[str, str], ...]
    title: str
    target: str
    value: str
    kept: str
    legend: str = ""
    source: str


def drawn_graph(graph: LogitGraph | AverageGraph | GraphComparison) -> DrawnGraph:
    """Any graph in the form that is drawn."""
    if isinstance(graph, LogitGraph):
        return _one(graph)
    if isinstance(graph, AverageGraph):
        return _average(graph)
    expected, got = "a graph of trace_logit", type(graph).__name__
    require(isinstance(graph, GraphComparison), "graph", expected=expected, got=got)
    return _comparison(graph)


def _one(graph: LogitGraph) -> DrawnGraph:
    components = (graph.leaf_values, graph.head_values, graph.mlp_values)
    texts: Sequence[str] = graph.str_tokens or [f"<{i}>" for i in graph.token_ids]
    nodes, edges = len(graph.names), len(graph.weights)
    logit = html.signed(graph.value)
    target = " minus ".join(f"“{html.token_text(t)}”" for t in graph.target_tokens)
    of_nodes = ("names", "layers", "heads_of", "positions", "values", "moved", "totals")
    same = (*of_nodes, "attention", "sources", "targets", "edge_types", "weights")
    return DrawnGraph(
        **{name: getattr(graph, name) for name in same},
        lookups=tuple(
            f"graph.node({name!a}{f', {at}' if at != NOWHERE else ''})"
            for name, at in zip(graph.names, graph.positions.tolist(), strict=True)
        ),
        node_numbers=torch.zeros(nodes, 0),
        edge_numbers=torch.zeros(edges, 0),
        node_marks=torch.zeros(nodes, dtype=torch.int64),
        edge_marks=torch.zeros(edges, dtype=torch.int64),
        blocks=len(graph.head_values),
        reached=reach(graph),
        written=sum(float(x.abs().sum()) for x in components) + abs(graph.constant_value),
        whole="all that is written",
        columns=tuple((shown_token(text), str(i)) for i, text in enumerate(texts)),
        title=_finding(graph, graph.positions.tolist(), f"the logit {logit} of {target}"),
        target=" − ".join(html.token_text(t) for t in graph.target_tokens),
        value=f"T is {html.signed(graph.value, '.4f')}, before any soft cap.",
        kept=f"all that carry {graph.keep:.0%}",
        source=graph.provenance.line(),
    )


def _average(graph: AverageGraph) -> DrawnGraph:
    # dotted: edges whose interval contains 0, where there is an interval
    uncertain = ~((graph.weights_low > 0) | (graph.weights_high < 0))
    uncertain &= ~graph.weights_low.isnan()
    columns = zip(graph.values_low, graph.values_high, graph.node_prompts, strict=True)
    interval = f" (95%: {graph.value_low:.2f} to {graph.value_high:.2f})"
    few = graph.value_low != graph.value_low  # true for NaN: too few prompts for an interval
    value = f"{graph.value:.4f}{'' if few else interval}".replace("-", "−")
    mean = html.signed(graph.value)
    has_interval = (
        "no intervals: these take 10 prompts" if few else "with 95% intervals in the lists"
    )
    return _placed(
        graph,
        values=graph.values,
        moved=graph.moved,
        weights=graph.weights,
        node_numbers=torch.tensor([[float(x) for x in row] for row in columns]),
        edge_numbers=torch.stack([graph.weights_low, graph.weights_high, graph.edge_prompts], 1),
        node_marks=torch.zeros(len(graph.names), dtype=torch.int64),
        edge_marks=uncertain.long(),
        rest=graph.rest,
        dashes=((2, 3),),
        prompts=graph.prompts,
        title=_finding(graph, graph.places, f"T = {mean}, means of {graph.prompts} prompts"),
        value=f"T is {value} in the mean of {graph.prompts} prompts, before any soft cap; an edge "
        "counts as 0 in a prompt whose graph does not have it.",
        kept="all that any prompt’s graph has",
        legend=f"Numbers are means of {graph.prompts} prompts, {has_interval}."
        + ("" if few else " A dotted line has an interval that contains 0."),
    )


def _comparison(graph: GraphComparison) -> DrawnGraph:
    has = ~graph.weights.isnan()
    # 0: both graphs have it; 1: only the first; 2: only the second
    only = lambda kept: torch.where(kept.all(1), 0, torch.where(kept[:, 0], 1, 2))  # noqa: E731
    node_marks, values = only(graph.kept), graph.values.mean(1)
    first, other = (html.signed(float(v)) for v in graph.values[graph.names.index(LOGIT)])
    share = lambda x, chance: f"{x:.0%} (by chance {chance:.0%})"  # noqa: E731
    nodes = share(graph.node_jaccard, graph.node_jaccard_by_chance)
    edges = share(graph.edge_jaccard, graph.edge_jaccard_by_chance)
    return _placed(
        graph,
        values=values,
        moved=graph.moved.mean(1),
        weights=graph.weights.nan_to_num().mean(1),
        node_numbers=torch.cat([graph.values, node_marks[:, None]], 1),
        edge_numbers=graph.weights,
        node_marks=node_marks,
        edge_marks=only(has),
        rest=None,
        dashes=((9, 4), (2, 4)),
        title=f"Two graphs share {nodes} of their nodes and {edges} of the edges between these",
        value=f"T is {first} in the first graph and {other} in the second, before any soft cap.",
        kept="all that either graph has",
        legend="Sizes are means of both graphs. A solid line is in both, a dashed one in the first "
        "alone, a dotted one in the second alone; marks that one graph has are hollow.",
    )


def _placed(
    graph: AverageGraph | GraphComparison,
    *,
    values: Float[Tensor, " node"],
    moved: Float[Tensor, " node"],
    weights: Float[Tensor, " edge"],
    node_numbers: Float[Tensor, "node row"],
    node_marks: Int[Tensor, " node"],
    rest: Float[Tensor, " node"] | None,
    **fields: Any,
) -> DrawnGraph:
    """The form of a graph over places (positions that prompts share). ``rest`` is what the edges
    into each node leave out, ``None`` for a comparison, which does not know it."""
    logit = graph.names.index(LOGIT)
    # the page expects the logit as node 0; ``place`` leads from old numbers to new ones
    order = torch.tensor([logit, *(i for i in range(len(graph.names)) if i != logit)])
    place, is_value = order.argsort(), graph.edge_types == VALUE
    read = torch.zeros_like(values).index_add_(0, graph.targets[is_value], weights[is_value])
    # the page needs what all edges into a node sum to, so that it can name what its list leaves out
    is_mlp = (graph.layers >= 0) & (graph.heads_of < 0)
    reads = (graph.heads_of >= 0) | (torch.arange(len(values)) == logit)
    # MLPs read something in all graphs but those in which all of them are leaves
    reads |= is_mlp & bool(is_mlp[graph.targets[is_value]].any())
    totals = torch.full((len(values), len(EDGE_TYPES)), torch.nan, dtype=torch.float64)
    totals[:, VALUE] = torch.where(reads, values, 0.0) if rest is None else read + rest
    # the logit writes nothing itself: it is left out of the shares, and appears at 0
    writers = torch.arange(len(values)) != logit
    shares = [_appears(sizes, sizes[writers]) for sizes in (values, moved)]
    reached = torch.minimum(*shares)
    reached[logit] = 0.0
    places = zip(graph.positions.tolist(), graph.places, strict=True)
    named = {position: name for position, name in places if name}
    texts = [shown_token(text) if text else "" for text in graph.place_tokens]
    return DrawnGraph(
        names=tuple(graph.names[i] for i in order.tolist()),
        lookups=tuple(map(str, order.tolist())),
        **{name: getattr(graph, name)[order] for name in ("layers", "heads_of", "positions")},
        values=values[order],
        moved=moved[order],
        totals=totals[order],
        attention=torch.zeros(len(values), 0),
        sources=place[graph.sources],
        targets=place[graph.targets],
        edge_types=graph.edge_types,
        weights=weights,
        node_numbers=node_numbers[order],
        node_marks=node_marks[order],
        blocks=1 + int(graph.layers.max()),
        reached=reached[order],
        written=float(values[writers].abs().sum()),
        whole="what its nodes write",
        columns=tuple((text, named.get(p, str(p))) for p, text in enumerate(texts)),
        target="",
        source=graph.provenance.line(),
        **fields,
    )


def reach(graph: LogitGraph) -> Float[Tensor, " node"]:
    """The share at which each node appears on the page. It is the share of all that is written that
    larger writers carry already; or the same of all that is moved, if that is smaller. The logit
    appears at 0."""
    shares = []
    for name, sizes in (("values", graph.values), ("moved", graph.moved)):
        # constants do not count, as where trace_logit chooses nodes: they are always shown
        components = [getattr(graph, f"{of}_{name}").flatten() for of in ("leaf", "head", "mlp")]
        shares.append(_appears(sizes, torch.cat(components)))
    reached = torch.minimum(*shares)
    reached[0] = 0.0
    return reached


def _appears(sizes: Float[Tensor, " node"], components: Float[Tensor, " row"]) -> Tensor:
    """For each of some sizes, the sum of all larger components as a share of the sum of all."""
    ordered = components.double().abs().sort(descending=True).values
    before = ordered.cumsum(0) - ordered
    # searchsorted needs ascending order: both sides are negated
    place = torch.searchsorted(-ordered, -sizes.abs().contiguous()).clamp(max=len(ordered) - 1)
    # where nothing is written at all, the shares are 0
    return before[place] / ordered.sum().clamp(min=1e-300)


def _finding(graph: LogitGraph | AverageGraph, places: Sequence[object], logit: str) -> str:
    """A sentence about the head that wrote most of the logit, for the title."""
    heads = (graph.heads_of >= 0).nonzero()[:, 0]
    if not len(heads):
        return f"What wrote {logit}"
    node = int(heads[graph.values[heads].abs().argmax()])
    value = html.signed(float(graph.values[node]), "+.2f")
    return f"{graph.names[node]} at {places[node]} wrote {value} of {logit}"


def shown_token(text: str) -> str:
    """The text of a token as the graph shows it: visible, and cut at :data:`LONGEST`."""
    shown = html.token_text(text)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"
