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

from tests.tiny import HAS_HOOKED, D, tiny, tokens
from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError
from tl_geometry.models import view
from tl_geometry.scores.features import Dictionary, dictionary, feature_shares
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
CLASSES = ["Standard", "JumpReLU", "TopK", "Gated"]


@torch.no_grad()
def autoencoder(name: str = "Standard", hook_name: str = HERE, **settings: Any) -> Any:
    """An ``SAE`` of SAELens with random weights, every bias and threshold included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated imports, and advice how to load the model
        lens: Any = importlib.import_module("sae_lens")
        about = {"hook_name": hook_name, "model_from_pretrained_kwargs": {}}
        metadata = lens.saes.sae.SAEMetadata(**about | settings.pop("about", {}))
        if name == "TopK":
            settings = {"k": 7} | settings
        config = getattr(lens, f"{name}SAEConfig")
        config = config(d_in=D, d_sae=FEATURES, metadata=metadata, **settings)
        found = getattr(lens, f"{name}SAE")(config).eval()
    generator = torch.Generator().manual_seed(5)
    for key, value in found.named_parameters():
        drawn = torch.randn(value.shape, generator=generator)
        value.copy_(drawn.abs() if "threshold" in key else drawn)
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
    scaled = autoencoder("TopK", k=7, rescale_acts_by_decoder_norm=True)
    with pytest.raises(ReconstructionError, match="decode"):
        feature_shares(model, PROMPTS, dictionary(scaled, 1, model), heads="L1H2")
