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

from tl_geometry.circuits.logit_graph import CONSTANTS, EDGE_TYPES, REST, TARGET, LogitGraph

Row = dict[str, Any]
"""A row of the table of nodes."""

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
    table: Any = graph.nodes
    own, between = table[table["kind"] != REST], graph.counterfactual is not None
    edges: Any = graph.edges
    linked = edges if between else edges[edges["type"] == EDGE_TYPES[0]]
    # edges of several types between two nodes are one link
    links = linked.groupby(["source", "target"], sort=False)["value"].sum()
    rests = table[table["node"].isin(links.index.get_level_values("source"))]
    rests = rests[rests["kind"] == REST].to_dict("records")
    size = own["value"].abs()
    influence = (size.cumsum() / max(size.sum(), 1e-300)).clip(upper=1.0)
    given = own.assign(influence=influence).to_dict("records")
    ids = {node["node"]: _node_id(graph, node) for node in (*given, *rests)}
    nodes = {node["node"]: _node(graph, node, ids[node["node"]]) for node in given}
    why: Any = edges[(edges["type"] != EDGE_TYPES[0]) & edges["source"].isin(list(nodes))]
    for edge in why.groupby(["target", "type"]).head(SHOWN_CONTRIBUTORS).to_dict("records"):
        lists = nodes[edge["target"]]["qk_tracing_results"]
        name = f"top_{edge['type'][0]}_marginal_contributors"
        lists[name].append([ids[edge["source"]], edge["value"]])
    for rest in rests:
        name = rest["node"]
        nodes[name] = _rest(graph, rest, ids[name], float(links[name].sum()))
    tokens = list(graph.texts)
    if all(node["ctx_idx"] == 0 for node in nodes.values()):
        # front ends place nothing if the first column has it all, and delete all of a single column
        tokens = ["", *tokens]
        nodes = {name: node | {"ctx_idx": 1} for name, node in nodes.items()}
    page = {"supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    return {
        "metadata": _metadata(graph, tokens),
        "qParams": {"pinnedIds": [ids[TARGET]], **page},
        "nodes": list(nodes.values()),
        "links": [
            {"source": ids[s], "target": ids[t], "weight": w, "signed": True}
            for (s, t), w in links.items()
        ],
    }


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
    node_id: str, feature: int, layer: object, position: int, node_type: str, text: str, value: Any
) -> dict[str, Any]:
    """A node: ``feature`` is a number that no other node of its layer and position has."""
    own = {"node_id": node_id, "jsNodeId": node_id, "feature": feature, "layer": str(layer)}
    own |= {"ctx_idx": max(0, position), "feature_type": node_type, "clerp": text}
    shared = {"token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0}
    return own | shared | {"activation": float(value), "influence": 1.0}


def _last_layer(graph: LogitGraph) -> int:
    """The logit's layer: above every block, and never 0, which the front end takes for none."""
    return len(graph.head_values) + 1


def _node_id(graph: LogitGraph, node: Row) -> str:
    """A node's name in the file, as the front ends split it: layer, what, position."""
    name, layer, at = node["component"], node["layer"], max(0, node["position"])
    rest, of_block = f"{REST}-" * (name == REST), "mlp" if node["head"] < 0 else f"h{node['head']}"
    if layer >= 0:
        return f"{layer}_{rest}{of_block}_{at}"
    if rest:  # the logit's own stands between the last block and the logit
        return f"{_last_layer(graph) - 1}_{rest}{TARGET}_{at}"
    if name == TARGET:
        return f"{_last_layer(graph)}_{graph.answer_ids[0]}_{at}"
    if name == CONSTANTS:
        return "E_constants_0"
    prefix = "" if name in TOKEN_LEAVES else f"{name.replace('_', '-')}-"
    return f"E_{prefix}{graph.token_ids[at]}_{at}"


def _feature(graph: LogitGraph, node: Row) -> int:
    """The number of a node, or of its rest, that no other node of its layer and position has."""
    n_heads, rest = graph.head_values.shape[1], node["kind"] == REST
    if node["layer"] >= 0:  # the heads, the MLP, then their rests in the same order
        place = node["head"] if node["head"] >= 0 else n_heads
        return pairing(node["layer"], place + (n_heads + 1) * rest)
    of_none = (REST, CONSTANTS, *graph.leaf_names)
    return pairing(_last_layer(graph) + 1, of_none.index(node["component"]))


def _node(graph: LogitGraph, node: Row, node_id: str) -> dict[str, Any]:
    name, layer, at = node["component"], node["layer"], node["position"]
    shown = name if at < 0 else f"{name} at {at} {node['token']!r}"
    value, moved = node["value"], node["moved"]
    if name == TARGET:  # the front end reads the probability out of this text
        target = repr(graph.answer) + ("" if graph.other is None else f" - {graph.other!r}")
        shown = f"Output {target} (p={graph.probability:.3f})"
        last, feature = _last_layer(graph), graph.answer_ids[0]
        record = _record(node_id, feature, last, at, "logit", shown, value)
        record |= {"token_prob": graph.probability, "is_target_logit": True}
    else:
        leaf = "embedding" if name in TOKEN_LEAVES else LEAF_TYPE
        node_type, row = (COMPONENT_TYPE, layer) if layer >= 0 else (leaf, "E")
        record = _record(node_id, _feature(graph, node), row, at, node_type, shown, value)
    record |= {"influence": node["influence"], "moved": moved if moved == moved else None}
    if node["head"] >= 0:
        lists = ("pair_wise", "top_q_marginal", "top_k_marginal")
        record["qk_tracing_results"] = {f"{name}_contributors": [] for name in lists}
    return record


def _rest(graph: LogitGraph, node: Row, node_id: str, value: float) -> dict[str, Any]:
    """What was left out of a node, drawn as the front ends draw errors of a replacement."""
    layer = node["layer"] if node["layer"] >= 0 else _last_layer(graph) - 1
    shown = f"rest of {node['node'].removeprefix(f'{REST}>')} {node['token']!r}"
    feature, at = _feature(graph, node), node["position"]
    return _record(node_id, feature, layer, at, REST_TYPE, shown, value)
