"""No pass inside an edit gives unedited logits without a word: copied models, weights that change,
code that was replaced, recomputed activations."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.interventions.bases import basis_of
from tests.lib.models import HAS_HOOKED, hf_model, tiny, tokens
from tl_geometry import check_model, decompose, split_scores, view
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions import LiveEdit, project_stream, remove_term
from tl_geometry.models import from_hf

MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
HEADS = ["L0H1", "L1H0"]
IDS = tokens(2, 10, seed=9)


def fresh(model_class: str, architecture: str = "gpt2") -> Any:
    """A model that a test may change, with the weights of the shared one."""
    name = f"tiny-{architecture}"
    return from_hf(hf_model(architecture), None, model_class=model_class, name=name)


def edit_of(model: Any, basis: PositionContext) -> LiveEdit:
    return remove_term(model, basis, "pos-cvec", HEADS)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits").clone()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------------------
# threads


# -------------------------------------------------------------------------------------------------
# passes are counted


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_passes_are_counted(model_class: str) -> None:
    model, basis = tiny(model_class, "gpt2"), basis_of(model_class)
    edit = edit_of(model, basis)
    assert "0 passes edited" in repr(edit)
    with edit as opened:
        logits(model)
        logits(model)
    assert (opened.passes, edit.passes) == (2, 2)
    assert "passes=2" in repr(opened)
    for _ in range(3):
        model.run_with_hooks(IDS, fwd_hooks=edit.hooks())
    assert edit.passes == 5
    assert "5 passes edited" in repr(edit)
    edit.hooks()
    assert edit.passes == 5  # the twin: a list that nobody ran


@pytest.mark.parametrize("name", ["term", "stream"])
def test_a_block_without_an_edited_pass_is_refused(name: str) -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge")

    def made() -> AbstractContextManager[Any]:
        return edit_of(model, basis) if name == "term" else project_stream(model, basis, 1)

    with pytest.raises(GeometryError, match="a forward pass inside the with block"), made():
        pass
    short = remove_term(model, basis, "pos-cvec", "L1H0") if name == "term" else made()
    with pytest.raises(GeometryError, match="a forward pass inside the with block"), short:
        model(IDS, stop_at_layer=int(name == "term"))  # up to the input of the edited layer
    with pytest.raises(KeyError), made():  # an error that is on its way stays
        raise KeyError
    with made() as edit:
        logits(model)
    assert edit.passes == 1


# -------------------------------------------------------------------------------------------------
# copies


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("name", ["term", "stream"])
def test_a_copy_made_inside_an_edit_is_refused(model_class: str, name: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    made = edit_of(model, basis) if name == "term" else project_stream(model, basis, 1)
    with made:
        logits(model)
        inside = copy.deepcopy(model)
        with pytest.raises(GeometryError, match="copied outside of edits"):
            logits(inside)
    assert same(logits(copy.deepcopy(model)), logits(model))  # the twin


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_copy_under_a_list_is_edited(model_class: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    clean = logits(model)
    with model.hooks(fwd_hooks=edit_of(model, basis).hooks()):
        inside = logits(model)
        assert same(logits(copy.deepcopy(model)), inside)
    assert not same(clean, inside)


# -------------------------------------------------------------------------------------------------
# weights and code that change


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_weights_that_change_in_use_are_seen(model_class: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    last = dict(model.named_parameters())
    weight = last[[n for n in last if "mlp" in n][-1]].data  # no edited head reads it
    with (
        pytest.raises(GeometryError, match="weights that it was made for"),
        edit_of(model, basis),
    ):
        logits(model)
        weight.mul_(2)
    weight.div_(2)
    edit = edit_of(model, basis)
    hooks = edit.hooks()
    model.run_with_hooks(IDS, fwd_hooks=hooks)
    weight.mul_(2)
    with pytest.raises(GeometryError, match="weights that it was made for"):
        model.run_with_hooks(IDS, fwd_hooks=hooks)
    model.reset_hooks()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("where", ["module", "model"])
def test_a_replaced_forward_is_a_flag(model_class: str, where: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    assert view(model).hooked() == ()
    module = model if where == "model" else model.blocks[0].mlp
    module = getattr(module, "original_component", module)  # a bridge gives it to what it holds
    forward = module.forward
    module.forward = lambda *given, **named: forward(*given, **named)
    try:
        flags = split_scores(model, IDS, basis, heads=HEADS).provenance.flags
        assert any("forward" in flag and "under hooks at" in flag for flag in flags), flags
        assert any(flag.startswith("basis fitted without these hooks") for flag in flags)
    finally:
        del module.forward
    assert split_scores(model, IDS, basis, heads=HEADS).provenance.flags == ()


# -------------------------------------------------------------------------------------------------
# recomputed activations, caches, quantised and processed weights


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_recomputed_activations_are_edited(model_class: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    weight = next(p for n, p in model.named_parameters() if "W_E" in n or "wte" in n)

    def gradient(recompute: bool) -> Tensor:
        run = partial(model, return_type="logits")
        found = checkpoint(run, IDS, use_reentrant=False) if recompute else run(IDS)
        assert isinstance(found, Tensor)
        (out,) = torch.autograd.grad(found.square().mean(), weight)
        return out

    clean = gradient(recompute=False)
    with edit_of(model, basis):
        plain, again = gradient(recompute=False), gradient(recompute=True)
    assert torch.allclose(plain, again, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain, clean, rtol=1e-2)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_weights_processed_after_the_basis_are_refused(model_class: str) -> None:
    model = fresh(model_class)
    basis = decompose(model, tokens(16, 18, seed=2), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_class == "hooked":
            model.process_weights_()
        else:
            model.enable_compatibility_mode(disable_warnings=True)
    with (
        pytest.raises(GeometryError, match="the model it was computed from"),
        edit_of(model, basis),
    ):
        logits(model)
    with pytest.raises(GeometryError, match="the model it was computed from"):
        split_scores(model, IDS, basis, heads=HEADS)
    again = decompose(model, tokens(16, 18, seed=2), progress=False)
    with edit_of(model, again) as edit:
        logits(model)
    assert edit.passes == 1


def test_dynamically_quantised_weights_are_refused() -> None:
    model = fresh("bridge", "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )
    with pytest.raises(GeometryError, match="quantis"):
        check_model(model)
