"""The graph of a logit adds up: leaves to the logit, edges to their node, and every number is that
of an independent frozen model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from einops import rearrange
from torch import Tensor

import tl_geometry as tlg
from tests.circuits.frozen_hf import frozen_run
from tests.circuits.in_double import InDouble, exact
from tests.lib.models import (
    ARCHITECTURES,
    HAS_HOOKED,
    HEADS,
    loadable,
    tiny,
    tiny_hooked,
    tiny_native,
    tokens,
)
from tl_geometry.base.errors import GeometryError, ReconstructionError, UnsupportedModelError
from tl_geometry.circuits import trace
from tl_geometry.circuits.frozen import FrozenBlock, FrozenMLP, FrozenPass
from tl_geometry.circuits.graph_edges import AFTER_ATTENTION, AFTER_MLP
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.circuits.trace import logit_readout, trace_logit
from tl_geometry.models import view
from tl_geometry.models.attention import Attention
from tl_geometry.scores.split import split_scores

PROMPT = tokens(batch=1, length=14, seed=7)
AT = 11
NOT_FOLLOWED = ("bert", "roberta", "gpt-oss")
"""Encoders, and a mixture of experts."""
DECODERS = [a for a in ARCHITECTURES if a not in NOT_FOLLOWED and loadable(a)]
PRECISION = 1e-13
"""Of sums, as a share of all that is added up: 1.5e-16 was measured."""


def traced(model: Any, **options: Any) -> LogitGraph:
    settings: dict[str, Any] = {"against": 9, "position": AT} | options
    return trace_logit(model, PROMPT, 5, **settings)


@cache
def complete(architecture: str) -> LogitGraph:
    """All nodes and edges, in float64 throughout."""
    with InDouble():
        return traced(exact(architecture), keep=1.0)


def size(graph: LogitGraph) -> float:
    """What rounding grows with."""
    tables = (graph.leaf_values, graph.head_values, graph.mlp_values)
    moved = (graph.leaf_moved, graph.head_moved, graph.mlp_moved)
    return sum(float(x.abs().sum()) for x in (*tables, *moved))


# ---- what is sure to sum


@pytest.mark.parametrize("architecture", DECODERS)
def test_leaves_sum_to_the_models_logit_in_every_loading(architecture: str) -> None:
    first: LogitGraph | None = None
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        graph = traced(model)
        logits, head = view(model).logits(PROMPT)[0, AT].double(), view(model).output_head()
        assert head is not None
        if head.softcap is not None:
            logits = head.softcap * torch.atanh(logits / head.softcap)
        bound = 2e-6 * size(graph)
        assert graph.value == pytest.approx(float(logits[5] - logits[9]), abs=bound)
        assert float(graph.tokens().value.sum()) == pytest.approx(graph.value, abs=bound)
        first = first or graph
        for name in ("leaf_values", "head_values", "mlp_values", "head_moved", "mlp_moved"):
            assert float((getattr(graph, name) - getattr(first, name)).abs().max()) < bound, name


@pytest.mark.parametrize("architecture", DECODERS)
def test_edges_sum_to_their_node_and_to_what_it_wrote(architecture: str) -> None:
    graph = complete(architecture)
    bound = PRECISION * size(graph)
    assert float(graph.tokens().value.sum()) == pytest.approx(graph.value, abs=bound)
    incoming = torch.zeros(len(graph.names), 3, dtype=torch.float64)
    incoming.index_put_((graph.targets, graph.edge_types), graph.weights, accumulate=True)
    is_logit = torch.arange(len(graph.names)) == 0
    is_head, is_mlp = graph.heads_of >= 0, (graph.layers >= 0) & (graph.heads_of < 0)
    reads = is_logit | is_head | is_mlp
    assert float((incoming - graph.totals)[reads].abs().max()) < bound
    assert float(graph.rest.abs().max()) < bound
    assert float((graph.totals[:, 0] - graph.values)[is_logit | is_mlp].abs().max()) < bound
    # what a head writes whatever it attends to is a constant, so that its edges from the stream
    # are its value
    assert float((graph.totals[:, 0] - graph.values)[is_head].abs().max()) < bound
    outgoing = torch.zeros(len(graph.names), dtype=torch.float64)
    value_edges = graph.edge_types == 0
    outgoing.index_put_((graph.sources[value_edges],), graph.weights[value_edges], accumulate=True)
    writes = ~is_logit & (graph.positions >= 0)
    assert float((outgoing - graph.values)[writes].abs().max()) < bound
    assert bool(graph.head_moved.any())  # a vacuous sum would pass everything above
    # what is written behind the last pattern moves none
    assert not graph.head_moved[-1].any()
    assert not graph.mlp_moved[-1].any()
    assert float(graph.weights[graph.edge_types > 0].abs().max()) > 1e3 * bound


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_a_model_that_computes_in_single_in_places_is_told(architecture: str) -> None:
    """The twin of the laws above: as Hugging Face runs it, a float64 model misses their bound by
    far, and is held to that of float32."""
    model = tiny(loadable(architecture)[0][0], architecture, dtype=torch.float64)
    graph, whole = traced(model), complete(architecture)
    off = float((graph.head_values - whole.head_values).abs().max()) / size(whole)
    assert 1e3 * PRECISION < off < 2e-7


@pytest.mark.parametrize("architecture", DECODERS)
def test_what_was_pruned_is_in_the_rest(architecture: str) -> None:
    graph, full = traced(tiny(loadable(architecture)[0][0], architecture)), complete(architecture)
    assert len(graph.names) < len(full.names)
    assert len(graph.weights) < len(full.weights)
    incoming = graph.rest.clone()
    incoming.index_put_((graph.targets, graph.edge_types), graph.weights, accumulate=True)
    bound = 2e-6 * size(graph)
    assert float((incoming - graph.totals).abs().max()) < bound
    assert float(graph.totals[0, 0]) == pytest.approx(graph.value, abs=bound)
    for node, name in enumerate(graph.names[2:], 2):
        other = full.node(name, int(graph.positions[node]))
        assert float((graph.totals[node] - full.totals[other]).abs().max()) < bound
    kept = graph.values[2:].abs().sum()
    everything = sum(x.abs().sum() for x in (full.leaf_values, full.head_values, full.mlp_values))
    assert float(kept) >= 0.8 * float(everything) - bound


# ---- the same numbers by autograd through Hugging Face's code


@cache
def adjoints(architecture: str, attention: bool) -> Any:
    """The library's, of the same T."""
    with InDouble():
        seen = view(exact(architecture))
        frozen = FrozenPass.of(seen, PROMPT)
    readout = logit_readout(seen, frozen, AT, 5, 9, False)
    entry = torch.zeros_like(frozen.last)
    entry[0, AT] = readout.direction
    return frozen.adjoints(entry, follow_patterns=attention)


def close(found: Tensor, expected: Tensor | None) -> bool:
    assert expected is not None
    return float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("architecture", DECODERS)
def test_adjoints_are_those_of_autograd(architecture: str, attention: bool) -> None:
    run, found = (
        frozen_run(architecture, PROMPT, attention=attention),
        adjoints(architecture, attention),
    )
    (run.logits[0, AT, 5] - run.logits[0, AT, 9]).backward()
    for l in range(2):
        assert close(found.stream[l], run.stream[l].grad)
        mixed = run.mixed[l].grad
        assert mixed is not None
        by_head = rearrange(mixed, "b i (h e) -> b i h e", h=found.heads[l].shape[2])
        assert close(found.heads[l], by_head)
    # BLOOM's embedding is the stream behind its norm, in TransformerLens
    embed = (run.stream if architecture.startswith("bloom") else run.embed)[0]
    graph = complete(architecture)
    assert embed.grad is not None
    by_token = (embed.grad * embed).sum(-1)[0].detach()
    assert close(graph.leaf_values[0] + attention * graph.leaf_moved[0], by_token)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "neox", "falcon"])
def test_value_edges_are_those_of_autograd(architecture: str) -> None:
    """Embedding at j -> head at i: how the head's write towards T answers to the embedding, the
    stream in front of its block held."""
    run, graph = frozen_run(architecture, PROMPT), complete(architecture)
    T = run.logits[0, AT, 5] - run.logits[0, AT, 9]
    towards = torch.autograd.grad(T, run.mixed, retain_graph=True)
    for layer, head, at in ((0, 1, 8), (1, 2, AT), (1, 0, AT)):
        d_head = run.mixed[layer].shape[-1] // HEADS
        part = slice(head * d_head, (head + 1) * d_head)
        wrote = (run.mixed[layer] * towards[layer])[0, at, part].sum()
        (read,) = torch.autograd.grad(wrote, run.stream[layer], retain_graph=True)
        expected = (read * run.embed[0]).sum(-1)[0].detach()
        found = torch.zeros_like(expected)
        for source, _, weight in graph.edges_into(graph.node((layer, head), at), "value"):
            if graph.names[source] == "embed":
                found[graph.positions[source]] = weight
        assert close(found, expected)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "llama", "qwen3", "neox", "bloom", "phi", "gpt2-inverse-layer"]
)
def test_query_and_key_edges_are_the_response_of_attention_to_each_writer(
    architecture: str,
) -> None:
    """``c`` is the gradient of T with respect to the scores by autograd, the score of each pair of
    writers that of a split. (In the graph the biases of an MLP are constants.)"""
    run, graph = frozen_run(architecture, PROMPT, attention=True), complete(architecture)
    (run.logits[0, AT, 5] - run.logits[0, AT, 9]).backward()
    for layer, head, at in ((0, 3, 6), (1, 2, AT), (1, 1, AT)):
        with InDouble():
            heads, model = [(layer, head)], exact(architecture)
            split = split_scores(model, PROMPT, None, heads=heads, parts="writers")
        response = run.scores[layer].grad
        assert response is not None
        row = response[0, head, at]
        node = graph.node((layer, head), at)
        by_pair = torch.stack(
            [
                torch.stack([split.terms[a, b][0, 0, at].double() * row for b in split.parts])
                for a in split.parts
            ]
        )  # [query part, key part, key]
        bound = PRECISION * float(by_pair.abs().sum())
        edges = {
            (side, graph.names[source], int(graph.positions[source])): weight
            for side in ("query", "key")
            for source, _, weight in graph.edges_into(node, side)
        }
        for a, name in enumerate(split.parts):
            biased = name.startswith("mlp") and architecture not in ("llama", "qwen3")
            if name in ("bias", "constants") or biased:
                continue
            expected = float(by_pair[a].sum())
            assert edges.get(("query", name, at), 0.0) == pytest.approx(expected, abs=bound), name
            for j in range(at + 1):
                expected = float(by_pair[:, a, j].sum())
                assert edges.get(("key", name, j), 0.0) == pytest.approx(expected, abs=bound)
        assert float(by_pair.sum()) == pytest.approx(float(graph.totals[node, 1]), abs=bound)
        assert float(graph.totals[node, 1]) == pytest.approx(
            float(graph.totals[node, 2]), abs=bound
        )


# ---- options


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "neox", "gpt-oss"])
def test_mlps_as_leaves(architecture: str) -> None:
    graph = traced(tiny("bridge", architecture), mlp="leaf", keep=1.0)
    tokens = graph.tokens()  # MLPs are leaves, and stand beside the embeddings
    assert tokens.parts[-1] == "mlps"
    bound = 2e-6 * size(graph)
    total = float(tokens.value.sum())
    assert total == pytest.approx(graph.value, abs=bound)
    mlps = {i for i, name in enumerate(graph.names) if name.startswith("mlp")}
    assert mlps
    assert not mlps & set(graph.targets.tolist())


def test_a_logit_and_the_linear_part_of_a_log_probability() -> None:
    model = tiny("bridge", "gpt2")
    logits = view(model).logits(PROMPT)[0, AT].double()
    one, other = (trace_logit(model, PROMPT, token, position=AT) for token in (5, 9))
    both = traced(model)
    assert one.value == pytest.approx(float(logits[5]), rel=1e-5)
    assert one.value - other.value == pytest.approx(both.value, rel=1e-5)
    assert torch.allclose(one.head_values - other.head_values, both.head_values, atol=1e-4)
    p = logits.softmax(-1)
    found = trace_logit(model, PROMPT, 5, position=AT, log_probability=True)
    assert found.value == pytest.approx(float(logits[5] - p @ logits), rel=1e-4)
    assert found.probability == pytest.approx(float(p[5]), rel=1e-4)
    assert found.target_weights[0] == pytest.approx(1 - float(p[5]), rel=1e-4)
    assert float(found.tokens().value.sum()) == pytest.approx(found.value, abs=1e-4)
    with pytest.raises(GeometryError, match="against, log_probability"):
        traced(model, log_probability=True)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bloom"])
def test_with_a_basis_the_leaves_are_mean_position_and_content(architecture: str) -> None:
    model = tiny("bridge", architecture)
    basis = tlg.decompose(model, tokens(24, 14, seed=2), progress=False)
    graph, plain = traced(model, basis=basis), traced(model)
    assert graph.leaf_names == ("mean", "pos", "cvec")
    table = graph.tokens()
    assert tuple(table.columns()[3:]) == graph.leaf_names
    bound = 2e-6 * size(graph)
    assert float(table.value.sum()) == pytest.approx(graph.value, abs=bound)
    assert torch.allclose(graph.head_values, plain.head_values, atol=bound)
    total = plain.leaf_values.sum(0)
    assert torch.allclose(graph.leaf_values.sum(0), total, atol=bound)
    normalized = tlg.decompose(model, tokens(24, 14, seed=2), normalize=True, progress=False)
    with pytest.raises(GeometryError, match="normalize=False"):
        traced(model, basis=normalized)


@pytest.mark.slow
def test_tokens_are_listed_with_the_constants_last() -> None:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=2)
    graph = trace_logit(model, windows[:1], int(windows.tokens[0, 15]), position=14)
    table = graph.tokens()
    assert table.tokens[:-1] == graph.str_tokens
    assert table.tokens[-1] == "constants"
    assert [row[0] for row in table.rows()] == [*range(16), -1]
    assert float(table.value[15]) == 0.0  # behind the position that is read
    shorter = trace_logit(model, windows.tokens[:1, :15], graph.target[0])
    assert shorter.value == pytest.approx(graph.value)
    assert graph.str_tokens[14] in graph.label(0)
    sizes = [abs(float(str(row[3]))) for row in graph.rows()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize(
    "settings",
    [
        {"attn_only": True},
        {"normalization_type": None},
        {"act_fn": "relu", "gated_mlp": True},
    ],
    ids=str,
)
def test_architectures_of_transformer_lens(settings: dict[str, Any]) -> None:
    graph = traced(tiny_hooked(**settings), keep=1.0)
    bound = 2e-6 * size(graph)
    assert float(graph.tokens().value.sum()) == pytest.approx(graph.value, abs=bound)
    assert float(graph.rest.abs().max()) < bound
    if settings.get("attn_only"):
        assert not bool(graph.mlp_values.any())
        assert not any(name.startswith("mlp") for name in graph.names)


@pytest.mark.parametrize(("norm", "position"), [("LN", "standard"), ("RMS", "rotary")])
def test_bridges_of_transformer_lens_itself(norm: str, position: str) -> None:
    graph = traced(tiny_native(norm, position), keep=1.0)
    assert float(graph.tokens().value.sum()) == pytest.approx(graph.value, abs=2e-6 * size(graph))


# ---- refusals


def test_what_cannot_be_followed_is_refused_by_name() -> None:
    model = tiny("bridge", "gpt2")
    with pytest.raises(UnsupportedModelError, match="tiny-bert"):
        traced(tiny("bridge", "bert"))
    with pytest.raises(UnsupportedModelError, match='mlp="leaf"'):
        traced(tiny("bridge", "gpt-oss"))
    with pytest.raises(GeometryError, match="one prompt"):
        trace_logit(model, tokens(2, 8), 5)
    for position in (14, -15):
        with pytest.raises(GeometryError, match="position"):
            traced(model, position=position)
    with pytest.raises(GeometryError, match="token_ids"):
        trace_logit(model, PROMPT, 1000)
    for keep in (0.0, 1.1):
        with pytest.raises(GeometryError, match="keep"):
            traced(model, keep=keep)
    with pytest.raises(GeometryError, match="mlp"):
        traced(model, mlp="none")
    graph = traced(model)
    with pytest.raises(GeometryError, match="none of that name"):
        graph.node("L9H9")
    with pytest.raises(GeometryError, match="at positions"):
        graph.node("embed")


# ---- planted faults


def both_halves(found: FrozenMLP) -> FrozenMLP:
    assert found.linear_slope is not None
    return replace(found, linear_slope=2 * found.linear_slope)


def scale_of_one(found: FrozenMLP) -> FrozenMLP:
    return replace(found, scale=torch.ones_like(found.scale))


@pytest.mark.parametrize("fault", [both_halves, scale_of_one])
def test_a_faulty_mlp_does_not_sum_to_the_logit(fault: Callable[[FrozenMLP], FrozenMLP]) -> None:
    model, of = tiny("bridge", "llama"), FrozenMLP.of

    def faulty(spec: Any, h: Tensor) -> FrozenMLP:
        return fault(of(spec, h))

    with (
        mock.patch.object(FrozenMLP, "of", faulty),
        pytest.raises(ReconstructionError, match="sum over tokens"),
    ):
        traced(model)


def of_the_token_before(scale: Tensor) -> Tensor:
    return scale.roll(1, 1)


def attention_norm(block: FrozenBlock, fault: Callable[[Tensor], Tensor]) -> FrozenBlock:
    return replace(block, layer=replace(block.layer, v_scale=fault(block.layer.v_scale)))


def norm_after_attention(block: FrozenBlock, fault: Callable[[Tensor], Tensor]) -> FrozenBlock:
    return replace(block, heads=replace(block.heads, scale=fault(block.heads.scale)))


def norm_after_mlp(block: FrozenBlock, fault: Callable[[Tensor], Tensor]) -> FrozenBlock:
    assert block.mlp is not None
    return replace(block, mlp=replace(block.mlp, after_scale=fault(block.mlp.after_scale)))


def traced_with(
    architecture: str, change: Callable[[FrozenBlock], FrozenBlock], **options: Any
) -> LogitGraph:
    """A graph of which every block was changed after it was frozen."""
    model = tiny("bridge", architecture)
    frozen = FrozenPass.of(view(model), PROMPT)
    frozen = replace(frozen, blocks=tuple(change(block) for block in frozen.blocks))
    with mock.patch.object(FrozenPass, "of", return_value=frozen):
        return traced(model, **options)


@pytest.mark.parametrize("fault", [torch.ones_like, of_the_token_before])
@pytest.mark.parametrize(
    ("architecture", "norm"),
    [
        ("llama", attention_norm),
        ("gpt2", attention_norm),
        ("gemma2", norm_after_attention),
        ("gemma2", norm_after_mlp),
    ],
)
def test_a_norm_that_is_not_frozen_does_not_sum_to_the_logit(
    architecture: str,
    norm: Callable[[FrozenBlock, Callable[[Tensor], Tensor]], FrozenBlock],
    fault: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(ReconstructionError, match="sum over tokens"):
        traced_with(architecture, lambda block: norm(block, fault))


@pytest.mark.parametrize("side", [1, 2], ids=["query", "key"])
def test_a_qk_norm_that_is_not_frozen_is_seen_by_the_edges_of_its_side(side: int) -> None:
    name = {1: "q_scale", 2: "k_scale"}[side]

    def without_qk_norm(block: FrozenBlock) -> FrozenBlock:
        layer = block.layer
        scale = (1 / layer.norm_scale).unsqueeze(-1).expand_as(layer.q_scale)
        return replace(block, layer=replace(layer, **{name: scale}))

    whole = traced_with("qwen3", lambda block: block, keep=1.0)
    graph = traced_with("qwen3", without_qk_norm, keep=1.0)
    bound = 2e-6 * size(whole)
    assert float(whole.rest.abs().max()) < bound
    others = [0, 3 - side]
    assert float(graph.rest[:, others].abs().max()) < 1e-2 * float(graph.rest[:, side].abs().max())
    assert float(graph.rest[:, side].abs().max()) > 100 * bound


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_final_norm_that_is_not_frozen_is_not_the_models_logit(architecture: str) -> None:
    """Leaves still sum to such a T, so that the model's own logits have to tell."""
    model, readout_of = tiny("bridge", architecture), logit_readout

    def unscaled(view: Any, frozen: FrozenPass, position: int, *rest: Any) -> trace.Readout:
        head, found = view.output_head(), readout_of(view, frozen, position, *rest)
        return found._replace(direction=found.direction * head.norm.scale(frozen.last[0, position]))

    logits = view(model).logits(PROMPT)[0, AT].double()
    expected = float(logits[5] - logits[9])
    assert traced(model).value == pytest.approx(expected, abs=1e-4)
    with mock.patch.object(trace, "logit_readout", unscaled):
        assert traced(model).value != pytest.approx(expected, abs=0.1)


def swapped_sides(which: str, found: Tensor, other: Tensor) -> Tensor:
    return found if which == "v" else other


def interleaved_groups(which: str, found: Tensor, other: Tensor) -> Tensor:
    """Grouped values repeated as (0, 1, 0, 1) in place of (0, 0, 1, 1)."""
    return found[[0, 2, 0, 2]] if which == "v" else found


@pytest.mark.parametrize("fault", [swapped_sides, interleaved_groups])
def test_faulty_readers_are_seen(fault: Callable[[str, Tensor, Tensor], Tensor]) -> None:
    model, matrix = tiny("bridge", "llama"), Attention.matrix

    def faulty(facts: Attention, which: str) -> Tensor:
        other = matrix(facts, {"q": "k", "k": "q", "v": "v"}[which])
        return fault(which, matrix(facts, which), other)

    frozen = FrozenPass.of(view(model), PROMPT)
    with (
        mock.patch.object(Attention, "matrix", faulty),
        mock.patch.object(FrozenPass, "of", return_value=frozen),
    ):
        if fault is interleaved_groups:
            with pytest.raises(ReconstructionError, match="sum over tokens"):
                traced(model)
            return
        graph = traced(model, keep=1.0)
    bound = 2e-6 * size(graph)
    assert float(graph.rest[:, 0].abs().max()) < bound  # values are as they were
    assert float(graph.rest[:, 1:].abs().max()) > 100 * bound


def test_only_earlier_writes_are_read() -> None:
    graph = complete("gpt2")
    enters = torch.where(
        graph.layers < 0,
        0,
        3 * graph.layers + torch.where(graph.heads_of >= 0, AFTER_ATTENTION, AFTER_MLP),
    )
    reads = 3 * graph.layers + torch.where(graph.heads_of >= 0, 0, AFTER_ATTENTION)
    targets = graph.targets > 0
    assert bool((enters[graph.sources] <= reads[graph.targets])[targets].all())
    assert bool((graph.positions[graph.sources] <= graph.positions[graph.targets]).all())
