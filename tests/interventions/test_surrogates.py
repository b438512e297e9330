"""Surrogates of W_QK in a live model: the whole changes nothing, every part acts, hooks go away,
planted structure carries the loss."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.interventions.surrogates import (
    PARTS,
    part_of,
    replacements,
    surrogate,
    surrogate_effect,
)
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors

MODELS = [("bridge", a) for a in ("gpt2", "opt", "bert", "bloom", "gpt-neo")] + (
    [("hooked", "gpt2")] if HAS_HOOKED else []
)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@cache
def basis_of(model: Any) -> tlg.PositionContext:
    return tlg.decompose(model, tokens(24, 16), progress=False)


@pytest.mark.parametrize(("model_class", "architecture"), MODELS)
def test_the_whole_changes_nothing_and_every_part_changes_the_logits(
    model_class: str, architecture: str
) -> None:
    model = tiny(model_class, architecture)
    view, basis = tlg.view(model), basis_of(model)
    clean = view.run(tokens(), {}, logits=True)
    assert clean is not None
    for part in PARTS:
        with surrogate(model, basis, part=part):
            edited = view.run(tokens(), {}, logits=True)
        assert edited is not None
        change = float((edited - clean).abs().max())
        assert (change < 1e-4) == (part == "whole"), (part, change)
    again = view.run(tokens(), {}, logits=True)
    assert again is not None
    assert torch.equal(again, clean)


def test_only_the_chosen_heads_change_and_hooks_are_removed_on_errors() -> None:
    model = tiny("bridge", "gpt2")
    view, basis, found = tlg.view(model), basis_of(model), {}
    name = "blocks.1.attn.hook_z"
    before = sum(len(p.fwd_hooks) for p in model.hook_dict.values())
    view.run(tokens(), {name: lambda v: found.__setitem__("clean", v)})
    with surrogate(model, basis, ["L1H2"], part="none"):
        view.run(tokens(), {name: lambda v: found.__setitem__("edited", v)})
    changed = (found["clean"] - found["edited"]).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, True, False]
    with surrogate(
        model, basis, ["L1H2"], part="none"
    ):  # hooks survive TransformerLens's own clean-up
        _, cache = model.run_with_cache(tokens())
        again = model(tokens(), return_type="logits")
    close(cache[name], found["edited"])
    assert not torch.allclose(again, model(tokens(), return_type="logits"), atol=1e-3)
    with pytest.raises(RuntimeError, match="stop here"), surrogate(model, basis, "L0H0"):
        raise RuntimeError("stop here")
    assert sum(len(p.fwd_hooks) for p in model.hook_dict.values()) == before


def test_parts_of_a_planted_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(30, 5, generator=generator, dtype=torch.float64)).Q
    L, d = (
        torch.randn(3, 3, generator=generator, dtype=torch.float64),
        torch.randn(30, generator=generator, dtype=torch.float64),
    )
    W = V[:, :3] @ L @ V[:, :3].mT + torch.diag(d)
    f = Factors(W[None], torch.eye(30, dtype=torch.float64)[None])

    def product(part: str) -> Tensor:
        found, _ = part_of(f, V, part, k=3)
        return found.left[0] @ found.right[0].mT

    close(product("structured"), W - torch.diag(d), 1e-8)
    assert not product("diagonal").any()
    assert not product("none").any()
    close(product("whole"), W)
    P = V[:, :3] @ V[:, :3].mT
    close(product("low_rank"), P @ W @ P)
    threshold = float(bilinear.structure(f, V, k=3).threshold)
    Q = bilinear.complete(V, torch.eye(30, dtype=torch.float64))
    rotated = Q.mT @ (W - torch.diag(W.diagonal())) @ Q
    close(product("thresholded"), Q @ torch.where(rotated.abs() > threshold, rotated, 0.0) @ Q.mT)
    assert int((rotated.abs() > threshold).sum()) > 0
    random = product("random")
    assert int(torch.linalg.matrix_rank(random)) == 3
    assert not torch.allclose(random, product("structured"), atol=0.1)
    close(random, product("random"))


@pytest.mark.slow
def test_effect_is_a_table_and_the_random_control_costs_more_on_the_embedded_model(
    tmp_path: Any,
) -> None:
    from tl_geometry import zoo

    model = zoo.embedded()
    rows = zoo.default_windows(model, 64, n=16)
    basis = tlg.decompose(model, rows, progress=False)
    effect = surrogate_effect(
        model, rows[:8], basis, layers=0, parts=("structured", "random", "whole")
    )
    table = effect.to_dataframe()
    assert list(table["part"]) == ["model", "structured", "random", "whole"]
    change = dict(zip(table["part"], table["change"], strict=True))
    assert abs(change["whole"]) < 1e-4
    assert change["structured"] < change["random"]
    assert effect.moved.shape == (3, 4)
    assert float(effect.moved[2].max()) < 1e-4
    assert 0 < float(effect.moved[0].mean()) < float(effect.moved[1].mean())
    assert len(replacements(tlg.view(model), basis, [(0, 1)], "low_rank", rank=60)) == 1
    with pytest.raises(GeometryError, match="rank: expected 1 to 60 directions, got 61"):
        replacements(tlg.view(model), basis, [(0, 1)], "low_rank", rank=61)
    again = type(effect).load(effect.save(tmp_path / "e.safetensors"))
    close(again.loss, effect.loss)


def test_refusals() -> None:
    import dataclasses

    llama, bert, gpt2 = (tiny("bridge", a) for a in ("llama", "bert", "gpt2"))
    asked = "part 'thresholded': expected a part of a W_QK that is one matrix for all offsets, "
    asked += "got rotary .*Use one of 'structured'"
    with (
        pytest.raises(UnsupportedModelError, match=asked),
        surrogate(llama, basis_of(llama), part="thresholded"),
    ):
        pass
    with pytest.raises(UnsupportedModelError, match="part 'thresholded'"):
        surrogate_effect(llama, tokens(), basis_of(llama), parts=("none", "thresholded"))
    with pytest.raises(GeometryError, match="part: expected one of 'structured'"):
        surrogate_effect(llama, tokens(), basis_of(llama), parts=("half",))
    with pytest.raises(GeometryError, match=r"parts: expected some of structured.*got none"):
        surrogate_effect(llama, tokens(), basis_of(llama), parts=())
    for rank in (0, -1, 33):
        with pytest.raises(GeometryError, match=f"rank: expected 1 to 32 directions, got {rank}"):
            surrogate_effect(gpt2, tokens(), basis_of(gpt2), rank=rank)
    with pytest.raises(
        UnsupportedModelError, match="surrogate_effect: expected a causal language model"
    ):
        surrogate_effect(bert, tokens(), basis_of(bert))
    untrained = dataclasses.replace(tlg.view(gpt2), head_trained=False)
    with pytest.raises(UnsupportedModelError, match="expected a model with a trained output head"):
        surrogate_effect(untrained, tokens(), basis_of(gpt2))
    with (
        pytest.raises(GeometryError, match="part: expected one of 'structured'"),
        surrogate(gpt2, basis_of(gpt2), part="half"),
    ):
        pass


def test_moved_patterns_are_the_mean_over_all_prompts() -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(11)
    basis = basis_of(model)
    whole, first, rest = (
        surrogate_effect(model, part, basis, parts="structured")
        for part in (rows, rows[:8], rows[8:])
    )
    assert whole.parts == ("structured",)
    close(whole.moved, (8 * first.moved + 3 * rest.moved) / 11, 1e-5)
    assert not torch.allclose(first.moved, rest.moved, atol=1e-3)


# rotary models: another W_QK at every offset

ROTARY = [
    ("bridge", a)
    for a in ("llama", "neox", "gptj", "qwen3", "gemma3", "phi", "olmo2", "llama3-rope")
]
ROTARY += [("hooked", "llama"), ("hooked", "gptj")] if HAS_HOOKED else []
