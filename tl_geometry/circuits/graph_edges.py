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

from typing import Any, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.circuits.runner import Apart, Attended, Block, Write
from tl_geometry.circuits.walk import Layer, Walk, fewest_carrying

VALUE, QUERY, KEY = range(3)
"""Places in :data:`~tl_geometry.circuits.logit_graph.EDGE_TYPES`."""
TARGET_NODE, CONSTANTS_NODE = 0, 1
"""Rows of the two nodes that every graph has."""


class _Sources(NamedTuple):
    """Nodes that have written so far: their numbers, positions and writes."""

    nodes: Int[Tensor, " source"]
    positions: Int[Tensor, " source"]
    writes: Float[Tensor, "source d_model"]


class EdgeFinder:
    """Forms the edges between the chosen nodes of one walk, block by block from the first, and
    prunes them."""

    def __init__(
        self,
        walk: Walk,
        leaves: dict[str, Write],
        first_constant: Write,
        nodes: dict[str, Any],
        keep: float,
    ) -> None:
        self.walk, self.keep, self.nodes = walk, keep, nodes
        count, length = len(self.nodes["layers"]), len(first_constant)
        self.totals, self.rest = (torch.zeros(count, 3, dtype=torch.float64) for _ in range(2))
        self.attention, self.response = torch.zeros(2, count, length)
        self.constant = first_constant
        self.found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        device = first_constant.device
        self.positions = self.nodes["positions"].to(device)
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        self.sources = _Sources(empty, empty, first_constant[:0])
        for name, part in leaves.items():
            rows = [i for i, other in enumerate(self.nodes["components"]) if other == name]
            at = torch.tensor(rows, dtype=torch.int64, device=device)
            self._write(at, part[self.positions[at]])

    def tables(self) -> dict[str, Any]:
        """The nodes and edges of the graph, as fields of its result."""
        walk = self.walk
        for block, layer in zip(walk.runner.blocks, walk.layers, strict=True):
            here = self.nodes["layers"] == block.number
            heads = (here & (self.nodes["heads_of"] >= 0)).nonzero()[:, 0].to(self.positions.device)
            mlps = (here & (self.nodes["heads_of"] < 0)).nonzero()[:, 0].to(self.positions.device)
            if block.parallel:
                self._into_mlp(mlps, layer)
            if len(heads):
                self._heads(block, layer, heads)
            self.constant = self.constant + layer.attention_constant
            if not block.parallel:
                self._into_mlp(mlps, layer)
            self._write(mlps, layer.mlp[self.positions[mlps]])
            self.constant = self.constant + layer.mlp_constant
        target = torch.tensor([TARGET_NODE], device=self.positions.device)
        self.totals[TARGET_NODE, VALUE] = walk.value
        self._here(VALUE, target, walk.direction.unsqueeze(0), walk.readout_constant)
        names = ("sources", "targets", "edge_types", "weights")
        edges = dict(zip(names, (torch.cat(x) for x in zip(*self.found, strict=True)), strict=True))
        tables = {"totals": self.totals, "rest": self.rest}
        return (
            self.nodes | edges | tables | {"attention": self.attention, "response": self.response}
        )

    def _write(self, nodes: Int[Tensor, " row"], writes: Float[Tensor, "row d_model"]) -> None:
        """Some nodes have written."""
        new = (nodes, self.positions[nodes], writes)
        self.sources = _Sources(*(torch.cat(x) for x in zip(self.sources, new, strict=True)))

    def _add(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        weights: Float[Tensor, "row source"],
        constants: Float[Tensor, " row"],
    ) -> None:
        """Prune the edges of one type into some targets; one from the constants is kept whatever
        its size."""
        carrying = fewest_carrying(weights, self.keep)
        carried = torch.where(carrying, weights, 0.0).sum(1, dtype=torch.float64) + constants
        rows, columns = carrying.nonzero().T
        targets, constants = targets.cpu(), constants.double().cpu()
        rest = self.totals[targets, edge_type] - carried.cpu()
        # with every edge kept the rest is rounding
        self.rest[targets, edge_type] = rest if self.keep < 1 else torch.zeros_like(rest)
        own = constants.nonzero()[:, 0]
        ends = torch.cat([targets[rows.cpu()], targets[own]])
        sources = torch.cat(
            [self.sources.nodes[columns].cpu(), torch.full_like(own, CONSTANTS_NODE)]
        )
        values = torch.cat([weights[rows, columns].double().cpu(), constants[own]])
        self.found.append((sources, ends, torch.full_like(ends, edge_type), values))

    def _here(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        vectors: Float[Tensor, "row d_model"],
        constant: float = 0.0,
    ) -> None:
        """Edges ``vector . write`` from what was written at the target's own position."""
        at = self.positions[targets]
        weights = vectors @ self.sources.writes.mT
        weights = weights * (self.sources.positions == at.unsqueeze(1))
        self._add(edge_type, targets, weights, (vectors * self.constant[at]).sum(-1) + constant)

    def _into_mlp(self, rows: Int[Tensor, " row"], layer: Layer) -> None:
        """Value edges into the MLP of a block; one that is a leaf reads nothing."""
        if not len(rows) or self.walk.leaf:
            return
        at = self.positions[rows]
        self.totals[rows.cpu(), VALUE] = layer.ways[0].mlp[at].cpu()
        self._here(VALUE, rows, layer.ways[0].mlp_read[at])

    def _heads(self, block: Block, layer: Layer, rows: Int[Tensor, " row"]) -> None:
        """Edges into heads of one block, and what these wrote."""
        walk, arithmetic, sources = self.walk, self.walk.arithmetic(), self.sources
        entered = walk.states.streams[block.number]
        with torch.enable_grad():
            seen = block.attend(Apart(entered), arithmetic)
            cotangent = walk.both(layer.ways[-1].z)
            response = torch.autograd.grad(seen.z, seen.scores, cotangent)[0][0]
        with torch.no_grad():
            norm = arithmetic.map(block.spec.norm, entered)
            everywhere = torch.arange(entered.shape[1], device=entered.device)
            normed = norm.at(sources.positions).linear(sources.writes)
            constant = norm.at(everywhere).linear(self.constant)
            projected, constants = {}, {}
            for which in "qkv":
                head_norm = block.head_map(seen.sides[which].raw, which, arithmetic)
                projected[which] = block.parts(normed, sources.positions, which, head_norm)
                constants[which] = block.parts(constant, everywhere, which, head_norm)
            if not walk.between:
                constants["q"] = constants["q"] + block.layer.q_constant[0]
                constants["k"] = constants["k"] + block.layer.k_constant[0]
            writes = walk.head_writes(block, seen, arithmetic)[0]
            heads = self.nodes["heads_of"].to(rows.device)[rows]
            for head in heads.unique().tolist():
                sides = ({w: x[:, head] for w, x in y.items()} for y in (projected, constants))
                of_head = rows[heads == head]
                self._into_head(block, layer, head, of_head, seen, response[head], *sides)
        # after all edges into this block, so that no head reads another
        self._write(rows, writes[heads, self.positions[rows]])

    def _into_head(
        self,
        block: Block,
        layer: Layer,
        head: int,
        rows: Int[Tensor, " row"],
        seen: Attended,
        response: Float[Tensor, "query key"],
        projected: dict[str, Float[Tensor, "source d_head"]],
        constants: dict[str, Float[Tensor, "position d_head"]],
    ) -> None:
        """Value, query and key edges into one head at some queries."""
        at, scale, source = self.positions[rows], block.spec.scale, self.sources.positions
        pattern = seen.pattern[:, head].mean(0)[at]
        q, k = (seen.sides[w].entering[:, :, head].mean(0) for w in "qk")
        adjoint, c = layer.ways[0].z[at, head], scale * response[at]
        pulled = c @ k
        weights = (
            pattern[:, source] * (adjoint @ projected["v"].mT),
            (source == at.unsqueeze(1)) * (pulled @ projected["q"].mT),
            c[:, source] * (q[at] @ projected["k"].mT),
        )
        from_constants = (
            (pattern * (adjoint @ constants["v"].mT)).sum(-1),
            (pulled * constants["q"][at]).sum(-1),
            (c * (q[at] @ constants["k"].mT)).sum(-1),
        )
        self._totals(rows, layer, head, seen, pattern, pulled, c, q)
        self.attention[rows.cpu()] = pattern.float().cpu()
        self.response[rows.cpu()] = response[at].float().cpu()
        for edge_type in (VALUE, QUERY, KEY):
            self._add(edge_type, rows, weights[edge_type], from_constants[edge_type])

    def _totals(
        self,
        rows: Int[Tensor, " row"],
        layer: Layer,
        head: int,
        seen: Attended,
        pattern: Tensor,
        pulled: Tensor,
        response: Tensor,
        q: Tensor,
    ) -> None:
        """What all edges of each type into some nodes sum to."""
        at, targets = self.positions[rows], rows.cpu()
        if not self.walk.between:
            self.totals[targets, VALUE] = layer.ways[0].heads[head, at].cpu()
            total = (pulled.double() * q[at].double()).sum(-1).cpu()
            self.totals[targets, QUERY] = self.totals[targets, KEY] = total
            return
        sides = (seen.sides[w].entering[:, :, head].detach().double() for w in "qkv")
        dq, dk, dv = (x[0] - x[1] for x in sides)
        adjoint = layer.ways[0].z[at, head].double()
        by_value = (pattern.double() * einsum(adjoint, dv, "r e, j e -> r j")).sum(-1)
        by_key = (response.double() * einsum(q[at].double(), dk, "r e, j e -> r j")).sum(-1)
        self.totals[targets, VALUE] = by_value.cpu()
        self.totals[targets, QUERY] = (pulled.double() * dq[at]).sum(-1).cpu()
        self.totals[targets, KEY] = by_key.cpu()
