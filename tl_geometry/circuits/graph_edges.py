"""What does each node of a logit's graph read of what each other node wrote? These are its edges.

Called by :func:`tl_geometry.trace_logit`. The weight of an edge is the source's write m times how T
changes with it through the target alone. With L_j the linear map of the norm at j, p the pattern, q
and k queries and keys, and c = dT/d(score):

- value edges into a head at query i: ``p_ij (m_j L_j W_V) . dT/d(mixed value of the head at i)``;
  into an MLP: m times dT/d(its input at i); into the logit: times the readout;
- query edges: ``scale (query of m_i) . sum_j c_ij k_j``;
- key edges: ``scale c_ij (key of m_j) . q_i``.

For one prompt L_j keeps its scale, p, q and k are those of the run, and query and key edges each
sum to ``sum_j c_ij S_ij``, S without ALiBi, which no writer makes. Between two prompts m is the
difference of writes, L_j the map between both, p, q and k are means of both runs, and c follows
from the line integral of the softmax: the edges of all types together sum to the node's value.

Of each type of edges into a node the fewest are kept that carry a given share of the absolute sum.
What the others carry is one number, the node's rest of that type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.circuits.arithmetic import NormMap
from tl_geometry.circuits.runner import Attended, Block
from tl_geometry.circuits.walk import Layer, Walk, fewest_carrying

VALUE, QUERY, KEY = range(3)
"""Places in :data:`~tl_geometry.circuits.logit_graph.EDGE_TYPES`."""
TARGET_NODE, CONSTANTS_NODE = 0, 1
"""Rows of the two nodes that every graph has."""
TARGETS = 256
"""Targets whose sources are gathered at a time: of 100 sources each 100 MB for d_model 1,024."""


class EdgeFinder:
    """Forms the edges between the chosen nodes of one walk, block by block from the first, and
    prunes them as they are formed. ``sources`` are the nodes that have written so far,
    ``writes [source d_model]`` what they wrote."""

    def __init__(self, walk: Walk, nodes: dict[str, Any], keep: float) -> None:
        self.walk, self.keep, self.nodes, self.constant = walk, keep, nodes, walk.constant
        count, length = len(nodes["layers"]), len(walk.constant)
        self.totals, self.rest = (torch.zeros(count, 3, dtype=torch.float64) for _ in range(2))
        self.attention, self.response = torch.zeros(2, count, length, dtype=torch.float32)
        self.edges: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.positions = nodes["positions"].to(walk.constant.device)
        self.sources, self.writes = self.positions[:0], walk.constant[:0]
        for name, part in walk.leaves.items():
            rows = [i for i, other in enumerate(nodes["components"]) if other == name]
            at = torch.tensor(rows, dtype=torch.int64, device=self.positions.device)
            self._write(at, part[self.positions[at]])

    def tables(self) -> dict[str, Any]:
        """The nodes and edges of the graph, as fields of its result."""
        walk, device = self.walk, self.positions.device
        for block, layer in zip(walk.runner.blocks, walk.layers, strict=True):
            here, is_head = self.nodes["layers"] == block.number, self.nodes["heads_of"] >= 0
            heads, mlps = (x.nonzero()[:, 0].to(device) for x in (here & is_head, here & ~is_head))
            if block.parallel:
                self._into_mlp(mlps, layer)
            if len(heads):
                self._heads(block, layer, heads)
            self.constant = self.constant + layer.attention_constant
            if not block.parallel:
                self._into_mlp(mlps, layer)
            self._write(mlps, layer.mlp[self.positions[mlps]])
            self.constant = self.constant + layer.mlp_constant
        target = torch.tensor([TARGET_NODE], device=device)
        total = torch.tensor([walk.value], dtype=torch.float64)
        direction, constant = walk.direction.unsqueeze(0), walk.readout_constant
        self._from_stream(VALUE, target, direction, total, constant)
        names = ("sources", "targets", "edge_types", "weights")
        edges = dict(zip(names, map(torch.cat, zip(*self.edges, strict=True)), strict=True))
        tables = ("totals", "rest", "attention", "response")
        return self.nodes | edges | {name: getattr(self, name) for name in tables}

    def _write(self, nodes: Int[Tensor, " row"], writes: Float[Tensor, "row d_model"]) -> None:
        """Some nodes have written."""
        self.sources = torch.cat([self.sources, nodes])
        self.writes = torch.cat([self.writes, writes])

    def _add(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        weights: Float[Tensor, "row column"],
        constants: Float[Tensor, " row"],
        total: Float[Tensor, " row"],
        columns: Int[Tensor, "row column"] | None = None,
    ) -> None:
        """Prune the edges of one type into some targets; one from the constants is kept whatever
        its size. ``columns`` says whose ``weights`` they are, by default of all sources."""
        row, column = fewest_carrying(weights, self.keep).nonzero(as_tuple=True)
        values = weights[row, column].double().cpu()
        source = self.sources[column if columns is None else columns[row, column]].cpu()
        row, constants, targets = row.cpu(), constants.double().cpu(), targets.cpu()
        self.totals[targets, edge_type] = total.double().cpu()
        if self.keep < 1:  # with every edge kept the rest is rounding
            rest = self.totals[targets, edge_type] - constants
            self.rest[targets, edge_type] = rest.index_add(0, row, values, alpha=-1)
        own = constants.nonzero()[:, 0]
        sources = torch.cat([source, torch.full_like(own, CONSTANTS_NODE)])
        ends, values = targets[torch.cat([row, own])], torch.cat([values, constants[own]])
        self.edges.append((sources, ends, torch.full_like(ends, edge_type), values))

    def _same_place(self, at: Int[Tensor, " row"]) -> tuple[Int[Tensor, "row column"], Tensor]:
        """The sources at the position of each target, and which of these columns are there."""
        places, length = self.positions[self.sources], len(self.constant)
        order, counts = places.argsort(stable=True), places.bincount(minlength=length)
        first = counts.cumsum(0) - counts
        column = torch.arange(int(counts.max()), device=places.device)
        there = column < counts[at].unsqueeze(1)
        return order[((first[at].unsqueeze(1) + column) * there)], there

    def _from_stream(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        vectors: Float[Tensor, "row d_model"],
        total: Float[Tensor, " row"],
        constant: float | Float[Tensor, " row"] = 0.0,
    ) -> None:
        """Edges ``vector . write`` from what was written at the target's own position."""
        at = self.positions[targets]
        columns, there = self._same_place(at)
        steps = zip(vectors.split(TARGETS), columns.split(TARGETS), strict=True)
        each = [einsum(v, self.writes[c], "r d, r c d -> r c") for v, c in steps]
        weights = torch.cat(each) * there
        constants = (vectors * self.constant[at]).sum(-1) + constant
        self._add(edge_type, targets, weights, constants, total, columns)

    def _into_mlp(self, rows: Int[Tensor, " row"], layer: Layer) -> None:
        """Value edges into the MLP of a block; one that is a leaf reads nothing."""
        if len(rows) and not self.walk.leaf:
            at = self.positions[rows]
            self._from_stream(VALUE, rows, layer.mlp_read[at], layer.mlps[0, at])

    def _heads(self, block: Block, layer: Layer, rows: Int[Tensor, " row"]) -> None:
        """Edges into heads of one block, and what these wrote."""
        walk, arithmetic = self.walk, self.walk.arithmetic()
        entered, at = walk.states.streams[block.number], self.positions[rows]
        seen, response = walk.attended(block)
        with torch.no_grad():
            norm = arithmetic.map(block.layer.norm, entered)
            maps = {w: block.head_map(seen.sides[w].raw, w, arithmetic) for w in "qkv"}
            heads = self.nodes["heads_of"].to(rows.device)[rows]
            pattern = seen.pattern.mean(0)
            for field, x in ((self.attention, pattern), (self.response, response)):
                field[rows.cpu()] = x[heads, at].float().cpu()
            self._query_edges(block, rows, heads, seen, response, norm, maps["q"])
            every = torch.arange(entered.shape[1], device=entered.device)
            stream = ((self.writes, self.positions[self.sources]), (self.constant, every))
            normed = [(norm.at(at).linear(x), at) for x, at in stream]
            parts = {w: [block.parts(*x, w, maps[w]) for x in normed] for w in "kv"}
            if not walk.between:
                parts["k"][1] = parts["k"][1] + block.layer.k_constant[0, :, :: block.size("k")]
            q, c = seen.sides["q"].entering.mean(0), block.layer.scale * response
            size = block.size("k")
            for group in (heads // size).unique().tolist():  # whose heads share keys and values
                some = heads // size == group
                h, i = heads[some], at[some]
                values = (VALUE, "v", pattern[h, i], layer.z[0][i, h])
                for edge_type, which, cells, vectors in (values, (KEY, "k", c[h, i], q[i, h])):
                    each = [x[:, group] for x in parts[which]]
                    whole = walk.written(block, seen, which)[:, group * size]
                    self._across(edge_type, rows[some], cells, vectors, [*each, whole])
            writes = walk.head_writes(block, seen, arithmetic)[0]
        # after all edges into this block, so that no head reads another
        self._write(rows, writes[heads, at])

    def _across(
        self,
        edge_type: int,
        rows: Int[Tensor, " row"],
        cells: Float[Tensor, "row position"],
        vectors: Float[Tensor, "row d_head"],
        parts: Sequence[Float[Tensor, "_ d_head"]],
    ) -> None:
        """Value or key edges ``cell (vector . part)`` into heads that share these at some queries,
        from all positions: of the sources, of constants, and of all of the stream, which is the sum
        of both."""
        writes, constants, whole = parts
        weights = cells[:, self.positions[self.sources]] * (vectors @ writes.mT)
        constant = (cells * (vectors @ constants.mT)).sum(-1)
        total = (cells * (vectors.double() @ whole.double().mT)).sum(-1)
        self._add(edge_type, rows, weights, constant, total)

    def _query_edges(
        self,
        block: Block,
        rows: Int[Tensor, " row"],
        heads: Int[Tensor, " row"],
        seen: Attended,
        response: Float[Tensor, "head query key"],
        norm: NormMap,
        head_norm: NormMap | None,
    ) -> None:
        """Query edges into heads of one block at some queries: what the scores' gradient is of the
        stream there, by queries alone."""
        at, scale = self.positions[rows], block.layer.scale
        k = seen.sides["k"].entering.mean(0)
        pulled = (scale * einsum(response, k, "h i j, j h e -> h i e"))[heads, at]
        with torch.enable_grad():
            x = torch.zeros_like(self.constant[at], requires_grad=True)
            query = block.parts(norm.at(at).linear(x), at, "q", head_norm)
            own = query[torch.arange(len(rows), device=at.device), heads]
            vectors = torch.autograd.grad(own, x, pulled)[0]
        whole = self.walk.written(block, seen, "q")[at, heads]
        total = (pulled.double() * whole.double()).sum(-1)
        constant = (pulled * block.layer.q_constant[0][at, heads]).sum(-1)
        constant = constant * (not self.walk.between)
        self._from_stream(QUERY, rows, vectors, total, constant)
