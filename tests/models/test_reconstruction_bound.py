"""How far recomputed numbers may be from the model's: clean runs stay well inside, planted faults
well outside, in every dtype."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, hf_model, loadable, tiny, tiny_hooked, tokens
from tl_geometry.base.errors import ReconstructionError
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.transfer import floats
from tl_geometry.models import attention_spec, from_hf, infer, layers, verify, view
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.precision import widened
from tl_geometry.models.reconstruction import (
    ReconstructionReport,
    pattern_error,
    reconstruction_bound,
)
from tl_geometry.models.support import check_model
from tl_geometry.models.verify import measured_scores, report_of

needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)
NAMES = [
    "gpt2",
    "llama",
    "neox",
    "qwen3",
    "gemma2",
    "gemma3",
    "bloom",
    "phi",
    "opt",
    "gptj",
    "gpt-oss",
    "bert",
    "olmo2",
    "mistral",
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def layers_of(seen: ModelView, ids: Tensor, verify: bool = True) -> list[LayerView]:
    found: list[LayerView] = []
    seen.run_layers(ids, range(seen.n_layers), found.append, verify=verify)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "bert"])
def test_clean_runs_stay_well_inside(architecture: str, dtype: str) -> None:
    for model_class, processed in loadable(architecture)[:: 1 if dtype == "float32" else 2]:
        seen = view(
            from_hf(
                hf_model(architecture, DTYPES[dtype]),
                None,
                model_class=model_class,
                processed=processed,
            )
        )
        for seed in range(3):
            # bfloat16 keeps 8 bits, of which scores are rounded to again on their way
            assert max(x.reconstruction.worst for x in layers_of(seen, tokens(seed=seed))) < (
                0.8 if dtype == "bfloat16" else 0.5
            )


def test_scores_that_a_float64_model_computes_in_float32_are_judged_as_such() -> None:
    model = tiny(loadable("gptj")[0][0], "gptj", dtype=torch.float64)
    for layer in layers_of(view(model), tokens()):
        (q, q_bound), (error, bound) = (layer.reconstruction.checks[n] for n in ("q", "pattern"))
        assert q < 2**-29 * q_bound  # its queries are float64: their error passes that bound
        assert 2**-29 * bound < error < bound


def checked(layer: LayerView) -> ReconstructionReport:
    """The scores and patterns of a layer, compared once more."""
    return report_of(layer, floats(measured_scores(layer)))


def test_the_scale_is_one_product_of_absolute_values() -> None:
    layer = layers_of(view(tiny("bridge", "gpt2")), tokens())[1]
    q, k, q0, k0 = (x.double() for x in (layer.q, layer.k, layer.q_constant, layer.k_constant))
    by_hand = 0.0
    for i in range(layer.h.shape[1]):
        for j in range(i + 1):
            cell = ((q - q0).abs() + q0.abs())[:, i] * ((k - k0).abs() + k0.abs())[:, j]
            by_hand = max(by_hand, float(cell.sum(-1).max()) * layer.scale)
    assert layer.reconstruction.scale == pytest.approx(by_hand, rel=1e-5)
    assert layer.scores is not None
    largest = float(torch.where(layer.allowed, layer.scores, 0.0).abs().max())
    assert layer.reconstruction.scale > 1.5 * largest  # which is what rounding does not follow


def test_a_score_that_cancels_is_judged_by_what_cancelled() -> None:
    """Large products of queries and keys that cancel in every score: their rounding is far above 32
    u of the largest score."""
    generator = torch.Generator().manual_seed(0)
    layer = layers_of(view(tiny("bridge", "llama")), tokens())[0]
    q, k = (1e3 * torch.randn(x.shape, generator=generator) for x in (layer.q, layer.k))
    q[..., 1::2], k[..., 1::2] = q[..., ::2], -k[..., ::2] * (1 + 1e-5)
    exact = torch.einsum("bihe,bjhe->bhij", q.double(), k.double()) * layer.scale
    scores = exact.float()
    found = dataclasses.replace(
        layer, q=q, k=k, q_constant=0 * q, k_constant=0 * k, scores=scores, pattern=None
    )
    error, bound = checked(found).checks["scores"]
    assert 32 * 2**-24 * float(exact.abs().max()) < error < bound


FAULTS: dict[str, Callable[[LayerView], LayerView]] = {
    "scale off by 1%": lambda x: dataclasses.replace(x, scale=x.scale * 1.01),
    "key heads permuted": lambda x: dataclasses.replace(x, k=x.k.roll(1, 2)),
    "keys of the next position": lambda x: dataclasses.replace(x, k=x.k.roll(1, 1)),
    "one head dimension left out": lambda x: dataclasses.replace(
        x, q=torch.cat([torch.zeros_like(x.q[..., :1]), x.q[..., 1:]], -1)
    ),
    "constant left out": lambda x: dataclasses.replace(
        x, q=x.q - x.q_constant + 0.9 * x.q_constant
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("architecture", NAMES)
def test_planted_faults_are_ten_times_outside(architecture: str, fault: str) -> None:
    layer = layers_of(view(tiny("bridge", architecture)), tokens())[1]
    if fault == "constant left out" and not bool(layer.q_constant.any()):
        assert torch.equal(FAULTS[fault](layer).q, layer.q)  # nothing to leave out, and so no fault
        return
    clean, report = checked(layer).checks, checked(FAULTS[fault](layer)).checks
    which = "scores" if "scores" in report else "pattern"
    error, bound = report[which]
    assert clean[which][0] <= 0.5 * clean[which][1]
    assert error > 10 * bound


@pytest.mark.parametrize("architecture", ["llama", "neox", "gemma3", "gptj"])
def test_a_rotation_off_by_one_position_is_refused(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = view(tiny("bridge", architecture))
    layers_of(seen, tokens())
    plain = layers.AttentionSpec.head_map

    def late(self: Any, x: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        return plain(
            self,
            x,
            which,
            turn if which == "k" or turn is None else (turn[0].roll(1, 0), turn[1].roll(1, 0)),
        )

    monkeypatch.setattr(attention_spec.AttentionSpec, "head_map", late)
    with pytest.raises(ReconstructionError, match=r"(scores|pattern) off by"):
        layers_of(seen, tokens())


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_another_eps_of_the_norm_is_refused(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = view(tiny("bridge", architecture))
    layers_of(seen, tokens())
    plain = NormWeights.scale
    monkeypatch.setattr(
        NormWeights,
        "scale",
        lambda self, h: plain(dataclasses.replace(self, eps=self.eps + 1e-3), h),
    )
    with pytest.raises(ReconstructionError, match=r"[qk] off by"):
        layers_of(seen, tokens())


@pytest.mark.parametrize("cells", [1, verify.CHUNK])
def test_every_head_is_compared(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CHUNK", cells)
    layer = layers_of(view(tiny("bridge", "gpt2")), tokens())[1]
    assert layer.scores is not None
    for head in range(layer.scores.shape[1]):
        scores = layer.scores.clone()
        scores[:, head] += 1
        error, _ = checked(dataclasses.replace(layer, scores=scores)).checks["scores"]
        assert error == pytest.approx(1, rel=1e-3)


def test_a_pattern_that_does_not_sum_to_one_is_refused() -> None:
    for architecture in ("llama", "gpt-oss"):
        layer = layers_of(view(tiny("bridge", architecture)), tokens())[1]
        assert layer.pattern is not None
        report = checked(dataclasses.replace(layer, pattern=layer.pattern * 1.01))
        assert report.checks["pattern"][0] <= report.checks["pattern"][1]  # rows are centred
        assert not report.adds_up
        assert checked(layer).adds_up


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 1.1754944e-35), (torch.float16, 0.061), (None, 0.0)]
)
def test_a_key_without_weight_must_be_negligible(dtype: torch.dtype | None, least: float) -> None:
    """Up to ten times a thousand smallest normal numbers of the model's dtype."""
    dtype, least = (torch.bfloat16, 1.1754944e-35) if dtype is None else (dtype, least)
    for share, seen in ((5.0, False), (20.0, True)):
        probability = min(share * least, 0.9)
        scores = torch.tensor([[math.log(probability), 0.0]])
        pattern = torch.tensor([[0.0, 1.0]])
        allowed = torch.ones(1, 2, dtype=torch.bool)
        error = float(pattern_error(scores, pattern, allowed, unit_roundoff(dtype)))
        assert error == (math.inf if seen else 0.0)
        assert float(pattern_error(scores, pattern, pattern > 0, unit_roundoff(dtype))) == 0
        assert math.isinf(pattern_error(scores, pattern, pattern == 0, unit_roundoff(dtype)))


def test_sums_of_many_keys_round_by_the_root_of_their_number() -> None:
    layer = layers_of(view(tiny("bridge", "gpt2")), tokens())[1]
    numbers = {"scale": 5.0, "pattern sum": 0.0, "pattern": 0.0, "scores": 0.0}

    def bounds(keys: int, roundoff: float, **more: Any) -> list[float]:
        wide = layer.k[:, :1].expand(-1, keys, -1, -1)
        mask = torch.ones(16, keys, dtype=torch.bool)
        more |= {"k": wide, "k_constant": wide, "mask": mask, "pattern": None, "scores": None}
        seen = dataclasses.replace(layer, roundoff=roundoff, **more)
        checks = report_of(seen, numbers).checks
        return [checks[name][1] / roundoff for name in ("pattern sum", "pattern", "scores")]

    for keys, root in ((16, 1), (256, 1), (1024, 2), (2304, 3)):
        assert bounds(keys, 2**-24) == [32 * root, 160, 160]
        assert bounds(keys, 2**-24, sinks=torch.zeros(4)) == [160 * root, 160, 160]
        assert bounds(keys, 2**-8) == [4, 20, 20]  # half precision sums in float32
    numbers["scale"] = 0.1  # softmax rounds however small the scores
    assert bounds(16, 2**-24) == [32, 32, pytest.approx(3.2)]


# --------------------------------------------------------------------------------------------------
# ------ half precision


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "gptj", "bert"])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.003), (torch.float16, 1.0004)])
def test_faults_below_one_percent_are_seen_in_half_precision(
    architecture: str, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_class, processed in loadable(architecture)[::2]:
        model = from_hf(
            hf_model(architecture, dtype), None, model_class=model_class, processed=processed
        )
        layers_of(view(model), tokens())
        monkeypatch.setattr(infer.SpecInference, "infer", lambda self: off_by(FIND(self), factor))
        again = from_hf(
            hf_model(architecture, dtype), None, model_class=model_class, processed=processed
        )
        with pytest.raises(ReconstructionError, match=r"(scores|pattern) off by"):
            layers_of(view(again), tokens())
        monkeypatch.setattr(layers.Layers, "verify_spec", lambda self, layer, h: None)
        layers_of(
            view(
                from_hf(
                    hf_model(architecture, dtype),
                    None,
                    model_class=model_class,
                    processed=processed,
                )
            ),
            tokens(),
        )  # hidden by rounding
        monkeypatch.undo()


FIND = infer.SpecInference.infer


def off_by(found: attention_spec.AttentionSpec, factor: float) -> attention_spec.AttentionSpec:
    return dataclasses.replace(found, scale=found.scale * factor)


@pytest.mark.parametrize("model_class", ["bridge", "hooked"] if HAS_HOOKED else ["bridge"])
def test_weights_that_were_widened_are_the_same_tensors_again(model_class: str) -> None:
    model = from_hf(hf_model("gpt2", torch.bfloat16), None, model_class=model_class)
    before = {n: (p, p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    plain = model(tokens())
    with pytest.raises(KeyError), widened(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model(tokens()).dtype == torch.float32
        raise KeyError
    assert all(
        p is before[n][0] and (p.data_ptr(), p.dtype) == before[n][1:]
        for n, p in model.named_parameters()
    )
    assert model.cfg.dtype == torch.bfloat16
    assert torch.equal(model(tokens()), plain)


# ------------------------------------------------------------------------------------- masked
# scores, additive identity


@needs_hooked
@pytest.mark.parametrize("value", [-1e5, -torch.inf])
def test_a_score_at_the_blocks_own_ignore_is_masked(value: float) -> None:
    model = tiny_hooked(attn_only=True, normalization_type="LN")
    for block in model.blocks:
        block.attn.IGNORE.fill_(value)
    seen = view(model)
    basis = tlg.decompose(model, tokens(8), progress=False)
    split = tlg.split_scores(model, tokens(), basis)
    assert split.reconstruction.adds_up
    assert bool((split.allowed == torch.ones(16, 16).tril().bool()).all())
    assert bool(torch.isinf(split.total()[:, :, 0, 1:]).all())
    assert torch.allclose(
        split.pattern()[:, :4], model.run_with_cache(tokens())[1]["pattern", 0], atol=1e-6
    )
    assert [x.reconstruction.adds_up for x in layers_of(seen, tokens())] == [True, True]


@needs_hooked
def test_a_mask_that_leaves_weight_on_masked_keys_is_refused() -> None:
    model = tiny_hooked(attn_only=True, normalization_type="LN")
    for block in model.blocks:
        block.attn.IGNORE.fill_(-5.0)
    with pytest.raises(ReconstructionError, match=r"mask of layer 0 .*, got other masked keys in"):
        layers_of(view(model), tokens())


def identity_row(model: Any) -> str:
    return next(
        value for name, value, _ in check_model(model).findings if name == "additive identity"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_additive_identity_is_relative_to_the_stream(dtype: torch.dtype) -> None:
    hf = hf_model("llama", dtype)
    with torch.no_grad():
        hf.model.embed_tokens.weight.mul_(28000.0)
    row = identity_row(from_hf(hf, None))
    assert row.startswith("holds within ")
    error, size = float(row.split()[2]), float(row.split()[-1])
    assert size > 28000
    assert 1e-3 < error <= reconstruction_bound(unit_roundoff(dtype), size)
    assert identity_row(tiny("bridge", "bert")).startswith("does not hold, off by up to ")
