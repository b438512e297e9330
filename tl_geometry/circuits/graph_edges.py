"""What does each node of a logit's graph read of what each other node wrote? These are its edges.

Called by :func:`tl_geometry.trace_logit`. The weight of an edge is the source's write m times how T
(the logit, or a difference of two) changes with it through the target alone; A is centring, s_j the
frozen scale of the norm at j:

- value edges into a head at query i: ``p_ij (m_j A gain / s_j W_V) . (dT/d mixed value of the
  head at i)``; into an MLP: its adjoint at i; into the logit: the readout;
- query edges: ``(query of m_i) . g_i``, with ``g_i = scale sum_j c_ij k_j`` and attention's
  response ``c_ij`` (:func:`~tl_geometry.circuits.frozen.attention_response`);
- key edges: ``scale c_ij (key of m_j) . q_i``.

Query edges and key edges each sum to ``sum_j c_ij S_ij``, S without ALiBi, which no writer makes.
Of each type of edges into a node the fewest are kept that carry a given share of the absolute sum.
What the others carry is one number, the node's rest of that type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_geometry.base.transfer import on_cpu
from tl_geometry.circuits.frozen import Adjoints, FrozenBlock, FrozenPass, attention_response
from tl_geometry.circuits.logit_graph import KEY, QUERY, VALUE

AFTER_ATTENTION, AFTER_MLP = 1, 2
"""When a write enters the stream, in steps of three for each block: block l reads at 3 l, its
attention has written at 3 l + 1, its MLP at 3 l + 2."""
LOGIT_NODE, CONSTANTS_NODE = 0, 1
"""Rows of the two nodes that every graph has."""
EDGE_CELLS = 2**24
"""Edges that are held at a time before pruning (64 MB in float32)."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a graph: what they are, what they wrote (``writes``), when their write enters
    the stream (``enters``), and when they read it (``reads``; -1: never)."""

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
    """The kept edges, and for each node and edge type what all edges sum to (``totals``) and what
    those left out carry (``rest``). ``attention`` and ``response`` are pattern and dT/d(score) of
    each node that is a head, 0 for the others."""

    sources: Int[Tensor, " edge"]
    targets: Int[Tensor, " edge"]
    edge_types: Int[Tensor, " edge"]
    weights: Float[Tensor, " edge"]
    totals: Float[Tensor, "node side"]
    rest: Float[Tensor, "node side"]
    attention: Float[Tensor, "node position"]
    response: Float[Tensor, "node position"]


def fewest_carrying(
    sizes: Float[Tensor, "*row column"], keep: float
) -> Bool[Tensor, "*row column"]:
    """In each row, the fewest columns whose absolute sizes make up the share ``keep`` of all.

    >>> fewest_carrying(torch.tensor([5.0, -1.0, 3.0, 1.0]), 0.8).tolist()
    [True, False, True, False]
    """
    size = sizes.abs()
    ordered, order = size.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    # 1e-6: a share reached but for rounding counts as reached; zeros are never kept
    short = (before < keep * ordered.sum(-1, keepdim=True) * (1 - 1e-6)) & (ordered > 0)
    return torch.zeros_like(short).scatter(-1, order, short if keep < 1 else ordered > 0)


class EdgeFinder:
    """Forms the edges between the nodes of one frozen pass, block by block, and prunes them."""

    def __init__(
        self,
        frozen: FrozenPass,
        nodes: Nodes,
        first_constant: Float[Tensor, "batch position d_model"],
        adjoints: Adjoints,
        responsive: Adjoints,
        keep: float,
    ) -> None:
        self.frozen, self.nodes, self.keep = frozen, nodes, keep
        self.adjoints, self.responsive = adjoints, responsive
        count, length = len(nodes.names), frozen.last.shape[1]
        # in the order in which they enter the stream, what a target has read is a slice
        self.order = nodes.enters.argsort(stable=True)
        self.enters, self.positions = nodes.enters[self.order], nodes.positions[self.order]
        self.writes = nodes.writes[self.order]
        self.by_position = _by_position(self.positions, length)
        self.totals, self.rest = (torch.zeros(count, 3, dtype=torch.float64) for _ in range(2))
        self.attention, self.response = torch.zeros(2, count, length)
        # what constants have written so far: edges() adds to it, block by block
        self.constant_stream = first_constant[0]
        self.kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def edges(self, direction: Float[Tensor, " d_model"], constant: float, value: float) -> Edges:
        """All edges; ``direction`` and ``constant`` are the readout, ``value`` is T."""
        for layer, block in enumerate(self.frozen.blocks):
            heads = self.nodes.of_heads(layer)
            step = max(1, EDGE_CELLS // len(self.nodes.names))
            for rows in heads.split(step) if len(heads) else ():
                self._into_heads(block, layer, rows)
            parallel = block.mlp is not None and block.mlp.spec.parallel
            if parallel:
                self._into_mlp(layer)
            self.constant_stream = self.constant_stream + block.attention_constant[0]
            if block.mlp is not None:
                if not parallel:
                    self._into_mlp(layer)
                self.constant_stream = self.constant_stream + block.mlp.constant[0]
        # the logit reads by its readout, like an MLP by its adjoint
        logit, vectors = torch.tensor([LOGIT_NODE]), direction.unsqueeze(0)
        self.totals[logit, VALUE] = value
        constants = torch.tensor([constant], dtype=torch.float64)
        self._from_own_position(VALUE, logit, vectors, constants.to(vectors.device))
        columns = zip(*self.kept, strict=True)
        sources, targets, types, weights = (torch.cat(column) for column in columns)
        tables = self.totals, self.rest, self.attention, self.response
        return Edges(sources, targets, types, weights, *tables)

    def _add(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        weights: Float[Tensor, "row column"],
        places: Int[Tensor, "row column"],
        constants: Float[Tensor, " row"],
    ) -> None:
        """Prune the edges of one type into some targets; an edge from the constants is kept
        whatever its size. ``places`` says which source each column is, in ``order``."""
        carrying = fewest_carrying(weights, self.keep)
        carried = torch.where(carrying, weights, 0.0).sum(1, dtype=torch.float64) + constants
        rows, columns = carrying.nonzero().T
        # indexed, as a mask would wait for the device once more
        kept = weights[rows, columns].double()
        carried, constants, rows, columns, kept = on_cpu([carried, constants, rows, columns, kept])
        self.rest[targets, edge_type] = self.totals[targets, edge_type] - carried
        with_constants = (constants != 0).nonzero()[:, 0]
        sources = self.order[places[rows, columns]]
        targets = torch.cat([targets[rows], targets[with_constants]])
        self.kept.append(
            (
                torch.cat([sources, torch.full_like(with_constants, CONSTANTS_NODE)]),
                targets,
                torch.full_like(targets, edge_type),
                torch.cat([kept, constants[with_constants]]),
            )
        )

    def _read_by(self, targets: Int[Tensor, " row"]) -> int:
        """How many writes, in ``order``, were in the stream when targets of one layer read it."""
        return int((self.enters <= self.nodes.reads[targets[0]]).sum())

    def _from_own_position(
        self,
        edge_type: int,
        targets: Int[Tensor, " row"],
        vectors: Float[Tensor, "row d_model"],
        constants: Float[Tensor, " row"] | None = None,
    ) -> None:
        """Edges ``vector . write`` from what was written at the target's own position, as for
        queries, MLPs and the logit. The edge from the constants is that of the constants in the
        stream, plus ``constants``."""
        at, count = self.nodes.positions[targets], self._read_by(targets)
        from_constants = dot(vectors, self.constant_stream[at])
        if constants is not None:
            from_constants = from_constants + constants
        places = self.by_position[at]
        read = (places >= 0) & (places < count)
        # writes at a position stand in the order in which they enter: those read come first
        places, read = (x[:, : int(read.sum(1).max())] for x in (places, read))
        products = vectors @ self.writes[:count].mT
        rows = torch.arange(len(targets)).unsqueeze(1)
        weights = products[rows, torch.where(read, places, 0)] * read.to(products)
        self._add(edge_type, targets, weights, places, from_constants)

    def _from_values(
        self,
        targets: Int[Tensor, " row"],
        vectors: Float[Tensor, "row d_model"],
        paid: Float[Tensor, "row position"],
    ) -> None:
        """Edges ``paid[position of the write] * vector . write`` into the values of heads;
        ``paid`` is the attention to each position, times the frozen scale there."""
        count = self._read_by(targets)
        constants = dot(paid, vectors @ self.constant_stream.mT)
        weights = vectors @ self.writes[:count].mT * paid[:, self.positions[:count]]
        self._add(VALUE, targets, weights, torch.arange(count).expand(weights.shape), constants)

    def _into_mlp(self, layer: int) -> None:
        """Value edges into the MLP of a block."""
        rows, mlp = self.nodes.of_mlp(layer), self.frozen.blocks[layer].mlp
        vectors = self.adjoints.mlps[layer]
        if mlp is None or vectors is None:
            raise RuntimeError("an MLP that is a leaf reads nothing")
        if len(rows):
            at, after = self.nodes.positions[rows], self.adjoints.stream[layer + 1]
            self.totals[rows, VALUE] = dot(mlp.written[0, at], after[0, at]).cpu()
            self._from_own_position(VALUE, rows, vectors[0, at])

    def _into_heads(self, block: FrozenBlock, layer: int, rows: Int[Tensor, " row"]) -> None:
        """Value, query and key edges into heads of one block."""
        layer_view, heads, at = block.layer, self.nodes.heads[rows], self.nodes.positions[rows]
        # each row's own head, of all heads at the queries of all rows
        pick = (0, heads, torch.arange(len(rows)))
        patterns, slope = block.pattern(at)
        value_adjoints, all_adjoints = (a.heads[layer] for a in (self.adjoints, self.responsive))
        response = attention_response(layer_view, patterns, slope, all_adjoints[:, at])[pick]
        pattern = patterns[pick]
        seen = pattern.float(), response.float()
        response = response * layer_view.scale
        adjoint, query = value_adjoints[0, at, heads], layer_view.q[0, at, heads]
        gradient = einsum(response, layer_view.k[0][:, heads], "r j, j r e -> r e")
        mixed = block.heads.z[0, at, heads]
        by_value, by_score = dot(mixed, adjoint), dot(query, gradient)
        self.attention[rows], self.response[rows], by_value, by_score = on_cpu(
            [*seen, by_value, by_score]
        )
        self.totals[rows, VALUE] = by_value
        # both are sum_j c_ij S_ij
        self.totals[rows, QUERY] = self.totals[rows, KEY] = by_score
        n_heads = layer_view.q.shape[2]
        vectors = block.back(_at_head(n_heads, heads, adjoint), "v")
        self._from_values(rows, vectors, pattern * layer_view.v_scale[0, :, heads].mT)
        vectors = block.to_stream(_at_head(n_heads, heads, gradient), "q", at)
        constants = dot(gradient, layer_view.q_constant[0, at, heads])
        self._from_own_position(QUERY, rows, vectors, constants)
        self._from_keys(block, rows, query, response)

    def _from_keys(
        self,
        block: FrozenBlock,
        rows: Int[Tensor, " row"],
        query: Float[Tensor, "row d_head"],
        response: Float[Tensor, "row position"],
    ) -> None:
        """Key edges. A key is rotated by the position of its source, so that no one direction of
        the stream stands for a query at all sources. Each write is made a key instead, once for all
        heads that share keys."""
        count, everywhere = self._read_by(rows), torch.arange(response.shape[1])
        at = self.positions[:count]
        keys = block.keys(self.writes[:count], at)
        group_size = block.layer.q.shape[2] // keys.shape[1]
        queries = _at_head(keys.shape[1], self.nodes.heads[rows] // group_size, query).flatten(1)
        constant_keys = block.keys(self.constant_stream, everywhere)
        constant_keys = (constant_keys + block.layer.k_constant[0, :, ::group_size]).flatten(1)
        constants = dot(response, queries @ constant_keys.mT)
        weights = queries @ keys.flatten(1).mT * response[:, at]
        self._add(KEY, rows, weights, torch.arange(count).expand(weights.shape), constants)


def _at_head(
    count: int, heads: Int[Tensor, " row"], x: Float[Tensor, "row d_head"]
) -> Float[Tensor, "row head d_head"]:
    """A vector of each target on an axis of ``count`` heads, zero but for its own head, for maps
    that take all heads at once."""
    padded = x.new_zeros(len(x), count, x.shape[1])
    padded[torch.arange(len(x)), heads] = x
    return padded


def _by_position(positions: Int[Tensor, " node"], length: int) -> Int[Tensor, "position column"]:
    """Where each position occurs in ``positions``, ascending; -1 fills the rows."""
    places = [(positions == at).nonzero()[:, 0] for at in range(length)]
    return pad_sequence(places, batch_first=True, padding_value=-1)


def dot(a: Float[Tensor, "*row column"], b: Float[Tensor, "*row column"]) -> Float[Tensor, "*row"]:
    """Dot products over the last axis, summed in float64."""
    return (a.double() * b.double()).sum(-1)
