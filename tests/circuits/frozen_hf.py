"""The frozen linear model of a forward pass, by autograd through a Hugging Face model: the
independent route that :func:`tl_geometry.trace_logit` is compared with.

Hugging Face's own code runs under :class:`Frozen`, which makes constants of what is not linear:
scales of norms, attention patterns, and activations by their secant ``a(x) = (a(x) / x) x``. A
gated MLP multiplies two factors, and is written as two halves in which one of them is constant.
Gradients of the logit are then the adjoints. With ``attention=True`` the softmax stays live.

A second pass can take the constants of a first one, and edit what some module reads or gives: what
follows is recomputed in the frozen model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.circuits.in_double import InDouble, double_hf

ACTIVATIONS = ("gelu", "silu", "relu")
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense")


class Edit(NamedTuple):
    """A change of the input of a module of the model, or with ``output`` of what it gives."""

    module: str
    change: Callable[[Tensor], Tensor]
    output: bool = False

    def attach(self, model: nn.Module) -> None:
        module = model.get_submodule(self.module)

        def on_output(_module: nn.Module, _args: Any, out: Any) -> Any:
            return self.change(out)

        if self.output:
            module.register_forward_hook(on_output)
        else:
            module.register_forward_pre_hook(lambda _m, args: (self.change(args[0]), *args[1:]))


class Frozen(TorchFunctionMode):
    """Makes constants of everything in a forward pass that is not linear; keeps them and the
    scores. ``given`` are the constants of another pass, used in place of this one's."""

    def __init__(self, attention: bool, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.attention, self.given = attention, iter(given)
        self.scores: list[Tensor] = []
        self.constants: list[Tensor] = []

    def constant(self, value: Tensor) -> Tensor:
        """The value of the pass whose constants these are."""
        self.constants.append(next(self.given, value.detach()))
        return self.constants[-1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "softmax":
            args[0].retain_grad()
            self.scores.append(args[0])
            out = func(*args, **kwargs)
            return out if self.attention else self.constant(out)
        if name == "rsqrt":
            return self.constant(func(*args, **kwargs))
        if name == "tanh":  # of gelu, or (four axes) a soft cap of scores
            out = func(*args, **kwargs)
            return self.constant(out) if args[0].dim() < 4 else out
        if name in ACTIVATIONS:
            return args[0] * self.constant(func(*args, **kwargs) / args[0])
        if name == "layer_norm":
            return self.layer_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def layer_norm(
        self, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor:
        """LayerNorm at a constant scale."""
        centred = x - x.mean(-1, keepdim=True)
        out = centred / self.constant((centred.square().mean(-1, keepdim=True) + eps).sqrt())
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def halves(self, mlp: nn.Module) -> None:
        """Hooks that make a gated MLP ``a(g) u`` linear: the product as it was, times the mean of
        what became of each factor."""
        factors: list[Tensor] = []

        def keep(_module: nn.Module, _args: Any, out: Any) -> None:
            factors.append(out)

        for name, module in mlp.named_children():
            if name == "down_proj":
                module.register_forward_pre_hook(lambda _m, args: (self.half(args[0], factors),))
            elif isinstance(module, nn.Linear):
                module.register_forward_hook(keep)

    def half(self, product: Tensor, factors: list[Tensor]) -> Tensor:
        """What enters the last matrix."""
        gate, linear = torch.cat(factors, -1).chunk(2, -1)
        factors.clear()
        was = self.constant(product)
        return was / 2 * (gate / self.constant(gate) + linear / self.constant(linear))


@dataclass
class FrozenRun:
    """Tensors of one pass, with their gradients: outputs of ``embed``, inputs of the blocks
    (``stream``), mixed values of heads (``mixed``), attention ``scores``; and its ``constants``."""

    logits: Tensor
    embed: list[Tensor] = field(default_factory=list)
    stream: list[Tensor] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)


def frozen_run(
    architecture: str,
    tokens: Tensor,
    *,
    attention: bool = False,
    given: Iterable[Tensor] = (),
    edits: Iterable[Edit] = (),
) -> FrozenRun:
    """One pass of the Hugging Face model with everything frozen, in float64 throughout; with the
    ``given`` constants of another pass, and ``edits``."""
    model, mode = double_hf(architecture), Frozen(attention, given)
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
        for module in names.values():
            if any("gate" in name for name, _ in module.named_children()):
                mode.halves(module)
    for edit in edits:
        edit.attach(model)
    with InDouble(), mode, torch.enable_grad():
        run.logits = model(tokens, use_cache=False).logits
    run.scores, run.constants = mode.scores, mode.constants
    return run
