"""How do other tools read the graph of a logit? As the JSON that the pages of Neuronpedia and
circuit-tracer draw (:meth:`~tl_geometry.circuits.LogitGraph.to_json`).

Every node of it has an integer ``feature``. Pages silently delete nodes that share one at the same
layer and position, so each head, MLP and rest gets a number of its own: Cantor's pairing of its
layer and its place there. Value edges are links, in the graph between two prompts query and key
edges too; the writers that made a head attend are in its ``qk_tracing_results``. What pruning left
out of a node is a node of its own (``rest``), so that the links into every node sum to its value in
the file too.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tl_geometry.circuits.logit_graph import CONSTANTS, EDGE_TYPES, REST, LogitGraph

COMPONENT_TYPE, REST_TYPE, LEAF_TYPE = "cross layer transcoder", "mlp reconstruction error", "leaf"
"""What the pages call a node of a block, and a part that a graph leaves out. They draw a type that
they do not know (constants, positions) as a disc with the file's text."""
TOKEN_LEAVES = ("embed", "cvec")
"""Parts of the first state that differ from token to token: an ``embedding`` is named after its
token."""
SHOWN_CONTRIBUTORS = 10
"""Writers of query and key that a head's node lists in the file."""


def pairing(a: int, b: int) -> int:
    """Cantor's pairing: a different integer for each pair.

    >>> [pairing(a, b) for a, b in ((0, 0), (0, 1), (1, 0), (2, 3))]
    [0, 2, 1, 18]
    """
    return (a + b) * (a + b + 1) // 2 + b


def slug(text: str) -> str:
    """A name as files and addresses take it: letters, digits, dot, hyphen and underscore.

    >>> slug("When Mary and John"), slug("***")
    ('When-Mary-and-John', 'graph')
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:60] or "graph"


def neuronpedia(graph: LogitGraph) -> dict[str, Any]:
    """The graph as the JSON object that Neuronpedia and circuit-tracer's front end read.

    ``influence`` of a node is cumulative: the share of all absolute values that the nodes down to
    this one carry.
    """
    ids = [_node_id(graph, i) for i in range(len(graph.components))]
    size = graph.values.abs()
    order = size.argsort(descending=True, stable=True)
    influence = torch.empty_like(size)
    influence[order] = (size[order].cumsum(0) / size.sum().clamp(min=1e-300)).clamp(max=1.0)
    nodes = [_node(graph, i, ids, float(influence[i])) for i in range(len(ids))]
    linked = range(3) if graph.counterfactual is not None else (0,)
    totals: dict[tuple[str, str], float] = {}
    ends = (graph.sources, graph.targets, graph.edge_types, graph.weights)
    for source, target, edge_type, weight in zip(*(x.tolist() for x in ends), strict=True):
        if edge_type in linked:  # edges of several types between two nodes are one link
            key = ids[source], ids[target]
            totals[key] = totals.get(key, 0.0) + weight
    for i, rest in enumerate(graph.rest[:, list(linked)].sum(1).tolist()):
        if rest:
            nodes.append(_rest_node(graph, i, rest))
            totals[nodes[-1]["node_id"], ids[i]] = rest
    links = [
        {"source": s, "target": t, "weight": w, "signed": True} for (s, t), w in totals.items()
    ]
    tokens = list(graph.texts)
    if all(node["ctx_idx"] == 0 for node in nodes):
        # front ends place nothing if the first column has it all, and delete all of a single column
        tokens = ["", *tokens]
        nodes = [node | {"ctx_idx": 1} for node in nodes]
    page = {"supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    about = {"metadata": _metadata(graph, tokens), "qParams": {"pinnedIds": ids[:1], **page}}
    return about | {"nodes": nodes, "links": links}


def _metadata(graph: LogitGraph, tokens: list[str]) -> dict[str, Any]:
    """What the graph is of: one entry of ``graph-metadata.json``."""
    between, prompt = graph.counterfactual, "".join(tokens)
    target = [text for text in (graph.answer, graph.other) if text is not None]
    settings = {"mlp": graph.mlp, "position": graph.position, "value": graph.value}
    generator = {"name": "tl_geometry", "target": target}
    return {
        "slug": slug(prompt),
        "scan": slug(graph.provenance.model or "model"),
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": prompt,
        "node_threshold": 1.0,  # front ends hide nodes of a larger influence: none of these
        "schema_version": 1,
        "info": {"creator_name": "tl_geometry", "source_urls": [], "generator": generator},
        "generation_settings": settings
        | {"counterfactual": None if between is None else "".join(between)},
        "pruning_settings": {"node_threshold": graph.keep, "edge_threshold": graph.keep},
    }


def _record(
    node_id: str, feature: int, layer: str, position: int, node_type: str, text: str, value: float
) -> dict[str, Any]:
    """A node: ``feature`` is a number that no other node of its layer and position has."""
    own = {"node_id": node_id, "jsNodeId": node_id, "feature": feature, "layer": layer}
    own |= {"ctx_idx": position, "feature_type": node_type, "clerp": text, "activation": value}
    shared = {"token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0}
    return own | shared | {"influence": 1.0}


def _place(graph: LogitGraph, node: int) -> tuple[str, int, int, int]:
    """Component, layer, head and position of a node."""
    columns = (graph.layers, graph.heads_of, graph.positions)
    layer, head, position = (int(column[node]) for column in columns)
    return graph.components[node], layer, head, position


def _node_id(graph: LogitGraph, node: int) -> str:
    """A node's name in the file, as the front ends split it: layer, what, position."""
    name, layer, head, position = _place(graph, node)
    if node == 0:
        return f"{_last_layer(graph)}_{graph.answer_ids[0]}_{position}"
    if layer >= 0:
        return f"{layer}_{'mlp' if head < 0 else f'h{head}'}_{position}"
    if name == CONSTANTS:
        return "E_constants_0"
    prefix = "" if name in TOKEN_LEAVES else f"{name.replace('_', '-')}-"
    return f"E_{prefix}{graph.token_ids[position]}_{position}"


def _last_layer(graph: LogitGraph) -> int:
    """The logit's layer: above every block, and never 0, which the front end takes for none."""
    return len(graph.head_values) + 1


def _feature(graph: LogitGraph, node: int, rest: bool = False) -> int:
    """The number of a node, or of its rest, that no other node has."""
    _, layer, head, _ = _place(graph, node)
    n_heads = graph.head_values.shape[1]
    if layer < 0:
        return pairing(_last_layer(graph) + 1, node)
    # the heads, the MLP, then their rests in the same order
    return pairing(layer, (head if head >= 0 else n_heads) + (n_heads + 1) * rest)


def _label(graph: LogitGraph, node: int) -> str:
    """A node as it is shown: its name, and the token at its position."""
    name, _, _, position = _place(graph, node)
    return name if position < 0 else f"{name} at {position} {graph.texts[position]!r}"


def _node(graph: LogitGraph, node: int, ids: list[str], influence: float) -> dict[str, Any]:
    name, layer, head, position = _place(graph, node)
    at, value = max(0, position), float(graph.values[node])
    if node == 0:  # the front end reads the probability out of this text
        target = repr(graph.answer) + ("" if graph.other is None else f" - {graph.other!r}")
        text = f"Output {target} (p={graph.probability:.3f})"
        last = _last_layer(graph)
        record = _record(ids[0], graph.answer_ids[0], str(last), at, "logit", text, value)
        record |= {"token_prob": graph.probability, "is_target_logit": True}
    else:
        node_type = "embedding" if name in TOKEN_LEAVES else LEAF_TYPE
        node_type, row = (node_type, "E") if layer < 0 else (COMPONENT_TYPE, str(layer))
        text, feature = _label(graph, node), _feature(graph, node)
        record = _record(ids[node], feature, row, at, node_type, text, value)
    moved = float(graph.moved[node])
    record |= {"influence": influence, "moved": moved if moved == moved else None}
    if head >= 0:
        record["qk_tracing_results"] = {
            "pair_wise_contributors": [],
            "top_q_marginal_contributors": _contributors(graph, node, "query", ids),
            "top_k_marginal_contributors": _contributors(graph, node, "key", ids),
        }
    return record


def _contributors(graph: LogitGraph, node: int, edge_type: str, ids: list[str]) -> list[list[Any]]:
    """The largest query or key edges into a head."""
    into = (graph.targets == node) & (graph.edge_types == EDGE_TYPES.index(edge_type))
    rows = into.nonzero()[:, 0]
    rows = rows[graph.weights[rows].abs().argsort(descending=True, stable=True)]
    rows = rows[:SHOWN_CONTRIBUTORS].tolist()
    return [[ids[int(graph.sources[row])], float(graph.weights[row])] for row in rows]


def _rest_node(graph: LogitGraph, node: int, rest: float) -> dict[str, Any]:
    """What was left out of a node, drawn as the front ends draw errors of a replacement."""
    name, layer, _, position = _place(graph, node)
    # the logit's own stands between the last block and the logit
    row = _last_layer(graph) - 1 if layer < 0 else layer
    name, at = f"{row}_{REST}-{name}_{max(0, position)}", max(0, position)
    feature, text = _feature(graph, node, rest=True), f"rest of {_label(graph, node)}"
    return _record(name, feature, str(row), at, REST_TYPE, text, rest)
