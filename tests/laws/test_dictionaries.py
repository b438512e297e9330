"""Laws of features of a dictionary (SPEC M): they add up with their error to what a head reads,
and autoencoders are read as they are or refused."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.laws.test_writers import far
from tests.lib.data import marginals, refused
from tests.lib.models import HAS_HOOKED, D, tiny, tokens
from tl_geometry import circuits

SHORT = tokens(batch=3, length=10, seed=7)
Q = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(0)).double())[0]
OFFSET = torch.randn(D, generator=torch.Generator().manual_seed(1)).double()
HERE, FEATURES = "blocks.1.hook_resid_pre", 48


def states(model: Any) -> Tensor:
    with torch.no_grad():
        return model.run_with_cache(SHORT)[1][HERE]


def orthonormal(model: Any, keep: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """Activations of an orthonormal dictionary, all but the first ``keep`` features off."""
    activations = (states(model).double() - OFFSET) @ Q.mT
    activations[..., keep:] = 0
    return activations, Q, OFFSET


def shares(model: Any, source: Any, **options: Any) -> Any:
    known = circuits.dictionary(source, 1, model)
    return circuits.feature_shares(model, SHORT, known, **{"heads": "L1H2", **options})


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "bloom"])
def test_an_orthonormal_dictionary_leaves_no_error(architecture: str) -> None:
    """What is dropped goes to the error exactly."""
    model = tiny("bridge", architecture, dtype=torch.float64)
    found, fewer = shares(model, orthonormal(model)), shares(model, orthonormal(model, 20))
    assert found.unexplained < 1e-12
    assert float(found.cs[..., 1].abs().max()) < 1e-5
    assert architecture == "bloom" or far(found.cs.sum(-1), torch.ones(())) < 1e-5
    parts = {f"f{i}": ((states(model) - OFFSET) @ Q[i]).unsqueeze(-1) * Q[i] for i in range(D)}
    parts["b_dec"] = OFFSET.expand(3, 10, D)
    split = marginals(tlg.split_scores(model, SHORT, heads="L1H2", parts=parts).shares())
    for name in ("f0", "f7", "b_dec"):
        here, there = found.parts.index(name), split.parts.index(name)
        assert far(found.cs[..., here], split.cs[..., there]) < 1e-5
        assert far(found.gs[..., here], split.gs[..., there]) < 1e-5
    assert fewer.feature_ids.tolist() == list(range(20))
    assert far(fewer.cs[..., 1] - found.cs[..., 1], found.cs[..., 23:].sum(-1)) < 1e-5
    assert far(fewer.cs[..., 3:], found.cs[..., 3:23]) < 1e-5
    assert fewer.unexplained > 0.01


class Rescaled:
    """What an SAELens object looks like: here states have norm sqrt(d) and mean zero inside."""

    def __init__(self, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.W_dec, self.b_dec = (torch.randn(*n, D, generator=generator) for n in ((48,), ()))
        self.cfg = SimpleNamespace(metadata=SimpleNamespace(hook_name=HERE, **settings))
        self.power = 1

    def encode(self, x: Tensor) -> Tensor:
        self.mean, self.size = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return torch.relu(((x - self.mean) / self.size - self.b_dec) @ self.W_dec.mT - 4)

    def decode(self, activations: Tensor) -> Tensor:
        return (activations**self.power @ self.W_dec + self.b_dec) * self.size + self.mean


def explains(model: Any, source: Any, found: Any) -> bool:
    """Whether features, the offset and the error of an autoencoder are those of its own decode."""
    with torch.no_grad():
        activations = source.encode(states(model))
        activations = activations.to_dense() if activations.is_sparse else activations
        decoded = source.decode(activations)
    error = states(model) - decoded
    ids = (activations != 0).flatten(0, 1).any(0).nonzero()[:, 0]
    assert found.feature_ids.tolist() == ids.tolist()
    assert 0 < int((activations != 0).sum()) < activations.numel()
    kept = float(error.square().sum() / states(model).square().sum())
    assert found.unexplained == pytest.approx(kept, rel=1e-4)
    parts = {"error": error, "rest": decoded}
    split = marginals(tlg.split_scores(model, SHORT, heads=found.heads, parts=parts).shares())
    ours, theirs = found.cs[..., 1], split.cs[..., split.parts.index("error")]
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)  # a random one's share is up to 50
    return bool(far(found.cs.sum(-1), torch.ones(())) < 1e-3)


def test_an_autoencoder_is_read_by_its_own_decode() -> None:
    model, source = tiny("bridge", "llama"), Rescaled()
    assert explains(model, source, shares(model, source))
    source.power = 2
    what = refused(lambda: shares(model, source), tlg.ReconstructionError).what
    assert what == "dictionary Rescaled"
    gpt2 = tiny("bridge", "gpt2")
    centred = Rescaled(model_from_pretrained_kwargs={"center_writing_weights": True})
    circuits.dictionary(centred, 1, tiny("bridge", "gpt2", processed=True))
    foreign = (centred, Rescaled(hook_name_out="blocks.1.hook_mlp_out"))
    for other in (*foreign, Rescaled(normalize_activations="expected_average_only_in")):
        refused(partial(circuits.dictionary, other, 1, gpt2), tlg.UnsupportedModelError)
    assert refused(lambda: circuits.dictionary(source, 0), tlg.UnsupportedModelError).what == what
    assert refused(lambda: shares(gpt2, orthonormal(gpt2), heads="L0H0")).what == "heads"


SAE = [(name, {}) for name in ("Standard", "JumpReLU", "TopK", "Gated", "MatchingPursuit")]
SAE += [(name, {"normalize_activations": "layer_norm"}) for name in ("Standard", "TopK")]
SAE += [("JumpReLU", {"normalize_activations": "constant_norm_rescale"})]
SAE += [("TopK", {"rescale_acts_by_decoder_norm": True})]
SAE += [("TopKTraining", {"use_sparse_activations": True})]


@torch.no_grad()
def autoencoder(name: str = "Standard", hook_name: str = HERE, **settings: Any) -> Any:
    """An ``SAE`` of SAELens with random weights, every bias and threshold included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated imports, and advice how to load the model
        lens: Any = importlib.import_module("sae_lens")
        about = {"hook_name": hook_name, "model_from_pretrained_kwargs": {}}
        metadata = lens.saes.sae.SAEMetadata(**about)
        settings = {"k": 7} | settings if "TopK" in name else settings
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


saelens = pytest.mark.skipif(
    not HAS_HOOKED or importlib.util.find_spec("sae_lens") is None,
    reason="SAELens pins TransformerLens 3, and is an extra (README, second block)",
)


@saelens
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # said by torch, once
@pytest.mark.parametrize(("name", "settings"), SAE)
def test_features_and_error_of_saelens_add_up(name: str, settings: dict[str, Any]) -> None:
    model, source = tiny("bridge", "llama"), autoencoder(name, **settings)
    assert explains(model, source, shares(model, source, heads=["L1H2", "L1H0"]))


@saelens
@pytest.mark.parametrize("name", ["BatchTopKTraining", "MatryoshkaBatchTopKTraining"])
def test_a_batch_topk_is_read_as_it_is_saved(name: str) -> None:
    """With its threshold, as the JumpReLU autoencoder that SAELens saves."""
    model = tiny("bridge", "gpt2")
    widths: dict[str, Any] = {"matryoshka_widths": [16, FEATURES]} if "Matryoshka" in name else {}
    source = autoencoder(name, rescale_acts_by_decoder_norm=True, **widths)
    source.topk_threshold.fill_(30.0)
    saved = {key: value.clone() for key, value in source.state_dict().items()}
    source.process_state_dict_for_saving_inference(saved)
    jump = autoencoder("JumpReLU")
    jump.load_state_dict(saved)
    ours = [shares(model, source, batch_size=n) for n in (1, 3)]
    assert far(ours[0].cs, ours[1].cs) < 1e-4
    assert explains(model, jump, ours[0])


@saelens
def test_autoencoders_of_something_else_are_refused() -> None:
    into_output = {"d_out": D, "apply_b_dec_to_input": False}
    cases: list[dict[str, Any]] = [
        {"hook_name": "blocks.0.hook_resid_pre"},
        {"hook_name": "blocks.1.attn.hook_z", "reshape_activations": "hook_z"},
        {"normalize_activations": "covariance_whitening"},
        {"name": "SkipTranscoder", **into_output},
        {"name": "Temporal", "n_heads": 1, "bottleneck_factor": 16},
    ]
    circuits.dictionary(autoencoder(hook_name="blocks.0.hook_resid_post"), 1)
    for options in cases:
        read = partial(circuits.dictionary, autoencoder(**options), 1)
        assert refused(read, tlg.UnsupportedModelError).what.startswith("dictionary")
