"""SAELens's own objects, as they are: activations are those of their ``encode``, what is explained
is what their ``decode`` gives, and with the error it adds up to the stream."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.models import HAS_HOOKED, D, tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.circuits.dictionaries import Dictionary, dictionary
from tl_geometry.circuits.features import feature_shares
from tl_geometry.models import view
from tl_geometry.scores.split import split_scores

PROMPTS = tokens(batch=3, length=10, seed=7)
FEATURES = 48
HERE = "blocks.1.hook_resid_pre"
pytestmark = [
    pytest.mark.skipif(not HAS_HOOKED, reason="SAELens pins TransformerLens 3"),
    pytest.mark.skipif(
        HAS_HOOKED and importlib.util.find_spec("sae_lens") is None,
        reason="the package sae-lens is not installed (README, second block)",
    ),
]
CLASSES = ["Standard", "JumpReLU", "TopK", "Gated", "AbsTopK", "MatchingPursuit"]
BY_NORM = [
    ("TopK", {}),
    ("TopKTraining", {}),
    ("TopKTraining", {"use_sparse_activations": True}),
    ("BatchTopKTraining", {}),
    ("MatryoshkaBatchTopKTraining", {"matryoshka_widths": [16, FEATURES]}),
]
"""Classes that may rescale activations by the norms of the decoder's rows."""


@torch.no_grad()
def autoencoder(name: str = "Standard", hook_name: str = HERE, **settings: Any) -> Any:
    """An ``SAE`` of SAELens with random weights, every bias and threshold included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated imports, and advice how to load the model
        lens: Any = importlib.import_module("sae_lens")
        about = {"hook_name": hook_name, "model_from_pretrained_kwargs": {}}
        metadata = lens.saes.sae.SAEMetadata(**about | settings.pop("about", {}))
        if "TopK" in name:
            settings = {"k": 7} | settings
        name = name if "Transcoder" in name else f"{name}SAE"
        config = getattr(lens, f"{name}Config")
        config = config(d_in=D, d_sae=FEATURES, metadata=metadata, **settings)
        found = getattr(lens, name)(config).eval()
    generator = torch.Generator().manual_seed(5)
    for key, value in found.named_parameters():
        drawn = torch.randn(value.shape, generator=generator)
        value.copy_(drawn.abs() if "threshold" in key else drawn)
    if "MatchingPursuit" in name:  # it expects rows of norm one, or its pursuit diverges
        found.W_dec.copy_(found.W_dec / found.W_dec.norm(dim=-1, keepdim=True))
    return found


def states(model: Any) -> Tensor:
    return view(model).activations(PROMPTS, [HERE])[HERE]


def agreement(source: Any, found: Dictionary, h: Tensor) -> float:
    """Largest difference between our account of the object and its own, which is never nothing."""
    with torch.no_grad():
        activations = source.encode(h)
        decoded = source.decode(activations)
    assert torch.equal(found.encode(h), activations)
    assert 0 < int((activations != 0).sum()) < activations.numel()
    assert float((decoded - h).abs().max()) > 0.1
    return float((found.explained(h, activations) - decoded).abs().max() / decoded.abs().max())


@pytest.mark.parametrize("normalization", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("name", CLASSES)
def test_features_and_error_add_up_to_the_stream(name: str, normalization: str) -> None:
    model = tiny("bridge", "llama")
    source = autoencoder(name, normalize_activations=normalization)
    found = dictionary(source, 1, model)
    h = states(model)
    assert agreement(source, found, h) < 1e-5
    shares = feature_shares(model, PROMPTS, found, heads=["L1H2", "L1H0"])
    assert torch.allclose(shares.cs.sum(-1), torch.ones(2, 2).double(), atol=1e-3)
    with torch.no_grad():
        activations = source.encode(h)
        error = h - source.decode(activations)
    kept = error.square().sum() / h.square().sum()
    assert shares.unexplained == pytest.approx(float(kept), rel=1e-4)
    assert shares.feature_ids.tolist() == (activations != 0).any(0).any(0).nonzero()[:, 0].tolist()
    parts = {"error": error, "rest": h - error}
    table = split_scores(model, PROMPTS, None, heads=["L1H2", "L1H0"], parts=parts).shares()
    own = table.marginals()
    mine = shares.cs[..., shares.parts.index("error")]
    theirs = own.cs[..., own.parts.index("error")]  # a random dictionary's share is up to 50
    assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Standard", "JumpReLU"])
def test_a_bias_that_the_encoder_does_not_see(name: str) -> None:
    model = tiny("bridge", "gpt2")
    h, found = states(model), []
    for applied in (True, False):
        source = autoencoder(name, apply_b_dec_to_input=applied)
        assert agreement(source, dictionary(source, 1, model), h) < 1e-5
        found.append(source.encode(h))
    assert not torch.equal(*found)


def test_what_is_not_of_this_stream_is_refused() -> None:
    model = tiny("bridge", "gpt2")
    dictionary(autoencoder(hook_name="blocks.0.hook_resid_post"), 1, model)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("blocks.0.hook_resid_pre", {"hook_name": "blocks.0.hook_resid_pre"}),
        ("hook_z", {"hook_name": "blocks.1.attn.hook_z", "reshape_activations": "hook_z"}),
        ("hook_name_out", {"about": {"hook_name_out": "blocks.1.hook_mlp_out"}}),
        ("only_in", {"normalize_activations": "expected_average_only_in"}),
        ("whitening", {"normalize_activations": "covariance_whitening"}),
        ("centred", {"about": {"model_from_pretrained_kwargs": {"center_writing_weights": True}}}),
    ]
    for name, options in cases:
        with pytest.raises(UnsupportedModelError, match=name):
            dictionary(autoencoder(**options), 1, model)
    into_output = {"d_out": D, "apply_b_dec_to_input": False}
    foreign: list[tuple[str, str, dict[str, Any]]] = [
        ("Transcoder", "transcoder", into_output),
        ("SkipTranscoder", "skip_transcoder", into_output),
        ("JumpReLUTranscoder", "jumprelu_transcoder", into_output),
        ("Temporal", "temporal", {"n_heads": 1, "bottleneck_factor": 16}),
    ]
    for name, said, options in foreign:
        with pytest.raises(UnsupportedModelError, match=f"got '{said}'"):
            dictionary(autoencoder(name, **options), 1, model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # said by torch, once
@pytest.mark.parametrize("rescaled", [True, False])
@pytest.mark.parametrize(("name", "settings"), BY_NORM)
def test_activations_rescaled_by_the_decoder(
    name: str, settings: dict[str, Any], rescaled: bool
) -> None:
    """By hand: a feature is its activation times the decoder's row, over the row's norm where it is
    rescaled."""
    model = tiny("bridge", "gpt2")
    source = autoencoder(name, rescale_acts_by_decoder_norm=rescaled, **settings)
    found, h = dictionary(source, 1, model), states(model)
    assert found.over_batch == ("Batch" in name)
    with torch.no_grad():
        activations = source.encode(h)
        activations = activations.to_dense() if activations.is_sparse else activations
        rows = source.W_dec / source.W_dec.norm(dim=-1, keepdim=True) if rescaled else source.W_dec
        by_hand = torch.einsum("bif,fd->bid", activations, rows) + source.b_dec
        assert torch.allclose(by_hand, source.decode(activations), atol=1e-4)
    assert torch.allclose(found.explained(h, found.encode(h)), by_hand, atol=1e-4)
    shares = feature_shares(model, PROMPTS, found, heads="L1H2")
    error = (h - by_hand).square().sum() / h.square().sum()
    assert shares.unexplained == pytest.approx(float(error), rel=1e-4)
    assert torch.allclose(shares.cs.sum(-1), torch.ones(1, 2).double(), atol=1e-3)
    most = int(activations.abs().sum((0, 1)).argmax())
    part = {"one": activations[..., most, None] * rows[most]}
    parts = part | {"rest": h - part["one"]}
    marginals = split_scores(model, PROMPTS, heads="L1H2", parts=parts).shares().marginals()
    own, split = shares.parts.index(f"f{most}"), marginals.parts.index("one")
    assert torch.allclose(shares.cs[..., own], marginals.cs[..., split], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["BatchTopKTraining", "MatryoshkaBatchTopKTraining"])
def test_a_batch_topk_is_read_as_it_is_saved(name: str) -> None:
    """With its threshold, as the JumpReLU autoencoder that SAELens saves; without one, in one batch
    only."""
    model = tiny("bridge", "gpt2")
    settings: dict[str, Any] = {"matryoshka_widths": [16, FEATURES]} if "Matryoshka" in name else {}
    source = autoencoder(name, rescale_acts_by_decoder_norm=True, **settings)
    untrained = dictionary(source, 1, model)
    with pytest.raises(GeometryError, match="one batch"):
        feature_shares(model, PROMPTS, untrained, heads="L1H2", batch_size=2)
    source.topk_threshold.fill_(30.0)
    h = states(model)
    before = source.encode_with_hidden_pre(h)[1]
    assert float((before.detach() - 30).abs().min()) > 1e-3  # rounding decides nothing
    saved = {key: value.clone() for key, value in source.state_dict().items()}
    source.process_state_dict_for_saving_inference(saved)
    jump = autoencoder("JumpReLU")
    jump.load_state_dict(saved)
    found = dictionary(source, 1, model)
    with torch.no_grad():
        expected = jump.encode(h)
    assert 0 < int((expected != 0).sum()) < expected.numel()
    assert torch.allclose(found.encode(h), expected, atol=1e-4)
    one, all_three = (
        feature_shares(model, PROMPTS, found, heads="L1H2", batch_size=size).cs for size in (1, 3)
    )
    assert torch.allclose(one, all_three, atol=1e-4)
