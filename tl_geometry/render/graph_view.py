"""The page of a logit's graph: which heads, MLPs and tokens a logit came from, and why the heads
attended as they did. Notebooks, the gallery and ``tl-geometry trace`` show it.

1. :mod:`tl_geometry.render.graph_nodes` brings the input into one form: a
   :class:`~tl_geometry.circuits.LogitGraph`, an average of several, or two side by side.
2. The graph has tokens along x, and blocks from the embeddings at the bottom to the logit at the
   top. Each writer has a mark at its position, each value edge a line.
3. A node appears when the slider reaches its share: the share of all that is written (or of all
   that is moved) that larger nodes carry already. So the page begins with few nodes, those that
   ``trace_logit(..., keep=share)`` would keep.
4. The page explains the chosen node below the graph: edges into it and out of it, and for a head
   the attention that it paid and the writers of its query and its keys. The last line of every
   list is what the list leaves out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.circuits.graph_comparison import GraphComparison
from tl_geometry.circuits.graph_means import AverageGraph
from tl_geometry.circuits.logit_graph import CONSTANTS, NOWHERE, LogitGraph
from tl_geometry.render.figure import NEGATIVE, POSITIVE, View, canvas, drawable
from tl_geometry.render.graph_nodes import DrawnGraph, drawn_graph
from tl_geometry.render.page import PageView, rounded

START, MOST, LISTED = 40, 400, 12
"""How many nodes the page shows first, how many it holds at most, and how many edges of each type
into a node it holds. They limit a page to some hundred kilobytes for any prompt and model.
``assets/graph.js`` lists the same number of edges."""
SOURCES, LEAST_PAID = 6, 0.0005
"""How many positions the attention of a head is listed for, and the least attention that is listed:
smaller values would show as 0."""
WIDTH, TALLEST = 1080, 1180
"""Width of the page in pixels, and its largest height."""
SUMS = "Value edges and what is left out add up to the logit exactly: they have no null."


def graph_page(graph: LogitGraph | AverageGraph | GraphComparison) -> PageView:
    """The graph of a logit as an interactive page: tokens along x, blocks upwards, marks for what
    writes at each position, lines for value edges, red for the logit and blue against it.

    The size of a disc is what the node writes towards the logit; the width of its ring is how much
    it changes the logit by moving the attention of later heads. A slider sets how much is shown. A
    click (or the arrow keys) chooses a node and shows its edges, and for a head the attention that
    it paid and who wrote its query and its keys. Each list sums to the number of the node. Lines of
    code give this number, the edges of a list, and a single edge (a click on its line, or on its
    number in a list) from ``graph``.

    Args:
        graph: from :func:`tl_geometry.trace_logit`; or an average from
            :func:`tl_geometry.circuits.average_graphs`, in which edges whose interval contains 0
            are dotted; or two graphs side by side (:meth:`LogitGraph.compare`), in which edges that
            only one graph has are dashed or dotted.

    The page holds the 400 largest nodes, and for each the 12 largest edges of each type. It says
    what it leaves out.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> graph = tlg.trace_logit(model, windows, int(windows.tokens[0, 15]), position=14)
    >>> graph_page(graph).title  # .save("graph.html") writes the page
    'L0H3 at 14 wrote +1.78 of the logit 3.99 of “␣t”'
    """
    drawn = drawn_graph(graph)
    # stable, so that the logit, which appears at 0, stays the first node
    data = _payload(drawn, drawn.reached.argsort(stable=True)[:MOST])
    return PageView(
        "graph",
        data,
        title=drawn.title,
        caption=_caption(drawn, data),
        width=WIDTH,
        height=_height(data),
        image=functools.partial(graph_figure, drawn),
        source=drawn.source,
        null=f"{SUMS} Query and key edges are first order in the attention.",
    )


def row_of(graph: DrawnGraph) -> Int[Tensor, " node"]:
    """The row of each node, from the embeddings (row 0) upwards: heads of block l stand on row
    2 l + 1, its MLP on the row above, the logit on the top row."""
    rows = 2 * graph.layers + 1 + (graph.heads_of < 0)
    rows[graph.layers < 0] = 0
    rows[0] = 2 * graph.blocks + 1
    return rows


def _largest_edges(
    graph: DrawnGraph, held: Int[Tensor, " row"]
) -> tuple[Int[Tensor, " edge"], Int[Tensor, " node"]]:
    """The :data:`LISTED` largest edges of each type into each node that the page holds, from nodes
    that it holds too; and the place of each node among those held (-1: not held)."""
    place = torch.full((len(graph.names),), -1)
    place[held] = torch.arange(len(held))
    # sorted by size, then (stable) by target and type: an edge's place in its group is its rank
    inside = ((place[graph.sources] >= 0) & (place[graph.targets] >= 0)).nonzero()[:, 0]
    inside = inside[graph.weights[inside].abs().argsort(descending=True, stable=True)]
    # a number for each target and each of the three types
    into = 3 * graph.targets[inside] + graph.edge_types[inside]
    by_target = into.argsort(stable=True)
    inside, into = inside[by_target], into[by_target]
    first = torch.searchsorted(into, into)  # where the group of each edge begins
    return inside[torch.arange(len(into)) - first < LISTED], place


def _payload(graph: DrawnGraph, held: Int[Tensor, " row"]) -> dict[str, Any]:
    """The data of the page: the nodes that it holds, their edges and attention."""
    edges, place = _largest_edges(graph, held)
    rows = row_of(graph).tolist()
    attention = graph.attention.topk(min(SOURCES, graph.attention.shape[1]), dim=1)
    nodes = [
        {
            "name": graph.names[i],
            "lookup": graph.lookups[i],
            "position": int(graph.positions[i]),
            "row": rows[i],
            "shape": _shape(graph, i),
            "value": rounded(float(graph.values[i]), 7),
            "moved": rounded(float(graph.moved[i])),
            "reached": rounded(float(graph.reached[i]), 4),
            "totals": [rounded(v, 7) for v in graph.totals[i].tolist()],
            "numbers": [rounded(v, 4) for v in graph.node_numbers[i].tolist()],
            "mark": int(graph.node_marks[i]),
            "paid": [
                [j, rounded(p, 3)]
                for j, p in zip(
                    attention.indices[i].tolist(), attention.values[i].tolist(), strict=True
                )
                if p >= LEAST_PAID
            ]
            if graph.heads_of[i] >= 0
            else [],
        }
        for i in held.tolist()
    ]
    # the page needs the texts of only those positions that it names
    named = {n["position"] for n in nodes} | {j for n in nodes for j, _ in n["paid"]}
    ends = (place[graph.sources[edges]], place[graph.targets[edges]], graph.edge_types[edges])
    columns = [x.tolist() for x in (*ends, graph.weights[edges], graph.edge_marks[edges])]
    numbers = graph.edge_numbers[edges].tolist()
    return {
        "nodes": nodes,
        "edges": [
            [s, t, edge_type, rounded(w, 4), mark, *(rounded(x, 3) for x in more)]
            for s, t, edge_type, w, mark, more in zip(*columns, numbers, strict=True)
        ],
        "at": edges.tolist(),
        "tokens": [[i, *graph.columns[i]] for i in sorted(named) if i != NOWHERE],
        "blocks": graph.blocks,
        "target": graph.target,
        "written": rounded(graph.written),
        "whole": graph.whole,
        "legend": graph.legend,
        "dashes": [list(dash) for dash in graph.dashes],
        "prompts": graph.prompts,
        "start": min(START, len(nodes)),
        "all": len(graph.names),
    }


def _shape(graph: DrawnGraph, node: int) -> str:
    """The type of a node, which decides its mark."""
    if node == 0:
        return "logit"
    if graph.layers[node] < 0:
        return "constants" if graph.names[node] == CONSTANTS else "token"
    return "head" if graph.heads_of[node] >= 0 else "mlp"


def _caption(graph: DrawnGraph, data: dict[str, Any]) -> str:
    left_out = len(graph.names) - len(data["nodes"])
    share = f"{left_out} smaller are left out" if left_out else graph.kept
    return (
        f"{graph.value} The page holds {len(data['nodes'])} of the "
        f"graph’s {len(graph.names)} nodes ({share}) and of each node the {LISTED} largest edges "
        f"of a type, {len(data['edges'])} of {len(graph.weights)}; the other edges are in its last "
        "line, “everything else”. What is written adds up along value edges; what is moved is "
        "first order in the attention and adds up to nothing."
    )


def _height(data: dict[str, Any]) -> int:
    """Pixels that the page is likely to need; a taller page scrolls."""
    # as graph.js draws: 22 pixels for a row with a node, 3 for an empty one; 640 for all else
    rows = {n["row"] for n in data["nodes"][: data["start"]]}
    return min(TALLEST, 640 + 22 * len(rows) + 3 * (2 * data["blocks"] + 2 - len(rows)))


def graph_figure(graph: DrawnGraph) -> View:
    """The static image of :func:`tl_geometry.render.graph_page`: the graph as the page shows it
    first."""
    rows = row_of(graph)
    shown = sorted(graph.reached.argsort(stable=True)[:START].tolist())
    lines = {r: y for y, r in enumerate(sorted({int(rows[i]) for i in shown}))}
    columns = {p: x for x, p in enumerate(sorted({int(graph.positions[i]) for i in shown}))}
    cells: dict[tuple[int, int], list[int]] = {}
    for i in shown:
        cells.setdefault((int(graph.positions[i]), int(rows[i])), []).append(i)
    # nodes that share a position and a row stand side by side, evenly spaced across the column
    points = {
        i: (columns[position] + (k + 1) / (len(members) + 1) - 0.5, lines[row])
        for (position, row), members in cells.items()
        for k, i in enumerate(members)
    }
    figure, (axis,) = canvas(size=(max(6.0, 0.75 * len(columns)), 1.2 + 0.3 * len(lines)))
    largest = float(graph.values.abs().max().clamp(min=1e-300))
    edges, _ = _largest_edges(graph, torch.tensor(shown))
    for e in edges[graph.edge_types[edges] == 0].tolist():  # value edges
        ends = [points[int(of[e])] for of in (graph.sources, graph.targets)]
        weight = float(graph.weights[e])
        x, y = zip(*ends, strict=True)
        line: dict[str, Any] = {"lw": 0.2 + 4 * abs(weight) / largest, "alpha": 0.6, "zorder": 1}
        if mark := int(graph.edge_marks[e]):
            line["ls"] = (0, graph.dashes[mark - 1])
        axis.plot(x, y, color=POSITIVE if weight > 0 else NEGATIVE, **line)
    for i in shown:
        value, size = float(graph.values[i]), abs(float(graph.values[i])) / largest
        mark = {"mlp": "s", "logit": "D", "token": "^"}.get(_shape(graph, i), "o")
        colour = POSITIVE if value > 0 else NEGATIVE
        face = "white" if graph.node_marks[i] else colour
        look: dict[str, Any] = {"marker": mark, "facecolor": face, "edgecolor": colour}
        axis.scatter(*points[i], s=15 + 150 * size, **look, zorder=2)
        if graph.heads_of[i] >= 0:
            note: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6, "zorder": 3}
            axis.annotate(f"H{int(graph.heads_of[i])}", points[i], (4, 4), **note)
    labels = {p: " ".join(filter(None, column)) for p, column in enumerate(graph.columns)}
    labels[NOWHERE] = CONSTANTS
    names = [drawable(labels[p]) for p in columns]
    axis.set_xticks(range(len(columns)), names, fontsize=7, rotation=45, ha="right")
    # the inverse of row_of
    top = 2 * graph.blocks + 1
    label = lambda r: "logit" if r == top else f"{'block' if r % 2 else 'MLP'} {(r - 1) // 2}"  # noqa: E731
    axis.set_yticks(range(len(lines)), ["embeddings" if r == 0 else label(r) for r in lines])
    axis.tick_params(length=0, labelsize=7)
    axis.set(xlabel="token and its position", ylabel="block (those with a node)")
    return View(
        figure,
        title=graph.title,
        caption=f"{graph.value} The {len(shown)} largest of {len(graph.names)} nodes, as large as "
        "what they write towards the logit; lines are value edges, red for it and blue against it; "
        f"triangles are tokens, squares MLPs. {graph.legend}".strip(),
        null=SUMS,
        source=graph.source,
    )
