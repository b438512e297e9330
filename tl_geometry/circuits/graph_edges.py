"""Edges between the kept nodes of a logit's graph: what each target reads of what each source wrote.

Called by :func:`tl_geometry.trace_logit`. Every weight is ``coefficient[target, position of source]
* (write of source . reading vector of target)``; the reading vector of a target is how T changes
with the stream that it reads, through it alone:

- value edges into a head at query i: W_V and the adjoint of its mixed value, with coefficient
  ``p_ij / s_j``; into an MLP: its adjoint; into the logit: the readout;
- query edges: the gradient of ``sum_j c_ij S_ij`` with respect to the query at i;
- key edges: the same with respect to the key at j (the reading vector then turns with j).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.circuits.frozen import (
    Adjoints,
    FrozenBlock,
    FrozenPass,
    attention_response,
    turn_back,
)

AFTER_ATTENTION, AFTER_MLP = 1, 2
"""When a write enters the stream, in steps of three for each block: a block reads at 3 l, attention
has written at 3 l + 1, the MLP at 3 l + 2."""
KEY_CELLS = 2**24
"""Numbers of turned-back keys that are held at a time."""
VALUE, QUERY, KEY = 0, 1, 2
"""Places of the edge types in :data:`tl_geometry.circuits.logit_graph.EDGE_TYPES`."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a graph: what they are, what they wrote (``writes``), when their write
    ``enters`` the stream, and when they ``read`` it (-1: never)."""

    names: tuple[str, ...]
    layers: Int[Tensor, " node"]
    heads: Int[Tensor, " node"]
    positions: Int[Tensor, " node"]
    enters: Int[Tensor, " node"]
    reads: Int[Tensor, " node"]
    writes: Float[Tensor, "node d_model"]

    def of_heads(self, layer: int) -> Int[Tensor, " row"]:
        """Nodes that are heads of a block."""
        return ((self.layers == layer) & (self.heads >= 0)).nonzero()[:, 0]

    def of_mlp(self, layer: int) -> Int[Tensor, " row"]:
        """Nodes that are the MLP of a block."""
        return ((self.layers == layer) & (self.heads < 0)).nonzero()[:, 0]


class Edges(NamedTuple):
    """All edges between nodes: ``weights[edge type, source, target]``, of which ``constants`` come
    from the constants, and ``totals[target, edge type]``, what all edges into a target sum to,
    those from writers outside the graph included."""

    weights: Float[Tensor, "side node node"]
    constants: Float[Tensor, "node side"]
    totals: Float[Tensor, "node side"]
    attention: Float[Tensor, "node position"]


class EdgeFinder:
    """Forms all edges between the nodes of one frozen pass, block by block."""

    def __init__(
        self,
        frozen: FrozenPass,
        nodes: Nodes,
        start: Float[Tensor, "batch position d_model"],
        adjoints: Adjoints,
        responsive: Adjoints,
    ) -> None:
        self.frozen, self.nodes = frozen, nodes
        self.adjoints, self.responsive = adjoints, responsive
        count, length = len(nodes.names), frozen.last.shape[1]
        like = {"dtype": torch.float64}
        self.weights = torch.zeros(3, count, count, **like)
        self.constants = torch.zeros(count, 3, **like)
        self.totals = torch.zeros(count, 3, **like)
        self.attention = torch.zeros(count, length)
        self.constant_stream = start[0]
        self.positions = nodes.positions.clamp(min=0).to(nodes.writes.device)

    def edges(self, direction: Float[Tensor, " d_model"], constant: float, value: float) -> Edges:
        """Everything; ``direction`` and ``constant`` are the readout, ``value`` is T."""
        for layer, block in enumerate(self.frozen.blocks):
            rows = self.nodes.of_heads(layer)
            if len(rows):
                self._into_heads(block, layer, rows)
            middle = self.constant_stream + block.attention_constant[0]
            rows = self.nodes.of_mlp(layer)
            if len(rows) and block.mlp is not None:
                reads = self.constant_stream if block.mlp.spec.parallel else middle
                self._into_mlp(block, layer, rows, reads)
            self.constant_stream = middle
            if block.mlp is not None:
                self.constant_stream = middle + block.mlp.constant[0]
        at = self.nodes.positions[:1]
        self._add(VALUE, torch.tensor([0]), direction.unsqueeze(0), self._one_position(at))
        self.constants[0, VALUE] += constant
        self.totals[0, VALUE] = value
        return Edges(self.weights, self.constants, self.totals, self.attention)

    def _one_position(self, positions: Int[Tensor, " row"]) -> Float[Tensor, "row position"]:
        length = self.frozen.last.shape[1]
        one = torch.nn.functional.one_hot(positions, length)
        return one.to(self.nodes.writes)

    def _add(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        vectors: Float[Tensor, "row d_model"],
        coefficients: Float[Tensor, "row position"],
        constant_stream: Float[Tensor, "position d_model"] | None = None,
    ) -> None:
        """Edges of one type into some targets, and what they read of the constants."""
        products = self.nodes.writes.double() @ vectors.double().mT
        weights = products * coefficients[:, self.positions].double().mT
        self.weights[edge_type][:, targets] = self._allowed(weights, targets).cpu()
        constants = self.constant_stream if constant_stream is None else constant_stream
        read = einsum(
            coefficients.double(), constants.double(), vectors.double(), "r j, j d, r d -> r"
        )
        self.constants[targets, edge_type] += read.cpu()

    def _allowed(
        self, weights: Float[Tensor, "node row"], targets: Int[Tensor, " row"]
    ) -> Float[Tensor, "node row"]:
        """Only writes that were there when the target read, at a position."""
        nodes = self.nodes
        there = (nodes.enters[:, None] <= nodes.reads[targets]) & (nodes.positions >= 0)[:, None]
        return torch.where(there.to(weights.device), weights, 0.0)

    def _into_mlp(
        self, block: FrozenBlock, layer: int, rows: Int[Tensor, " row"], constants: Tensor
    ) -> None:
        if block.mlp is None:
            raise RuntimeError("an MLP that is a leaf reads nothing")
        at = self.nodes.positions[rows]
        after = self.adjoints.stream[layer + 1]
        vectors = block.mlp.adjoint(after)[0, at]
        self._add(VALUE, rows, vectors, self._one_position(at), constants)
        wrote = block.mlp.written[0, at].double()
        self.totals[rows, VALUE] = (wrote * after[0, at].double()).sum(-1).cpu()

    def _into_heads(self, block: FrozenBlock, layer: int, rows: Int[Tensor, " row"]) -> None:
        """Value, query and key edges into heads of one block."""
        attention, heads, at = block.layer, self.nodes.heads[rows], self.nodes.positions[rows]
        pick = (0, heads, torch.arange(len(rows)))
        pattern, slope = block.pattern(at)
        self.attention[rows] = pattern[pick].float().cpu()
        of_value, of_response = (a.heads[layer] for a in (self.adjoints, self.responsive))
        adjoint = of_value[0, at, heads]
        vectors = einsum(block.reader("v")[:, heads], adjoint, "d r e, r e -> r d")
        self._add(VALUE, rows, vectors, pattern[pick] * attention.v_scale[0, :, heads].mT)
        mixed = block.heads.z[0, at, heads].double()
        self.totals[rows, VALUE] = (mixed * adjoint.double()).sum(-1).cpu()
        response = attention_response(attention, pattern, slope, of_response[:, at])[pick]
        self._by_query(block, rows, response * attention.scale)
        self._by_key(block, rows, response * attention.scale)

    def _by_query(
        self, block: FrozenBlock, rows: Int[Tensor, " row"], response: Float[Tensor, "row key"]
    ) -> None:
        attention, heads, at = block.layer, self.nodes.heads[rows], self.nodes.positions[rows]
        weight = einsum(response, attention.k[0, :, heads], "r j, j r e -> r e")
        whole = torch.zeros_like(attention.q)
        whole[0, at, heads] = weight
        turned = turn_back(attention, "q", whole)[0, at, heads]
        vectors = einsum(block.reader("q")[:, heads], turned, "d r e, r e -> r d")
        self._add(QUERY, rows, vectors, self._one_position(at))
        fixed = (attention.q_constant[0, at, heads].double() * weight.double()).sum(-1)
        self.constants[rows, QUERY] += fixed.cpu()
        query = attention.q[0, at, heads].double()
        self.totals[rows, QUERY] = (query * weight.double()).sum(-1).cpu()

    def _by_key(
        self, block: FrozenBlock, rows: Int[Tensor, " row"], response: Float[Tensor, "row key"]
    ) -> None:
        attention, heads, at = block.layer, self.nodes.heads[rows], self.nodes.positions[rows]
        _, length, count, d_head = attention.k.shape
        # one matrix for all heads: writes and constants as keys before rotation and scale
        reader = block.reader("k")
        writes = einsum(self.nodes.writes, reader, "n d, d h e -> n h e")
        constants = einsum(self.constant_stream, reader, "j d, d h e -> j h e")
        for some in torch.arange(len(rows)).split(max(1, KEY_CELLS // (length * count * d_head))):
            query = attention.q[0, at[some], heads[some]]
            weight = response[some].unsqueeze(-1) * query.unsqueeze(1)  # [row key d_head]
            whole = attention.k.new_zeros(len(some), length, count, d_head)
            whole[torch.arange(len(some)), :, heads[some]] = weight
            back = turn_back(attention, "k", whole)[torch.arange(len(some)), :, heads[some]]
            read = einsum(
                back[:, self.positions].double(),
                writes[:, heads[some]].double(),
                "r n e, n r e -> n r",
            )
            targets = rows[some]
            self.weights[KEY][:, targets] = self._allowed(read, targets).cpu()
            fixed = einsum(back.double(), constants[:, heads[some]].double(), "r j e, j r e -> r")
            own = attention.k_constant.expand_as(attention.k)[0][:, heads[some]].double()
            fixed = fixed + einsum(weight.double(), own, "r j e, j r e -> r")
            self.constants[targets, KEY] += fixed.cpu()
            keys = attention.k[0][:, heads[some]].double()
            self.totals[targets, KEY] = einsum(weight.double(), keys, "r j e, j r e -> r").cpu()
