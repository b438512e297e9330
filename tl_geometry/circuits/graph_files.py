"""How do other tools read the graph of a logit? As the JSON that the pages of Neuronpedia and
circuit-tracer draw, or as a graph of ``networkx``. Methods of the graph call this. The records of
these formats are made here.

In Neuronpedia's JSON every node has an integer ``feature``. Pages silently delete nodes that share
one at the same layer and position, so each head, MLP and rest gets a number of its own: Cantor's
pairing of its layer and its place there. Value edges are links; the writers that made a head attend
are in its ``qk_tracing_results``. Pages name every embedding after its token, so constants and what
is the same for all tokens (positions) have a type of their own. What pruning left out of a node is
a node of its own (``rest``), so that the links into every node sum to its value in the file too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.circuits.logit_graph import (
    CONSTANTS,
    EDGE_TYPES,
    VALUE,
    LogitGraph,
    token_texts,
)

COMPONENT_TYPE = "cross layer transcoder"
"""What the front ends call a node of a block."""
REST_TYPE = "mlp reconstruction error"
"""What the front ends call a part that a graph leaves out."""
TOKEN_LEAVES = ("embed", "cvec")
"""Parts of the first state that differ from token to token."""
LEAF_TYPE = "leaf"
"""The type of all other parts before the first block, and of constants. Front ends draw a type that
they do not know as a disc with the file's text; a square is a token's."""
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
    ids = [node_id(graph, i) for i in range(len(graph.names))]
    influence = influences(graph.values).tolist()
    nodes = [_node(graph, i, ids, influence[i]) for i in range(len(graph.names))]
    values = graph.edge_types == VALUE
    ends = (x[values].tolist() for x in (graph.sources, graph.targets, graph.weights))
    links = [link_record(ids[s], ids[t], weight) for s, t, weight in zip(*ends, strict=True)]
    for i, rest in enumerate(graph.rest[:, VALUE].tolist()):
        if rest:
            nodes.append(_rest_node(graph, i, rest))
            links.append(link_record(nodes[-1]["node_id"], ids[i], rest))
    tokens = list(token_texts(graph))
    if all(node["ctx_idx"] == 0 for node in nodes):
        # front ends place nothing if the first column has it all, and delete all of a single column
        tokens = ["", *tokens]
        nodes = [node | {"ctx_idx": 1} for node in nodes]
    settings = {
        "mlp": graph.mlp,
        "position": graph.position,
        "value": graph.value,
        "log_probability": graph.log_probability,
    }
    about = metadata(
        graph.provenance.model,
        tokens,
        "".join(tokens),
        {"target": list(graph.target_tokens)},
        settings,
        {"node_threshold": graph.keep, "edge_threshold": graph.keep},
    )
    return file_record(about, nodes, links, pinned=ids[:1])


def influences(values: Float[Tensor, " node"]) -> Float[Tensor, " node"]:
    """The share of all absolute values that the nodes down to each one carry, the largest first."""
    size = values.abs()
    order = size.argsort(descending=True, stable=True)
    influence = torch.empty_like(size)
    influence[order] = size[order].cumsum(0) / size.sum().clamp(min=1e-300)  # all may be 0
    return influence.clamp(max=1.0)


def file_record(
    about: dict[str, Any],
    nodes: list[dict[str, Any]],
    links: list[dict[str, Any]],
    pinned: list[str],
) -> dict[str, Any]:
    """A graph as Neuronpedia's JSON."""
    page_state = {"supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    return {
        "metadata": about,
        "qParams": {"pinnedIds": pinned, **page_state},
        "nodes": nodes,
        "links": links,
    }


def metadata(
    model: str | None,
    tokens: list[str],
    prompt: str,
    generator: dict[str, Any],
    settings: dict[str, Any],
    pruning: dict[str, Any],
) -> dict[str, Any]:
    """What a graph is of: one entry of ``graph-metadata.json``. ``tokens`` name the columns."""
    return {
        "slug": slug(prompt),
        "scan": slug(model or "model"),
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": prompt,
        "node_threshold": 1.0,  # front ends hide nodes of a larger influence: none of these
        "schema_version": 1,
        "info": {
            "creator_name": "tl_geometry",
            "source_urls": [],
            "generator": {"name": "tl_geometry", **generator},
        },
        "generation_settings": settings,
        "pruning_settings": pruning,
    }


def first_type(name: str) -> str:
    """What the front ends are told of a writer before the first block."""
    return "embedding" if name in TOKEN_LEAVES else LEAF_TYPE


def node_record(
    node_id: str,
    feature: int,
    layer: str,
    position: int,
    node_type: str,
    text: str,
    activation: float,
    influence: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    """A node: ``feature`` is a number that no other node of its layer and position has."""
    return {
        "node_id": node_id,
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": node_type,
        "token_prob": 0.0,
        "is_target_logit": False,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": node_id,
        "clerp": text,
        "influence": influence,
        "activation": activation,
        **more,
    }


def link_record(source: str, target: str, weight: float) -> dict[str, Any]:
    """An edge."""
    return {"source": source, "target": target, "weight": weight, "signed": True}


def multigraph(
    nodes: Iterable[tuple[Hashable, dict[str, Any]]],
    edges: Iterable[tuple[Hashable, Hashable, str, float]],
    **about: Any,
) -> Any:
    """A ``networkx.MultiDiGraph`` of nodes with attributes and edges (source, target, type,
    weight)."""
    import networkx

    out = networkx.MultiDiGraph(**about)
    out.add_nodes_from(nodes)
    for source, target, edge_type, weight in edges:
        out.add_edge(source, target, edge_type=edge_type, weight=weight)
    return out


def node_id(graph: LogitGraph, node: int) -> str:
    """A node's name in the file, as the front ends split it: layer, what, position."""
    name, position = graph.names[node], int(graph.positions[node])
    layer, head = int(graph.layers[node]), int(graph.heads_of[node])
    if node == 0:
        return f"{_last_layer(graph)}_{graph.target[0]}_{position}"
    if head >= 0:
        return f"{layer}_h{head}_{position}"
    if layer >= 0:
        return f"{layer}_mlp_{position}"
    if name == CONSTANTS:
        return "E_constants_0"
    prefix = "" if name in TOKEN_LEAVES else f"{name.replace('_', '-')}-"
    return f"E_{prefix}{graph.token_ids[position]}_{position}"


def _last_layer(graph: LogitGraph) -> int:
    """The logit's layer: above every block, and never 0, which the front end takes for none."""
    return len(graph.head_values) + 1


def _feature(graph: LogitGraph, node: int, rest: bool = False) -> int:
    """The number of a node, or of its rest, that no other node has."""
    layer, head = int(graph.layers[node]), int(graph.heads_of[node])
    n_heads = graph.head_values.shape[1]
    if layer < 0:
        return pairing(_last_layer(graph) + 1, node)
    # the heads, the MLP, then their rests in the same order
    return pairing(layer, (head if head >= 0 else n_heads) + (n_heads + 1) * rest)


def _node(graph: LogitGraph, node: int, ids: list[str], influence: float) -> dict[str, Any]:
    position = max(0, int(graph.positions[node]))
    layer, head = int(graph.layers[node]), int(graph.heads_of[node])
    logit = node == 0
    node_type = first_type(graph.names[node]) if layer < 0 else COMPONENT_TYPE
    text = graph.label(node)
    if logit:  # the front end reads the probability out of this text
        text = f"Output {' - '.join(map(repr, graph.target_tokens))} (p={graph.probability:.3f})"
    record = node_record(
        ids[node],
        graph.target[0] if logit else _feature(graph, node),
        str(_last_layer(graph)) if logit else "E" if layer < 0 else str(layer),
        position,
        "logit" if logit else node_type,
        text,
        float(graph.values[node]),
        influence,
        moved=float(graph.moved[node]),
    )
    if logit:
        record |= {"token_prob": graph.probability, "is_target_logit": True}
    if head >= 0:
        record["qk_tracing_results"] = {
            "pair_wise_contributors": [],
            "top_q_marginal_contributors": _contributors(graph, node, "query", ids),
            "top_k_marginal_contributors": _contributors(graph, node, "key", ids),
        }
    return record


def _contributors(graph: LogitGraph, node: int, edge_type: str, ids: list[str]) -> list[list[Any]]:
    edges = graph.edges_into(node, edge_type)[:SHOWN_CONTRIBUTORS]
    return [[ids[source], weight] for source, _, weight in edges]


def _rest_node(graph: LogitGraph, node: int, rest: float) -> dict[str, Any]:
    """What was left out of a node, drawn as the front ends draw errors of a replacement."""
    layer = int(graph.layers[node])
    # the logit's own stands between the last block and the logit
    row = _last_layer(graph) - 1 if layer < 0 else layer
    position = max(0, int(graph.positions[node]))
    name = f"{row}_rest-{graph.names[node]}_{position}"
    feature, text = _feature(graph, node, rest=True), f"rest of {graph.label(node)}"
    return node_record(name, feature, str(row), position, REST_TYPE, text, rest)


def networkx_graph(graph: LogitGraph) -> Any:
    """The graph as a ``networkx.MultiDiGraph``; edges have ``edge_type`` and ``weight``, nodes
    their numbers. ``networkx.write_graphml`` takes it."""
    nodes = (
        (
            i,
            {
                "label": graph.label(i),
                "writer": name,
                "layer": int(graph.layers[i]),
                "head": int(graph.heads_of[i]),
                "position": int(graph.positions[i]),
                "value": float(graph.values[i]),
                "moved": float(graph.moved[i]),
                "rest": float(graph.rest[i, VALUE]),
            },
        )
        for i, name in enumerate(graph.names)
    )
    columns = (graph.sources, graph.targets, graph.edge_types, graph.weights)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    edges = ((source, target, EDGE_TYPES[e], weight) for source, target, e, weight in rows)
    return multigraph(nodes, edges, value=graph.value, model=graph.provenance.model or "")
