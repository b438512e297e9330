"""What circuits refuse, in whole sentences: what was expected, what came, what to call instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.refusals import refused
from tests.tiny import D, tiny, tokens
from tl_geometry.base.errors import (
    BudgetError,
    GeometryError,
    ReconstructionError,
    UnsupportedModelError,
)
from tl_geometry.circuits import (
    LogitGraph,
    attention_pairs,
    average_graphs,
    composition,
    dictionary,
    edge_scores,
    explain_logits,
    faithfulness,
    feature_shares,
)
from tl_geometry.circuits.composition_files import neuronpedia
from tl_geometry.circuits.dictionaries import Dictionary

PROMPTS, OTHERS = tokens(3, 8, seed=5), tokens(3, 8, seed=6)
ZEROS = torch.zeros(3, 8, 4)
DECODER, BIAS = torch.eye(D)[:4], torch.zeros(D)


@cache
def graph(keep: float = 0.5, seed: int = 5, length: int = 6, mlp: str = "frozen") -> LogitGraph:
    """The graph of one logit of a tiny model."""
    prompt = tokens(1, length, seed=seed)
    return tlg.trace_logit(tiny("bridge", "gpt2"), prompt, 5, keep=keep, mlp=mlp)


@cache
def edges() -> Any:
    """Edge scores of a tiny model."""
    return edge_scores(tiny("bridge", "gpt2"), PROMPTS, OTHERS, targets=(5, 9), method="gradient")


@cache
def composed(layers: int = 1) -> Any:
    """Composition of the heads of one block of a tiny model."""
    return composition(tiny("bridge", "gpt2"), PROMPTS, layers=[layers], draws=1, progress=False)


def autoencoder(**settings: Any) -> SimpleNamespace:
    """What an autoencoder of four features says of itself."""
    architecture = settings.pop("architecture", "standard")
    about: dict[str, Any] = {"hook_name": "blocks.1.hook_resid_pre"} | settings
    return SimpleNamespace(
        W_dec=DECODER,
        b_dec=BIAS,
        encode=lambda h: h @ DECODER.mT,
        cfg=SimpleNamespace(
            architecture=lambda: architecture,
            normalize_activations=about.pop("normalize_activations", "none"),
            metadata=SimpleNamespace(**about),
        ),
    )


def features(**options: Any) -> Any:
    """Shares of four features that are never active."""
    known = options.pop("features", None) or dictionary((ZEROS, DECODER, BIAS), 1)
    return feature_shares(tiny("bridge", "gpt2"), PROMPTS, known, **options)


def over_batch() -> Dictionary:
    """A dictionary that chooses features over a batch."""
    return Dictionary(1, DECODER, BIAS, lambda h: h @ DECODER.mT, over_batch=True)


def wrong_decode() -> SimpleNamespace:
    """An autoencoder whose decode adds 2.5 to what decoder and bias give."""
    source = autoencoder()
    source.decode = lambda activations: activations @ DECODER + 2.5
    return source


def scored(*given: Any, **options: Any) -> Any:
    """Edge scores of a tiny model."""
    return edge_scores(tiny("bridge", "gpt2"), *given, **options)


def ran(circuit: Any, **options: Any) -> Any:
    """Pruned runs of a tiny model."""
    return faithfulness(tiny("bridge", "gpt2"), circuit, PROMPTS, OTHERS, **options)


def traced(*given: Any, **options: Any) -> Any:
    """The graph of a logit of a tiny model."""
    return tlg.trace_logit(tiny("bridge", "gpt2"), *given, **options)


def explained(*given: Any, **options: Any) -> Any:
    """Direct contributions to a logit of a tiny model."""
    return tlg.explain_logit(tiny("bridge", "gpt2"), *given, **options)


def paired(name: str, at: int, *, length: int = 6, heads: str = "L1H0", **options: Any) -> Any:
    """Pairs of blocks for a head of a whole graph."""
    of = graph(1.0)
    prompt = tokens(1, length, seed=5)
    split = tlg.split_scores(tiny("bridge", "gpt2"), prompt, heads=heads, parts="blocks")
    return attention_pairs(of, split, of.node(name, at), **options)


REFUSED: dict[str, Callable[[], Any]] = {
    "width": lambda: features(features=Dictionary(1, torch.eye(4), torch.zeros(4), lambda h: h)),
    "batch_size": lambda: features(batch_size=0),
    "pairs": lambda: features(pairs=-1),
    "per cell": lambda: features(per_cell=-1),
    "prompts": lambda: features(features=dictionary((ZEROS[:2], DECODER, BIAS), 1)),
    "length": lambda: features(features=dictionary((ZEROS[:, :7], DECODER, BIAS), 1)),
    "drop": lambda: features(drop=7),
    "over batch": lambda: features(features=over_batch(), batch_size=2),
    "two tensors": lambda: dictionary((ZEROS, DECODER), 1),
    "a list": lambda: dictionary((ZEROS, DECODER, [0.0]), 1),
    "flat": lambda: dictionary((ZEROS[0], DECODER, BIAS), 1),
    "other count": lambda: dictionary((ZEROS[..., :3], DECODER, BIAS), 1),
    "other bias": lambda: dictionary((ZEROS, DECODER, BIAS[:5]), 1),
    "no autoencoder": lambda: dictionary(SimpleNamespace(encode=None), 1),
    "transcoder": lambda: dictionary(autoencoder(architecture="skip_transcoder"), 1),
    "hook": lambda: dictionary(autoencoder(hook_name="blocks.0.hook_mlp_out"), 1),
    "centred": lambda: dictionary(
        autoencoder(model_from_pretrained_kwargs={"center_writing_weights": True}),
        1,
        tiny("bridge", "gpt2"),
    ),
    "not centred": lambda: dictionary(autoencoder(), 1, tiny("bridge", "gpt2", processed=True)),
    "normalization": lambda: dictionary(autoencoder(normalize_activations="other"), 1),
    "decode": lambda: features(features=dictionary(wrong_decode(), 1)),
    "short": lambda: composition(tiny("bridge", "gpt2"), PROMPTS[:, :3], drop=2, progress=False),
    "one prompt": lambda: composition(tiny("bridge", "gpt2"), PROMPTS[:1], progress=False),
    "queries": lambda: composition(
        tiny("bridge", "gpt2"), PROMPTS, queries=[0, 4], drop=1, draws=1, progress=False
    ),
    "block 0": lambda: neuronpedia(composed(0), share="cs", writers="all", n=3),
    "pairs of lengths": lambda: scored(PROMPTS, OTHERS[:, 1:]),
    "pair numbers": lambda: scored(PROMPTS, OTHERS[:2]),
    "same token": lambda: scored(PROMPTS, PROMPTS),
    "both": lambda: scored(PROMPTS, OTHERS, lambda logits: logits[:, 0, 0], targets=(5, 9)),
    "one number": lambda: scored(PROMPTS, OTHERS, lambda logits: logits[:, 0]),
    "no tensor": lambda: scored(PROMPTS, OTHERS, lambda logits: 3.0),
    "no gradient": lambda: scored(PROMPTS, OTHERS, lambda logits: logits[:, -1, 0].detach()),
    "targets": lambda: scored(PROMPTS, OTHERS, targets=[(5, 9)] * 2),
    "a text": lambda: scored(PROMPTS, OTHERS, targets="59"),
    "twice": lambda: scored(PROMPTS, OTHERS, targets=[(5, 9), (4, 4), (1, 2)]),
    "draws": lambda: ran("L1H0", draws=0, targets=(5, 9)),
    "nodes of a set": lambda: ran("L1H0", nodes=True, targets=(5, 9)),
    "no fractions": lambda: ran(edges(), fractions=(), targets=(5, 9)),
    "other model": lambda: faithfulness(tiny("bridge", "llama"), edges(), PROMPTS, OTHERS),
    "no set": lambda: ran(7, targets=(5, 9)),
    "unknown edges": lambda: ran(["embed->L0H0<q>", "mlp1->mlp0"], targets=(5, 9)),
    "seed": lambda: ran("L1H0", seed=-1, targets=(5, 9)),
    "no curve": lambda: ran("L1H0", targets=(5, 9), draws=1).cpr,
    "curve": lambda: ran(edges(), targets=(5, 9), draws=1, fractions=(0.5,)).completeness,
    "random curve": lambda: (
        ran(edges(), targets=(5, 9), draws=1, fractions=(0.5,)).random_completeness
    ),
    "same metric": lambda: faithfulness(
        tiny("bridge", "gpt2"), "L1H0", PROMPTS, PROMPTS, targets=(5, 9), draws=1
    ),
    "node": lambda: graph().node("L7H0"),
    "node at": lambda: graph(1.0).node("mlp1", 3),
    "several": lambda: graph(1.0).node((0, 0)),
    "layout": lambda: graph().to_json("gml"),
    "edge type": lambda: graph().edges_into(0, "score"),
    "one graph": lambda: average_graphs([graph()]),
    "keep of graphs": lambda: average_graphs([graph(), graph(0.6)]),
    "log probability": lambda: average_graphs([graph(), replace(graph(), log_probability=True)]),
    "mlp": lambda: graph().compare(graph(mlp="leaf")),
    "lengths": lambda: graph().compare(graph(seed=4, length=5)),
    "names": lambda: graph().compare(graph(seed=4), positions=[{"a": 1}, {"b": 1}]),
    "two names": lambda: graph().compare(graph(seed=4), positions=[{"a": 1, "b": 1}] * 2),
    "logit places": lambda: graph().compare(
        graph(seed=4), positions=[{"a": -1, "b": 2}, {"a": 1, "b": -1}]
    ),
    "counts": lambda: graph().compare(graph(seed=4), positions=[{"a": 1}]),
    "no head": lambda: paired("mlp0", 3),
    "other head": lambda: paired("L1H0", 5, heads="L1H2"),
    "other length": lambda: paired("L1H0", 5, length=5),
    "budget": lambda: paired("L1H0", 5, memory_budget=100),
    "prompts of a graph": lambda: traced(PROMPTS, 5),
    "keep 0": lambda: traced(PROMPTS[:1], 5, keep=0.0),
    "keep 1.5": lambda: traced(PROMPTS[:1], 5, keep=1.5),
    "mlp of a graph": lambda: traced(PROMPTS[:1], 5, mlp="cut"),
    "against itself": lambda: traced(PROMPTS[:1], 5, against=5),
    "against and log": lambda: traced(PROMPTS[:1], 5, against=6, log_probability=True),
    "prompts of a logit": lambda: explained(PROMPTS, -1, 5),
    "three targets": lambda: explained(PROMPTS[:1], -1, [5, 6, 7]),
    "top": lambda: explained(PROMPTS[:1], -1, 5, top=0),
    "budget of a logit": lambda: explained(PROMPTS[:1], -1, 5, memory_budget=1000),
    "targets of prompts": lambda: explain_logits(tiny("bridge", "gpt2"), PROMPTS, [5, 6]),
    "targets of two kinds": lambda: explain_logits(tiny("bridge", "gpt2"), PROMPTS, [5, (6, 7), 8]),
}


KINDS: dict[str, type[GeometryError]] = {
    **dict.fromkeys(
        ("transcoder", "hook", "centred", "not centred", "normalization"), UnsupportedModelError
    ),
    "decode": ReconstructionError,
    "budget": BudgetError,
    "budget of a logit": BudgetError,
}
"""Refusals that have a class of their own."""
SENTENCES = {
    "width": "dictionary: expected a model with d_model 4, got 32.",
    "batch_size": "batch_size: expected at least 1, got 0.",
    "pairs": "pairs: expected at least 0, got -1.",
    "per cell": "per_cell: expected at least 0, got -1.",
    "prompts": "activations: expected those of 3 prompts, got those of 2.",
    "length": (
        "activations: expected those of (3, 8) tokens, got float32 tensor of shape (3, 7, 4)."
    ),
    "drop": "drop: expected 0 to 6, to leave two positions, got 7.",
    "over batch": (
        "batch_size: expected one batch: this dictionary chooses features over a batch, "
        "without a threshold, got 3 contexts with batch_size=2. Use batch_size=3, or the "
        "autoencoder as SAELens saves it."
    ),
    "two tensors": (
        "dictionary: expected (activations, decoder, bias), got ['float32 tensor of shape"
        " (3, 8, 4)', 'float32 tensor of shape (4, 32)']."
    ),
    "a list": (
        "dictionary: expected (activations, decoder, bias), got ['float32 tensor of shape"
        " (3, 8, 4)', 'float32 tensor of shape (4, 32)', '[0.0]']."
    ),
    "flat": (
        "dictionary: expected [batch position feature], [feature d_model], [d_model], got"
        " float32 tensor of shape (8, 4), float32 tensor of shape (4, 32) and float32 "
        "tensor of shape (32,)."
    ),
    "other count": (
        "dictionary: expected [batch position feature], [feature d_model], [d_model], got"
        " float32 tensor of shape (3, 8, 3), float32 tensor of shape (4, 32) and float32 "
        "tensor of shape (32,)."
    ),
    "other bias": (
        "dictionary: expected [batch position feature], [feature d_model], [d_model], got"
        " float32 tensor of shape (3, 8, 4), float32 tensor of shape (4, 32) and float32 "
        "tensor of shape (5,)."
    ),
    "no autoencoder": (
        "dictionary: expected an object with encode, W_dec, b_dec, got SimpleNamespace "
        "without W_dec, b_dec. Use (activations, decoder, bias)."
    ),
    "transcoder": (
        "dictionary SimpleNamespace: expected an autoencoder whose decoder explains the "
        "states that it encodes, got 'skip_transcoder'. Use (activations, decoder, bias) "
        "of states at a block's input."
    ),
    "hook": (
        "dictionary SimpleNamespace: expected the stream before block 1, got "
        "['hook_name=blocks.0.hook_mlp_out']."
    ),
    "centred": (
        "dictionary SimpleNamespace: expected "
        "model_from_pretrained_kwargs={'center_writing_weights': True}, as it was "
        "trained, got a model whose writing weights are not centred."
    ),
    "not centred": (
        "dictionary SimpleNamespace: expected model_from_pretrained_kwargs={}, as it was "
        "trained, got a model whose writing weights are centred."
    ),
    "normalization": (
        "dictionary SimpleNamespace: expected normalize_activations of ('none', "
        "'constant_norm_rescale', 'layer_norm'), got other."
    ),
    "decode": (
        "dictionary SimpleNamespace: expected decoder and bias that give what its decode "
        "gives, got a difference of 2.5. Use (activations, decoder, bias)."
    ),
    "short": "tokens: expected more than 3 positions (2 left out), got 3.",
    "one prompt": "tokens: expected batches of at least 2 prompts, got 1, one at a time.",
    "queries": "queries: expected queries from 1 on, got [0]. Use drop=0.",
    "block 0": (
        "heads: expected readers behind block 0 with a writer to show, got 3 edges, none "
        'into a later block. Use composition(..., layers=[1, ...]), or writers="all".'
    ),
    "pairs of lengths": (
        "prompt pair 0 ('<24><10><15><11><21><32>' and '<44><23><35><16><36><49>'): "
        "expected a prompt and a counterfactual of equal token length, got 8 and 7 "
        "tokens. Use a counterfactual that changes one token for another."
    ),
    "pair numbers": "counterfactuals: expected one for each of 3 prompts, got 2.",
    "same token": (
        "targets of prompt pair 0 ('<24><10><15><11><21><32>'): expected another most "
        "likely token after the counterfactual, got '<30>' after both. Use "
        "targets=[(answer, other), ...]."
    ),
    "both": "metric, targets: expected one of them, got both.",
    "one number": "metric: expected one number for each of 3 prompts of a batch, got (3, 61).",
    "no tensor": "metric: expected one number for each of 3 prompts of a batch, got 3.0.",
    "no gradient": (
        "metric: expected a differentiable function, got one without a gradient. Use a "
        "function of the logits in torch."
    ),
    "targets": (
        "targets: expected (answer, other) for each of 3 prompts, or for all of them, got"
        " [(5, 9), (5, 9)]."
    ),
    "a text": (
        "targets: expected (answer, other) for each of 3 prompts, or for all of them, got '59'."
    ),
    "twice": "targets of prompt pair 1: expected two different tokens, got (4, 4).",
    "draws": "draws: expected a whole number, at least 1, got 0.",
    "nodes of a set": (
        "nodes, fractions: expected EdgeScores, which they rank, got a chosen set. Use "
        "neither of them."
    ),
    "no fractions": "fractions: expected at least one share, got none.",
    "other model": (
        "circuit: expected scores of this model's edges, got 110 edges of another. Use "
        "edge_scores(model, ...)."
    ),
    "no set": "circuit: expected EdgeScores, heads, or edges, got 7.",
    "unknown edges": (
        "circuit: expected edges of this model, such as \"embed->L0H0<q>\", got ['mlp1->mlp0']."
    ),
    "seed": "seed: expected 0 or more, at most 4294967295, got -1.",
    "no curve": (
        "CPR and CMD: expected a curve of rankings, got a chosen set. Use .f and .completeness."
    ),
    "curve": (
        "completeness: expected a chosen set, got a curve of rankings. Use "
        "faithfulness(model, heads_or_edges, ...)."
    ),
    "random curve": (
        "completeness: expected a chosen set, got a curve of rankings. Use "
        "faithfulness(model, heads_or_edges, ...)."
    ),
    "same metric": (
        "metric: expected one that prompts and counterfactuals differ in, got a mean of "
        "9.834 for both."
    ),
    "node": (
        "node: expected one node 'L7H0', got none of that name. Use position=, or a "
        "larger keep= in trace_logit."
    ),
    "node at": (
        "node: expected one node 'mlp1' at 3, got nodes of that name at positions [5]. "
        "Use position=, or a larger keep= in trace_logit."
    ),
    "several": (
        "node: expected one node 'L0H0', got nodes of that name at positions [0, 1, 2, 3,"
        " 4, 5]. Use position=, or a larger keep= in trace_logit."
    ),
    "layout": "layout: expected one of 'neuronpedia', got 'gml'.",
    "edge type": "edge_type: expected one of 'value', 'query', 'key', got 'score'.",
    "one graph": "graphs: expected two or more graphs of trace_logit, got 1.",
    "keep of graphs": (
        "graphs: expected one model, keep= and log_probability=, got 2 combinations. Use "
        "graph.compare(other)."
    ),
    "log probability": (
        "graphs: expected one model, keep= and log_probability=, got 2 combinations. Use "
        "graph.compare(other)."
    ),
    "mlp": (
        "graphs: expected graphs of one shape, leaves and mlp=, got (torch.Size([2, 4]), "
        "('embed', 'pos_embed'), 'frozen') and (torch.Size([2, 4]), ('embed', "
        "'pos_embed'), 'leaf')."
    ),
    "lengths": (
        "graphs: expected prompts of as many tokens, with the logit at the same position,"
        ' got (tokens, position) [(5, 4), (6, 5)]. Use positions=[{"subject": 2, "end": '
        "-1}, ...], names for each prompt."
    ),
    "names": "positions: expected the same names, ['a'], for each graph, got ['b'].",
    "two names": "positions: expected one name a position, got two names for position 1.",
    "logit places": "positions: expected one name for where the logit is read, got ['a', 'b'].",
    "counts": "positions: expected names for each of 2 graphs, got 1.",
    "no head": "node: expected a head's node, got mlp0 at 3 '<10>'.",
    "other head": "heads of the split: expected L1H0, got L1H2.",
    "other length": "split: expected one prompt of 6 tokens, got 1 prompt of 5.",
    "budget": (
        "pairs: expected at most memory_budget=100 bytes, got 5,184 bytes for the pairs "
        'of 6 parts. Use split_scores(..., parts="blocks"), other parts, or a larger '
        "memory_budget=."
    ),
    "prompts of a graph": "prompt: expected one prompt, got 3 prompts. Use a call for each prompt.",
    "keep 0": "keep: expected a share above 0, at most 1, got 0.0.",
    "keep 1.5": "keep: expected a share above 0, at most 1, got 1.5.",
    "mlp of a graph": "mlp: expected one of 'frozen', 'leaf', got 'cut'.",
    "against itself": "target, against: expected two different tokens, got '<5>' twice.",
    "against and log": "against, log_probability: expected one of them, got both.",
    "prompts of a logit": (
        "tokens: expected one prompt, got 3 prompts. Use tokens[:1], or "
        "explain_logits(model, tokens, targets)."
    ),
    "three targets": "target: expected a token, or two for their difference, got 3.",
    "top": "top: expected at least 1, got 0.",
    "budget of a logit": (
        "logit: expected at most memory_budget=1,000 bytes, got 8,192 bytes for all heads"
        " and MLPs. Use a shorter prompt, or a larger memory_budget=."
    ),
    "targets of prompts": (
        "targets: expected a token for each of 3 prompts, or a pair for each, got 2 of [1] tokens."
    ),
    "targets of two kinds": (
        "targets: expected a token for each of 3 prompts, or a pair for each, got 3 of "
        "[1, 2] tokens."
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_whole_sentences(name: str) -> None:
    """Each refusal says what was expected, what came, and what to call instead."""
    assert refused(REFUSED[name], KINDS.get(name, GeometryError)) == SENTENCES[name]
