"""The frozen linear model of a forward pass, by autograd through a Hugging Face model: a route of
its own to the gradients of a logit's graph.

Hugging Face's own code runs under :class:`Frozen`, which makes constants of what is not linear:
scales of norms, attention patterns, and activations by their secant ``a(x) = (a(x) / x) x``. A
gated MLP multiplies two factors, and is written as two halves in which one of them is constant.
With ``follow`` the softmax stays live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.lib.double import InDouble, double_hf

ACTIVATIONS = ("gelu", "silu", "relu")
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense")


class Frozen(TorchFunctionMode):
    """Makes constants of everything in a forward pass that is not linear."""

    def __init__(self, follow: bool) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "softmax":
            out = func(*args, **kwargs)
            return out if self.follow else out.detach()
        if name == "rsqrt":
            return func(*args, **kwargs).detach()
        if name == "tanh":  # of a gelu, or (four axes) a soft cap of scores
            out = func(*args, **kwargs)
            return out.detach() if args[0].dim() < 4 else out
        if name in ACTIVATIONS:
            return args[0] * (func(*args, **kwargs) / args[0]).detach()
        if name == "layer_norm":
            return _layer_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _layer_norm(x: Tensor, _shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm at a constant scale."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt().detach() * weight + bias


def _halves(mlp: nn.Module) -> None:
    """Hooks that make a gated MLP ``a(g) u`` linear: the product as it was, times the mean of what
    became of each factor."""
    factors: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, out: Any) -> None:
        factors.append(out)

    def half(_module: nn.Module, args: Any) -> tuple[Tensor]:
        gate, linear = factors
        factors.clear()
        was = args[0].detach()
        return (was / 2 * (gate / gate.detach() + linear / linear.detach()),)

    for name, module in mlp.named_children():
        if name == "down_proj":
            module.register_forward_pre_hook(half)
        elif isinstance(module, nn.Linear):
            module.register_forward_hook(keep)


@dataclass
class FrozenRun:
    """Tensors of one pass, with their gradients: outputs of the embedding, inputs of blocks
    (``stream``), mixed values of heads."""

    logits: Tensor
    stream: list[Tensor] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)


def frozen_run(architecture: str, tokens: Tensor, *, follow: bool = False) -> FrozenRun:
    """One pass of the Hugging Face model with everything frozen, in float64 throughout; logits
    before a soft cap."""
    model, mode = double_hf(architecture), Frozen(follow)
    if hasattr(model.config, "final_logit_softcapping"):
        model.config.final_logit_softcapping = None
    run = FrozenRun(torch.zeros(0))

    def note(kept: list[Tensor], value: Tensor) -> None:
        value.retain_grad()
        kept.append(value)

    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    for block in blocks:
        block.register_forward_pre_hook(
            lambda _m, args, kwargs: note(run.stream, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        names = dict(block.named_modules())
        ends = (n for n in names if "att" in n and n.split(".")[-1] in OUTPUT_PROJECTIONS)
        out = names[next(ends)]
        out.register_forward_pre_hook(lambda _m, args: note(run.mixed, args[0]))
        for module in names.values():
            if any("gate" in name for name, _ in module.named_children()):
                _halves(module)
    with InDouble(), mode, torch.enable_grad():
        run.logits = model(tokens, use_cache=False).logits
    return run
