"""Where does a logit come from? ``trace_logit`` follows it back to the tokens, in these steps.

1. One forward pass is frozen (:mod:`tl_geometry.circuits.frozen`). T, a logit or a difference of
   two, is read out of the last state through the final norm at its frozen scale.
2. One walk back gives the adjoint, dT/d(write), of every write; a node's **value** is ``write .
   adjoint``. With the MLPs followed, the values of embeddings and constants sum to T.
3. A second walk also follows queries and keys into the softmax. What it adds to a node's value is
   what the node does by the attention that it **moves**. Over all edges out of the node, that is
   its query and key edges, plus its value edges with the adjoint of each target replaced by what
   the second walk adds to that adjoint.
4. Nodes are kept until they carry ``keep`` of the sum of absolute values, and of everything moved.
   Edges between them are the source's write times what the target reads in it, and are pruned
   alike (:mod:`tl_geometry.circuits.graph_edges`).

A is the centring and s_j the frozen scale of the head's norm. A value edge from writer m at j to
head h at i is ``p_ij (m_j A gain / s_j W_V) . (dT/d mixed value of h at i)``; one to an MLP or to
the logit is alike, without attention. Query and key edges of head h at i are made with its
response ``c_ij = p_ij (t_ij - sum_j p_ij t_ij)``, dT/d(score), where t_ij is what one unit of
attention to j writes towards T: ``sum_j c_ij S_ij`` is additive in the writers of the query at i,
and in those of the keys at j.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import ReconstructionError, fail, require
from tl_geometry.circuits.frozen import Adjoints, FrozenPass
from tl_geometry.circuits.graph_edges import (
    AFTER_ATTENTION,
    AFTER_MLP,
    EdgeFinder,
    Nodes,
    dot,
    fewest_carrying,
)
from tl_geometry.circuits.logit_graph import CONSTANTS, LOGIT, NOWHERE, LogitGraph
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.scores.families import stream_parts
from tl_geometry.scores.splitter import check_basis, provenance_of
from tl_geometry.scores.values import target_ids, trained_head


class Readout(NamedTuple):
    """What T is: ``direction . last[position] + constant``."""

    direction: Float[Tensor, " d_model"]
    constant: float
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    probability: float


class ComponentValues(NamedTuple):
    """``write . adjoint`` of every component at every position."""

    leaves: Float[Tensor, "part position"]
    heads: Float[Tensor, "layer head position"]
    mlps: Float[Tensor, "layer position"]
    constant: float

    def flat(self) -> Float[Tensor, " row"]:
        """Leaves, heads and MLPs in one row."""
        return torch.cat([self.leaves.flatten(), self.heads.flatten(), self.mlps.flatten()])

    def of_nodes(self, logit: float, chosen: Bool[Tensor, " row"]) -> Float[Tensor, " node"]:
        """Those of the logit, of the constants, and of the ``chosen`` components."""
        ends = torch.tensor([logit, self.constant], dtype=torch.float64)
        return torch.cat([ends, self.flat()[chosen]])

    def minus(self, other: ComponentValues) -> ComponentValues:
        """Component by component."""
        return ComponentValues(
            self.leaves - other.leaves,
            self.heads - other.heads,
            self.mlps - other.mlps,
            self.constant - other.constant,
        )


def trace_logit(
    model: ModelLike,
    prompt: TokensLike,
    target: int | str,
    *,
    position: int | str = -1,
    against: int | str | None = None,
    log_probability: bool = False,
    mlp: str = "frozen",
    basis: PositionContext | None = None,
    keep: float = 0.8,
    prepend_bos: bool | None = None,
) -> LogitGraph:
    """One logit of one prompt as a graph back to the tokens, and why heads attended as they did.

    T is the logit of ``target`` at ``position``, less that of ``against``, or with
    ``log_probability`` less the mean logit under the model's own probabilities (the linear part of
    the log-probability). Logits are those before a soft cap of the output. In the frozen linear
    model of the pass (norm scales, patterns and MLP slopes fixed) T is a sum over the embeddings of
    all tokens and the constants, exactly.

    Args:
        prompt: one prompt, text or token ids.
        target, against: a token each, as an id or a text of one token.
        position: where the logit is read: a number (-1 is the last), or a name of the prompt's
            ``positions``.
        mlp: ``"frozen"`` follows MLPs back by their secant, ``"leaf"`` takes what they wrote as
            inputs (the only way for a mixture of experts).
        basis: of :func:`tl_geometry.decompose`; then the leaves are mean, pos and cvec of state 0
            in place of the embeddings: how much of T came from position and how much from content.
        keep: share of all absolute values (and of all that is moved) that the nodes of the graph
            carry, and the edges of each type into each node. What the other edges carry is one
            number for each node and edge type, its rest.

    Returns a :class:`LogitGraph`: ``.value`` (T), ``.tokens()``, ``.edges_into(node)``,
    ``.to_json("neuronpedia")``, ``.to_networkx()``, ``.save(path)``.

    Raises ``ReconstructionError`` where leaves and constants do not sum to T within the rounding of
    the model; ``UnsupportedModelError`` for an encoder, an output head other than a norm and a
    linear map, and (with ``mlp="frozen"``) an MLP other than two or three matrices.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=2)
    >>> graph = tlg.trace_logit(model, windows[:1], int(windows.tokens[0, 15]), position=14)
    >>> abs(float(graph.tokens().value.sum()) - graph.value) < 1e-4
    True
    """
    view = as_view(model)
    rows = as_tokens(view, prompt, prepend_bos=prepend_bos)
    got, instead = f"{len(rows)} prompts", "a call for each prompt"
    require(len(rows) == 1, "prompt", expected="one prompt", got=got, instead=instead)
    require(0 < keep <= 1, "keep", expected="a share above 0, at most 1", got=keep)
    checks.choice(mlp, ("frozen", "leaf"), "mlp")
    at = rows.position(position)
    check_basis(view, rows, basis)
    frozen = FrozenPass.of(view, rows.tokens, mlp=mlp)
    readout = logit_readout(view, frozen, at, target, against, log_probability)
    leaves, first_constant = frozen.leaves, frozen.embedding_constant
    if basis is not None:
        basis.require_raw("trace_logit")
        leaves = stream_parts(basis, ("pos", "cvec"), frozen.blocks[0].layer)
        # they sum to all of state 0; embeddings leave what a norm behind them added
        first_constant = torch.zeros_like(frozen.last)
    directions = torch.zeros_like(frozen.last)
    directions[0, at] = readout.direction.to(directions)
    adjoints = frozen.adjoints(directions)
    # these also follow queries and keys into the softmax: the response c_ij is made with them
    responsive = frozen.adjoints(directions, follow_patterns=True)
    values = _component_values(frozen, leaves, first_constant, adjoints, readout.constant)
    with_moved = _component_values(frozen, leaves, first_constant, responsive, readout.constant)
    moved = with_moved.minus(values)
    T = float(frozen.last[0, at].double() @ readout.direction.double()) + readout.constant
    _require_sum(frozen, values, T, mlp)
    chosen = fewest_carrying(values.flat(), keep) | fewest_carrying(moved.flat(), keep)
    nodes = _nodes(frozen, leaves, values, chosen, at)
    finder = EdgeFinder(frozen, nodes, first_constant, adjoints, responsive, keep)
    edges = finder.edges(readout.direction, readout.constant, T)
    return LogitGraph(
        provenance=provenance_of(view, rows, basis),
        str_tokens=rows.str_tokens,
        token_ids=tuple(rows.tokens[0].tolist()),
        position=at,
        target=readout.tokens,
        target_tokens=tuple(view.decode(readout.tokens)),
        target_weights=readout.weights,
        log_probability=log_probability,
        probability=readout.probability,
        value=T,
        mlp=mlp,
        keep=keep,
        leaf_names=tuple(leaves),
        leaf_values=values.leaves,
        leaf_moved=moved.leaves,
        head_values=values.heads,
        head_moved=moved.heads,
        mlp_values=values.mlps,
        mlp_moved=moved.mlps,
        constant_value=values.constant,
        constant_moved=moved.constant,
        names=nodes.names,
        layers=nodes.layers,
        heads_of=nodes.heads,
        positions=nodes.positions,
        values=values.of_nodes(T, chosen),
        moved=moved.of_nodes(0.0, chosen),
        **edges._asdict(),
    )


def logit_readout(
    view: ModelView,
    frozen: FrozenPass,
    position: int,
    target: int | str,
    against: int | str | None,
    log_probability: bool,
) -> Readout:
    """T as a direction of the last state and a constant, at the frozen scale of the final norm."""
    head = trained_head(view, instead="composition(model, prompts), which needs no logits")
    tokens = [target] if against is None else [target, against]
    ids = target_ids(view, tokens)
    differ, got = len(set(ids)) == len(ids), f"{view.decode(ids[:1])[0]!r} twice"
    require(differ, "target, against", expected="two different tokens", got=got)
    one_of_them, what = len(ids) == 1 or not log_probability, "against, log_probability"
    require(one_of_them, what, expected="one of them", got="both")
    last = frozen.last[0, position]
    scale = head.norm.scale(last)
    probabilities = head.logits(last).softmax(-1)
    weights = torch.zeros_like(head.b_U)
    weights[list(ids)] = weights.new_tensor([1.0, -1.0][: len(ids)])
    if log_probability:
        weights = weights - probabilities
    readout = head.W_U @ weights
    direction = head.norm.centre(readout * head.norm.gain) / scale
    constant = float(
        head.norm.bias.double() @ readout.double() + head.b_U.double() @ weights.double()
    )
    chosen = tuple(weights[list(ids)].tolist())
    return Readout(direction, constant, ids, chosen, float(probabilities[ids[0]]))


def _component_values(
    frozen: FrozenPass,
    leaves: dict[str, Tensor],
    first_constant: Tensor,
    adjoints: Adjoints,
    readout_constant: float,
) -> ComponentValues:
    """``write . adjoint`` of every component, and the sum over all constants."""
    constant = dot(first_constant, adjoints.stream[0]).sum() + readout_constant
    heads, mlps = [], []
    for l, block in enumerate(frozen.blocks):
        constant = constant + dot(block.attention_constant, adjoints.after_attention[l]).sum()
        heads.append(dot(block.heads.z, adjoints.heads[l])[0].mT)
        write = block.mlp_leaf if block.mlp is None else block.mlp.written
        after = adjoints.stream[l + 1]
        mlps.append(heads[-1].new_zeros(after.shape[1]) if write is None else dot(write, after)[0])
        if block.mlp is not None:
            constant = constant + dot(block.mlp.constant, after).sum()
    parts = torch.stack([dot(leaf, adjoints.stream[0])[0] for leaf in leaves.values()])
    return ComponentValues(
        parts.cpu(), torch.stack(heads).cpu(), torch.stack(mlps).cpu(), float(constant)
    )


def _require_sum(frozen: FrozenPass, values: ComponentValues, T: float, mlp: str) -> None:
    """Raise where leaves and constants do not sum to T within the rounding of all that is added up
    on the way."""
    total = float(values.leaves.sum()) + values.constant
    total += float(values.mlps.sum()) if mlp == "leaf" else 0.0
    # leaves, heads and MLPs: all but the constant
    size = sum(float(x.abs().sum()) for x in values[:3]) + abs(values.constant)
    bound = reconstruction_bound(frozen.roundoff, size)
    if not abs(total - T) <= bound:  # NaN is refused too
        fail(
            f"logit of {frozen.view.name}",
            expected=f"{T:.6g} as the sum over tokens and constants, within {bound:.1e}",
            got=f"{total:.6g}",
            instead="check_model(model)",
            error=ReconstructionError,
        )


def _nodes(
    frozen: FrozenPass,
    leaves: dict[str, Tensor],
    values: ComponentValues,
    chosen: Bool[Tensor, " row"],
    position: int,
) -> Nodes:
    """The logit, the constants, and the ``chosen`` components."""
    leaf, head, mlp = chosen.split([x.numel() for x in values[:3]])
    names, rows, writes = [LOGIT, CONSTANTS], [], []
    end = 3 * len(frozen.blocks)
    nowhere = (NOWHERE, NOWHERE)
    # each row: layer, head, position, when the write enters the stream, when the node reads it.
    # These two enter after the end, so that no target reads them: edges from the constants are
    # formed apart
    rows += [(*nowhere, position, end + 1, end), (*nowhere, NOWHERE, end + 1, NOWHERE)]
    writes += [torch.zeros_like(frozen.last[0, 0])] * 2
    for part, at in leaf.view_as(values.leaves).nonzero().tolist():
        name = list(leaves)[part]
        names.append(name)
        rows.append((*nowhere, at, 0, NOWHERE))
        writes.append(leaves[name][0, at])
    of_blocks = zip(frozen.blocks, head.view_as(values.heads), strict=True)
    for l, (block, chosen_heads) in enumerate(of_blocks):
        heads_of, at = chosen_heads.nonzero().T
        names += [checks.head_name((l, h)) for h in heads_of.tolist()]
        rows += [
            (l, h, i, 3 * l + AFTER_ATTENTION, 3 * l)
            for h, i in zip(heads_of.tolist(), at.tolist(), strict=True)
        ]
        writes += block.heads.some(heads_of, at)
    for l, at in mlp.view_as(values.mlps).nonzero().tolist():
        block = frozen.blocks[l]
        parallel = block.mlp is not None and block.mlp.spec.parallel
        reads = NOWHERE if block.mlp is None else 3 * l + (0 if parallel else AFTER_ATTENTION)
        write = block.mlp_leaf if block.mlp is None else block.mlp.written
        names.append(f"mlp{l}")
        rows.append((l, NOWHERE, at, 3 * l + AFTER_MLP, reads))
        writes.append(write[0, at])  # type: ignore[index]
    layers, heads_of, positions, enters, reads = torch.tensor(rows).T
    return Nodes(tuple(names), layers, heads_of, positions, enters, reads, torch.stack(writes))
