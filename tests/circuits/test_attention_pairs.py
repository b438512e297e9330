"""Pairs of parts behind one row of attention: weights by autograd through Hugging Face's model,
gains by their own definition, any parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.circuits.frozen_hf import frozen_run
from tests.circuits.in_double import InDouble, exact
from tests.tiny import loadable, tiny, tokens
from tl_geometry.base.errors import BudgetError, GeometryError, ReconstructionError
from tl_geometry.circuits import attention_pairs, trace_logit
from tl_geometry.scores.split import split_scores

PROMPT = tokens(batch=1, length=14, seed=7)
AT, HEAD = 11, (1, 2)


def graph_and_split(architecture: str, **options: Any) -> tuple[Any, Any]:
    with InDouble():
        model = exact(architecture)
        graph = trace_logit(model, PROMPT, 5, against=9, position=AT, keep=1.0)
        return graph, split_scores(model, PROMPT, None, heads=[HEAD], **options)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "gemma2"])
def test_weights_are_gradients_of_the_scores_times_the_terms(architecture: str) -> None:
    graph, split = graph_and_split(architecture, parts="writers")
    node = graph.node(HEAD, AT)
    pairs = attention_pairs(graph, split, node)
    run = frozen_run(architecture, PROMPT, attention=True)
    (run.logits[0, AT, 5] - run.logits[0, AT, 9]).backward()
    response = run.scores[HEAD[0]].grad
    assert response is not None
    slope = 1.0
    if architecture == "gemma2":  # the gradient is that of the score behind the soft cap
        slope = 1 - torch.tanh(split.total()[0, 0, AT, : AT + 1] / split.softcap[0]).square()
    row = response[0, HEAD[1], AT, : AT + 1] * slope
    size = float(pairs.weights.abs().sum())
    for a, query_part in enumerate(split.parts):
        for b, key_part in enumerate(split.parts):
            expected = split.terms[query_part, key_part][0, 0, AT, : AT + 1] * row
            # the graph keeps its response in float32
            error = (pairs.weights[a, b, : AT + 1] - expected).abs().max()
            assert float(error) < 1e-6 * size, (query_part, key_part)
    assert not bool(pairs.weights[..., AT + 1 :].any())
    wrong = pairs.weights.transpose(0, 1)[..., : AT + 1] - pairs.weights[..., : AT + 1]
    assert float(wrong.abs().max()) > 1e-3 * size  # query and key part swapped would be seen


@pytest.mark.parametrize("drop", [0, 3])
def test_gains_sum_to_the_divergence_from_uniform(drop: int) -> None:
    graph, split = graph_and_split("llama", parts="writers")
    pairs = attention_pairs(graph, split, graph.node(HEAD, AT), drop=drop)
    log_p = split.total()[0, 0, AT, drop : AT + 1].double().log_softmax(-1)
    log_u = -torch.tensor(float(AT + 1 - drop)).log()
    p, u = log_p.exp(), log_u.exp()
    divergence = (p * (log_p - log_u)).sum() + (u * (log_u - log_p)).sum()
    assert float(pairs.gains.sum()) == pytest.approx(float(divergence), rel=1e-6)
    assert not bool(pairs.gains[..., :drop].any())
    if drop == 0:
        plain = attention_pairs(graph, split, graph.node(HEAD, AT))
        assert torch.equal(plain.gains, pairs.gains)  # nothing is left out unless it is asked for
    other = attention_pairs(graph, split, graph.node(HEAD, AT), drop=drop + 1)
    assert abs(float(other.gains.sum()) - float(divergence)) > 1e-3


def test_pairs_of_features_are_those_of_a_split_by_features() -> None:
    kind, processed = loadable("gpt2")[0]
    model = tiny(kind, "gpt2", processed, dtype=torch.float64)
    graph = trace_logit(model, PROMPT, 5, against=9, position=AT, keep=1.0)
    h = model.run_with_cache(PROMPT)[1][f"blocks.{HEAD[0]}.hook_resid_pre"]
    directions = torch.linalg.qr(torch.randn(h.shape[-1], h.shape[-1], dtype=h.dtype))[0]
    features = {f"f{i}": (h @ d).unsqueeze(-1) * d for i, d in enumerate(directions.unbind())}
    split = split_scores(model, PROMPT, None, heads=[HEAD], parts=features)
    node = graph.node(HEAD, AT)
    pairs = attention_pairs(graph, split, node)
    assert float(pairs.weights.sum()) == pytest.approx(float(graph.totals[node, 1]), rel=1e-5)
    table = pairs.to_dataframe()
    sizes = table.weight.abs().tolist()
    assert sizes == sorted(sizes, reverse=True)
    first = table.iloc[0]
    a, b = pairs.parts.index(first.query_part), pairs.parts.index(first.key_part)
    assert first.weight == float(pairs.weights[a, b, first.key])


def test_rows_are_the_largest_by_weight() -> None:
    graph, split = graph_and_split("gpt2", parts="writers")
    pairs = attention_pairs(graph, split, graph.node(HEAD, AT), drop=1)
    expected = [
        (a, b, j, f"<{int(PROMPT[0, j])}>", weight, float(pairs.gains[i, k, j]))
        for i, a in enumerate(pairs.parts)
        for k, b in enumerate(pairs.parts)
        for j, weight in enumerate(pairs.weights[i, k].tolist())
    ]
    expected.sort(key=lambda row: -abs(row[4]))
    assert list(pairs.columns()) == ["query_part", "key_part", "key", "token", "weight", "gain"]
    assert pairs.rows() == expected[:50]
    assert pairs.rows(3) == expected[:3]
    assert (pairs.head, pairs.query, pairs.drop) == ("L1H2", AT, 1)


def test_pairs_beyond_the_memory_budget_are_refused() -> None:
    graph, split = graph_and_split("llama", parts="writers")
    node, needed = graph.node(HEAD, AT), 24 * len(split.parts) ** 2 * PROMPT.shape[1]
    pairs = attention_pairs(graph, split, node, memory_budget=needed)
    assert pairs.weights.nbytes + pairs.gains.nbytes == needed * 2 / 3
    with pytest.raises(BudgetError, match=f'{needed:,} bytes .* parts="blocks"'):
        attention_pairs(graph, split, node, memory_budget=needed - 1)


def test_what_does_not_belong_together_is_refused() -> None:
    graph, split = graph_and_split("gpt2", parts="writers")
    model = tiny(loadable("gpt2")[0][0], "gpt2", dtype=torch.float64)
    with pytest.raises(GeometryError, match="a head's node"):
        attention_pairs(graph, split, graph.node("logit"))
    with pytest.raises(GeometryError, match="L0H1"):
        attention_pairs(graph, split, graph.node("L0H1", AT))
    shorter = split_scores(model, PROMPT[:, :12], None, heads=[HEAD], parts="writers")
    with pytest.raises(GeometryError, match="one prompt of 14 tokens"):
        attention_pairs(graph, shorter, graph.node(HEAD, AT))
    other = split_scores(model, PROMPT.flip(1), None, heads=[HEAD], parts="writers")
    with pytest.raises(ReconstructionError, match="the graph's query edges"):
        attention_pairs(graph, other, graph.node(HEAD, AT))
