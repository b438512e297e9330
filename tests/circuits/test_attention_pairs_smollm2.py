"""Pairs of parts behind the attention of a head of a real decoder that matters by where later heads
look: they sum to the model's own scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.circuits.test_edges_smollm2 import PAIRS
from tl_geometry.circuits import attention_pairs
from tl_geometry.models.reconstruction import reconstruction_bound

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]
PROMPT = "When Mary and John went to the store, John gave a drink to"
LAYER, HEAD = 20, 0


def test_pairs_sum_to_the_scores_of_the_model() -> None:
    """Largest error measured as a share of the bound: 0.002 with writers, 0.07 with a basis."""
    model = tlg.zoo.smollm2()
    graph = tlg.trace_logit(model, PROMPT, " Mary", against=" John", prepend_bos=True)
    node, options = graph.node((LAYER, HEAD), graph.position), dict[str, Any](prepend_bos=True)
    basis = tlg.decompose(model, PAIRS["prompts"], states=[LAYER], progress=False, **options)
    hook = f"blocks.{LAYER}.attn.hook_attn_scores"
    seen: dict[str, Any] = {}
    with torch.no_grad():
        hooks = [(hook, lambda x, hook: seen.update(row=x[0, HEAD, -1].double()))]
        model.run_with_hooks(torch.tensor([graph.token_ids]), fwd_hooks=hooks)
    for given, parts, count in ((None, "writers", 203), (basis, ("pos", "cvec"), 3)):
        split = tlg.split_scores(
            model, PROMPT, given, heads=[(LAYER, HEAD)], parts=parts, **options
        )
        pairs = attention_pairs(graph, split, node)
        assert pairs.weights.shape == (count, count, 15)
        q, k = (x[..., 0, :].abs().double().sum(0)[0] for x in (split.q[:, :, -1:], split.k))
        bound = reconstruction_bound(2**-24, float((k @ q[0]).max()))
        expected = pairs.response.double() * seen["row"]
        allowed = pairs.response.abs().double() * bound
        assert bool(((pairs.weights.sum((0, 1)) - expected).abs() <= allowed).all())
        # without the pair that counts most
        most = int(pairs.weights.abs().sum(-1).argmax())
        without = pairs.weights.flatten(0, 1).sum(0) - pairs.weights.flatten(0, 1)[most]
        assert not bool(((without - expected).abs() <= allowed).all())
