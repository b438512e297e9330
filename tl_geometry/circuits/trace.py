"""Where does a logit come from? ``trace_logit`` follows it back to the tokens, in these steps.

1. The model is run (:mod:`tl_geometry.circuits.runner`); T, a logit or a difference of two, is read
   out of the last state through the final norm as a linear map.
2. A walk back through the blocks gives dT/d(write) of every write; a node's **value** is ``write .
   dT/d(write)``. In the graph of one prompt everything that is not linear is frozen
   (:class:`~tl_geometry.circuits.arithmetic.Frozen`): values of embeddings and constants sum to T.
   Between two prompts writes are differences and the maps those of
   :class:`~tl_geometry.circuits.arithmetic.Between`: values of embeddings sum to the difference.
3. In the graph of one prompt a second gradient also follows queries and keys into the softmax. What
   it adds to a node's value is what the node does by the attention that it **moves**.
4. Nodes are kept until they carry ``keep`` of the sum of absolute values, of everything moved, and
   of what is written straight to the logit. Edges between them are formed and pruned alike
   (:mod:`tl_geometry.circuits.graph_edges`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import choice, require
from tl_geometry.circuits.graph_edges import EdgeFinder
from tl_geometry.circuits.logit_graph import CONSTANTS, NOWHERE, TARGET, LogitGraph
from tl_geometry.circuits.prompt_pairs import measured, share_of
from tl_geometry.circuits.walk import Values, Walk, fewest_carrying
from tl_geometry.corpus.prompt_sets import Prompts, as_prompts
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.write_spec import require_decoder
from tl_geometry.scores.families import stream_parts
from tl_geometry.scores.splitter import check_basis, provenance_of


def trace_logit(
    model: ModelLike,
    prompt: TokensLike | Prompts,
    answer: int | str | None = None,
    *,
    other: int | str | None = None,
    counterfactual: TokensLike | None = None,
    position: int | str = -1,
    mlp: str = "frozen",
    basis: PositionContext | None = None,
    keep: float = 0.8,
    prepend_bos: bool | None = None,
) -> LogitGraph:
    """Direct logit attribution, continued through every block: one logit of one prompt as a graph
    back to the tokens, and why heads attended as they did; or the difference of the logit between a
    prompt and a counterfactual as an exact sum.

    T is the logit of ``answer`` at ``position``, less that of ``other``, before a soft cap of the
    output. In the frozen linear model of the pass (norm scales, patterns and MLP slopes fixed) T is
    a sum over the embeddings of all tokens and the constants, exactly. With ``counterfactual`` the
    difference of T between both prompts is a sum over the tokens that differ, through norms,
    softmax and MLPs, query and key edges included, exactly. A model in half precision is traced by
    its weights in float32.

    Args:
        prompt: one prompt, a text or token ids; or :class:`~tl_geometry.corpus.Prompts` of one,
            which hold answers and counterfactual.
        answer, other: a token each, as an id or a text of one token.
        counterfactual: another prompt of as many tokens.
        position: where the logit is read: a number (-1 is the last), or a name of the prompt's
            ``positions``.
        mlp: ``"frozen"`` follows MLPs back, ``"leaf"`` takes what they wrote as inputs (the only
            way for a mixture of experts).
        basis: of :func:`tl_geometry.decompose`, of raw states, for one prompt; then the leaves are
            mean, pos and cvec of state 0 in place of the embeddings: how much of T came from
            position and how much from content.
        keep: share of all absolute values (of all that is moved, and of what is written straight
            to the logit) that the nodes of the graph carry, and the edges of each type into each
            node. What the other edges carry is one number for each node and edge type, its rest.

    Raises ``ReconstructionError`` where the sum is not T within the rounding of the model;
    ``UnsupportedModelError`` for an encoder, an output head other than a norm and a linear map,
    and (with ``mlp="frozen"``) an MLP other than two or three matrices, as a mixture of experts.

    Sources: the graph between two runs is of this library; a norm, softmax or product between two
    points by the mean value theorem as in integrated gradients (Sundararajan et al. 2017).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=2).tokens
    >>> graph = tlg.trace_logit(model, windows[:1], int(windows[0, 15]), position=14)
    >>> abs(sum(graph.tokens().column("value")) - graph.value) < 1e-4
    True
    >>> two = tlg.trace_logit(model, windows[:1], 5, counterfactual=windows[1:])
    >>> abs(sum(two.tokens().column("value")) - two.value) < 1e-4
    True
    """
    view = as_view(model)
    options = {"counterfactuals": counterfactual, "answers": answer, "others": other}
    asked = as_prompts(view, prompt, **options, prepend_bos=prepend_bos)
    got, instead = f"{len(asked)} prompts", "a call for each prompt"
    require(len(asked) == 1, "prompt", expected="one prompt", got=got, instead=instead)
    keep = share_of(keep, "keep")
    choice(mlp, ("frozen", "leaf"), "mlp")
    require_decoder(view, f"logits of {view.name}")
    rows, at = asked.as_windows(), int(asked.at(position))
    check_basis(view, rows, basis)
    others = asked.counterfactuals
    one = basis is None or others is None
    require(one, "basis, counterfactual", expected="one of them", got="both")
    if basis is not None:
        basis.require_raw("trace_logit")
    tokens = asked.tokens if others is None else torch.cat([asked.tokens, others])
    walk = Walk.of(view, asked, tokens, at, leaf=mlp == "leaf")
    if basis is not None:
        parts = stream_parts(basis, ("pos", "cvec"), walk.runner.blocks[0].layer)
        walk.leaves = {name: part[0] for name, part in parts.items()}
        walk.constant = torch.zeros_like(walk.constant)  # the parts sum to all of state 0
    walk.walk()
    values = walk.values()
    walk.require_sum(values.map(lambda way: way[0]))
    found = _components(walk, values, keep)
    answer, *rest = view.decode(walk.answers)
    ids = [torch.tensor([token] * len(tokens)) for token in walk.answers]
    capped = float(walk.one(measured(walk.states.logits.double(), None, ids)))
    return LogitGraph(
        provenance=provenance_of(view, rows, basis),
        texts=tuple(view.decode(asked.tokens[0].tolist())),
        token_ids=tuple(asked.tokens[0].tolist()),
        counterfactual=None if others is None else tuple(view.decode(others[0].tolist())),
        position=walk.position,
        answer=answer,
        other=rest[0] if rest else None,
        answer_ids=walk.answers,
        probability=float(walk.states.logits[0, 0].softmax(-1)[walk.answers[0]]),
        value=walk.value,
        capped=None if walk.runner.head.softcap is None else capped,
        mlp=mlp,
        keep=keep,
        **found,
    )


def _components(walk: Walk, ways: Values, keep: float) -> dict[str, Any]:
    """Values of all components, the chosen nodes, and the edges between them."""
    values, straight, nan = ways.map(lambda way: way[0]), walk.straight(), torch.nan
    moved = ways.map(lambda way: way[0] * nan if walk.between else way[1] - way[0])
    sizes = values.map(torch.zeros_like)
    for size, value in zip(sizes[:3], straight[:3], strict=True):
        size[..., walk.position] = value
    chosen = fewest_carrying(values.flat(), keep) | fewest_carrying(sizes.flat(), keep)
    if not walk.between:
        chosen = chosen | fewest_carrying(moved.flat(), keep)
    nodes = _nodes(walk, values, chosen)
    ends = torch.tensor([walk.value, float(values.constant)], dtype=torch.float64)
    ends_moved = torch.stack([moved.constant * 0, moved.constant])  # NaN stays
    found = EdgeFinder(walk, nodes, keep).tables()
    for name, value in (("values", values), ("moved", moved)):
        fields = zip(("leaf", "head", "mlp"), value[:3], strict=True)
        found |= {f"{part}_{name}": numbers for part, numbers in fields}
    mlps = [block.number for block in walk.runner.blocks if block.mlp is not None]
    names = (*walk.leaves, *(f"mlp{layer}" for layer in mlps), CONSTANTS)
    direct = torch.cat([straight.leaves, straight.mlps[mlps], straight.constant.unsqueeze(0)])
    count = len(names) - walk.between  # two runs have no constants
    return found | {
        "leaf_names": tuple(walk.leaves),
        "constant": float(values.constant),
        "constant_moved": float(moved.constant),
        "direct_heads": torch.stack([layer.direct_heads for layer in walk.layers]).cpu(),
        "direct_names": names[:count],
        "direct_others": direct[:count],
        "values": torch.cat([ends, values.flat()[chosen]]),
        "moved": torch.cat([ends_moved, moved.flat()[chosen]]),
    }


def _nodes(walk: Walk, values: Values, chosen: Bool[Tensor, " row"]) -> dict[str, Any]:
    """Component, layer, head and position of the logit, the constants and the chosen."""
    parts = zip(chosen.split([x.numel() for x in values[:3]]), values[:3], strict=True)
    leaf, head, mlp = (marks.view_as(x).nonzero().tolist() for marks, x in parts)
    names, none = list(walk.leaves), NOWHERE
    rows = [(TARGET, none, none, walk.position), (CONSTANTS, none, none, none)]
    rows += [(names[part], none, none, at) for part, at in leaf]
    rows += [(head_name((layer, h)), layer, h, at) for layer, h, at in head]
    rows += [(f"mlp{layer}", layer, none, at) for layer, at in mlp]
    components, *columns = zip(*rows, strict=True)
    layers, heads, positions = (torch.tensor(column) for column in columns)
    places = {"layers": layers, "heads_of": heads, "positions": positions}
    return {"components": tuple(components), **places}
