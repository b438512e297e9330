"""MLPs are read in few tries, and those of a model in half precision where they lie: no second copy
in float32, and the numbers of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tiny import hf_model, loadable, tiny, tokens
from tl_geometry.base.errors import UnsupportedModelError
from tl_geometry.models import from_hf, view
from tl_geometry.models.mlp import MLPModule, MLPSpec, live_mlp, mlp_spec

STORED = ("stored_gate", "stored_in", "stored_out")


def copied(spec: MLPSpec, storages: set[int]) -> list[str]:
    """Matrices that lie outside the model's parameters."""
    matrices: list[tuple[str, Tensor | None]] = [(name, getattr(spec, name)) for name in STORED]
    return [
        name
        for name, matrix in matrices
        if matrix is not None and matrix.untyped_storage().data_ptr() not in storages
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2"])
def test_matrices_are_those_of_the_model(architecture: str, dtype: torch.dtype) -> None:
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed, dtype)
        seen = view(model)
        storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for layer in range(seen.n_layers):
            spec = mlp_spec(seen, layer)
            assert spec is not None
            assert not copied(spec, storages)
            widened = replace(spec, stored_gate=spec.stored_gate.double())
            assert copied(widened, storages) == ["stored_gate"]
            assert spec.W_gate.dtype == spec.W_out.dtype == torch.float32
            h = torch.randn(3, seen.d_model, generator=torch.Generator().manual_seed(0))
            wide = {
                name: None if (matrix := getattr(spec, name)) is None else matrix.float()
                for name in STORED
            }
            assert torch.equal(spec.apply(h), replace(spec, **wide).apply(h))


@pytest.mark.parametrize(
    ("architecture", "most"), [("gpt2", 1), ("llama", 1), ("neox", 4), ("gemma2", 15)]
)
def test_likely_readings_are_tried_first_and_what_fits_one_block_at_the_next(
    architecture: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, apply, tried = view(tiny("bridge", architecture)), MLPSpec.apply, [0] * 2

    def counted(self: MLPSpec, h: Tensor) -> Tensor:
        tried[layer] += 1
        return apply(self, h)

    monkeypatch.setattr(MLPSpec, "apply", counted)
    seen._layers.memo.clear()
    for layer in range(2):
        assert mlp_spec(seen, layer) is not None
    assert tried[0] <= most
    assert tried[1] == 1


ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gelu": ("gelu", lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2),
    "gelu_new": (
        "gelu_tanh",
        lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2,
    ),
    "silu": ("silu", lambda x: x / (1 + (-x).exp())),
    "relu": ("relu", lambda x: x.clamp(min=0)),
    "quick_gelu": ("quick_gelu", lambda x: x / (1 + (-1.702 * x).exp())),
    "relu2": ("relu_squared", lambda x: x.clamp(min=0) ** 2),
}
"""By the name of Hugging Face: the name here, and the formula."""


@pytest.mark.parametrize("configured", ACTIVATIONS)
def test_the_activation_is_found_by_what_the_model_computes(configured: str) -> None:
    name, formula = ACTIVATIONS[configured]
    model = from_hf(hf_model("gpt2", activation_function=configured), None)
    seen, x = view(model), torch.linspace(-4, 4, 41)
    for layer in range(2):
        spec = mlp_spec(seen, layer)
        assert spec is not None
        assert (spec.activation, spec.parallel, spec.W_in) == (name, False, None)
        assert torch.allclose(spec.act(x), formula(x), atol=1e-6)
        names = [f"blocks.{layer}.hook_resid_mid", f"blocks.{layer}.hook_mlp_out"]
        h, out = seen.activations(tokens(), names).values()
        assert torch.allclose(spec.apply(h), out, atol=1e-4)


def test_an_activation_that_is_not_known_is_left_to_the_module() -> None:
    seen = view(from_hf(hf_model("gpt2", activation_function="tanh"), None))
    found = live_mlp(seen, 0)
    assert isinstance(found, MLPModule)
    h, out = seen.activations(
        tokens(), ["blocks.0.hook_resid_mid", "blocks.0.hook_mlp_out"]
    ).values()
    assert torch.allclose(found.apply(h), out, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"MLP of block 0 of .*: expected two or three"):
        mlp_spec(seen, 0)
