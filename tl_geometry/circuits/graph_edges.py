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

from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.circuits.runner import Apart, Attended, Block
from tl_geometry.circuits.walk import Layer, Walk, fewest_carrying

VALUE, QUERY, KEY = range(3)
"""Places in :data:`~tl_geometry.circuits.logit_graph.EDGE_TYPES`."""
TARGET_NODE, CONSTANTS_NODE = 0, 1
"""Rows of the two nodes that every graph has."""


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
        self._from_stream(target, walk.direction.unsqueeze(0), total, walk.readout_constant)
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
        targets: Int[Tensor, " row"],
        vectors: Float[Tensor, "row d_model"],
        total: Float[Tensor, " row"],
        constant: float = 0.0,
    ) -> None:
        """Value edges ``vector . write`` from what was written at the target's own position."""
        at = self.positions[targets]
        columns, there = self._same_place(at)
        weights = einsum(vectors, self.writes[columns], "r d, r c d -> r c") * there
        constants = (vectors * self.constant[at]).sum(-1) + constant
        self._add(VALUE, targets, weights, constants, total, columns)

    def _into_mlp(self, rows: Int[Tensor, " row"], layer: Layer) -> None:
        """Value edges into the MLP of a block; one that is a leaf reads nothing."""
        if len(rows) and not self.walk.leaf:
            at = self.positions[rows]
            self._from_stream(rows, layer.mlp_read[at], layer.mlps[0, at])

    def _heads(self, block: Block, layer: Layer, rows: Int[Tensor, " row"]) -> None:
        """Edges into heads of one block, and what these wrote."""
        walk, arithmetic = self.walk, self.walk.arithmetic()
        entered = walk.states.streams[block.number]
        with torch.enable_grad():
            seen = block.attend(Apart(entered), arithmetic)
            cotangent = walk.both(layer.z[-1])
            response = torch.autograd.grad(seen.z, seen.scores, cotangent)[0][0]
        with torch.no_grad():
            norm = arithmetic.map(block.spec.norm, entered)
            every = torch.arange(entered.shape[1], device=entered.device)
            stream = {"writes": (self.writes, self.positions[self.sources])}
            stream |= {"constants": (self.constant, every)}
            parts = {}
            for name, (vectors, at) in stream.items():
                normed = norm.at(at).linear(vectors)
                for which in "qkv":
                    head_norm = block.head_map(seen.sides[which].raw, which, arithmetic)
                    parts[name, which] = block.parts(normed, at, which, head_norm)
            if not walk.between:
                for which in "qk":
                    constant = getattr(block.layer, f"{which}_constant")[0]
                    parts["constants", which] = parts["constants", which] + constant
            heads = self.nodes["heads_of"].to(rows.device)[rows]
            for head in heads.unique().tolist():
                of_head = {name: x[:, head] for name, x in parts.items()}
                self._into_head(block, layer, head, rows[heads == head], seen, response, of_head)
            writes = walk.head_writes(block, seen, arithmetic)[0]
        # after all edges into this block, so that no head reads another
        self._write(rows, writes[heads, self.positions[rows]])

    def _into_head(
        self,
        block: Block,
        layer: Layer,
        head: int,
        rows: Int[Tensor, " row"],
        seen: Attended,
        response: Float[Tensor, "head query key"],
        parts: dict[tuple[str, str], Float[Tensor, "source d_head"]],
    ) -> None:
        """Value, query and key edges into one head at some queries, from the queries, keys and
        values that ``parts`` of the stream make."""
        at, source = self.positions[rows], self.positions[self.sources]
        pattern, response = seen.pattern[:, head].mean(0)[at], response[head][at]
        q, k = (seen.sides[w].entering[:, :, head].mean(0) for w in "qk")
        adjoint, c = layer.z[0][at, head], block.spec.scale * response
        pulled, q = c @ k, q[at]
        columns, there = self._same_place(at)
        weights = (
            pattern[:, source] * (adjoint @ parts["writes", "v"].mT),
            einsum(pulled, parts["writes", "q"][columns], "r e, r c e -> r c") * there,
            c[:, source] * (q @ parts["writes", "k"].mT),
        )
        # what all of the stream makes sums to all edges; without constants of the values
        whole = {w: self.walk.written(block, seen, w)[:, head].double() for w in "qkv"}
        each = {w: parts["constants", w] for w in "qkv"}
        constants, totals = (
            (
                (pattern * (adjoint.to(x["v"]) @ x["v"].mT)).sum(-1),
                (pulled * x["q"][at]).sum(-1),
                (c * (q.to(x["k"]) @ x["k"].mT)).sum(-1),
            )
            for x in (each, whole)
        )
        self.attention[rows.cpu()], self.response[rows.cpu()] = (
            x.float().cpu() for x in (pattern, response)
        )
        for kind in (VALUE, QUERY, KEY):
            picked = columns if kind == QUERY else None
            self._add(kind, rows, weights[kind], constants[kind], totals[kind], picked)
