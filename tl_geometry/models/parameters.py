"""The modules of a model of any class, and the weights of its heads in TransformerLens order:
grouped keys expanded, absent biases zero, all at least float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import UnsupportedModelError, require


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadWeights:
    """Weights of one attention layer in TransformerLens order, grouped keys expanded to
    ``n_heads``; absent biases are zeros. ``W_O`` and ``b_O`` give what the block adds (times
    :func:`added_times`)."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "head d_head"]
    b_V: Float[Tensor, "head d_head"]
    b_O: Float[Tensor, " d_model"]

    def to(self, like: Tensor) -> HeadWeights:
        """The weights in the dtype and on the device of a tensor."""
        return HeadWeights(**{name: value.to(like) for name, value in vars(self).items()})


def upcast(value: Tensor) -> Tensor:
    """At least float32, and detached where no gradients are taken."""
    value = value if torch.is_grad_enabled() else value.detach()
    return value if value.dtype == torch.float64 else value.float()


def part(owner: Any, *names: str) -> Any:
    """The first attribute of ``owner`` that exists and is not ``None``, or ``None``."""
    for name in names:
        try:  # a property may raise where the model has nothing to give
            value = getattr(owner, name, None)
        except (AttributeError, RuntimeError, ValueError, KeyError):
            continue
        if value is not None:
            return value
    return None


def added_times(block: Any) -> float:
    """What a block multiplies the outputs of its attention and of its MLP by before it adds them
    to the stream (Granite)."""
    return float(part(block, "residual_contribution_scale") or 1)


def inner(module: Any) -> Any:
    """The Hugging Face module inside a bridge component, or the module itself."""
    return part(module, "original_component") or module


def modules_of(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Every module once but hook points, which hold nothing, by its name without the wrappers of
    bridges, in the order of ``named_modules``, which takes ten times as long for the 2,000 modules
    of a bridge."""
    stack, seen = [("", getattr(model, "original_model", None) or model)], set()
    while stack:
        name, module = stack.pop()
        if module not in seen:
            seen.add(module)
            yield name.replace("_original_component.", ""), module
            inside = [
                (f"{name}{n}.", m)
                for n, m in module._modules.items()
                if m is not None and type(m).__name__ != "HookPoint"
            ]
            stack += reversed(inside)


def head_weights(attn: Any, name: str) -> HeadWeights:
    """The weights of an attention module; ``name`` is what messages call it.

    Raises ``UnsupportedModelError`` where it has no W_Q and W_K (state-space and latent attention).
    """
    W_Q = part(attn, "W_Q")
    expected, got = "attention with W_Q [head d_model d_head]", describe(W_Q)
    fits, kind = getattr(W_Q, "ndim", 0) == 3, UnsupportedModelError
    require(fits, name, expected=expected, got=got, instead="another model", error=kind)
    W_Q, W_O = upcast(W_Q), upcast(attn.W_O)

    def of_heads(name: str, width: int = 0) -> Tensor:
        """Weights or biases of all heads, zeros where there are none."""
        value = part(attn, name)
        value = W_Q.new_zeros(len(W_Q), width) if value is None else upcast(value)
        groups = len(W_Q) // len(value)
        return value if groups == 1 else value.repeat_interleave(groups, 0)

    W = {"Q": W_Q, "K": of_heads("W_K"), "V": of_heads("W_V")}
    b = {f"b_{w}": of_heads(f"b_{w}", matrix.shape[-1]) for w, matrix in W.items()}
    b_O = part(attn, "b_O")
    b["b_O"] = W_O.new_zeros(W_O.shape[-1]) if b_O is None else upcast(b_O)
    return HeadWeights(W_Q=W_Q, W_K=W["K"], W_V=W["V"], W_O=W_O, **b)
