"""On which model: the fingerprint is the same in another process, an untrained control is another
model, and hooks of others are seen."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import tl_geometry as tlg
from tests.lib.models import (
    HAS_HOOKED,
    hf_model,
    tiny,
    tokens,
)
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.models import from_hf, view

MODEL_CLASSES = ["bridge", "hooked"] if HAS_HOOKED else ["bridge"]


def test_a_checkpoint_of_edited_weights_does_not_go_on(tmp_path: Path) -> None:
    model = from_hf(hf_model("llama"), None)
    path = tmp_path / "sums.safetensors"
    windows = tokens(12)
    tlg.decompose(model, windows[:8], batch_size=4, checkpoint=path, progress=False)
    weight = next(
        v for n, v in model.named_parameters() if "down_proj" in n or n.endswith("mlp.out.weight")
    )
    old = weight.detach().clone()
    weight.data[:, :7] = 0
    with pytest.raises(GeometryError, match="fingerprint"):
        tlg.decompose(model, windows, batch_size=4, checkpoint=path, progress=False)
    weight.data.copy_(old)


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = "from tests.lib.models import tiny; from tl_geometry.models import view; "
    code += "print(view(tiny('bridge', 'gemma2', True)).fingerprint)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout.strip().endswith(view(tiny("bridge", "gemma2", True)).fingerprint), run.stderr


def test_an_untrained_control_has_random_matrices_gains_of_one_and_no_biases() -> None:
    model = from_hf(hf_model("gpt2"), None)
    with tlg.models.reinitialized(model, std=0.5):
        for module in model.original_model.modules():
            for leaf, value in module.named_parameters(recurse=False):
                if leaf == "bias":
                    assert not value.any()
                elif isinstance(module, nn.LayerNorm):
                    assert bool((value == 1).all())
                else:
                    assert float(value.detach().std()) == pytest.approx(0.5, rel=0.1)


# --------------------------------------------------------------------------------------------------
# ----- hooks of others


def shift(x: Tensor, hook: Any = None) -> Tensor:
    return x + 0.5


def after(module: nn.Module, args: Any, output: Any) -> Any:
    return None


def before(module: nn.Module, args: Any) -> Any:
    return None


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("architecture", ["gpt2", "bert", "opt", "llama"])
def test_a_model_by_itself_has_no_hooks_of_others(model_class: str, architecture: str) -> None:
    model = from_hf(hf_model(architecture), None, model_class=model_class)
    model(tokens())
    assert view(model).hooked() == ()
    model.run_with_cache(tokens())
    assert view(model).hooked() == ()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_hooks_of_others_are_named_wherever_they_are(model_class: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    seen = view(model)
    module = model.blocks[1].mlp
    for attach, name in (
        (lambda: model.add_hook("blocks.0.hook_resid_pre", shift), "blocks.0.hook_resid_pre"),
        (lambda: model.add_perma_hook("blocks.0.attn.hook_q", shift), "blocks.0.attn.hook_q"),
        (
            lambda: model.blocks[1].hook_resid_pre.register_forward_hook(after),
            "blocks.1.hook_resid_pre",
        ),
        (lambda: module.register_forward_hook(after), "blocks.1.mlp"),
        (lambda: module.register_forward_pre_hook(before), "blocks.1.mlp"),
    ):
        handle = attach()
        assert seen.hooked() == (name,)
        assert seen.provenance().hooks == (name,)
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()
        model.reset_hooks(including_permanent=True)
        assert seen.hooked() == ()
    everywhere = register_module_forward_hook(after)
    assert seen.hooked() == ("every module",)
    everywhere.remove()
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", shift)]):
        assert seen.hooked() == ("blocks.1.hook_mlp_out",)
    inside: list[tuple[str, ...]] = []
    seen.run(tokens(), {"blocks.0.hook_resid_pre": lambda _: inside.append(seen.hooked())})
    assert inside == [()]  # a pass of ours is not somebody else's
    basis = tlg.decompose(model, tokens(6), progress=False)
    with tlg.interventions.remove_term(model, basis, ("pos", "pos"), heads=[(1, 0)]):
        assert seen.hooked()
        model(tokens())
    assert seen.hooked() == ()


def test_a_hook_on_the_model_inside_a_bridge_is_seen() -> None:
    hf = hf_model("llama")
    model = from_hf(hf, None)
    handle = hf.model.layers[0].register_forward_hook(after)
    assert len(view(model).hooked()) == 1
    handle.remove()
    handle = hf.register_forward_pre_hook(before)
    assert view(model).hooked() == ("original_model",)
    handle.remove()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_facts_are_found_without_hooks_and_kept_under_them(model_class: str) -> None:
    model = from_hf(hf_model("llama"), None, model_class=model_class)
    model.add_hook("blocks.0.attn.hook_q", lambda q, hook: q * 3)
    seen = view(model)  # the first view of this model is made under the hook
    facts = seen.describe_layer(0)
    model.reset_hooks()
    layers: list[Any] = []
    seen.run_layers(tokens(), [0, 1], layers.append)
    assert [x.reconstruction.adds_up for x in layers] == [True, True]
    assert facts == view(from_hf(hf_model("llama"), None, model_class=model_class)).describe_layer(
        0
    )


ACTING = {
    "blocks.0.attn.hook_q": True,
    "blocks.0.attn.hook_k": True,
    "blocks.0.attn.hook_pattern": True,
    "blocks.0.ln1.hook_scale": True,
    "blocks.0.hook_resid_pre": False,
    "blocks.0.hook_mlp_out": False,
    "blocks.0.attn.hook_z": False,
    "blocks.0.attn.hook_v": False,
}


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("name", ACTING)
def test_a_split_under_somebody_elses_hook_is_exact_or_refused(model_class: str, name: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    basis = tlg.decompose(model, tokens(6), progress=False)
    model.add_hook(name, lambda x, hook: x * 1.05)
    view(model).run(tokens(), {name: lambda _: None})
    if ACTING[name]:
        with pytest.raises(ReconstructionError, match="off by"):
            tlg.sweep_heads(model, tokens(), basis, layers=0, progress=False)
        with pytest.raises(ReconstructionError, match="off by"):
            view(model).run_layers(tokens(), [0], lambda _: None)
        return
    table = tlg.sweep_heads(model, tokens(), basis, progress=False)
    assert table.provenance.hooks == (name,)
    split = tlg.split_scores(model, tokens(), basis)
    cache = model.run_with_cache(tokens())[1]
    own = cache["attn_scores", 1]
    ours = split.total()[:, 4:8]
    seen = torch.isfinite(ours)
    assert torch.allclose(ours[seen], own[seen], atol=1e-4 * float(own[seen].abs().max()))


# --------------------------------------------------------------------------------------------------
# padding and autocast


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bridge_masks_nothing_by_itself(side: str) -> None:
    from tests.models.test_adapter import small_tokenizer

    model = from_hf(hf_model("gpt2"), small_tokenizer(), name="pads")
    model.tokenizer.padding_side = side
    ids = tokens()
    ids[:, :3] = model.tokenizer.pad_token_id
    found: list[Tensor] = []
    view(model).run(ids, {"blocks.0.attn.hook_pattern": found.append})
    assert float(found[0][:, :, 5, 0].min()) > 0


def test_autocast_is_refused_by_name() -> None:
    model = from_hf(hf_model("gpt2"), None, name="cast")
    seen = view(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (
            lambda: seen.run(tokens(), {}),
            lambda: view(model),
            lambda: tlg.decompose(seen, tokens(), progress=False),
        ):
            with pytest.raises(
                GeometryError, match=r"cast: expected no torch\.autocast, got autocast on cpu"
            ):
                call()
        with torch.autocast("cpu", enabled=False):
            seen.run(tokens(), {})
    assert dataclasses.replace(seen).run(tokens(), {}) is None
