"""The frozen linear model of a forward pass, by autograd through a Hugging Face model: the
independent route that :func:`tl_geometry.trace_logit` is compared with.

Hugging Face's own code runs under :class:`Frozen`, which makes constants of what is not linear:
scales of norms, attention patterns, and activations by their secant ``a(x) = (a(x) / x) x``. A
gated MLP multiplies two factors, so the gradient that enters its last matrix is halved. Gradients
of the logit are then the adjoints. With ``attention=True`` the softmax stays live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.circuits.in_double import InDouble, double_hf

ACTIVATIONS = ("gelu", "silu", "relu")
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense")


class Frozen(TorchFunctionMode):
    """Makes constants of everything in a forward pass that is not linear; keeps the scores."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attention = attention
        self.scores: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "softmax":
            args[0].retain_grad()
            self.scores.append(args[0])
            out = func(*args, **kwargs)
            return out if self.attention else out.detach()
        if name == "rsqrt":
            return func(*args, **kwargs).detach()
        if name == "tanh":  # of gelu, or (four axes) a soft cap of scores
            return func(*args, **kwargs).detach() if args[0].dim() < 4 else func(*args, **kwargs)
        if name in ACTIVATIONS:
            return args[0] * (func(*args, **kwargs) / args[0]).detach()
        if name == "layer_norm":
            return layer_norm(*args, **kwargs)
        return func(*args, **kwargs)


def layer_norm(
    x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm at a constant scale."""
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt().detach()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@dataclass
class FrozenRun:
    """Tensors of one pass, with their gradients: outputs of ``embed``, inputs of the blocks
    (``stream``), mixed values of heads (``mixed``), attention ``scores``."""

    logits: Tensor
    embed: list[Tensor] = field(default_factory=list)
    stream: list[Tensor] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


def frozen_run(architecture: str, tokens: Tensor, *, attention: bool = False) -> FrozenRun:
    """One pass of the Hugging Face model with everything frozen, in float64 throughout."""
    model = double_hf(architecture)
    if hasattr(model.config, "final_logit_softcapping"):
        model.config.final_logit_softcapping = None
    run = FrozenRun(torch.zeros(0))
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)

    def note(kept: list[Tensor], value: Tensor) -> None:
        value.retain_grad()
        kept.append(value)

    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _m, _args, out: note(run.embed, out))
    for block in blocks:
        block.register_forward_pre_hook(
            lambda _m, args, kwargs: note(run.stream, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        names = dict(block.named_modules())
        out = next(
            m for n, m in names.items() if "att" in n and n.split(".")[-1] in OUTPUT_PROJECTIONS
        )
        out.register_forward_pre_hook(lambda _m, args: note(run.mixed, args[0]))
        for name, module in names.items():
            if name.endswith("down_proj") and any("gate" in other for other in names):
                module.register_forward_pre_hook(
                    lambda _m, args: (args[0] / 2 + (args[0] / 2).detach(),)
                )
    with InDouble(), Frozen(attention) as mode, torch.enable_grad():
        run.logits = model(tokens, use_cache=False).logits
    run.scores = mode.scores
    return run
