"""Knockouts of heads give what hooks written by hand give, in every class, and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.models import HAS_HOOKED, tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.interventions import remove_heads
from tl_geometry.interventions.head_edits import derangement

KINDS = ("gpt2", "llama", "gemma2", "neox", "gptj", "bloom", "bert", "opt", "gpt-neo")
CASES = [*(("bridge", a) for a in KINDS), *(("hooked", a) for a in ("gpt2", "llama") if HAS_HOOKED)]
PROMPTS = tokens(batch=3, length=12, seed=4)
REFERENCE = tokens(batch=5, length=14, seed=5)
HEADS = [(0, 1), (1, 0), (1, 3)]
EDITS: dict[str, dict[str, Any]] = {
    "mean": {"reference": REFERENCE},
    "zero": {},
    "prompt": {"seed": 3},
}


def logits(model: Any, hooks: Any = ()) -> Tensor:
    with torch.no_grad():
        return model.run_with_hooks(PROMPTS, return_type="logits", fwd_hooks=list(hooks)).clone()


def by_hand(model: Any, by: str, order: Tensor | None = None) -> Tensor:
    """Logits with hooks that change z, after a pass that reads it."""
    with torch.no_grad():
        _, cache = model.run_with_cache(REFERENCE if by == "mean" else PROMPTS)
    heads = model.cfg.n_heads

    def acting(layer: int) -> Any:
        name = f"blocks.{layer}.attn.hook_z"

        def act(z: Tensor, hook: Any) -> Tensor:
            changed = z.reshape(*z.shape[:2], heads, -1).clone()
            read = cache[name].reshape(len(cache[name]), -1, heads, changed.shape[-1])
            for head in [head for at, head in HEADS if at == layer]:
                if by == "mean":
                    changed[:, :, head] = read[:, : z.shape[1], head].mean(0)
                elif by == "zero":
                    changed[:, :, head] = 0.0
                else:
                    changed[:, :, head] = changed[order, :, head]
            return changed.reshape(z.shape)

        return name, act

    return logits(model, [acting(layer) for layer in (0, 1)])


@pytest.mark.parametrize("by", ["mean", "zero"])
@pytest.mark.parametrize(("model_class", "architecture"), CASES)
def test_a_knockout_is_that_of_hooks_by_hand(model_class: str, architecture: str, by: str) -> None:
    model = tiny(model_class, architecture)
    clean, wanted = logits(model), by_hand(model, by)
    edit = remove_heads(model, HEADS, by, **EDITS[by])
    with edit as opened:
        inside = logits(model)
    scale = float(clean.abs().max())
    assert opened.passes == 1
    assert float((inside - wanted).abs().max()) < 1e-5 * scale
    assert float((wanted - clean).abs().max()) > 1e-3 * scale
    assert torch.equal(logits(model), clean)
    assert torch.equal(logits(model, edit.hooks()), inside)


@pytest.mark.parametrize("by", ["zero", "prompt"])
def test_a_reference_matters_for_the_mean_alone(by: str) -> None:
    model = tiny("bridge", "gpt2")
    with remove_heads(model, HEADS, by, reference=REFERENCE):
        given = logits(model)
    with remove_heads(model, HEADS, by):
        assert torch.equal(given, logits(model))


def test_another_prompt_is_one_layer_at_a_time() -> None:
    """The heads of the second block take what they make in the edited run."""
    model = tiny("bridge", "gpt2")
    with remove_heads(model, HEADS, "prompt", seed=3):
        inside = logits(model)
    assert torch.allclose(inside, by_hand(model, "prompt", derangement(3, 3)), atol=1e-5)
    same = PROMPTS[:1].expand(3, -1)
    with torch.no_grad(), remove_heads(model, HEADS, "prompt"):
        assert torch.allclose(model(same), model(same)[[1, 2, 0]], atol=1e-5)


def test_the_mean_of_one_prompt_changes_nothing() -> None:
    model = tiny("bridge", "gpt2")
    with torch.no_grad():
        clean = model(PROMPTS[:1])
        with remove_heads(model, reference=PROMPTS[:1]):
            assert torch.allclose(model(PROMPTS[:1]), clean, atol=1e-5)
        with remove_heads(model, reference=REFERENCE):
            assert not torch.allclose(model(PROMPTS[:1]), clean, atol=1e-3)


def test_what_makes_no_sense_is_refused() -> None:
    model = tiny("bridge", "gpt2")
    with pytest.raises(GeometryError, match="prompts to take the mean over"):
        remove_heads(model, "L0H0")
    with pytest.raises(GeometryError, match="by: expected one of"):
        remove_heads(model, "L0H0", "median")
    with pytest.raises(GeometryError, match="L9H0"):
        remove_heads(model, "L9H0", "zero")
    short = pytest.raises(GeometryError, match="at most 8 tokens, as in the reference")
    with short, remove_heads(model, "L0H0", reference=PROMPTS[:, :8]):
        model(PROMPTS)
    alone = pytest.raises(GeometryError, match="at least 2 prompts")
    with alone, remove_heads(model, "L0H0", "prompt"):
        model(PROMPTS[:1])
