"""Who wrote towards a logit, what did each of these writers read, and why did heads look where they
looked? The graph of the logit holds the answers. Made by :func:`tl_geometry.trace_logit`.

Nodes are writers at positions: parts of the embedding, heads, MLPs, constants (all biases), and the
logit itself. A value edge says how much of what its target wrote towards the logit came from its
source; the value edges into a node, and its rest, sum to the node's value. Query and key edges say
who made a head attend where it attended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import fail
from tl_geometry.base.results import Result

if TYPE_CHECKING:
    from tl_geometry.circuits.graph_comparison import GraphComparison

EDGE_TYPES = ("value", "query", "key")
"""What a source is read for: a value, or the query or the key of a head's score."""
VALUE, QUERY, KEY = range(3)
"""Their places in :data:`EDGE_TYPES`."""
LOGIT, CONSTANTS = "logit", "constants"
"""Names of the nodes that are no component at one position: T itself, and all biases."""
NOWHERE = -1
"""Position, layer or head of a node that has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTable(Result):
    """A logit by input token: what the embedding at each position contributes to it along value
    paths. The last row (position -1) is that of the constants; the column sums to the logit.

    ``parts`` are the leaves that ``value`` sums over (the token embedding and, in models that have
    it, the positional one; with a basis mean, pos and cvec), ``by_part`` each of them.
    """

    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    parts: tuple[str, ...]
    value: Float[Tensor, " position"]
    by_part: Float[Tensor, "position part"]

    def columns(self) -> Sequence[str]:
        return ("position", "token", "value", *(self.parts if len(self.parts) > 1 else ()))

    def rows(self) -> Sequence[Sequence[object]]:
        parts = self.by_part.tolist() if len(self.parts) > 1 else [[] for _ in self.positions]
        cells = zip(self.positions, self.tokens, self.value.tolist(), parts, strict=True)
        return [(position, token, value, *more) for position, token, value, more in cells]


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitGraph(Result):
    """A logit, or a difference of two, T, as a graph from the tokens.

    Every component has two numbers at each position. ``*_values`` is what it writes along value
    paths: exact, and leaves and constants sum to T. ``*_moved`` is what it does by the attention
    that it moves: first order in the patterns, and no part of that sum. These tables are complete.

    The graph is pruned to the nodes that carry ``keep`` of all values, and of everything moved.
    ``names``, ``layers``, ``heads_of``, ``positions`` say what each node is (-1: it has none),
    ``sources``, ``targets``, ``edge_types`` and ``weights`` are the edges. ``rest[node, edge
    type]`` is what the edges that are not in the graph carry: the edges of a type into a node and
    its rest sum to ``totals[node, edge type]`` (``value``: the node's value; ``query`` and
    ``key``: the sum over the row of dT/d(score) times score, see
    :mod:`tl_geometry.circuits.trace`).

    ``value`` is T before a final soft cap, ``target`` its tokens, ``target_weights`` their weights
    in T, and ``probability`` that of the first of them. ``attention[node]`` is the pattern of a
    head's node, ``response[node]`` dT/d(score) at each key
    (:func:`tl_geometry.circuits.attention_pairs`).
    """

    str_tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    position: int
    target: tuple[int, ...]
    target_tokens: tuple[str, ...]
    target_weights: tuple[float, ...]
    log_probability: bool
    probability: float
    value: float
    mlp: str
    keep: float
    leaf_names: tuple[str, ...]
    leaf_values: Float[Tensor, "part position"]
    leaf_moved: Float[Tensor, "part position"]
    head_values: Float[Tensor, "layer head position"]
    head_moved: Float[Tensor, "layer head position"]
    mlp_values: Float[Tensor, "layer position"]
    mlp_moved: Float[Tensor, "layer position"]
    constant_value: float
    constant_moved: float
    names: tuple[str, ...]
    layers: Int[Tensor, " node"]
    heads_of: Int[Tensor, " node"]
    positions: Int[Tensor, " node"]
    values: Float[Tensor, " node"]
    moved: Float[Tensor, " node"]
    totals: Float[Tensor, "node side"]
    rest: Float[Tensor, "node side"]
    attention: Float[Tensor, "node position"]
    response: Float[Tensor, "node position"]
    sources: Int[Tensor, " edge"]
    targets: Int[Tensor, " edge"]
    edge_types: Int[Tensor, " edge"]
    weights: Float[Tensor, " edge"]

    # ---- the logit by input token

    def tokens(self) -> TokenTable:
        """T by input token, the constants last; MLPs that are leaves (``mlp="leaf"``) are a part of
        their own."""
        leaf_mlps = self.mlp == "leaf"
        parts = (*self.leaf_names, "mlps") if leaf_mlps else self.leaf_names
        by_part = self.leaf_values.T
        if leaf_mlps:
            by_part = torch.cat([by_part, self.mlp_values.sum(0).unsqueeze(1)], dim=1)
        by_part = torch.cat([by_part, torch.zeros(1, len(parts))])
        value = by_part.sum(1)
        value[-1] = self.constant_value
        length = self.leaf_values.shape[1]
        return TokenTable(
            positions=(*range(length), NOWHERE),
            tokens=(*token_texts(self), CONSTANTS),
            parts=parts,
            value=value,
            by_part=by_part,
            provenance=self.provenance,
        )

    # ---- nodes and edges

    def node(self, name: str | Head, position: int | None = None) -> int:
        """Number of a node by name (``"L5H1"``, ``(5, 1)``, ``"mlp3"``, ``"embed"``, ``"logit"``)
        and position (of the only such node, where there is one)."""
        text = name if isinstance(name, str) else checks.head_name((name[0], name[1]))
        of_name = [i for i, other in enumerate(self.names) if other == text]
        rows = [i for i in of_name if position is None or int(self.positions[i]) == position]
        if len(rows) != 1:
            there = self.positions[of_name].tolist()
            fail(
                "node",
                expected=f"one node {text!r}" + ("" if position is None else f" at {position}"),
                got=f"nodes of that name at positions {there}" if there else "none of that name",
                instead="position=, or a larger keep= in trace_logit",
            )
        return rows[0]

    def edges_into(self, node: int, edge_type: str | None = None) -> list[tuple[int, str, float]]:
        """(source, edge type, weight) of the edges into a node, the largest first."""
        return self._edges(self.targets == node, self.sources, edge_type)

    def edges_from(self, node: int, edge_type: str | None = None) -> list[tuple[int, str, float]]:
        """(target, edge type, weight) of the edges out of a node, the largest first."""
        return self._edges(self.sources == node, self.targets, edge_type)

    def _edges(
        self, chosen: Tensor, ends: Tensor, edge_type: str | None
    ) -> list[tuple[int, str, float]]:
        if edge_type is not None:
            at = EDGE_TYPES.index(checks.choice(edge_type, EDGE_TYPES, "edge_type"))
            chosen = chosen & (self.edge_types == at)
        rows = chosen.nonzero()[:, 0]
        rows = rows[self.weights[rows].abs().argsort(descending=True, stable=True)]
        return [
            (int(ends[i]), EDGE_TYPES[int(self.edge_types[i])], float(self.weights[i]))
            for i in rows
        ]

    def label(self, node: int) -> str:
        """A node as it is shown: its name, and the token at its position."""
        position = int(self.positions[node])
        if position == NOWHERE:
            return self.names[node]
        return f"{self.names[node]} at {position} {token_texts(self)[position]!r}"

    def compare(
        self, other: LogitGraph, *, positions: Sequence[Mapping[str, int]] | None = None
    ) -> GraphComparison:
        """Compare with the graph of another prompt, or of another model of the same shape: which
        nodes and edges they share, their numbers side by side, correlations, and Jaccard indices
        with the values that chance gives (:mod:`tl_geometry.circuits.graph_comparison`).

        ``positions`` names positions of both prompts, as in
        :func:`tl_geometry.circuits.average_graphs`, where they have different lengths.

        >>> import tl_geometry as tlg
        >>> model = tlg.zoo.embedded()
        >>> windows = tlg.zoo.default_windows(model, 16, n=2)
        >>> graphs = [tlg.trace_logit(model, windows[i : i + 1], 5, keep=0.3) for i in range(2)]
        >>> found = graphs[0].compare(graphs[1])
        >>> found.node_jaccard > found.node_jaccard_by_chance
        True
        """
        from tl_geometry.circuits.graph_comparison import compare_graphs

        return compare_graphs(self, other, positions=positions)

    def columns(self) -> Sequence[str]:
        return ("writer", "position", "token", "value", "moved", "rest")

    def rows(self) -> Sequence[Sequence[object]]:
        """The nodes of the graph, the largest absolute ``value`` first. ``moved`` does not decide:
        it is first order, and largest at attention sinks, which write next to nothing."""
        order = self.values.abs().argsort(descending=True, stable=True).tolist()
        # position -1 (none) takes the last text, which is empty
        tokens = [*token_texts(self), ""]
        return [
            (
                self.names[i],
                int(self.positions[i]),
                tokens[int(self.positions[i])],
                float(self.values[i]),
                float(self.moved[i]),
                float(self.rest[i, VALUE]),
            )
            for i in order
        ]

    def to_json(self, layout: str = "neuronpedia") -> dict[str, Any]:
        """The graph in the JSON that other tools read; see
        :mod:`tl_geometry.circuits.graph_files`."""
        from tl_geometry.circuits.graph_files import neuronpedia

        checks.choice(layout, ("neuronpedia",), "layout")
        return neuronpedia(self)

    def to_networkx(self) -> Any:
        """The graph as a ``networkx.MultiDiGraph``, with every number as an attribute."""
        from tl_geometry.circuits.graph_files import networkx_graph

        return networkx_graph(self)


def token_texts(graph: LogitGraph) -> tuple[str, ...]:
    """The text of each token, or its id where the model has no tokenizer."""
    return graph.str_tokens or tuple(f"<{i}>" for i in graph.token_ids)
