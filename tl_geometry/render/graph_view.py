"""Where did a logit come from? The page of its graph (which heads, MLPs and tokens wrote it, and
why the heads attended as they did) and of its text. Notebooks, the gallery and ``tl-geometry
trace`` show them.

The text stands above, each token in the colour of what came from it. Below, the graph has tokens
along x, and blocks from the embeddings at the bottom to the logit at the top; each writer has a
mark at its position, each value edge a line. A click lists the edges of a node; the last line of
the list of what a node read is what it leaves out, so that it sums to the node (between two
prompts with queries and keys, in a graph of one prompt by values alone).
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from tl_geometry.base.errors import require
from tl_geometry.base.html import signed, token_text
from tl_geometry.base.results import Result
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.render import figure as draw
from tl_geometry.render import parts
from tl_geometry.render.page import Page

START, MOST = 40, 400
"""How many nodes the page shows first, and how many it holds at most: some hundred kilobytes for
any prompt and model."""
SUMS = "Value edges and what is left out add up to the logit exactly: they have no null."
BETWEEN = "Value, query and key edges add up to the difference exactly: they have no null."


def graph_page(graph: LogitGraph) -> Page:
    """The attribution graph of a logit as a page: tokens along x, blocks upwards, marks for what
    writes at each position (circles are heads, squares MLPs, diamonds tokens), lines for value
    edges, red for the logit and blue against it.

    A slider sets how many nodes are shown. A click (or Tab and Enter) chooses a node and lists what
    it read as values, who wrote its query and its keys, and who read it; a click on a name goes on
    to that node. The page holds the 400 largest nodes, and of each type of edges into a node the 12
    largest; the rest is the last line of a list.

    Args:
        graph: from :func:`tl_geometry.trace_logit`, of one prompt or between two
            (``counterfactual=``).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> graph = tlg.trace_logit(model, windows, int(windows.tokens[0, 15]), position=14)
    >>> graph_page(graph).title  # .save("graph.html") writes the page
    'L0H3 at 14 wrote +1.78 of the logit 3.99 of “␣t”'
    """
    draw.require_result(graph, LogitGraph, "graph", "trace_logit(model, prompt, answer)")
    exact = graph.counterfactual is not None
    nodes = _nodes(graph.nodes)
    edges = _edges(graph.edges, nodes, exact=exact)
    tokens = draw.frame(graph.tokens(), "position", "value")
    tokens = tokens[tokens["position"] >= 0]
    caption = "Marks are as large as what they wrote, lines as wide as what went along them; "
    caption += "dashed lines of the chosen node are queries, dotted ones keys"
    caption += "." if exact else " (first order in the attention, and no part of the sum)."
    text = parts.tokens("From which tokens", graph.texts, tokens["value"].tolist(), graph.position)
    drawn = parts.arcs(nodes, edges, texts=[*map(token_text, graph.texts)], exact=exact)
    return Page(
        title=_title(graph, nodes, exact=exact),
        caption=f"{caption} Choose a node to list its edges.",
        parts=[text, drawn],
        begin={"shown": min(START, len(nodes)), "node": int((nodes["kind"] == "head").argmax())},
        height=1000,
        source=graph.provenance.line(),
        null=BETWEEN if exact else SUMS,
    )


def _nodes(table: pd.DataFrame) -> pd.DataFrame:
    """The largest nodes, the target first, with the row that each stands on: the embeddings on row
    0, heads of block l on row 2 l + 1, its MLP above them, the target on top."""
    nodes: Any = table[table["kind"] != "rest"].reset_index(drop=True)
    target, leaf = nodes["kind"] == "target", nodes["layer"] < 0
    row = (2 * nodes["layer"] + 1 + (nodes["kind"] == "mlp")).mask(leaf, 0)
    row = row.mask(target, 1 + row[~target].max() // 2 * 2 + 1)  # above the last MLP
    nodes = nodes.assign(row=row, name=nodes["component"].mask(target, "logit"))
    order = (-nodes["value"].abs()).mask(target, -float("inf")).argsort(kind="stable")
    return nodes.iloc[order].head(MOST).reset_index(drop=True)


def _edges(table: pd.DataFrame, nodes: pd.DataFrame, *, exact: bool) -> pd.DataFrame:
    """The largest edges of each type into each node, by the places of their ends among ``nodes``;
    what a list leaves out has the source -1."""
    place: Any = pd.Series(nodes.index, nodes["node"])
    edges: Any = table.assign(at=table["source"].map(place), target=table["target"].map(place))
    edges = edges[edges["target"].notna()].astype({"target": int})
    group = ["target", "type"]
    whole = edges.groupby(group)["value"].sum()
    if not exact:  # the value edges into a node of one prompt sum to it, whatever the graph holds
        read = whole.index[whole.index.get_level_values("type") == "value"]
        whole[read] = nodes["value"].loc[read.get_level_values("target")].to_numpy()
    held = edges[edges["at"].notna()]
    held = held.iloc[(-held["value"].abs()).argsort(kind="stable")]
    held = held[held.groupby(group).cumcount() < parts.LISTED]
    rest = whole.sub(held.groupby(group)["value"].sum(), fill_value=0.0)
    if not exact:  # the others sum to what moved, which no list claims
        rest = rest[rest.index.get_level_values("type") == "value"]
    held = held.assign(source=held["at"].astype(int))[["source", "target", "type", "value"]]
    found: Any = pd.concat([held, rest.reset_index().assign(source=-1)], ignore_index=True)
    return found[found["value"].abs() > 1e-6 * whole.abs().max()]  # below it is rounding


def _title(graph: LogitGraph, nodes: pd.DataFrame, *, exact: bool) -> str:
    """What the largest head wrote, of what."""
    answer = f"“{token_text(graph.answer)}”"
    if graph.other is not None:
        answer += f" minus “{token_text(graph.other)}”"
    number = signed(float(graph.value))
    logit = f"the difference {number} in the logit" if exact else f"the logit {number}"
    wrote = nodes[nodes["kind"] == "head"].head(1)
    if not len(wrote):
        return f"What wrote {logit} of {answer}"
    best: Any = wrote.iloc[0]
    name = f"{best['component']} at {int(best['position'])}"
    return f"{name} wrote {signed(best['value'], '+.2f')} of {logit} of {answer}"


def token_attribution(table: Result | pd.DataFrame, *, title: str = "") -> Page:
    """The text of a prompt. The colour of each token is its value: red for the logit, blue against
    it. Values above a twentieth of the largest stand below their token.

    Args:
        table: from ``trace_logit(...).tokens()``, or any table with ``token`` and ``value``; rows
            of position -1 (constants) stand in the caption.
        title: title of the page.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> graph = tlg.trace_logit(model, windows, int(windows.tokens[0, 15]), position=14)
    >>> token_attribution(graph.tokens()).title
    'What each token contributes to the logit'
    """
    rows: Any = draw.frame(table, "token", "value")
    placed = rows if "position" not in rows else rows[rows["position"] >= 0]
    known, expected = int(placed["value"].count()), f"one number for each of {len(placed)} tokens"
    once = "position" not in rows or placed["position"].is_unique  # .direct() has many for a token
    require(once, "table", expected="one row for each token", got=f"{len(placed)} rows")
    require(known == len(placed) > 0, "table", expected=expected, got=known)
    rest, total = rows["value"].sum() - placed["value"].sum(), rows["value"].sum()
    constants = f" and the constants ({signed(rest, '+.3g')})" if len(placed) < len(rows) else ""
    what = "difference between two prompts" if "counterfactual" in rows else "logit"
    return Page(
        title=title or f"What each token contributes to the {what}",
        caption="Each token has the colour of its value, red for the logit and blue against it. "
        f"The tokens{constants} sum to {signed(total, '.4g')}.",
        parts=[parts.tokens("", placed["token"].tolist(), placed["value"].tolist())],
        begin={},
        height=220 + 26 * (sum(map(len, placed["token"].astype(str))) // 80),
        source=draw.source_of(table),
        null=f"The parts add up to the {what} exactly: they have no null.",
    )
