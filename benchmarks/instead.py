"""What a user of TransformerLens would do instead, in the same process: head types by its detector,
composition scores of the weights, and the scores of one head by component with a cache.

(The positional basis from stacked caches is in ``decomposition``, the nine terms of all heads from
a full cache in ``sweep``, dense SVDs in ``weights``.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from einops import einsum
from torch import Tensor
from transformer_lens.head_detector import detect_head

import tl_geometry as tlg
from benchmarks.decomposition import gpt2
from benchmarks.harness import Row, interleave
from tl_geometry.models.model_view import ModelView
from tl_geometry.scores.head_types import SEQUENCES, detection_patterns, head_type_scores

SIZES = {"smoke": (2, 128, 32), "cpu": (6, 512, 64), "gpu": (12, 768, 64)}
"""Layers, d_model, positions. ``all_composition_scores`` of 12 layers of 768 takes 8 GB."""
ROUNDS = {"smoke": 1, "cpu": 5, "gpu": 7}
TYPES = {
    "previous": "previous_token_head",
    "duplicate": "duplicate_token_head",
    "induction": "induction_head",
}


def detected(view: ModelView, tokens: Tensor) -> Tensor:
    """Three types of all heads by TransformerLens's detector."""
    model = SimpleNamespace(
        cfg=view._model.cfg,
        to_tokens=lambda row: tokens if isinstance(row, list) else tokens[int(row)].unsqueeze(0),
        run_with_cache=view._model.run_with_cache,
    )
    rows: Any = [str(row) for row in range(len(tokens))]
    with torch.inference_mode():
        return torch.stack([detect_head(model, rows, kind) for kind in TYPES.values()])  # pyright: ignore[reportArgumentType]


def scored(view: ModelView, tokens: Tensor) -> Tensor:
    """The same by this package (with two more types, baselines and standard errors)."""
    found: dict[int, Tensor] = {}

    def take(layer: int, pattern: Tensor) -> None:
        head_type_scores(pattern, tokens)
        keys = detection_patterns(tokens)  # for the detector's own score, sum(A * D) / sum(A)
        scores = [(pattern * keys[kind].unsqueeze(1)).sum((0, 2, 3)) for kind in TYPES]
        found[layer] = torch.stack(scores) / pattern.sum((0, 2, 3))

    hooks: Any = {
        name: (lambda pattern, layer=layer: take(layer, pattern))
        for layer, name in enumerate(view.pattern_hooks)
    }
    view.run(tokens, hooks)
    return torch.stack([found[layer] for layer in range(view.n_layers)], dim=1)


def by_component(view: ModelView, tokens: Tensor) -> Tensor:
    """Scores of head 0 of the last layer by component of queries and keys, from a cache: ``[query
    part, key part, batch, query, key]``."""
    model, layer = view._model, view.n_layers - 1
    with torch.inference_mode():
        cache = model.run_with_cache(tokens, return_type=None)[1]
        parts = cache.apply_ln_to_stack(cache.decompose_resid(layer, mode="all"), layer=layer)
        block = model.blocks[layer].attn
        q, k = (
            einsum(parts, w[0], "part batch position d_model, d_model e -> part batch position e")
            for w in (block.W_Q, block.W_K)
        )
        scores = einsum(q, k, "a batch query e, b batch key e -> a b batch query key")
    return scores / k.shape[-1] ** 0.5


def split(view: ModelView, tokens: Tensor) -> Any:
    """The same by this package, verified against the model's own scores."""
    head = (view.n_layers - 1, 0)
    return tlg.split_scores(view, tokens, None, heads=[head], parts="blocks")


def run(size: str) -> list[Row]:
    """Agreement of types and of scores (that of composition is in the tests), then both routes in
    turn."""
    layers, width, length = SIZES[size]
    model: Any = gpt2(layers, width, 2 * length)
    view = tlg.view(model.to("cuda") if size == "gpu" else model)
    tokens = tlg.corpus.repeated_random_tokens(length // 2, 2, SEQUENCES, low=0, high=500)
    tokens = tokens.to(view.device)
    theirs, ours = detected(view, tokens), scored(view, tokens)
    assert (theirs - ours.to(theirs)).abs().max() < 1e-4, "the routes disagree"
    few = tokens[:2]
    by_hand, found = by_component(view, few), split(view, few)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    apart = (by_hand.sum((0, 1)).cpu() - found.summed()[:, 0])[:, allowed]
    assert apart.abs().max() < 1e-4, "the routes disagree"
    rounds = ROUNDS[size]
    return [
        *interleave(
            f"head types, {len(tokens)} sequences of {length}",
            {
                "head_detector, three types": lambda: detected(view, tokens),
                "head_type_scores, five types": lambda: scored(view, tokens),
            },
            rounds=rounds,
        ),
        *interleave(
            f"one head by component, {len(few)} x {length}",
            {
                "cache, decompose_resid, products": lambda: by_component(view, few),
                "split_scores by blocks, verified": lambda: split(view, few),
            },
            rounds=rounds,
        ),
        *interleave(
            "composition, all pairs of heads",
            {
                "all_composition_scores, Q, K, V": lambda: [
                    model.all_composition_scores(kind) for kind in "QKV"
                ],
                "composition, with shares on data": lambda: tlg.composition(
                    view, few, draws=1, progress=False
                ),
            },
            rounds=rounds,
        ),
    ]
