"""How do other tools read a table of composition? As the JSON that the pages of Neuronpedia and
circuit-tracer draw, or as a graph of ``networkx`` (``networkx.write_graphml`` writes it as
GraphML). Methods of :class:`tl_geometry.circuits.Composition` call this; the records are those of
:mod:`tl_geometry.circuits.graph_files`.

Shares belong to no position. In place of tokens the file has four columns: the writers, and the
query, key and value side of the heads that read them. A link is a share. The links into a side and
its ``rest`` (the reader's own constants, ALiBi, writers that are not shown) sum to one.
"""

from __future__ import annotations

from typing import Any

import torch

from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import fail
from tl_geometry.circuits.graph_files import (
    COMPONENT_TYPE,
    REST_TYPE,
    file_record,
    first_type,
    influences,
    link_record,
    metadata,
    multigraph,
    node_record,
    pairing,
)
from tl_geometry.circuits.writer_edges import HEAD_SIDES, Composition

COLUMNS = ("writers", *HEAD_SIDES)
"""Columns of the file. There is more than one, because front ends delete what stands in more than
two thirds of the columns."""


def neuronpedia(composition: Composition, *, share: str, writers: str, n: int) -> dict[str, Any]:
    """The ``n`` strongest edges as Neuronpedia's JSON."""
    edges = _edges(composition, share, writers, n)
    nodes, links = _writer_nodes(composition, edges), []
    for reader, side in dict.fromkeys(edge[1:3] for edge in edges):
        into = [edge for edge in edges if edge[1:3] == (reader, side)]
        node, rest = _side_nodes(composition, reader, side, 1.0 - sum(x[3] for x in into))
        nodes += [node, rest]
        target = node["node_id"]
        links += [link_record(_node_id(composition, x[0], 0), target, x[3]) for x in into]
        links.append(link_record(rest["node_id"], target, rest["activation"]))
    sizes = torch.tensor([node["activation"] for node in nodes], dtype=torch.float64)
    for node, influence in zip(nodes, influences(sizes).tolist(), strict=True):
        node["influence"] = influence
    settings = {"share": share, "writers": writers, "drop": composition.drop}
    about = metadata(
        composition.provenance.model,
        list(COLUMNS),
        "composition",
        {"readers": list(map(head_name, composition.heads))},
        settings | {"queries": list(composition.queries)},
        {"node_threshold": 1.0, "edge_threshold": 1.0, "edges": n},
    )
    return file_record(about, nodes, links, pinned=[])


def networkx_graph(composition: Composition, *, share: str, writers: str, n: int) -> Any:
    """The ``n`` strongest edges as a ``networkx.MultiDiGraph``: nodes by name with layer and head,
    edges with ``edge_type`` (the side) and ``weight`` (the share)."""
    edges = composition.edges(share=share, writers=writers, n=n)
    names = dict.fromkeys(name for edge in edges for name in edge[:2])
    places = {name: composition.place(name) for name in names}
    nodes = ((name, {"layer": l, "head": h}) for name, (l, h) in places.items())
    return multigraph(nodes, edges, model=composition.provenance.model or "", share=share)


def _edges(
    composition: Composition, share: str, writers: str, n: int
) -> list[tuple[str, str, str, float]]:
    """The strongest edges, refused where no file could show them."""
    edges = composition.edges(share=share, writers=writers, n=n)
    deepest = max((composition.place(edge[1])[0] for edge in edges), default=0)
    if deepest < 1:  # front ends take a largest layer of 0 for none
        fail(
            "heads",
            expected="readers behind block 0 with a writer to show",
            got=f"{len(edges)} edges, none into a later block",
            instead='composition(..., layers=[1, ...]), or writers="all"',
        )
    return edges


def _writer_nodes(
    composition: Composition, edges: list[tuple[str, str, str, float]]
) -> list[dict[str, Any]]:
    """Every writer, with the sum of its absolute shares."""
    nodes = []
    for name in dict.fromkeys(edge[0] for edge in edges):
        layer, _ = composition.place(name)
        where, node_type = ("E", first_type(name)) if layer < 0 else (str(layer), COMPONENT_TYPE)
        feature = pairing(layer + 1, composition.parts.index(name))
        size, text = sum(abs(x[3]) for x in edges if x[0] == name), f"{name} writes"
        node = _node_id(composition, name, 0)
        nodes.append(node_record(node, feature, where, 0, node_type, text, size))
    return nodes


def _side_nodes(
    composition: Composition, reader: str, side: str, rest: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A side of a head, and what no link into it shows."""
    (layer, head), column = composition.place(reader), COLUMNS.index(side)
    text, where = f"{reader} {side}", str(layer)
    # even numbers for heads, odd ones for rests: of two nodes with one number a page deletes one
    feature, rest_feature = (pairing(layer + 1, 2 * head + is_rest) for is_rest in (0, 1))
    node, rest_node = _node_id(composition, reader, column), f"{layer}_rest-h{head}_{column}"
    return (
        node_record(node, feature, where, column, COMPONENT_TYPE, text, 1.0),
        node_record(rest_node, rest_feature, where, column, REST_TYPE, f"rest of {text}", rest),
    )


def _node_id(composition: Composition, name: str, column: int) -> str:
    """A name in the file, as the front ends split it: layer, what, column."""
    layer, head = composition.place(name)
    what = f"h{head}" if head >= 0 else name.replace("_", "-")
    return f"{'E' if layer < 0 else layer}_{what}_{column}"
