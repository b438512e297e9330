"""What interventions refuse, in whole sentences: what was expected, what came, what to call
instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.interventions.bases import basis_of
from tests.refusals import refused
from tests.tiny import HEADS, tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.interventions import (
    beside_knockouts,
    dominant_only,
    edge_necessity,
    head_knockouts,
    head_paths,
    keep_planes,
    mean_term,
    necessity_sufficiency,
    project_stream,
    remove_edge,
    remove_heads,
    remove_planes,
    remove_term,
    surrogate,
    surrogate_effect,
    swap_edge,
    swap_planes,
)
from tl_geometry.interventions.stream import subspace_of

PROMPTS = tokens(3, 8, seed=5)
TARGETS = [(5, 9), (7, 3), (11, 20)]
MANY = [(50 + i % 10, i) for i in range(30)]


def model(architecture: str = "gpt2") -> Any:
    """A tiny model."""
    return tiny("bridge", architecture)


def inside(edit: Any, prompts: Any = PROMPTS, architecture: str = "gpt2") -> Any:
    """A pass under an edit."""
    with edit:
        return model(architecture)(prompts)


def knocked(*given: Any, prompts: Any = PROMPTS, **options: Any) -> Any:
    """Knockouts of heads of a tiny model."""
    defaults: dict[str, Any] = {"controls": 0, "progress": False}
    return head_knockouts(model(), prompts, *given, **defaults | options)


def pathed(senders: Any, receivers: Any, prompts: Any = PROMPTS, **options: Any) -> Any:
    """Paths between heads of a tiny model with keys that heads share."""
    defaults: dict[str, Any] = {"metric": "loss", "controls": 0, "progress": False}
    return head_paths(model("llama"), prompts, senders, receivers, **defaults | options)


@cache
def a_knockout() -> Any:
    """The knockout of one head."""
    return knocked("loss", heads="L0H0", by="zero")


def needed(*given: Any, **options: Any) -> Any:
    """Necessity of an edge in a tiny model."""
    return edge_necessity(model(), PROMPTS, *given, **options)


def term(prompts: Any = PROMPTS, **options: Any) -> Any:
    """Necessity of a term in a tiny model."""
    basis, defaults = basis_of("bridge"), {"progress": False}
    given = model(), prompts, basis, "L1H0", "content"
    return necessity_sufficiency(*given, **defaults | options)


def dominant(**options: Any) -> Any:
    """Dominant terms of a tiny model."""
    return dominant_only(model(), PROMPTS, basis_of("bridge"), progress=False, **options)


def first_block() -> Any:
    """A sweep of the heads of the first block alone."""
    return tlg.sweep_heads(model(), PROMPTS, basis_of("bridge"), layers=[0], progress=False)


REFUSED: dict[str, Callable[[], Any]] = {
    "metric": lambda: knocked("accuracy", targets=TARGETS),
    "no targets": lambda: knocked("difference"),
    "no targets of a probability": lambda: knocked("probability"),
    "targets of a loss": lambda: knocked("loss", targets=TARGETS),
    "many targets of a loss": lambda: knocked("loss", targets=MANY),
    "too few targets": lambda: knocked("difference", targets=TARGETS[:2]),
    "single targets": lambda: knocked("difference", targets=[5, 7, 11]),
    "three targets": lambda: knocked("probability", targets=[(5, 6, 7)] * 3),
    "position of a loss": lambda: knocked("loss", position=3),
    "shape of a metric": lambda: knocked(lambda logits: logits[:, 0]),
    "attributions of a loss": lambda: knocked("loss", attributions=True),
    "attributions of a user's": lambda: knocked(lambda logits: logits[:, -1, 0], attributions=True),
    "by": lambda: knocked("loss", by="median"),
    "reference by zero": lambda: knocked("loss", by="zero", reference=PROMPTS),
    "short reference": lambda: knocked("loss", reference=PROMPTS[:, :6]),
    "no sets": lambda: knocked("loss", heads={}),
    "negative controls": lambda: knocked("loss", heads="L0H0", controls=-1),
    "controls of all": lambda: knocked("loss", controls=2),
    "controls of a large set": lambda: knocked(
        "loss", heads={"a": [(0, h) for h in range(HEADS)] + [(1, 0)]}, controls=2
    ),
    "one prompt": lambda: knocked("loss", prompts=PROMPTS[:1]),
    "encoder": lambda: head_knockouts(model("bert"), PROMPTS, "loss", progress=False),
    "no writers": lambda: beside_knockouts(a_knockout(), a_knockout()),
    "other model": lambda: beside_knockouts(
        tlg.explain_logit(model("llama"), PROMPTS[:1], -1, 5), a_knockout()
    ),
    "no mean": lambda: remove_heads(model(), "L0H0"),
    "long prompts": lambda: inside(remove_heads(model(), "L0H0", reference=PROMPTS[:, :5])),
    "another prompt of one": lambda: inside(
        remove_heads(model(), "L0H0", by="prompt"), PROMPTS[:1]
    ),
    "no inputs": lambda: pathed("L0H0", []),
    "no input sets": lambda: pathed("L0H0", {}),
    "unknown input": lambda: pathed("L0H0", ["L1H0<k>"]),
    "unknown block": lambda: pathed("L0H0", ["mlp9"]),
    "before all": lambda: pathed(None, ["L0H0<q>"]),
    "order": lambda: pathed("L1H0", ["mlp1", "L1H2<q>"]),
    "between": lambda: pathed("L0H0", "mlp1", between="hot"),
    "paths of one prompt": lambda: pathed("L0H0", "mlp1", PROMPTS[:1]),
    "other prompts": lambda: pathed("L0H0", "mlp1", by="prompt", reference=PROMPTS[:2]),
    "drop": lambda: remove_edge(model(), PROMPTS, "L0H0", "L1H2", drop=8),
    "negative drop": lambda: remove_edge(model(), PROMPTS, "L0H0", "L1H2", drop=-1),
    "other tokens": lambda: inside(remove_edge(model(), PROMPTS, "L0H0", "L1H2"), PROMPTS.flip(0)),
    "swap of one": lambda: swap_edge(model(), PROMPTS[:1], "L0H0", "L1H2"),
    "swap of others": lambda: swap_edge(model(), PROMPTS, "L0H0", "L1H2", other=PROMPTS[:, :7]),
    "later writer": lambda: inside(remove_edge(model(), PROMPTS, "L1H0", "L1H2")),
    "side": lambda: needed("L0H0", "L1H0", side="keys"),
    "own control": lambda: needed("L0H0", "L1H0", controls=["L0H1", "L0H0"]),
    "a control twice": lambda: needed("L0H0", "L1H0", controls=["L0H1", "L0H1"]),
    "fewer controls": lambda: needed("L0H0", "L1H0", controls=-1),
    "counted numbers": lambda: needed("L0H0", "L1H0", counted=torch.ones(8).bool()[:7]),
    "none counted": lambda: needed("L0H0", "L1H0", counted=torch.arange(8) < 1),
    "one prompt of an edge": lambda: edge_necessity(model(), PROMPTS[:1], "L0H0", "L1H0"),
    "one prompt of a term": lambda: term(PROMPTS[:1]),
    "no swap": lambda: term(draws=0),
    "one token": lambda: term(PROMPTS[:, :1]),
    "no draws": lambda: dominant(draws=0),
    "some heads": lambda: dominant(table=first_block()),
    "term": lambda: remove_term(model(), basis_of("bridge"), "cvec-cvex", "L1H0"),
    "mean of one": lambda: inside(mean_term(model(), basis_of("bridge"), "content"), PROMPTS[:1]),
    "longer than the basis": lambda: inside(
        remove_term(model(), basis_of("bridge"), "content", "L1H0"), tokens(1, 19)
    ),
    "no such planes": lambda: inside(remove_planes(model("llama"), "pass"), PROMPTS, "llama"),
    "all planes": lambda: inside(
        keep_planes(model("llama"), [0, 1, 2, 3], control=1), PROMPTS, "llama"
    ),
    "planes of one prompt": lambda: inside(swap_planes(model("llama"), [0]), PROMPTS[:1], "llama"),
    "subspace": lambda: subspace_of(basis_of("bridge"), 1, "mean"),
    "rank": lambda: subspace_of(basis_of("bridge"), 1, "pos", 18),
    "rank 0": lambda: subspace_of(basis_of("bridge"), 1, "pos", 0),
    "state": lambda: inside(project_stream(model(), basis_of("bridge"), 7)),
    "part": lambda: inside(surrogate(model(), basis_of("bridge"), "L0H0", "half")),
    "threshold of a rotary model": lambda: inside(
        surrogate(model("llama"), basis_of("bridge", "llama"), "L0H0", "thresholded")
    ),
    "rank of a part": lambda: inside(surrogate(model(), basis_of("bridge"), "L0H0", rank=33)),
    "rank 0 of a part": lambda: inside(surrogate(model(), basis_of("bridge"), "L0H0", rank=0)),
    "no parts": lambda: surrogate_effect(model(), PROMPTS, basis_of("bridge"), parts=()),
}


KINDS: dict[str, type[GeometryError]] = dict.fromkeys(
    ("encoder", "threshold of a rotary model"), UnsupportedModelError
)
"""Refusals that have a class of their own."""
SENTENCES = {
    "metric": "metric: expected one of 'difference', 'probability', 'loss', got 'accuracy'.",
    "no targets": "targets: expected a pair (right, wrong) for each of 3 prompts, got none.",
    "no targets of a probability": (
        "targets: expected a token for each of 3 prompts, or a pair for each, got none."
    ),
    "targets of a loss": "targets: expected none, got [(5, 9), (7, 3), (11, 20)].",
    "many targets of a loss": (
        "targets: expected none, got [(50, 0), (51, 1), (52, 2), (53, 3), (54, 4), (55, "
        "5), (56, 6), (57, 7), (58, 8) and more."
    ),
    "too few targets": (
        "targets: expected a pair (right, wrong) for each of 3 prompts, got [(5, 9), (7, 3)]."
    ),
    "single targets": (
        "targets: expected a pair (right, wrong) for each of 3 prompts, got [5, 7, 11]."
    ),
    "three targets": (
        "targets: expected a token for each of 3 prompts, or a pair for each, "
        "got [(5, 6, 7), (5, 6, 7), (5, 6, 7)]."
    ),
    "position of a loss": (
        "position: expected position=-1, as this metric looks at all positions, got 3."
    ),
    "shape of a metric": (
        "metric: expected one number for each of 3 prompts, got float32 tensor of shape (3, 61)."
    ),
    "attributions of a loss": (
        "attributions: expected a difference of two logits, got the metric loss. Use "
        'metric="difference".'
    ),
    "attributions of a user's": (
        "attributions: expected a difference of two logits, got the metric <lambda>. Use "
        'metric="difference".'
    ),
    "by": "by: expected one of 'mean', 'zero', 'prompt', got 'median'.",
    "reference by zero": 'reference: expected by="mean", got by="zero".',
    "short reference": (
        "reference: expected prompts of at least 8 tokens, as those that are run, got "
        "prompts of 6 tokens."
    ),
    "no sets": "heads: expected at least one set of heads, got none.",
    "negative controls": "controls: expected a number of random sets, got -1.",
    "controls of all": (
        "controls: expected at least 1 heads that no row has, got 0. Use controls=0."
    ),
    "controls of a large set": (
        "controls: expected at least 5 heads that no row has, got 3. Use controls=0."
    ),
    "one prompt": (
        "prompts: expected a batch of at least 2 prompts, got 1. Use more prompts of the "
        "same length."
    ),
    "encoder": (
        "head_knockouts: expected a causal language model, got tiny-bert, an encoder. Use"
        " the measures of states."
    ),
    "no writers": (
        "table: expected a column 'writer', got HeadKnockouts with ('condition', "
        "'effect', 'effect_low', 'effect_high'). Use explain_logit or trace_logit."
    ),
    "other model": (
        "knockouts: expected knockouts of tiny-llama with the same weights, got those of tiny-gpt2."
    ),
    "no mean": (
        'remove_heads(..., by="mean"): expected prompts to take the mean over, got none. '
        'Use reference=prompts, or by="zero" or by="prompt".'
    ),
    "long prompts": (
        "remove_heads: expected prompts of at most 5 tokens, as in the reference, got 8. "
        "Use reference= prompts at least as long."
    ),
    "another prompt of one": (
        'remove_heads(..., by="prompt"): expected a batch of at least 2 prompts, got 1. '
        "Use more prompts of the same length."
    ),
    "no inputs": "receivers: expected at least one input, got none.",
    "no input sets": "receivers: expected at least one set of inputs, got none.",
    "unknown input": (
        "receivers: expected inputs of this model: 'L1H0<q>', 'L1H1<q>', 'L1H2<q>', "
        "'L1H3<q>', 'L1H0-1<k>', 'L1H2-3<k>', 'L1H0-1<v>', 'L1H2-3<v>', got ['L1H0<k>']."
    ),
    "unknown block": (
        "receivers: expected inputs of this model: 19 names, such as 'mlp1', 'mlp0', got ['mlp9']."
    ),
    "before all": (
        "receivers: expected inputs that read some head, got one that comes before all heads."
    ),
    "order": (
        "the path from L1H0 to L1H2<q>: expected a receiver that reads behind the sender,"
        " got one that reads before it. Use receivers of later blocks."
    ),
    "between": "between: expected one of 'frozen', 'live', got 'hot'.",
    "paths of one prompt": (
        "prompts: expected a batch of at least 2 prompts, got 1. Use more prompts of the "
        "same length."
    ),
    "other prompts": (
        "reference: expected counterfactual prompts (3, 8), one for each prompt, got (2, 8)."
    ),
    "drop": "drop: expected a position from 0 to 7, got 8.",
    "negative drop": "drop: expected a position from 0 to 7, got -1.",
    "other tokens": (
        "tokens inside an edit: expected the tokens of the clean run, got others, or "
        "embeddings. Use remove_edge(model, these tokens, ...)."
    ),
    "swap of one": (
        "other: expected a batch of at least 2 prompts, got 1. Use more prompts of the same length."
    ),
    "swap of others": (
        "other: expected counterfactual prompts (3, 8), one for each prompt, got (3, 7)."
    ),
    "later writer": (
        "writer before block 1: expected one of 'embed', 'pos_embed', 'constants', "
        "'L0H0', 'L0H1', 'L0H2', 'L0H3', 'mlp0', 'attn0', got 'L1H0'."
    ),
    "side": "side: expected one of 'query', 'key', 'value', got 'keys'.",
    "own control": "controls: expected other writers than 'L0H0', each once, got ('L0H1', 'L0H0').",
    "a control twice": (
        "controls: expected other writers than 'L0H0', each once, got ('L0H1', 'L0H1')."
    ),
    "fewer controls": "controls: expected 0 or more, got -1.",
    "counted numbers": "counted: expected bool [3, 8] or [8], got bool tensor of shape (7,).",
    "none counted": "counted: expected tokens of every prompt, got none.",
    "one prompt of an edge": (
        "tokens: expected a batch of at least 2 prompts, got 1. Use more prompts of the "
        "same length."
    ),
    "one prompt of a term": "tokens: expected at least 2 prompts, got 1.",
    "no swap": "draws: expected at least one swap, got 0.",
    "one token": "tokens: expected prompts of at least 2 tokens, got 1.",
    "no draws": "draws: expected at least 1, got 0.",
    "some heads": (
        "table: expected a row for every head, got none for [(1, 0), (1, 1), (1, 2), (1, "
        "3)]. Use sweep_heads(model, tokens, basis)."
    ),
    "term": (
        "term: expected one of 'bias-bias', 'bias-pos', 'bias-cvec', 'pos-bias', "
        "'pos-pos', 'pos-cvec', 'cvec-bias', 'cvec-pos', 'cvec-cvec', 'alibi-alibi', "
        "'position', 'content', 'mixed', got 'cvec-cvex'."
    ),
    "mean of one": (
        "mean_term: expected a batch of at least 2 prompts, got 1. Use more prompts of "
        "the same length."
    ),
    "longer than the basis": (
        "tokens: expected at most 18 positions, as the basis has seen, got 19. Use "
        "decompose(...) on windows of this length."
    ),
    "no such planes": (
        "planes: expected planes that the heads have, got none of pass in layer 0, whose "
        "wavelengths are 6.28, 62.8, 628, 6.28e+03. Use others, or longer prompts."
    ),
    "all planes": (
        "planes: expected fewer than all 4 rotated planes, and no other, for a control, "
        "got 4 planes."
    ),
    "planes of one prompt": (
        "swap_planes: expected a batch of at least 2 prompts, got 1. Use more prompts of "
        "the same length."
    ),
    "subspace": "subspace: expected one of 'pos', 'ctx', got 'mean'.",
    "rank": "rank: expected 1 to 16, the rank of pos at state 1, got 18.",
    "rank 0": "rank: expected 1 to 16, the rank of pos at state 1, got 0.",
    "state": "states: expected an index from 0 to 2, got 7.",
    "part": (
        "part: expected one of 'structured', 'low_rank', 'diagonal', 'thresholded', "
        "'random', 'none', 'whole', got 'half'."
    ),
    "threshold of a rotary model": (
        "part 'thresholded': expected a part of a W_QK that is one matrix for all "
        "offsets, got rotary positions in tiny-llama. Use one of 'structured', "
        "'low_rank', 'diagonal', 'random', 'none'."
    ),
    "rank of a part": "rank: expected 1 to 32 directions, got 33.",
    "rank 0 of a part": "rank: expected 1 to 32 directions, got 0.",
    "no parts": (
        "parts: expected some of structured, low_rank, diagonal, thresholded, random, "
        "none, whole, got none."
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_whole_sentences(name: str) -> None:
    """Each refusal says what was expected, what came, and what to call instead."""
    assert refused(REFUSED[name], KINDS.get(name, GeometryError)) == SENTENCES[name]
