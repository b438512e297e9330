"""The rotary planes of a layer are those of the published formulas, and turn as the pass turned
them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.models import ARCHITECTURES, loadable, randomize, tiny, tokens
from tl_geometry.base.errors import UnsupportedModelError
from tl_geometry.models import from_hf, view
from tl_geometry.models.layer_view import LayerView, Rotation
from tl_geometry.models.rotary import planes_of_tables, rotary_planes


def powers(base: float, d_rot: int) -> Tensor:
    """Su et al. 2021: ``base^(-2m / d_rot)``."""
    return base ** (-torch.arange(0, d_rot, 2, dtype=torch.float64) / d_rot)


def llama3(theta: Tensor, factor: float, low: float, high: float, original: float) -> Tensor:
    """Llama 3.1: long waves divided by the factor, short ones kept, smooth in between."""
    wave = 2 * math.pi / theta
    smooth = ((original / wave - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * theta / factor + smooth * theta


def yarn(base: float, d_rot: int, factor: float, original: float) -> Tensor:
    """Peng et al. 2023: a ramp over planes from those that turn 32 times to those that turn
    once."""
    theta = powers(base, d_rot)
    ends = [
        d_rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (32, 1)
    ]
    first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), d_rot - 1)
    ramp = ((torch.arange(d_rot // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
    return theta / factor * ramp + theta * (1 - ramp)


PLAIN = powers(10000.0, 8)
LLAMA3, YARN = llama3(powers(500.0, 8), 4.0, 1.0, 4.0, 16.0), yarn(500.0, 8, 4.0, 16.0)
EXPECTED: dict[str, tuple[str, Tensor, Tensor]] = {
    "llama": ("half", PLAIN, PLAIN),
    "mistral": ("half", PLAIN, PLAIN),
    "qwen2": ("half", PLAIN, PLAIN),
    "qwen3": ("half", PLAIN, PLAIN),
    "gemma2": ("half", PLAIN, PLAIN),
    "gemma3": ("half", PLAIN, powers(1e6, 8)),
    "olmo2": ("half", PLAIN, PLAIN),
    "neox": ("half", powers(10000.0, 4), powers(10000.0, 4)),
    "phi": ("half", powers(10000.0, 4), powers(10000.0, 4)),
    "gptj": ("adjacent", powers(10000.0, 4), powers(10000.0, 4)),
    "llama3-rope": ("half", LLAMA3, LLAMA3),
    "llama-yarn": ("half", YARN, YARN),
}
"""Pairing, and frequencies of a local and a global layer, written out from the papers."""


def layers_of(model: Any, ids: Tensor | None = None) -> list[LayerView]:
    seen: list[LayerView] = []
    view(model).run_layers(tokens() if ids is None else ids, range(2), seen.append)
    return seen


@pytest.mark.parametrize("architecture", EXPECTED)
def test_frequencies_are_those_of_the_formulas(architecture: str) -> None:
    pairing, *expected = EXPECTED[architecture]
    for kind, processed in loadable(architecture):
        for layer, theta in zip(
            layers_of(tiny(kind, architecture, processed)), expected, strict=True
        ):
            found = rotary_planes(layer)
            count = len(theta)
            assert torch.allclose(found.theta[:count], theta, rtol=1e-6, atol=0)
            passed = 8 - 2 * count
            assert found.theta[count:].tolist() == [0.0] * (passed > 0)
            index = torch.arange(2 * count)
            turned = index % count if pairing == "half" else index // 2
            assert found.plane.tolist() == [*turned.tolist(), *[count] * passed]
            assert torch.allclose(found.wavelength[:count], 2 * math.pi / theta, rtol=1e-6)
            assert found.amplitude == pytest.approx(
                1 + 0.1 * math.log(4) if architecture == "llama-yarn" else 1.0, rel=1e-6
            )


def test_local_and_global_layers_have_their_own_base() -> None:
    for layer, base in zip(layers_of(tiny("bridge", "gemma3")), (1e4, 1e6), strict=True):
        assert torch.allclose(rotary_planes(layer).theta, powers(base, 8), rtol=1e-4, atol=0)


@pytest.mark.parametrize("architecture", EXPECTED)
def test_planes_turn_as_the_maps_of_the_pass_do(architecture: str) -> None:
    """Each plane of a constant query is one complex number that turns by theta per token."""
    for kind, processed in loadable(architecture):
        for layer in layers_of(tiny(kind, architecture, processed)):
            planes = rotary_planes(layer)
            x = torch.randn(1, 1, layer.h.shape[-1]).expand(1, layer.h.shape[1], -1)
            q = layer.q_map(x)[0].double()
            assert float((q[1:] - q[:1]).abs().max()) > 0.1 * float(q.abs().max())
            for m, theta in enumerate(planes.theta.tolist()):
                own = q[..., planes.plane == m]
                if theta == 0:
                    assert torch.equal(own, own[:1].expand_as(own))
                    continue
                number = torch.view_as_complex(own.contiguous())
                angle = torch.arange(len(q)).double() * theta
                turned = number[:1] * torch.polar(torch.ones_like(angle), angle)[:, None]
                assert float((number - turned).abs().max()) < 1e-5 * float(q.abs().max())


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "opt", "bert"])
def test_without_rotation_there_is_one_plane(architecture: str) -> None:
    for layer in layers_of(tiny("bridge", architecture)):
        planes = rotary_planes(layer)
        assert planes.theta.tolist() == [0.0]
        assert planes.plane.tolist() == [0] * 8
        assert planes.wavelength.tolist() == [math.inf]


def scaled_llama(parameters: dict[str, Any], **settings: Any) -> Any:
    import transformers

    base: dict[str, Any] = ARCHITECTURES["llama"][1] | {"rope_parameters": parameters} | settings
    make: Any = transformers.LlamaConfig
    config = make(**base)
    config._attn_implementation = "eager"
    model: Any = transformers.LlamaForCausalLM(config).eval()
    randomize(model)
    return from_hf(model, None, name=f"llama {parameters['rope_type']}")


def test_linear_scaling_divides_the_frequencies() -> None:
    model = scaled_llama({"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    for layer in layers_of(model):
        planes = rotary_planes(layer)
        assert torch.allclose(planes.theta, powers(500.0, 8) / 4, rtol=1e-6, atol=0)


def test_dynamic_scaling_depends_on_the_length_of_the_pass() -> None:
    """Beyond its original length T the base grows by ``(f L / T - f + 1)^(d / (d - 2))``, L the
    longest pass so far."""
    model = scaled_llama(
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}, max_position_embeddings=16
    )
    model.cfg.n_ctx = 64  # as somebody who reads beyond the original length does

    def grown(longest: int) -> Tensor:
        return powers(500.0 * (4.0 * longest / 16 - 3.0) ** (8 / 6), 8)

    passes = ((12, 16), (40, 40), (24, 40), (12, 16))
    for length, longest in passes:
        for layer in layers_of(model, tokens(length=length)):
            found = rotary_planes(layer).theta
            assert torch.allclose(found, grown(longest), rtol=1e-6, atol=0), length
    assert not torch.allclose(grown(40), grown(16), rtol=0.1)


def tables(theta: Tensor, length: int = 50, pairing: str = "half") -> Rotation:
    wide = torch.cat([theta, theta]) if pairing == "half" else theta.repeat_interleave(2)
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * wide
    return Rotation(angle.cos(), angle.sin(), pairing)


def test_half_precision_tables_give_the_frequencies_they_hold() -> None:
    theta = powers(1e5, 16)
    exact = tables(theta, 200)
    half = Rotation(exact.cos.bfloat16().float(), exact.sin.bfloat16().float(), "half")
    found = planes_of_tables(half, 16, roundoff=2**-8)
    assert torch.allclose(found.theta, theta, rtol=4e-3, atol=0)


def test_tables_that_are_no_rotation_are_refused() -> None:
    right = tables(powers(500.0, 8))
    assert torch.allclose(planes_of_tables(right, 8).theta, powers(500.0, 8))
    off = right.cos.clone()
    off[7, 2] += 1e-3
    wrong = {
        "other pairing": Rotation(right.cos, right.sin, "adjacent"),
        "no function of the position": right._replace(cos=off),
        "faster later": right._replace(
            cos=torch.cat([right.cos[:25], tables(powers(600.0, 8)).cos[25:]]),
            sin=torch.cat([right.sin[:25], tables(powers(600.0, 8)).sin[25:]]),
        ),
    }
    for rotation in wrong.values():
        with pytest.raises(UnsupportedModelError, match="one frequency for each plane"):
            planes_of_tables(rotation, 8)


def test_pairs_of_frequency_zero_are_not_rotated() -> None:
    theta = torch.tensor([1.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    found = planes_of_tables(tables(theta, pairing="adjacent"), 10)
    assert torch.allclose(found.theta, torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64))
    assert found.plane.tolist() == [0, 0, 2, 2, 1, 1, 2, 2, 2, 2]


def test_planes_that_turn_the_other_way_have_a_negative_frequency() -> None:
    right = tables(powers(500.0, 8))
    found = planes_of_tables(right._replace(sin=-right.sin), 8)
    assert torch.allclose(found.theta, -powers(500.0, 8))
    assert torch.allclose(found.wavelength, 2 * math.pi / powers(500.0, 8))
