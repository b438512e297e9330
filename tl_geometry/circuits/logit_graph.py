"""Who wrote towards a logit, what did each of these writers read, and why did heads look where they
looked? The graph of the logit holds the answers. Made by :func:`tl_geometry.trace_logit`.

Nodes are writers at positions: parts of the embedding, heads, MLPs, constants (all biases), and the
target, the logit itself. A value edge says how much of what its target wrote towards the logit came
from its source. Query and key edges say who made a head attend where it attended: to first order in
the graph of one prompt, exactly and as parts of the sum in the graph between two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import choice, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Result
from tl_geometry.base.tables import Table

if TYPE_CHECKING:
    import pandas as pd

EDGE_TYPES = ("value", "query", "key")
"""What a source is read for: a value, or the query or the key of a head's score."""
TARGET, CONSTANTS, REST = "target", "constants", "rest"
"""Names of what is no component at one position: T itself, all biases, what pruning left out."""
NOWHERE = -1
"""Position, layer or head of a node that has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitGraph(Guarded, Result):
    """An attribution graph: a logit, or a difference of two, T, as a graph from the tokens; with a
    counterfactual the difference of T between both prompts.

    ``value`` is T before a soft cap of the output, ``capped`` behind it (``None`` without one):
    what is behind it is no sum. ``answer`` and ``other`` are the texts of its tokens,
    ``position`` where it is read, ``probability`` that of the answer there. ``leaf_values``,
    ``head_values`` and ``mlp_values`` are complete: the part of T that passes through each
    component at each position. Leaves and ``constant`` (and MLPs, with ``mlp="leaf"``) sum to T.
    ``leaf_moved`` and its like say what a component does by the attention that it moves: first
    order in the patterns and no part of that sum; NaN between two prompts, where query and key
    edges are in the sum. ``direct_heads`` is what each head wrote straight to the logit, by source
    token, ``direct_others`` what everything else (``direct_names``) did; together they sum to T.

    The graph itself is pruned to nodes and edges that carry ``keep`` (:func:`trace_logit`).
    ``nodes`` and ``edges`` are its tables. ``rest[node, edge type]`` is what the edges left out
    carry: with it, the edges of each type into a node sum to ``totals[node, edge type]``. Value
    edges sum to the node's value, between two prompts the edges of all types together.
    ``attention`` and ``response`` are pattern (between two prompts the mean of both) and
    dT/d(score) of the nodes that are heads.
    """

    texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    counterfactual: tuple[str, ...] | None
    position: int
    answer: str
    other: str | None
    answer_ids: tuple[int, ...]
    probability: float
    value: float
    capped: float | None
    mlp: str
    keep: float
    leaf_names: tuple[str, ...]
    leaf_values: Float[Tensor, "part position"]
    leaf_moved: Float[Tensor, "part position"]
    head_values: Float[Tensor, "layer head position"]
    head_moved: Float[Tensor, "layer head position"]
    mlp_values: Float[Tensor, "layer position"]
    mlp_moved: Float[Tensor, "layer position"]
    constant: float
    constant_moved: float
    direct_heads: Float[Tensor, "layer head source"]
    direct_names: tuple[str, ...]
    direct_others: Float[Tensor, " writer"]
    components: tuple[str, ...]
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

    @property
    def names(self) -> tuple[str, ...]:
        """A text for each node that no other has: ``"L5H1@7"``, ``"constants"``."""
        places = zip(self.components, self.positions.tolist(), strict=True)
        one = (TARGET, CONSTANTS)
        return tuple(name if name in one else f"{name}@{at}" for name, at in places)

    @property
    def nodes(self) -> pd.DataFrame:
        """A row for each node, the largest absolute value first: ``node`` (its text),
        ``component``, ``kind`` (leaf, head, mlp, target, rest), ``layer``, ``head``, ``position``
        (-1: none), ``token``, ``value``, ``moved``. A node of kind rest is what pruning left out of
        another; constants are of kind leaf."""
        return self._nodes.copy()

    @cached_property
    def _nodes(self) -> pd.DataFrame:
        import pandas as pd

        names = {"node": self.names, "component": self.components}
        places = {"layer": self.layers, "head": self.heads_of, "position": self.positions}
        numbers = {"value": self.values, "moved": self.moved}
        columns = {name: x.tolist() for name, x in (places | numbers).items()}
        frame = pd.DataFrame(names | columns)
        kind = frame["head"].map(lambda head: "head" if head >= 0 else "leaf")
        kind = kind.mask((frame["layer"] >= 0) & (frame["head"] < 0), "mlp")
        frame["kind"] = kind.mask(frame["component"] == TARGET, TARGET)
        frame["token"] = [(*self.texts, "")[at] for at in frame["position"]]
        # between two prompts queries and keys are parts of the sum too
        left_out = self.rest[:, 0] if self.counterfactual is None else self.rest.sum(1)
        rest = frame.assign(value=left_out.tolist(), moved=float("nan"), kind=REST)
        rest = rest.assign(component=REST, node=f"{REST}>" + frame["node"])
        frame = pd.concat([frame, rest[(self.rest != 0).any(1).tolist()]])
        return _largest_first(frame[["node", "component", "kind", *places, "token", *numbers]])

    @property
    def edges(self) -> pd.DataFrame:
        """A row for each edge, the largest absolute value first: ``source`` and ``target`` (texts
        of nodes), ``type`` (value, query, key), ``value``; what pruning left out comes from nodes
        of kind rest."""
        return self._edges.copy()

    @cached_property
    def _edges(self) -> pd.DataFrame:
        import pandas as pd

        names, types = np.array(self.names, dtype=object), np.array(EDGE_TYPES, dtype=object)
        node, edge_type = (self.rest != 0).nonzero(as_tuple=True)
        sources = [
            names[self.sources],
            np.array([f"{REST}>{names[i]}" for i in node], dtype=object),
        ]
        columns = {
            "source": np.concatenate(sources),
            "target": names[torch.cat([self.targets, node])],
            "type": types[torch.cat([self.edge_types, edge_type])],
            "value": torch.cat([self.weights, self.rest[node, edge_type]]).numpy(),
        }
        return _largest_first(pd.DataFrame(columns))

    def into(self, node: str) -> pd.DataFrame:
        """The edges into a node (its text, ``"L5H1@7"``, ``"target"``), the largest first."""
        choice(node, self.names, "node")
        edges: Any = self._edges
        return edges[edges["target"] == node].reset_index(drop=True)

    def tokens(self) -> Table:
        """T by input token: ``position``, ``token``, ``value`` and each part of it; the constants
        last. The column sums to T."""
        import pandas as pd

        parts, names = self.leaf_values, list(self.leaf_names)
        if self.mlp == "leaf":
            parts = torch.cat([parts, self.mlp_values.sum(0, keepdim=True)])
            names.append("mlps")
        frame = pd.DataFrame({"position": range(len(self.texts)), "token": self.texts})
        frame["value"] = parts.double().sum(0).tolist()
        if len(names) > 1:
            frame = frame.assign(**dict(zip(names, parts.tolist(), strict=True)))
        if self.counterfactual is not None:
            frame.insert(2, "counterfactual", list(self.counterfactual))
        else:
            last = {"position": NOWHERE, "token": CONSTANTS, "value": self.constant}
            frame.loc[len(frame)] = [last.get(name, 0.0) for name in frame]
        return Table.of(frame, self.provenance)

    def direct(self) -> Table:
        """What was written straight to the logit (direct logit attribution), the largest absolute
        value first: ``component``, ``layer``, ``head``, ``position`` (the source token that a head
        took it from; -1 for others), ``token``, ``value``. The column sums to T."""
        import pandas as pd

        places = itertools.product(*map(range, self.direct_heads.shape))
        rows = [(head_name((layer, head)), layer, head, at) for layer, head, at in places]
        rows += [(name, NOWHERE, NOWHERE, NOWHERE) for name in self.direct_names]
        frame = pd.DataFrame(rows, columns=["component", "layer", "head", "position"])
        frame["token"] = [(*self.texts, "")[at] for at in frame["position"]]
        frame["value"] = torch.cat([self.direct_heads.flatten(), self.direct_others]).tolist()
        return Table.of(_largest_first(frame), self.provenance)

    def traced(self) -> str:
        """What was traced, in words."""
        T = repr(self.answer) + ("" if self.other is None else f" - {self.other!r}")
        at = f"after {self.texts[self.position]!r} (position {self.position})"
        between = "" if self.counterfactual is None else ", between two prompts"
        cap = "" if self.capped is None else f" before the soft cap, {self.capped:.4g} behind it"
        return f"{T} {at}{between}: {self.value:.4g}{cap}"

    def _whole(self) -> pd.DataFrame:
        """Text, value and what is moved of all nodes, with those that pruning left out."""
        import pandas as pd

        layers, heads = map(range, self.head_values.shape[:2])
        names = [*self.leaf_names, *map(head_name, itertools.product(layers, heads))]
        names += [f"mlp{layer}" for layer in layers]
        places = [f"{name}@{at}" for name in names for at in range(len(self.texts))]

        def column(name: str) -> list[float]:
            parts = (getattr(self, f"{part}_{name}").flatten() for part in ("leaf", "head", "mlp"))
            return torch.cat([getattr(self, name)[:2], *parts]).tolist()

        columns = {"value": column("values"), "moved": column("moved")}
        return pd.DataFrame({"target": [TARGET, CONSTANTS, *places], **columns})

    def columns(self) -> Sequence[str]:
        return ("node", "token", "value", "moved")

    def rows(self) -> Sequence[Sequence[object]]:
        """The nodes, the largest absolute value first. ``moved`` does not decide: it is first
        order, and largest at attention sinks, which write next to nothing."""
        nodes: Any = self.nodes
        shown = nodes[nodes["kind"] != REST]
        return list(shown[list(self.columns())].itertuples(index=False, name=None))

    def _caption(self, table: Sequence[Sequence[object]]) -> str:
        return f"{type(self).__name__} of {self.traced()} ({self.provenance.line()})"

    def to_json(self) -> dict[str, Any]:
        """The graph in the JSON that the pages of Neuronpedia and circuit-tracer read; see
        :mod:`tl_geometry.circuits.graph_files`."""
        from tl_geometry.circuits.graph_files import neuronpedia

        return neuronpedia(self)


def mean_graph(graphs: Iterable[LogitGraph]) -> Table:
    """Means over the graphs of several prompts, with 95% intervals over prompts (paired: each graph
    counts once; NaN below 10). A row is a node or an edge of prompts of one length: ``source``
    (empty for a node), ``target``, ``type`` (node, value, query, key), ``value``, ``low``,
    ``high``, ``moved``, and ``prompts``, how many graphs hold it.

    Every graph holds the values of all nodes. An edge that pruning left out counts as 0 there, and
    has no interval (``keep=1`` leaves none out).

    Raises ``GeometryError`` for graphs of different lengths, positions or models.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=2).tokens
    >>> graphs = [tlg.trace_logit(model, row[None], 5, keep=0.5) for row in windows]
    >>> mean_graph(graphs).df.columns.tolist()[:4]
    ['source', 'target', 'type', 'value']
    """
    import pandas as pd

    from tl_geometry.base.intervals import paired_interval

    graphs = list(graphs) if isinstance(graphs, Iterable) else [graphs]
    types = {type(graph).__name__ for graph in graphs}
    require(types == {LogitGraph.__name__}, "graphs", expected="graphs of logits", got=types)
    kinds = [(g.mlp, g.leaf_names, g.counterfactual is None) for g in graphs]
    places = [(g.provenance.fingerprint, len(g.texts), g.position) for g in graphs]
    alike = set(zip(kinds, places, strict=True))
    expected = "graphs of one model and kind, of prompts of one length, read at one position"
    require(len(alike) == 1, "graphs", expected=expected, got=f"{len(alike)} kinds of graphs")
    shown = sorted({name for graph in graphs for name in graph.names})
    parts = []
    for number, graph in enumerate(graphs):
        nodes = graph._whole().assign(source="", type="node")
        nodes = nodes[nodes["target"].isin(shown)]
        parts.append(pd.concat([nodes, graph.edges]).assign(graph=number))
    rows: Any = pd.concat(parts).set_index(["source", "target", "type", "graph"])
    wide = rows["value"].unstack("graph")
    interval = paired_interval(torch.tensor(wide.fillna(0.0).to_numpy().copy()).mT)
    frame, left_out = wide.index.to_frame(index=False), wide.isna().to_numpy()
    for name, column in zip(("value", "low", "high"), interval[:3], strict=True):
        frame[name] = column.tolist()
    # what is missing from a whole graph is 0, from another unknown
    frame.loc[left_out[:, [graph.keep < 1 for graph in graphs]].any(1), ["low", "high"]] = torch.nan
    frame["moved"] = rows["moved"].unstack("graph").mean(axis=1).tolist()
    frame["prompts"] = (~left_out).sum(1)
    first = graphs[0].provenance
    about = dataclasses.replace(first, contexts=len(graphs), corpus="prompts", token_hash=None)
    return Table.of(_largest_first(frame), about)


def _largest_first(frame: Any) -> Any:
    """Rows by absolute value; of equals the first."""
    return frame.iloc[(-frame["value"].abs()).argsort(kind="stable")].reset_index(drop=True)
