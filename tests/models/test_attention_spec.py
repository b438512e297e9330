"""What one attention layer does, against plain loops: masks, norms of queries and keys, sizes,
score biases that no family has, and what a reader is told."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import HAS_HOOKED, tiny, tiny_hooked, tokens
from tl_geometry.models import check_model, view
from tl_geometry.models.attention_spec import (
    AttentionSpec,
    QKNorm,
    alibi,
    allowed_cells,
    unmasked,
)
from tl_geometry.models.infer import alibi_slopes
from tl_geometry.models.layer_view import HeadWeights, LayerView
from tl_geometry.models.norms import NormWeights

needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def norm_of(kind: str | None, width: int = 6) -> NormWeights:
    gain, bias = 1 + 0.3 * draw(width, seed=1), 0.3 * draw(width, seed=2)
    return NormWeights(norm_type=kind, gain=gain, bias=bias, eps=0.1)


def layers_of(model: Any, length: int = 16) -> list[LayerView]:
    found: list[LayerView] = []
    seen = view(model)
    seen.run_layers(tokens(length=length), range(seen.n_layers), found.append)
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_without_scores_the_mask_is_that_of_the_settings(causal: bool, window: int | None) -> None:
    spec, wide = AttentionSpec(norm=norm_of("LN"), window=window), math.inf
    cells = [
        [(j <= i or not causal) and abs(i - j) < (window or wide) for j in range(7)]
        for i in range(7)
    ]
    assert allowed_cells(spec, 7, causal, None, None).tolist() == cells


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masked_scores_are_the_most_negative_numbers_of_their_dtype(dtype: torch.dtype) -> None:
    """Perhaps plus a score, and in float64 perhaps those of float32."""
    least = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).min
    masked = [-math.inf, least, 0.6 * least]
    seen = [0.0, 3e4, -2e4, least / 8]
    assert unmasked(torch.tensor([masked], dtype=dtype), None).tolist() == [[False] * 3]
    assert unmasked(torch.tensor([seen], dtype=dtype), None).tolist() == [[True] * 4]
    own = torch.tensor([[-1e4, 1.0, -math.inf]], dtype=dtype)
    assert unmasked(own, torch.tensor(-1e4)).tolist() == [[False, True, False]]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["LN", "RMS"])
def test_a_norm_of_queries_is_over_each_head_or_all(kind: str, flat: bool) -> None:
    gain_q, gain_k, x = draw(3, 4, seed=1), draw(3, 4, seed=2), draw(2, 5, 3, 4)
    norm = QKNorm(kind, flat, gain_q, gain_k, 0.1)
    assert torch.equal(norm.gain("q"), gain_q)
    assert torch.equal(norm.gain("k"), gain_k)
    for b, i, h in itertools.product(range(2), range(5), range(3)):
        row = (x[b, i].flatten() if flat else x[b, i, h]).tolist()
        mean = math.fsum(row) / len(row) if kind == "LN" else 0.0
        scale = math.sqrt(math.fsum((v - mean) ** 2 for v in row) / len(row) + 0.1)
        assert torch.allclose(norm.centre(x)[b, i, h], x[b, i, h] - mean)
        assert float(norm.scale(x)[b, i, h]) == pytest.approx(scale)


def spec_of(kind: str | None, qk_norm: QKNorm | None, added: Tensor | None) -> AttentionSpec:
    matrices = {f"W_{w}": draw(3, 6, 4, seed=10 + i) for i, w in enumerate("QKV")}
    biases = {f"b_{w}": draw(3, 4, seed=20 + i) for i, w in enumerate("QKV")}
    weights = HeadWeights(**matrices, **biases, W_O=draw(3, 4, 6, seed=30), b_O=draw(6, seed=31))
    return AttentionSpec(norm=norm_of(kind), weights=weights, qk_norm=qk_norm, added=added)


@pytest.mark.parametrize("kind", ["LN", "RMS", None])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_queries_and_the_sizes_behind_them_by_hand(
    kind: str | None, normed: bool, which: str
) -> None:
    qk_norm = QKNorm("RMS", False, draw(3, 4, seed=5), draw(3, 4, seed=6), 0.2)
    added = None if normed else draw(5, 6, seed=7)
    spec, h = spec_of(kind, qk_norm if normed else None, added), draw(1, 5, 6)
    W, b = (getattr(spec.weights, f"{name}_{which.upper()}") for name in "Wb")
    for i, e in itertools.product(range(5), range(3)):
        x = h[0, i] - (h[0, i].mean() if kind == "LN" else 0.0)
        x = x / (1.0 if kind is None else (x.square().mean() + 0.1).sqrt()) * spec.norm.gain
        shift = spec.norm.bias + (added[i] if added is not None and which != "v" else 0.0)
        raw = (x + shift) @ W[e] + b[e]
        size = x.abs() @ W[e].abs() + (shift @ W[e] + b[e]).abs()
        assert torch.allclose(spec.raw(h, which)[0, i, e], raw)
        assert torch.allclose(spec.sizes(h, which)[0, i, e], size)
        if not normed or which == "v":
            assert torch.allclose(spec.full(h, which, None)[0, i, e], raw)
            continue
        factor = qk_norm.gain(which)[e] / (raw.square().mean() + 0.2).sqrt()
        assert torch.allclose(spec.full(h, which, None)[0, i, e], raw * factor)
        assert torch.allclose(spec.entering_sizes(h, which)[0, i, e], size * factor.abs())
    shares = spec.added_position()
    if added is None:
        assert shares is None
    elif which != "v":
        assert shares is not None
        assert torch.allclose(getattr(shares, which), torch.einsum("td,hde->the", added, W))


def test_one_head_of_each_group_has_its_own_weights() -> None:
    norm = QKNorm("RMS", False, draw(3, 4, seed=5), draw(3, 4, seed=6), 0.2)
    for qk_norm in (norm, None):
        whole = spec_of("LN", qk_norm, None)
        some = whole.every(2)
        assert whole.weights is not None
        assert some.weights is not None
        for name, value in vars(whole.weights).items():
            kept = value if name == "b_O" else value[[0, 2]]
            assert torch.equal(getattr(some.weights, name), kept)
        if some.qk_norm is not None:
            assert torch.equal(some.qk_norm.gain_q, norm.gain_q[[0, 2]])
            assert torch.equal(some.qk_norm.gain_k, norm.gain_k[[0, 2]])
        assert (some.qk_norm is None) == (qk_norm is None)


def test_alibi_is_a_slope_times_a_distance_or_a_place() -> None:
    places = {"k": lambda i, j: j, "k-q": lambda i, j: j - i, "k-last": lambda i, j: j - 4}
    for form, place in places.items():
        cells = [[float(place(i, j)) for j in range(5)] for i in range(5)]
        assert alibi(form, 5).tolist() == cells
    # Press et al. 2022: every other one of the double power follows
    assert alibi_slopes(6).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]


# ---- score biases that no family has


def biased(table: Tensor | None) -> Any:
    model = tiny_hooked(positional_embedding_type="alibi", normalization_type="LN")
    for block in model.blocks:
        block.attn.alibi = table
    return copy.deepcopy(model)  # a new object, not looked at yet


def bias_of(layer: LayerView) -> Tensor:
    assert layer.bias is not None
    return torch.where(layer.allowed, layer.bias, 0.0)


@needs_hooked
def test_slopes_of_any_size_are_read_off_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_lens.components.abstract_attention import AbstractAttention

    slopes, model = torch.tensor([0.3, 1.7, -0.4, 0.01]), biased(None)
    monkeypatch.setattr(AbstractAttention, "create_alibi_multipliers", lambda *_: slopes)
    found = view(model).layer_facts(1).slopes
    assert found is not None
    assert torch.allclose(found, slopes.double(), atol=1e-5)
    assert view(model).describe_layer(1)["score bias"] == "ALiBi, analytic"
    for length in (16, 9):  # the table of the longest prompt is kept
        origin = torch.arange(16 - length, 16)[:, None]
        for layer in layers_of(model, length):
            assert layer.bias_source == "analytic"
            place = (torch.arange(length) - origin).tril()
            assert torch.allclose(bias_of(layer), slopes[:, None, None] * place, atol=1e-4)


@needs_hooked
def test_a_bias_without_a_formula_is_measured_for_each_length() -> None:
    table = draw(4, 64, 64).float()
    model = biased(table)
    seen = view(model)
    assert seen.describe_layer(0)["score bias"] == "ALiBi, measured"
    for length in (16, 9, 16):
        for layer in layers_of(model, length):
            assert layer.bias_source == "measured"
            own = table[:, -length:, :length]
            assert torch.allclose(bias_of(layer), own.tril(), atol=1e-4)
    assert not check_model(model).refused


# ---- what a reader is told

PLAIN = {
    "norm before attention": "LN",
    "key and value heads": "4 for 4 query heads",
    "QK-norm": "none",
    "rotation": "none",
    "score scale": "0.353553",
    "soft cap": "none",
    "sinks": "none",
    "score bias": "none",
    "sliding window": "none",
    "hook_attn_scores holds": "scores",
    "arithmetic": "float32",
}
HALVES = {"rotation": "pairs (i, i + n/2)"}
GROUPED = {"norm before attention": "RMS", "key and value heads": "2 for 4 query heads"} | HALVES
OWN_KERNEL = {"hook_attn_scores holds": "the pattern"}
WORDS: dict[str, list[dict[str, str]]] = {
    "gpt2": [{}, {}],
    "gpt2-inverse-layer": [{}, {"score scale": "0.176777"}],
    "qwen3": [GROUPED | {"QK-norm": "RMS over each head"}] * 2,
    "olmo2": [
        {"norm before attention": "none", "QK-norm": "RMS over all heads"} | HALVES,
    ]
    * 2,
    "gptj": [{"rotation": "pairs (2i, 2i+1)"} | OWN_KERNEL] * 2,
    "gemma2": [
        GROUPED | {"score scale": "0.447214", "soft cap": "50"} | window
        for window in ({"sliding window": "6 positions"}, {})
    ],
    "gpt-oss": [
        GROUPED | {"sinks": "one logit for each head"} | window
        for window in ({"sliding window": "6 positions"}, {})
    ],
    "gpt-neo": [
        {"score scale": "1"} | OWN_KERNEL | window
        for window in ({}, {"sliding window": "6 positions"})
    ],
    "mpt": [{"score bias": "ALiBi, analytic"}] * 2,
    "bert": [{"norm before attention": "none"} | OWN_KERNEL] * 2,
}
"""What is said of a bridge's two layers, where it differs from ``PLAIN``."""


@pytest.mark.parametrize("architecture", WORDS)
def test_a_layer_in_words(architecture: str) -> None:
    seen = view(tiny("bridge", architecture))
    expected = [PLAIN | words for words in WORDS[architecture]]
    assert [seen.describe_layer(layer) for layer in range(2)] == expected


def test_float32_arithmetic_inside_a_float64_model_is_said() -> None:
    for architecture, words in (("gpt2", "float64"), ("llama", "float32 in places")):
        seen = view(tiny("bridge", architecture, dtype=torch.float64))
        assert seen.describe_layer(0)["arithmetic"] == words


def test_the_whole_account_of_a_model() -> None:
    model = tiny("bridge", "gemma2")
    seen, words = view(model), [PLAIN | words for words in WORDS["gemma2"]]
    reported = check_model(model).findings
    library = seen.library
    assert library.startswith("transformer_lens ")
    said = {
        "model": (f"tiny-gemma2 ({seen.fingerprint})", "supported"),
        "class": (f"TransformerBridge, {library}", "supported"),
        "weights": ("as trained, float32, cpu", "supported"),
        "size": ("2 layers, 4 heads, d_model 32, n_ctx 64, d_vocab 61", "supported"),
        "position": ("rotary, causal", "supported"),
        "states": (
            "3, last blocks.1.hook_resid_post",
            "verified, state l+1 is the output of block l",
        ),
        "text": ("token ids only", "supported"),
        "output head": ("RMS norm, then linear", "verified against the model's logits"),
        **{name: (value, "supported") for name, value in words[1].items()},
        "soft cap": ("50", "supported: scores are split before the cap"),
        "sliding window": ("6 positions in layers 0; none in layers 1", "supported"),
    }
    assert [row[0] for row in reported[: len(said)]] == list(said)
    assert {row[0]: row[1:] for row in reported[: len(said)]} == said
    layers = layers_of(model)
    for row, layer in zip(reported[len(said) :], layers, strict=False):
        name, error, bound = layer.reconstruction.nearest or ("", 0.0, 0.0)
        assert row[0] == f"scores of layer {layer.layer}"
        assert 0 < layer.reconstruction.worst == error / bound < 1
        assert row[2].startswith("verified, ")
        assert " within " in row[2]
        assert name in layer.reconstruction.checks
    assert [row[0] for row in reported[-3:]] == [
        *("scores of layer 0", "scores of layer 1"),
        "additive identity",
    ]
    bert = {row[0]: row[1:] for row in check_model(tiny("bridge", "bert")).findings}
    assert bert["position"] == ("standard, bidirectional", "supported")
    assert bert["output head"][0] == "not one norm and one linear map"
    assert bert["output head"][1].startswith("refused for direct effects on logits; losses")
    processed = {row[0]: row[1:] for row in check_model(tiny("bridge", "gpt2", True)).findings}
    assert processed["weights"] == ("processed, float32, cpu", "supported")
