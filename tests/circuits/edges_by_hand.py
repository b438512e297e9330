"""Edge scores and pruned runs by TransformerLens's own hooks, for comparison: the inputs of single
heads that HookedTransformer has, and hooks that rebuild them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.lib.models import hf_model, hooked_of, tiny_hooked, tokens
from tl_geometry.circuits import EdgeLayout

PROMPTS, COUNTERFACTUALS = tokens(3, 10, seed=5), tokens(3, 10, seed=6)
COUNTERFACTUALS[:, -1] = PROMPTS[:, -1]
TARGETS = [(5, 9), (7, 3), (11, 40)]
PAIRS: dict[str, Any] = {
    "prompts": PROMPTS,
    "counterfactuals": COUNTERFACTUALS,
    "targets": TARGETS,
}
BY_HAND = ("gpt2", "llama", "qwen2", "neox", "bloom", "gemma3", "gpt-oss", "attention-only")
"""Models whose heads have inputs of their own in HookedTransformer."""


def hooked(architecture: str) -> Any:
    """A float64 HookedTransformer in which every reader has an input of its own."""
    if architecture == "attention-only":
        model = tiny_hooked(attn_only=True, d_mlp=None, act_fn=None, normalization_type="LN")
        model = model.to(torch.float64)
    else:
        model = hooked_of(hf_model(architecture, torch.float64), name=f"split-{architecture}")
    model.set_use_split_qkv_input(True)
    if architecture != "attention-only":
        model.set_use_hook_mlp_in(True)
    return model


def difference(logits: Tensor) -> Tensor:
    """The difference of two logits at the last position of each prompt."""
    chosen = logits[:, -1].gather(1, torch.tensor(TARGETS))
    return chosen[:, 0] - chosen[:, 1]


def reader_hooks(model: Any) -> list[str]:
    """Hooks of the inputs of all readers, in the order of the layout."""
    names: list[str] = []
    for layer in range(model.cfg.n_layers):
        names += [f"blocks.{layer}.hook_{which}_input" for which in "qkv"]
        names += [] if model.cfg.attn_only else [f"blocks.{layer}.hook_mlp_in"]
    return [*names, f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]


def written(model: Any, cache: Any) -> Tensor:
    """What every writer wrote, ``[writer batch position d_model]``."""
    writes = [cache["blocks.0.hook_resid_pre"].unsqueeze(0)]
    for layer in range(model.cfg.n_layers):
        writes.append(head_writes(model, layer, cache[f"blocks.{layer}.attn.hook_z"]))
        if not model.cfg.attn_only:
            writes.append(cache[f"blocks.{layer}.hook_mlp_out"].unsqueeze(0))
    return torch.cat(writes)


def head_writes(model: Any, layer: int, z: Tensor) -> Tensor:
    """What the heads of a layer wrote, through the norm behind attention where there is one."""
    block = model.blocks[layer]
    writes = torch.einsum("bihe,hed->hbid", z, block.attn.W_O)
    if not model.cfg.use_normalization_before_and_after:
        return writes
    total = writes.sum(0)
    scale = (total.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt()
    return writes / scale * block.ln1_post.w


def scores_by_hand(model: Any) -> Tensor:
    """Scores of all pairs of reader and writer by TransformerLens's own gradients."""
    names, inputs, caches = reader_hooks(model), {}, []
    for rows in (PROMPTS, COUNTERFACTUALS):
        with torch.no_grad():
            caches.append(model.run_with_cache(rows)[1])

    def keep(value: Tensor, hook: Any) -> None:
        value.retain_grad()
        inputs[hook.name] = value

    with torch.enable_grad():
        logits = model.run_with_hooks(PROMPTS, fwd_hooks=[(name, keep) for name in names])
        difference(logits).sum().backward()
    gradients = []
    for name in names:
        gradient = inputs[name].grad
        gradients.append(gradient if gradient.dim() == 4 else gradient.unsqueeze(2))
    model.zero_grad()
    with torch.no_grad():
        differences = written(model, caches[1]) - written(model, caches[0])
    return torch.einsum("wbid,bird->rw", differences, torch.cat(gradients, 2)) / len(PROMPTS)


def pruned_by_hand(model: Any, layout: EdgeLayout, kept: Tensor) -> Tensor:
    """The metric of a run in which hooks give every reader the counterfactual's stream, plus what
    its kept writers write now less what they wrote there."""
    with torch.no_grad():
        cache = model.run_with_cache(COUNTERFACTUALS)[1]
    there, now = written(model, cache), [model_input(model)]
    names, mask, at = reader_hooks(model), kept.to(there), 0
    sizes = [layout.n_heads, layout.n_key_heads[0], layout.n_key_heads[0]]
    sizes += [] if model.cfg.attn_only else [1]
    hooks = []

    def reading(first: int, size: int) -> Any:
        def act(value: Tensor, hook: Any) -> Tensor:
            running = torch.cat(now)
            n = seen[first]
            change = running[:n] - there[:n]
            stream = there[:n].sum(0).unsqueeze(2) + bias_so_far(model, hook.name)
            new = stream + torch.einsum("rw,wbid->bird", mask[first : first + size, :n], change)
            return new if value.dim() == 4 else new[:, :, 0]

        return act

    def heads(value: Tensor, hook: Any) -> None:
        now.append(head_writes(model, hook.layer(), value))

    def mlp(value: Tensor, hook: Any) -> None:
        now.append(value.unsqueeze(0))

    seen = layout.seen
    for index, name in enumerate(names):
        size = 1 if index == len(names) - 1 else sizes[index % len(sizes)]
        hooks.append((name, reading(at, size)))
        at += size
    for layer in range(model.cfg.n_layers):
        hooks.append((f"blocks.{layer}.attn.hook_z", heads))
        if not model.cfg.attn_only:
            hooks.append((f"blocks.{layer}.hook_mlp_out", mlp))
    with torch.no_grad():
        return difference(model.run_with_hooks(PROMPTS, fwd_hooks=hooks))


def model_input(model: Any) -> Tensor:
    """The first state of the prompts, as one writer."""
    with torch.no_grad():
        return model.run_with_cache(PROMPTS)[1]["blocks.0.hook_resid_pre"].unsqueeze(0)


def bias_so_far(model: Any, name: str) -> Tensor:
    """The output biases of all heads that wrote before a hook: no writer's here."""
    layer = int(name.split(".")[1])
    behind = name.endswith("hook_resid_post") or (
        name.endswith("hook_mlp_in") and not model.cfg.parallel_attn_mlp
    )
    biases = [model.blocks[l].attn.b_O for l in range(layer + behind)]
    return sum(biases, start=torch.zeros_like(model.blocks[0].attn.b_O))
