"""Edits of rotary planes do exactly what they say in every class, leave no trace, and find a
planted cause."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.induction import rotary_previous_token
from tests.interventions.bases import basis_of
from tests.lib.models import HAS_HOOKED, tiny, tokens
from tl_geometry import split_scores
from tl_geometry.base.errors import GeometryError
from tl_geometry.interventions import keep_planes, remove_planes, swap_planes
from tl_geometry.interventions.head_edits import derangement
from tl_geometry.interventions.planes import random_planes
from tl_geometry.scores import Band, ScoreSplit

KINDS = (
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "neox",
    "phi",
    "gptj",
    "olmo2",
    "gpt-oss",
    "gpt2",
    "bloom",
)
HOOKED = ("llama", "neox", "gptj", "bloom") if HAS_HOOKED else ()
CASES = [*(("bridge", a) for a in KINDS), *(("hooked", a) for a in HOOKED)]
PROMPTS = tokens(batch=3, length=18, seed=4)


@cache
def split_of(kind: str, architecture: str) -> ScoreSplit:
    model = tiny(kind, architecture)
    return split_scores(model, PROMPTS, basis_of(kind, architecture))


def logits(model: Any, ids: Tensor = PROMPTS) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits").clone()


def hooks_of(model: Any) -> int:
    return sum(len(p.fwd_hooks) + len(p._forward_hooks) for p in model.hook_dict.values())


def z_and_v(kind: str, architecture: str, context: Any) -> tuple[Tensor, Tensor]:
    """(z, v) of layer 0 ``[batch position head d_head]``, as the model goes on with them."""
    with context:
        _, cached = tiny(kind, architecture).run_with_cache(PROMPTS)
    z, v = cached["blocks.0.attn.hook_z"], cached["blocks.0.attn.hook_v"]
    v = v.unflatten(-1, (-1, 8)) if v.dim() == 3 else v
    return z.reshape(*v.shape[:2], -1, v.shape[-1]), v.repeat_interleave(4 // v.shape[2], 2)


def expected_z(split: ScoreSplit, scores: Tensor, v: Tensor) -> Tensor:
    """The model's softmax of scores of layer 0, times v, written out."""
    cap, sinks = (
        split.softcap[:4, None, None],
        split.sinks[:4, None, None].expand(*scores.shape[:-1], 1),
    )
    capped = scores if torch.isinf(cap).all() else cap * torch.tanh(scores / cap)
    masked = capped.masked_fill(~split.allowed[:4], -torch.inf)
    pattern = torch.cat([masked, sinks], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhe->bihe", pattern, v)


@pytest.mark.parametrize(("kind", "architecture"), CASES)
def test_scores_are_edited_as_said(kind: str, architecture: str) -> None:
    split, model = split_of(kind, architecture), tiny(kind, architecture)
    planes: Any = "pass" if architecture in ("gpt2", "bloom") else [0]
    before, hooks = logits(model), hooks_of(model)
    q, k = split.q.sum(0)[:, :, :4], split.k.sum(0)[:, :, :4]
    coordinates = split.planes.coordinates(split.planes.chosen(planes))[:4]
    part = torch.einsum("bihe,bjhe->bhij", q * coordinates, k)
    whole = torch.einsum("bihe,bjhe->bhij", q, k)
    alibi = torch.zeros_like(whole) if split.bias is None else split.bias[:4].expand_as(whole)
    other = derangement(3, 5)
    cases = {
        "remove": (remove_planes(model, planes, "L0H0"), whole - part),
        "keep": (keep_planes(model, planes, "L0H0"), part),
        "swap": (swap_planes(model, planes, "L0H0", seed=5), whole - part + part[other]),
    }
    for name, (context, scores) in cases.items():
        z, v = z_and_v(kind, architecture, context)
        want = expected_z(split, scores + alibi, v)
        untouched = expected_z(split, whole + alibi, v)
        assert torch.allclose(z[:, :, 0], want[:, :, 0], atol=2e-4), name
        assert torch.allclose(z[:, :, 1:], untouched[:, :, 1:], atol=2e-4), name
        same = planes == "pass" and name == "keep"
        assert (float((want - untouched)[:, :, 0].abs().max()) > 1e-2) != same, name
    with remove_planes(model, [], "L0H0"):
        assert torch.equal(logits(model), before), "an edit of nothing changes nothing"
    with remove_planes(model, planes):
        assert float((logits(model) - before).abs().max()) > 1e-2
    assert torch.equal(logits(model), before)
    assert hooks_of(model) == hooks


def test_removing_is_keeping_the_others() -> None:
    model = tiny("bridge", "neox")
    with remove_planes(model, 1):
        removed = logits(model)
    with keep_planes(model, [0, "pass"]):
        kept = logits(model)
    assert torch.allclose(removed, kept, atol=1e-4)
    with remove_planes(model, [0, 1]):
        assert not torch.allclose(logits(model), kept, atol=1e-2)


def test_without_any_plane_attention_is_even() -> None:
    for architecture in ("llama", "gpt2"):
        model = tiny("bridge", architecture)
        with remove_planes(model, ["near", "middle", "far", "pass"], "L1H2"):
            _, cached = model.run_with_cache(PROMPTS)
        pattern = cached["pattern", 1]
        even = torch.ones(18, 18).tril() / torch.arange(1, 19).unsqueeze(1)
        assert torch.allclose(pattern[:, 2], even.expand(3, -1, -1), atol=1e-5)
        assert not torch.allclose(pattern[:, 1], even.expand(3, -1, -1), atol=1e-2)


def test_the_control_removes_as_many_other_planes() -> None:
    model = rotary_previous_token()
    ids = tokens(batch=2, length=18, seed=3)
    seen: dict[Any, Tensor] = {}
    for control in (None, 0, 0, 1, 2, 3):
        with remove_planes(model, [0, 1], "L0H0", control=control):
            _, cached = model.run_with_cache(ids)
        pattern = cached["pattern", 0][:, 0]
        if control in seen:
            assert torch.equal(seen[control], pattern), "a seed gives the same planes"
        seen[control] = pattern
    own = seen.pop(None)
    assert not any(torch.allclose(own, other, atol=1e-3) for other in seen.values())
    assert len({round(float(p.sum(0)[5, 4]), 4) for p in seen.values()}) > 1


def test_random_planes_are_as_many_and_others() -> None:
    theta = torch.tensor([1.0, 0.5, 0.1, 0.05, 0.0])
    chosen = torch.tensor([True, False, True, False, False])
    drawn = [random_planes(chosen, theta, seed, 1, 2) for seed in range(60)]
    assert {int(d.sum()) for d in drawn} == {2}
    assert not any(bool(d[-1]) for d in drawn)
    assert len({tuple(d.tolist()) for d in drawn}) == 5, "all pairs of four but the chosen one"
    heads = [tuple(random_planes(chosen, theta, 0, 0, head).tolist()) for head in range(20)]
    assert len(set(heads)) > 1
    for planes in ([True] * 4 + [False], [False] * 4 + [True]):
        with pytest.raises(GeometryError, match="fewer than all 4 rotated planes"):
            random_planes(torch.tensor(planes), theta, 0)


def test_a_planted_band_is_the_cause() -> None:
    """Head L0H0 finds the token before with planes of wavelengths 6 to 18: near ones make its
    attention, the slow one does not."""
    model, ids = rotary_previous_token(), tokens(batch=4, length=40, seed=3)

    def attention(context: Any) -> float:
        with context:
            _, cached = model.run_with_cache(ids)
        return float(cached["pattern", 0][:, 0].diagonal(-1, -2, -1).mean())

    clean = attention(remove_planes(model, [], "L0H0"))
    near = attention(remove_planes(model, "near", "L0H0"))
    middle = attention(remove_planes(model, "middle", "L0H0"))
    kept = attention(keep_planes(model, "near", "L0H0"))
    swapped = attention(swap_planes(model, "near", "L0H0"))
    assert clean > 0.8
    assert near < 0.5 * clean
    assert middle > 0.8 * clean
    assert kept > 0.8 * clean
    assert abs(swapped - clean) < 1e-5, "constant queries and keys are every prompt's"


def test_gradients_pass() -> None:
    model = tiny("bridge", "llama")
    q = model.blocks[0].attn.q.original_component.weight
    grads: list[Tensor] = []
    for planes in ([], [0], [0, 1, 2, 3]):
        with remove_planes(model, planes, ["L0H0", "L0H1", "L0H2", "L0H3"]):
            loss = model(PROMPTS, return_type="logits").square().sum()
        grads.append(torch.autograd.grad(loss, q)[0])
    assert bool(grads[1].isfinite().all())
    assert float(grads[1].abs().max()) > 0
    assert not torch.allclose(grads[0], grads[1], rtol=1e-2)
    assert float(grads[2].abs().max()) < 1e-4 * float(grads[0].abs().max())


def test_what_cannot_be_edited_is_refused() -> None:
    model = tiny("bridge", "llama")
    refusals = [
        (remove_planes(model, "near", "L0H0", control=0), None),
        (remove_planes(model, "pass", "L0H0"), "none of pass in layer 0, whose wavelengths are 6"),
        (remove_planes(model, Band(100, 101), "L0H0"), "none of wavelengths over 100 up to 101"),
        (remove_planes(model, 4, "L0H0"), "planes 0 to 3"),
        (remove_planes(model, [0, 1, 2, 3], "L0H0", control=0), "fewer than all 4 rotated"),
        (remove_planes(tiny("bridge", "gpt2"), "near"), "none of near in layer 0"),
    ]
    for context, refused in refusals:
        if refused is None:
            with context:
                logits(model)
            continue
        with pytest.raises(GeometryError, match=refused), context:
            logits(tiny("bridge", "gpt2") if "near" in refused else model)
    with pytest.raises(GeometryError, match="at least 2 prompts"), swap_planes(model, 0, "L0H0"):
        logits(model, PROMPTS[:1])
    with (
        pytest.raises(GeometryError, match="L0H0"),
        remove_planes(model, 0, "L0H0"),
        keep_planes(model, 1, ["L0H0"]),
    ):
        logits(model)
