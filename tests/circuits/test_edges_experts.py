"""Edges into and out of mixtures of experts: scores are autograd's through the router of the
Hugging Face model alone, and a pruned run gives an MLP what hooks on that model give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.circuits.edges_by_hand import COUNTERFACTUALS, PAIRS, PROMPTS, difference
from tests.circuits.test_edge_scores import close, matrix
from tests.lib.models import ARCHITECTURES, HEADS, redrawn
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.circuits import EdgeLayout, edge_scores, faithfulness
from tl_geometry.models import from_hf, view
from tl_geometry.models.mlp import MLPModule, mlp_spec

FEW: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ARCHITECTURES["gpt-oss"],
    "mixtral": ("MixtralForCausalLM", ARCHITECTURES["llama"][1] | {"num_local_experts": 4}),
    "olmoe": ("OlmoeForCausalLM", ARCHITECTURES["llama"][1] | FEW),
    # the first block has a dense MLP
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        ARCHITECTURES["qwen3"][1] | FEW | {"moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
}
"""Hugging Face classes and their configurations."""
ROUNDED = 3e-5
"""Allowed, relative to the largest: Hugging Face computes norms and most routers in float32
whatever the model's dtype. Measured: at most 5e-6."""


def alone(name: str) -> Any:
    """The Hugging Face model in float64, every parameter redrawn."""
    return redrawn(*EXPERTS[name], torch.float64)


def bridged(name: str) -> Any:
    return from_hf(alone(name), None, name=f"tiny-{name}")


def first_of(value: Any) -> Tensor:
    """A tensor, or the first of several."""
    return value[0] if isinstance(value, tuple) else value


class ByHand:
    """A run of the Hugging Face model that notes what every writer wrote, and what MLPs and the
    output read. ``instead`` maps the input of a norm, and its number, to another."""

    def __init__(self, hf: Any, rows: Tensor, instead: Any = None) -> None:
        self.writes: list[Tensor] = []
        self.reads: list[Tensor] = []
        layers = hf.model.layers
        first = layers[0].register_forward_pre_hook(lambda _, given: self.wrote(given[0][None]))
        handles = [first]
        for layer in layers:
            o_proj = layer.self_attn.o_proj
            handles.append(o_proj.register_forward_pre_hook(self.heads))
            handles.append(layer.mlp.register_forward_hook(self.mlp))
        norms = [layer.post_attention_layernorm for layer in layers] + [hf.model.norm]
        handles += [norm.register_forward_pre_hook(self.reading(instead)) for norm in norms]
        with torch.enable_grad():
            self.metric = difference(hf(rows).logits)
        for handle in handles:
            handle.remove()

    def wrote(self, writes: Tensor) -> None:
        self.writes.append(writes.detach())

    def heads(self, o_proj: Any, given: Any) -> None:
        z, W_O = given[0].unflatten(-1, (HEADS, -1)), o_proj.weight.unflatten(-1, (HEADS, -1))
        self.wrote(torch.einsum("bihe,dhe->hbid", z, W_O))

    def mlp(self, module: Any, given: Any, output: Any) -> None:
        self.wrote(first_of(output)[None])

    def reading(self, instead: Any) -> Any:
        def act(norm: Any, given: Any) -> Tensor:
            value = given[0] * 1.0  # another tensor than the stream, which goes on past the norm
            if instead is not None:
                value = instead(value, len(self.reads), torch.cat(self.writes))
            value.retain_grad()
            self.reads.append(value)
            return value

        return act


def rows_of(layout: EdgeLayout) -> list[int]:
    """Numbers of the MLPs and of the output among the readers."""
    return [at for at, name in enumerate(layout.readers) if "<" not in name]


def scores_alone(name: str) -> list[Tensor]:
    """Scores of the edges into every MLP and the output."""
    hf = alone(name)
    clean, other = ByHand(hf, PROMPTS), ByHand(hf, COUNTERFACTUALS)
    clean.metric.sum().backward()
    change = (torch.cat(other.writes) - torch.cat(clean.writes)) / len(PROMPTS)
    gradients = [read.grad for read in clean.reads]
    return [torch.einsum("wbid,bid->w", change, g) for g in gradients if g is not None]


def distance(name: str, model: Any) -> float:
    """How far scores are from those of the model alone, relative to the largest."""
    scores = edge_scores(model, **PAIRS, method="gradient")
    found, expected = matrix(scores), scores_alone(name)
    worst = 0.0
    for row, of_reader in zip(rows_of(scores.layout), expected, strict=True):
        seen = scores.layout.seen[row]
        error = (found[row, :seen] - of_reader[:seen]).abs().max()
        worst = max(worst, float(error / of_reader.abs().max()))
    return worst


@pytest.mark.parametrize("name", EXPERTS)
def test_scores_are_autograd_s_through_the_router(name: str) -> None:
    assert distance(name, bridged(name)) < ROUNDED


@pytest.mark.parametrize("name", EXPERTS)
def test_a_router_without_a_gradient_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = scores_alone(name), bridged(name)
    monkeypatch.setitem(globals(), "scores_alone", lambda name: expected)
    block = alone(name).model.layers[-1].mlp
    router = type(getattr(block, "router", None) or block.gate)
    forward = router.forward

    def detached(*given: Any) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in forward(*given))

    monkeypatch.setattr(router, "forward", detached)
    assert distance(name, model) > 1e-3


def kept_of(layout: EdgeLayout) -> Tensor:
    """All edges, but of those into MLPs and the output a random half."""
    generator = torch.Generator().manual_seed(0)
    kept = layout.allowed.clone()
    for row in rows_of(layout):
        kept[row] &= torch.rand(kept.shape[1], generator=generator) < 0.5
    return kept


def pruned_alone(name: str, layout: EdgeLayout, kept: Tensor) -> Tensor:
    """The metric where hooks give MLPs and output what writers that are not kept wrote on the
    counterfactual."""
    hf, rows = alone(name), rows_of(layout)
    there = torch.cat(ByHand(hf, COUNTERFACTUALS).writes)

    def instead(value: Tensor, number: int, now: Tensor) -> Tensor:
        dropped = (layout.allowed & ~kept)[rows[number], : len(now)].to(now)
        return value + torch.einsum("w,wbid->bid", dropped, there[: len(now)] - now)

    return ByHand(hf, PROMPTS, instead).metric.detach()


@pytest.mark.parametrize("name", EXPERTS)
def test_pruned_runs_give_experts_another_input(name: str) -> None:
    model = bridged(name)
    layout = EdgeLayout.of(view(model))
    kept = kept_of(layout)
    names = [e for e, k in zip(layout.edge_names(), kept[layout.allowed], strict=True) if k]
    result = faithfulness(model, names, **PAIRS, draws=1)
    expected = pruned_alone(name, layout, kept)
    assert close(result.metrics[0], expected, ROUNDED)
    assert not close(pruned_alone(name, layout, layout.allowed), expected, 1e-2)
    # an MLP whose input stays what it was on the prompt
    without_mlps = kept.clone()
    for row in rows_of(layout)[:-1]:
        without_mlps[row] = layout.allowed[row]
    assert not close(pruned_alone(name, layout, without_mlps), expected, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "sums"), [(4, True), (2, False)])
def test_integrated_scores_miss_the_jumps_of_the_router(chosen: int, sums: bool) -> None:
    """With every expert chosen the MLP is smooth, and the scores of the embedding sum to the change
    of the metric; where the choice changes between the prompts the metric jumps."""
    class_name, settings = EXPERTS["olmoe"]
    hf = redrawn(class_name, settings | {"num_experts_per_tok": chosen}, torch.float64)
    model = from_hf(hf, None)
    scores = edge_scores(model, PROMPTS[:1], COUNTERFACTUALS[:1], targets=(5, 9), steps=200)
    change = scores.counterfactual - scores.clean
    error = abs(float(scores.node_scores[0]) - change) / abs(change)
    assert (error < 0.01) if sums else (error > 0.1)


@pytest.mark.parametrize("hook", ["hook_in", "hook_out"])
def test_hooks_inside_experts_are_refused(hook: str) -> None:
    model = bridged("gpt-oss")
    hooks = [(f"blocks.0.mlp.{hook}", lambda value, hook: 0.5 * value)]
    with model.hooks(fwd_hooks=hooks), pytest.raises(GeometryError):
        edge_scores(model, **PAIRS)
    edge_scores(model, **PAIRS, method="gradient")


def test_experts_are_no_matrices() -> None:
    about = view(bridged("qwen3-moe"))
    assert mlp_spec(about, 0) is not None
    with pytest.raises(UnsupportedModelError, match="two or three matrices"):
        mlp_spec(about, 1)


def test_another_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = MLPModule.run
    monkeypatch.setattr(MLPModule, "run", lambda mlp, x: 1.001 * run(mlp, x))
    with pytest.raises(UnsupportedModelError, match="what its module gives"):
        edge_scores(bridged("gpt-oss"), **PAIRS)
