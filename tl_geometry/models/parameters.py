"""The weights of a model of any class in TransformerLens order: grouped keys expanded, absent
biases zero, all at least float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe, index
from tl_geometry.base.errors import UnsupportedModelError, fail, require


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadWeights:
    """Weights of one attention layer in TransformerLens order, grouped keys expanded to
    ``n_heads``; absent biases are zeros."""

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


def inner(module: Any) -> Any:
    """The Hugging Face module inside a bridge component, or the module itself."""
    return part(module, "original_component") or module


@dataclass(eq=False)
class Parameters:
    """Reads weights from one model."""

    model: Any
    class_name: str
    name: str

    @property
    def bridge(self) -> bool:
        """Whether the model is a TransformerBridge."""
        return self.class_name == "TransformerBridge"

    def block(self, layer: int) -> Any:
        """Block ``layer`` of the model."""
        return self.model.blocks[index(layer, len(self.model.blocks), "layer")]

    def attention(self, layer: int) -> Any:
        """The attention module of a block, or an error by name."""
        attn = part(self.block(layer), "attn")
        if attn is None or part(attn, "W_Q") is None:
            what, expected = f"block {layer} of {self.name}", "attention with W_Q and W_K"
            instead = "another model (state-space and latent attention are not supported)"
            fail(what, expected=expected, got="none", instead=instead, error=UnsupportedModelError)
        return attn

    def weights(self, layer: int) -> HeadWeights:
        """Head weights of one layer."""
        attn = self.attention(layer)
        W_Q, W_O = upcast(attn.W_Q), upcast(attn.W_O)
        fits, got = W_Q.dim() == 3 and W_O.dim() == 3, describe(W_Q)
        what, expected = f"block {layer} of {self.name}", "W_Q [head d_model d_head]"
        require(fits, what, expected=expected, got=got, error=UnsupportedModelError)

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

    def unembed(self) -> Float[Tensor, "d_model d_vocab"]:
        """Unembedding matrix."""
        return upcast(self.model.W_U)

    def unembed_bias(self) -> Float[Tensor, " d_vocab"]:
        """Bias of the output logits, zeros where there is none."""
        owner = self.model if self.bridge else part(self.model, "unembed")
        value, W_U = part(owner, "b_U"), self.unembed()
        return W_U.new_zeros(W_U.shape[-1]) if value is None else upcast(value)
