"""Models as users have them: moved after they were looked at, with NaN in a weight, with masks of
their own, under hooks that a reader must be told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.models import HAS_HOOKED, hf_model, tokens
from tl_geometry import (
    check_model,
    decompose,
    split_scores,
    sweep_heads,
    token_readout,
    weight_geometry,
)
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.interventions import keep_term, mean_term, remove_term
from tl_geometry.models import from_hf

MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
ROWS, IDS = tokens(16, 14, seed=2), tokens(3, 10, seed=9)


def fresh(model_class: str, architecture: str = "gpt2") -> Any:
    return from_hf(hf_model(architecture), None, model_class=model_class, name="mine")


# -------------------------------------------------------------------------------------------------
# moved


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_moved_to_another_dtype_after_a_look(model_class: str, dtype: torch.dtype) -> None:
    model = fresh(model_class, "llama" if model_class == "bridge" else "gpt2")
    assert not check_model(model).refused
    basis = decompose(model, ROWS, progress=False)
    model.to(dtype)
    assert not check_model(model).refused
    weight_geometry(model, decompose(model, ROWS, progress=False))
    token_readout(model)
    with pytest.raises(GeometryError, match="the model it was computed from"):
        split_scores(model, IDS, basis, heads="L1H0")


# -------------------------------------------------------------------------------------------------
# NaN


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(
    "kind", ["embedding", "positions", "query", "key", "output", "norm", "last MLP", "unembedding"]
)
def test_a_weight_that_is_no_number_is_named(model_class: str, kind: str) -> None:
    names = {
        "embedding": ("embed.W_E", "wte"),
        "positions": ("W_pos", "wpe"),
        "query": ("1.attn.W_Q", "h.1._original_component.attn.q."),
        "key": ("1.attn.b_K", "h.1._original_component.attn.k."),
        "output": ("1.attn.W_O", "h.1._original_component.attn.o."),
        "norm": ("1.ln2.w", "h.1._original_component.ln_2"),
        "last MLP": ("1.mlp.b_out", "h.1._original_component.mlp._original_component.c_proj"),
        "unembedding": ("W_U", "wte"),
    }[kind]
    model = fresh(model_class)
    assert not check_model(model).refused  # the twin
    named = dict(model.named_parameters())
    name = next(n for n in named if any(part in n for part in names))
    named[name].data[..., -1] = torch.nan
    with pytest.raises(UnsupportedModelError, match="expected numbers, got NaN in ") as error:
        check_model(model)
    assert name in str(error.value)


# -------------------------------------------------------------------------------------------------
# masks


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("change", [remove_term, keep_term, mean_term])
def test_a_saved_mask_value_is_a_mask_to_edits(change: Callable[..., Any]) -> None:
    plain = fresh("hooked")
    old = fresh("hooked")
    for block in old.blocks:
        block.attn.IGNORE = torch.tensor(-1e5)
    found: list[Tensor] = []
    for model in (plain, old):
        basis = decompose(model, ROWS, progress=False)
        with torch.no_grad(), change(model, basis, "pos-cvec", [(0, 1), (1, 0)]) as edit:
            found.append(model(IDS, return_type="logits"))
        assert edit.passes == 1
    assert torch.equal(found[0], found[1])


def masks_padding(model: Any, pad: int, value: float, *, added: bool) -> None:
    """The permanent hooks with which a course masks padding in its own models."""

    def hook(scores: Tensor, hook: Any) -> Tensor:
        hidden = (model.seen_ids == pad)[:, None, None, :]
        hidden = hidden & ~torch.eye(scores.shape[-1], dtype=torch.bool)
        if added:
            return torch.where(hidden, scores + value, scores)
        return scores.masked_fill(hidden, value)

    for name, point in model.hook_dict.items():
        if name.endswith("attn.hook_attn_scores"):
            point.add_hook(hook, is_permanent=True)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(("value", "added"), [(-torch.inf, False), (-1e5, False), (-1e9, True)])
def test_padding_hooks_are_named(model_class: str, value: float, added: bool) -> None:
    model, pad = fresh(model_class), 60
    basis = decompose(model, ROWS.clamp(max=59), progress=False)
    masks_padding(model, pad, value, added=added)
    notes = " ".join(row[1] for row in check_model_with_ids(model).findings if row[0] == "note")
    assert "blocks.0.attn.hook_attn_scores" in notes
    ids = IDS.clamp(max=59)
    model.__dict__["seen_ids"] = ids
    assert split_scores(model, ids, basis, heads="L1H0").provenance.hooks  # nothing is masked
    ids = ids.clone()
    ids[1, 3:5] = pad
    model.__dict__["seen_ids"] = ids
    with pytest.raises(GeometryError, match=r"mask of layer .* under hooks at blocks") as error:
        split_scores(model, ids, basis, heads="L1H0")
    assert "1 of 3 prompts" in str(error.value)
    assert "without padding" in str(error.value)


def check_model_with_ids(model: Any) -> Any:
    model.__dict__["seen_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    return check_model(model)


# -------------------------------------------------------------------------------------------------
# hooks among the flags


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_hooks_that_acted_are_flags(model_class: str) -> None:
    model = fresh(model_class)
    flags = decompose(model, ROWS, progress=False).provenance.flags
    assert not any("hooks" in flag for flag in flags)  # the twin
    name = "blocks.0.hook_resid_post" if model_class == "hooked" else "blocks.0.hook_out"
    with model.hooks(fwd_hooks=[(name, lambda value, hook: value * 1.5)]):
        basis = decompose(model, ROWS, progress=False)
        table = sweep_heads(model, IDS, basis, progress=False)
    for result in (basis, table):
        assert any(f.startswith("under hooks at blocks.0.") for f in result.provenance.flags)
        assert result.provenance.line().count("under hooks at") == 1
