"""Models whose scores are edited by hand, inside their own attention code: what an edit of a live
model must be equal to.

No hook is used: the norm in front of attention tells the stream that it reads, and the point that
scores go through before their softmax takes the term away before any hook sees them. Whatever hooks
a user has act on such a model as on any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from einops import einsum
from torch import Tensor

from tl_geometry.decomposition.position_context import PositionContext

ROPE_BASE = 10000.0


def norm_of(model: Any, layer: int) -> tuple[Tensor, Tensor, float, bool]:
    """(gain, bias, eps, centred) of the norm in front of attention."""
    module = model.blocks[layer].ln1
    source = getattr(module, "original_component", module)
    gain = source.weight if hasattr(source, "weight") else source.w
    bias = (
        getattr(source, "bias", None) if hasattr(source, "weight") else getattr(source, "b", None)
    )
    eps = float(getattr(source, "eps", None) or getattr(source, "variance_epsilon", 0.0))
    return gain, torch.zeros_like(gain) if bias is None else bias, eps, bias is not None


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding, pairs (i, i + n/2), of ``[... position head d_head]``."""
    n = x.shape[-1] // 2
    angle = torch.arange(x.shape[-3], dtype=torch.float64)[:, None] * ROPE_BASE ** (
        -torch.arange(n, dtype=torch.float64) / n
    )
    cos, sin = (f(angle).to(x)[:, None] for f in (torch.cos, torch.sin))
    a, b = x[..., :n], x[..., n:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def terms_by_hand(
    model: Any, layer: int, basis: PositionContext, h: Tensor, heads: Sequence[int], rotary: bool
) -> dict[tuple[str, str], Tensor]:
    """All nine terms of the scores of some heads, from the stream ``h`` and the weights, written
    out."""
    gain, beta, eps, centred = norm_of(model, layer)
    row = basis.index(layer)
    mean, pos = basis.mean[row].to(h), basis.pos_seen[row, : h.shape[1]].to(h)
    x = h - h.mean(-1, keepdim=True) if centred else h
    s = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    attn, sides = model.blocks[layer].attn, []
    for which in "QK":
        W, b = getattr(attn, f"W_{which}"), getattr(attn, f"b_{which}")
        W = W.repeat_interleave(attn.W_Q.shape[0] // len(W), 0)[list(heads)]
        b = 0.0 if b is None else b.repeat_interleave(attn.W_Q.shape[0] // len(b), 0)[list(heads)]

        def project(p: Tensor, W: Tensor = W) -> Tensor:
            p = p - p.mean(-1, keepdim=True) if centred else p
            return einsum(p / s * gain, W, "b i d, h d e -> b i h e")

        bias = project(mean.expand_as(h)) + einsum(beta, W, "d, h d e -> h e") + b
        parts = {"bias": bias, "pos": project(pos.expand_as(h)), "cvec": project(h - mean - pos)}
        sides.append({name: rotated(p) if rotary else p for name, p in parts.items()})
    scale = attn.W_Q.shape[-1] ** -0.5
    return {
        (a, b): scale * einsum(q, k, "b i h e, b j h e -> b h i j")
        for a, q in sides[0].items()
        for b, k in sides[1].items()
    }


@contextmanager
def modified(
    model: Any,
    layer: int,
    basis: PositionContext,
    heads: Sequence[int],
    names: Sequence[tuple[str, str]],
    *,
    rotary: bool = False,
) -> Iterator[None]:
    """The model without some terms of some heads of one layer."""
    point = model.hook_dict[f"blocks.{layer}.attn.hook_attn_scores"]
    module = model.hook_dict.get(
        f"blocks.{layer}.ln1.hook_in", model.blocks[layer].ln1
    )  # of a bridge, or the norm itself
    stream: dict[str, Tensor] = {}
    norm, identity = module.forward, point.forward

    def listen(h: Tensor, *args: Any, **kwargs: Any) -> Any:
        stream["h"] = h
        return norm(h, *args, **kwargs)

    def without(scores: Tensor) -> Tensor:
        terms = terms_by_hand(model, layer, basis, stream["h"], heads, rotary)
        out = identity(scores).clone()
        out[:, list(heads)] = scores[:, list(heads)] - torch.stack([terms[n] for n in names]).sum(0)
        return out

    with mock.patch.object(module, "forward", listen), mock.patch.object(point, "forward", without):
        yield
