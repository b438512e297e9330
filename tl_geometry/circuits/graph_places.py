"""Which node of one logit's graph is which node of another? Common axes for several graphs.

:func:`tl_geometry.circuits.average_graphs` and :meth:`~tl_geometry.circuits.LogitGraph.compare`
call it. Positions become **places**: the positions themselves where all prompts have as many
tokens, or the user's names for some of them (``{"subject": 2, "end": -1}``), with the other
positions together as one place. A node is a component at a place. Where several positions share a
place their values and their edges are summed, so that all sums of a graph hold for its places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.circuits.logit_graph import CONSTANTS, LOGIT, NOWHERE, LogitGraph

ELSEWHERE = "elsewhere"
"""The place of all positions that have no name."""
Positions = Sequence[Mapping[str, int]]
"""Named positions of each graph."""


class Kept(NamedTuple):
    """Rows of the nodes of one graph, and its edges by key (:meth:`PlacedGraphs.ends`): each once,
    and sorted."""

    nodes: Int[Tensor, " node"]
    keys: Int[Tensor, " edge"]
    weights: Float[Tensor, " edge"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedGraphs:
    """Graphs on common axes. A row is a component at a place, ``component * places + place``; the
    last two rows are the logit and the constants. ``values`` and ``moved`` hold every row, also of
    nodes that a graph does not have; ``kept`` are the nodes and edges that each has.

    ``steps`` say when a component writes: leaves 0, heads of block l 2 l + 1, its MLP 2 l + 2;
    ``heads_of`` is its head (-1: none). ``place_tokens`` are the texts at each place (up to two).
    ``spans`` are the first and the last position of each place over all graphs, ``logit_place`` is
    where the logit is read.
    """

    places: tuple[str, ...]
    components: tuple[str, ...]
    steps: Int[Tensor, " writer"]
    heads_of: Int[Tensor, " writer"]
    place_tokens: tuple[str, ...]
    spans: Int[Tensor, "position side"]
    logit_place: int
    values: Float[Tensor, "sample row"]
    moved: Float[Tensor, "sample row"]
    kept: tuple[Kept, ...]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return self.values.shape[1]

    def name(self, row: int) -> tuple[str, str]:
        """Component and place of a row."""
        if row >= self.size - 2:
            return (LOGIT, CONSTANTS)[row - self.size + 2], ""
        component, place = divmod(row, len(self.places))
        return self.components[component], self.places[place]

    def where(self, rows: Int[Tensor, " node"]) -> dict[str, Int[Tensor, " node"]]:
        """Block, head and place of rows (-1: none), as fields of a result."""
        is_component = rows < self.size - 2
        components = torch.where(is_component, rows // len(self.places), 0)
        of_others = torch.where(rows == self.size - 2, self.logit_place, NOWHERE)
        return {
            "layers": torch.where(is_component, (self.steps[components] - 1) // 2, NOWHERE),
            "heads_of": torch.where(is_component, self.heads_of[components], NOWHERE),
            "positions": torch.where(is_component, rows % len(self.places), of_others),
        }

    def ends(
        self, keys: Int[Tensor, " edge"]
    ) -> tuple[Int[Tensor, " edge"], Int[Tensor, " edge"], Int[Tensor, " edge"]]:
        """Source row, target row and edge type of edges; ``key = (target * rows + source) * 3 +
        type``."""
        pairs = keys // 3
        return pairs % self.size, pairs // self.size, keys % 3


def place_graphs(graphs: Sequence[LogitGraph], positions: Positions | None) -> PlacedGraphs:
    """Graphs of one shape on common axes."""
    first = graphs[0]
    for graph in graphs[1:]:
        shapes = [(g.head_values.shape[:2], g.leaf_names, g.mlp) for g in (first, graph)]
        expected, got = "graphs of one shape, leaves and mlp=", f"{shapes[0]} and {shapes[1]}"
        require(shapes[0] == shapes[1], "graphs", expected=expected, got=got)
    places, place_of = _places(graphs, positions)
    layers, heads = first.head_values.shape[:2]
    names = [*first.leaf_names]
    names += [checks.head_name((l, h)) for l in range(layers) for h in range(heads)]
    names += [f"mlp{l}" for l in range(layers)]
    steps = torch.cat(
        [
            torch.zeros(len(first.leaf_names), dtype=torch.int64),
            (2 * torch.arange(layers) + 1).repeat_interleave(heads),
            2 * torch.arange(layers) + 2,
        ]
    )
    heads_of = torch.full_like(steps, NOWHERE)
    heads_of[steps % 2 == 1] = torch.arange(heads).repeat(layers)
    at_place = (
        torch.cat([(of == p).nonzero()[:, 0] for of in place_of]) for p in range(len(places))
    )
    spans = torch.stack([torch.stack([at.min(), at.max()]) for at in at_place])
    rows = [_rows(graph, of, len(places)) for graph, of in zip(graphs, place_of, strict=True)]
    size = len(names) * len(places) + 2
    tables = [_tables(graph, of, len(places)) for graph, of in zip(graphs, place_of, strict=True)]
    return PlacedGraphs(
        places=places,
        components=tuple(names),
        steps=steps,
        heads_of=heads_of,
        place_tokens=_place_tokens(graphs, place_of, len(places)),
        spans=spans,
        logit_place=_logit_place(graphs, places, place_of),
        values=torch.stack([values for values, _ in tables]),
        moved=torch.stack([moved for _, moved in tables]),
        kept=tuple(_kept(graph, of, size) for graph, of in zip(graphs, rows, strict=True)),
    )


def _places(
    graphs: Sequence[LogitGraph], positions: Positions | None
) -> tuple[tuple[str, ...], list[Int[Tensor, " position"]]]:
    """Names of the places (each has a position), and the place of every position of each graph."""
    lengths = [len(graph.token_ids) for graph in graphs]
    if positions is None:
        ends = sorted({(n, graph.position) for n, graph in zip(lengths, graphs, strict=True)})
        expected = "prompts of as many tokens, with the logit at the same position"
        instead = 'positions=[{"subject": 2, "end": -1}, ...], names for each prompt'
        got = f"(tokens, position) {ends}"
        require(len(ends) == 1, "graphs", expected=expected, got=got, instead=instead)
        return tuple(map(str, range(lengths[0]))), [torch.arange(n) for n in lengths]
    expected, got = f"names for each of {len(graphs)} graphs", f"{len(positions)}"
    require(len(positions) == len(graphs), "positions", expected=expected, got=got)
    names = tuple(positions[0])
    usable = len(names) > 0 and ELSEWHERE not in names
    got = f"{list(names)}"
    require(usable, "positions", expected=f"names other than {ELSEWHERE!r}", got=got)
    place_of = []
    for named, n in zip(positions, lengths, strict=True):
        expected, got = f"the same names, {list(names)}, for each graph", f"{list(named)}"
        require(set(named) == set(names), "positions", expected=expected, got=got)
        of = torch.full((n,), len(names))
        for place, name in enumerate(names):
            at = checks.index(named[name] + n * (named[name] < 0), n, f"position of {name!r}")
            if int(of[at]) < len(names):
                fail(
                    "positions", expected="one name a position", got=f"two names for position {at}"
                )
            of[at] = place
        place_of.append(of)
    unnamed = any(bool((of == len(names)).any()) for of in place_of)
    return (*names, ELSEWHERE) if unnamed else names, place_of


def _place_tokens(
    graphs: Sequence[LogitGraph], place_of: list[Int[Tensor, " position"]], places: int
) -> tuple[str, ...]:
    """Texts of the tokens at each place: one or two, or none where there are more."""
    texts: list[dict[str, None]] = [{} for _ in range(places)]
    for graph, of in zip(graphs, place_of, strict=True):
        for place, text in zip(of.tolist(), graph.str_tokens, strict=False):
            texts[place][text] = None
    return tuple("|".join(of) if len(of) <= 2 else "" for of in texts)


def _logit_place(
    graphs: Sequence[LogitGraph], places: tuple[str, ...], place_of: list[Int[Tensor, " position"]]
) -> int:
    """The one place where all graphs read their logit."""
    at = {int(of[graph.position]) for graph, of in zip(graphs, place_of, strict=True)}
    expected, got = "one name for where the logit is read", f"{[places[p] for p in sorted(at)]}"
    require(len(at) == 1, "positions", expected=expected, got=got)
    return at.pop()


def _tables(
    graph: LogitGraph, place_of: Int[Tensor, " position"], places: int
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Value and moved of every row."""
    pooling = torch.nn.functional.one_hot(place_of, places).double()
    out = []
    for name, ends in (
        ("values", [graph.value, graph.constant_value]),
        ("moved", [0.0, graph.constant_moved]),
    ):
        tables = [getattr(graph, f"{of}_{name}").double() for of in ("leaf", "head", "mlp")]
        pooled = [(table @ pooling).flatten() for table in tables]
        out.append(torch.cat([*pooled, torch.tensor(ends, dtype=torch.float64)]))
    return out[0], out[1]


def _rows(
    graph: LogitGraph, place_of: Int[Tensor, " position"], places: int
) -> Int[Tensor, " node"]:
    """The row of each node of a graph."""
    layers, heads = graph.head_values.shape[:2]
    leaves = {name: i for i, name in enumerate(graph.leaf_names)}
    component = torch.tensor([leaves.get(name, 0) for name in graph.names])
    is_head, is_mlp = graph.heads_of >= 0, (graph.layers >= 0) & (graph.heads_of < 0)
    component[is_head] = (len(leaves) + graph.layers * heads + graph.heads_of)[is_head]
    component[is_mlp] = (len(leaves) + layers * heads + graph.layers)[is_mlp]
    at = torch.where(graph.positions == NOWHERE, 0, graph.positions)
    rows = component * places + place_of[at]
    size = (len(leaves) + layers * heads + layers) * places
    rows[graph.names.index(LOGIT)] = size
    rows[graph.names.index(CONSTANTS)] = size + 1
    return rows


def _kept(graph: LogitGraph, rows: Int[Tensor, " node"], size: int) -> Kept:
    """Nodes as rows, and edges between them: those of the same ends and type are summed."""
    keys = (rows[graph.targets] * size + rows[graph.sources]) * 3 + graph.edge_types
    unique, place = keys.unique(return_inverse=True)
    weights = torch.zeros(len(unique), dtype=torch.float64)
    return Kept(rows.unique(), unique, weights.index_add_(0, place, graph.weights.double()))
