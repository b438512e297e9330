"""What are the weights of a model of any class in TransformerLens order? Grouped keys are expanded,
absent biases zero, all at least float32. Views, inference and writers read weights only here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.checks import describe, index
from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.models.layer_view import HeadWeights
from tl_geometry.models.norms import NormWeights


def upcast(value: Tensor, *, detach: bool = True) -> Tensor:
    """At least float32, detached unless gradients are to pass."""
    value = value.detach() if detach else value
    return value if value.dtype == torch.float64 else value.float()


def block_of(model: Any, layer: int) -> Any:
    """Block ``layer`` of the model."""
    return model.blocks[index(layer, len(model.blocks), "layer")]


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


def _attached(value: Tensor, source: Tensor | None) -> Tensor:
    """``value`` as it is, with the gradient of the parameter ``source`` that it was read from."""
    if source is None or not source.requires_grad:
        return value
    change = (source - source.detach()).to(value)  # zero, with a gradient
    if value.dim() == 2:  # one gain of each (grouped) head, of all heads in a row, or for all heads
        change = change.reshape(-1, value.shape[-1])
        change = change.repeat_interleave(len(value) // len(change), 0)
    return value + change


def qk_norm_module(attn: Any, which: str) -> Any:
    """The norm of queries (``"q"``) or keys (``"k"``), or ``None``."""
    source, names = inner(attn), (f"{which}_norm", f"{which}_layernorm")
    return part(attn, names[0]) or part(source, *names)


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

    def attention(self, layer: int) -> Any:
        """The attention module of a block, or an error by name."""
        attn = part(block_of(self.model, layer), "attn")
        if attn is None or part(attn, "W_Q") is None:
            what, expected = f"block {layer} of {self.name}", "attention with W_Q and W_K"
            instead = "another model (state-space and latent attention are not supported)"
            fail(what, expected=expected, got="none", instead=instead, error=UnsupportedModelError)
        return attn

    def weights(self, layer: int, *, detach: bool = True) -> HeadWeights:
        """Head weights of one layer; with ``detach=False`` gradients reach the parameters."""
        attn, lift = self.attention(layer), partial(upcast, detach=detach)
        W_Q, W_O = lift(attn.W_Q), lift(attn.W_O)
        fits = W_Q.dim() == 3 and W_O.dim() == 3
        what, expected = f"block {layer} of {self.name}", "W_Q [head d_model d_head]"
        require(fits, what, expected=expected, got=describe(W_Q), error=UnsupportedModelError)
        heads, d_model, d_head = W_Q.shape

        def expanded(value: Tensor) -> Tensor:
            value = lift(value)
            return value if len(value) == heads else value.repeat_interleave(heads // len(value), 0)

        def bias(name: str, width: int) -> Tensor:
            value = part(attn, name)
            return W_Q.new_zeros(heads, width) if value is None else expanded(value)

        W_V, b_O = expanded(part(attn, "W_V")), part(attn, "b_O")
        return HeadWeights(
            W_Q=W_Q,
            W_K=expanded(part(attn, "W_K")),
            W_V=W_V,
            W_O=W_O,
            b_Q=bias("b_Q", d_head),
            b_K=bias("b_K", d_head),
            b_V=bias("b_V", W_V.shape[-1]),
            b_O=W_Q.new_zeros(d_model) if b_O is None else lift(b_O),
        )

    def with_gradients(
        self, layer: int, norm: NormWeights, qk_norm: Any
    ) -> tuple[NormWeights, Any]:
        """Norms of a layer with the same numbers, through which gradients reach the parameters that
        they were read from."""
        attn, source = self.attention(layer), inner(part(block_of(self.model, layer), "ln1"))
        if norm.norm_type is not None and source is not None:
            sources = {"gain": part(source, "weight", "w"), "bias": part(source, "bias", "b")}
            norm = replace(norm, **{k: _attached(getattr(norm, k), v) for k, v in sources.items()})
        if qk_norm is not None:
            modules = {w: inner(qk_norm_module(attn, w)) for w in "qk"}
            gains = {f"gain_{w}": part(m, "weight", "w") for w, m in modules.items()}
            attached = {k: _attached(getattr(qk_norm, k), v) for k, v in gains.items()}
            qk_norm = replace(qk_norm, **attached)
        return norm, qk_norm

    def norm_candidates(self, norm: Any, like: Tensor) -> Iterator[NormWeights]:
        """Readings of a norm module, the likeliest first: the one that reproduces the model's
        numbers is the right one."""
        ones, zeros = like.new_ones(like.shape[-1]), like.new_zeros(like.shape[-1])
        if norm is not None:
            source = inner(norm)
            gain, bias = part(source, "weight", "w"), part(source, "bias", "b")
            module_eps = part(source, "eps", "variance_epsilon", "layer_norm_epsilon")
            eps = float(module_eps or self.model.cfg.eps)
            gain = ones if gain is None else upcast(gain).to(ones)
            bias = zeros if bias is None else upcast(bias).to(ones)
            rms = "rms" in f"{type(source).__name__} {self.model.cfg.normalization_type}".lower()
            for norm_type in ("RMS", "LN") if rms else ("LN", "RMS"):
                for shift in (0.0, 1.0):  # the gain is the weight, or one more (Gemma)
                    yield NormWeights(norm_type=norm_type, gain=gain + shift, bias=bias, eps=eps)
        yield NormWeights(norm_type=None, gain=ones, bias=zeros, eps=0.0)

    def unembed(self) -> Tensor:
        """Unembedding matrix ``[d_model d_vocab]``."""
        return upcast(self.model.W_U)

    def unembed_bias(self) -> Tensor:
        """Bias of the output logits ``[d_vocab]``, zeros where there is none."""
        owner = self.model if self.bridge else part(self.model, "unembed")
        value, W_U = part(owner, "b_U"), self.unembed()
        return W_U.new_zeros(W_U.shape[-1]) if value is None else upcast(value)
