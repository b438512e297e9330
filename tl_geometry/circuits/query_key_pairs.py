"""Which pair of parts, one of the query and one of the key, made a head look where it looked?
:func:`attention_pairs` answers for one row of a head.

:func:`tl_geometry.trace_logit` says who wrote the query and who wrote the keys, each by itself. A
score is made of both: ``attention_pairs`` takes one row of a head and any split of its scores (by
writer, by position and content, by the features of a dictionary) and gives both numbers of each
pair (a, b) at each key j, with X_ab the pair's part of the score:

- **weight** ``c_ij X_ab[i, j]``, c the response of the graph, dT/d(score). First order: what T
  gains by what the pair adds to the score. All together sum to the node's query (or key) total.
- **gain** ``(p_ij - u_ij) X_ab[i, j]``, p the attention among the kept keys, u uniform on them.
  Exact, and without a logit: what the pair does to put attention where it is. All together sum to
  ``KL(p | u) + KL(u | p)`` where there is neither a soft cap nor ALiBi.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import ReconstructionError, require, within_budget
from tl_geometry.base.results import Result
from tl_geometry.circuits.logit_graph import QUERY, LogitGraph, token_texts
from tl_geometry.scores.score_split import ScoreSplit

TOLERANCE = 1e-3
"""How far the pairs may be from the graph's sum, as a share of their absolute sum: the graph keeps
its response in float32, and another prompt is off by far more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionPairs(Result):
    """Weight and gain of each pair of parts at each key, for one row of a head.

    ``attention`` is the row of the pattern, ``response`` dT/d(score). ``gains`` are zero at the
    first ``drop`` keys.
    """

    head: str
    query: int
    drop: int
    parts: tuple[str, ...]
    tokens: tuple[str, ...]
    weights: Float[Tensor, "part part key"]
    gains: Float[Tensor, "part part key"]
    attention: Float[Tensor, " key"]
    response: Float[Tensor, " key"]

    def columns(self) -> Sequence[str]:
        return ("query_part", "key_part", "key", "token", "weight", "gain")

    def rows(self, most: int = 50) -> Sequence[Sequence[object]]:
        """The ``most`` largest by absolute weight."""
        order = self.weights.flatten().abs().argsort(descending=True, stable=True)[:most]
        pairs = zip(*torch.unravel_index(order, self.weights.shape), strict=True)
        return [
            (
                *(self.parts[a], self.parts[b], int(j), self.tokens[j]),
                *(float(self.weights[a, b, j]), float(self.gains[a, b, j])),
            )
            for a, b, j in pairs
        ]


def attention_pairs(
    graph: LogitGraph,
    split: ScoreSplit,
    node: int,
    *,
    drop: int = 0,
    memory_budget: int = 2**31,
) -> AttentionPairs:
    """Pairs of parts that made a head of ``graph`` look where it looked.

    Args:
        graph: of :func:`tl_geometry.trace_logit`.
        split: of :func:`tl_geometry.split_scores` for the same model and prompt, with this head;
            its ``parts=`` say what the pairs are of (writers, a basis, or your own mapping, such as
            the features of a dictionary).
        node: a head's node, ``graph.node("L5H1", 11)``.
        drop: keys at the start that gain leaves out, such as one for a BOS token.
        memory_budget: bytes that terms, weights and gains may take together: three float64 tensors
            ``[part part key]``. That is 15 MB for the 203 parts at block 20 of SmolLM2 and 15
            tokens, and 1 GB for 1,000 tokens.

    Raises ``BudgetError`` where it does not suffice, and ``ReconstructionError`` where the pairs do
    not sum to the graph's query edges, as with a split of another prompt.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompt = tlg.zoo.default_windows(model, 16, n=1)
    >>> graph = tlg.trace_logit(model, prompt, 5, keep=1.0)
    >>> split = tlg.split_scores(model, prompt, heads="L1H0", parts="writers")
    >>> pairs = tlg.circuits.attention_pairs(graph, split, graph.node("L1H0", 15))
    >>> bool((pairs.weights.sum() - graph.totals[graph.node("L1H0", 15), 1]).abs() < 1e-4)
    True
    """
    layer, head = int(graph.layers[node]), int(graph.heads_of[node])
    require(head >= 0, "node", expected="a head's node", got=graph.label(node))
    expected, there = head_name((layer, head)), (layer, head) in split.heads
    got = ", ".join(map(head_name, split.heads))
    require(there, "heads of the split", expected=expected, got=got)
    length, (batch, n_keys) = len(graph.token_ids), split.k.shape[1:3]
    got = f"{batch} prompt{'s' * (batch > 1)} of {n_keys}"
    fits = (batch, n_keys) == (1, length)
    require(fits, "split", expected=f"one prompt of {length} tokens", got=got)
    # terms, weights and gains of all pairs
    needed = 3 * torch.float64.itemsize * len(split.parts) ** 2 * length
    instead = 'split_scores(..., parts="blocks"), other parts, or a larger memory_budget='
    of = f"the pairs of {len(split.parts)} parts"
    within_budget(needed, memory_budget, "pairs", of=of, instead=instead)
    query, column = int(graph.positions[node]), split.heads.index((layer, head))
    q, k = split.q[:, 0, query, column].double(), split.k[:, 0, :, column].double()
    terms = einsum(q, k, "a e, b j e -> a b j").cpu()
    weights = terms * graph.response[node]
    total, of_graph = float(weights.sum()), float(graph.totals[node, QUERY])
    require(
        abs(total - of_graph) <= TOLERANCE * float(weights.abs().sum()),
        "split",
        expected=f"{of_graph:.4g}, the graph's query edges into {graph.label(node)}, as their sum",
        got=f"{total:.4g}",
        instead="split_scores(model, prompt, heads=...) of the graph's own model and prompt",
        error=ReconstructionError,
    )
    row = slice(query, query + 1)
    kept = split.allowed_rows(row)[column, 0].cpu() & (torch.arange(length) >= drop)
    scores = split.model_scores(row)[0, column, 0].double().cpu()
    p = torch.where(kept, scores, -torch.inf).softmax(-1)
    above_uniform = torch.where(kept, p - 1 / kept.sum(), 0.0)
    return AttentionPairs(
        provenance=graph.provenance,
        head=head_name((layer, head)),
        query=query,
        drop=drop,
        parts=split.parts,
        tokens=token_texts(graph),
        weights=weights,
        gains=terms * above_uniform,
        attention=graph.attention[node],
        response=graph.response[node],
    )
