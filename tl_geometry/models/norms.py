"""A norm, ``((h A) / s) * gain + bias``: centring, scale, gain and bias written out once. Layers
(in front of their projections, and of queries and keys), writers, MLPs, the output head and the
sphere use these formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.models.parameters import inner, part, upcast


def remove_mean(
    x: Float[Tensor, "*batch d_model"], norm_type: str | None = "LN", axes: tuple[int, ...] = (-1,)
) -> Float[Tensor, "*batch d_model"]:
    """``x A``: without its mean over d_model for ``"LN"``, unchanged for ``"RMS"`` and ``None``."""
    return x - x.mean(axes, keepdim=True) if norm_type == "LN" else x


@dataclass(frozen=True, eq=False, kw_only=True)
class NormWeights:
    """A norm: ``x = ((h A) / s) * gain + bias``, A centring over d_model for ``"LN"``, identity for
    ``"RMS"``.

    ``norm_type`` ``None`` is no norm: ``x = h``, or a multiple of it behind what a block writes.
    ``s = sqrt(mean((hA)^2) + eps)``. The mean is over ``axes``: d_model, or of queries and keys
    (gain ``[head d_head]``) d_head, or all heads of a token together.
    """

    norm_type: str | None
    gain: Float[Tensor, "*head d_model"]
    bias: Float[Tensor, "*head d_model"]
    eps: float
    axes: tuple[int, ...] = (-1,)

    def centre(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``h A``: deviations from the mean over the axes for ``"LN"``, ``h`` itself otherwise."""
        return remove_mean(h, self.norm_type, self.axes)

    def scale(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """``s = sqrt(mean((h A)^2) + eps)`` of each vector; one where there is no norm."""
        if self.norm_type is None:
            return torch.ones_like(h[..., 0])
        mean = self.centre(h).square().mean(self.axes, keepdim=True)
        return (mean + self.eps).sqrt()[..., 0].expand(h.shape[:-1])

    def linear(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``(h A) * gain``: the norm of a part, without its scale and bias."""
        return self.centre(h) * self.gain.to(h)

    def normalize(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``h A / s``: the norm without gain and bias."""
        if self.norm_type is None:
            return h
        return self.centre(h) / self.scale(h).unsqueeze(-1)

    def apply(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``(h A / s) * gain + bias``: the whole norm (``h`` itself where there is none, or a
        multiple of it)."""
        return self.normalize(h) * self.gain.to(h) + self.bias.to(h)


class NormReading(NamedTuple):
    """How a norm module is read: ``shift`` is added to the gain that it stores (Gemma stores the
    gain less one), ``axes`` are those of :class:`NormWeights`."""

    norm_type: str | None
    shift: float = 0.0
    eps: float = 0.0
    axes: tuple[int, ...] = (-1,)


def norm_readings(module: Any, cfg: Any) -> list[NormReading]:
    """Readings of a norm module, the likeliest first; the last is no norm. The one that reproduces
    the model's numbers is the right one."""
    if module is None:
        return [NormReading(None)]
    source = inner(module)
    eps = float(part(source, "eps", "variance_epsilon", "layer_norm_epsilon") or cfg.eps)
    rms = "rms" in f"{type(source).__name__} {cfg.normalization_type}".lower()
    types = ("RMS", "LN") if rms else ("LN", "RMS")
    return [*(NormReading(t, shift, eps) for t in types for shift in (0.0, 1.0)), NormReading(None)]


def read_norm(
    module: Any, reading: NormReading, like: Float[Tensor, "*head d_model"]
) -> NormWeights:
    """The norm of a module by one reading, in the shape and dtype and on the device of ``like``;
    gradients reach the module's parameters."""
    source = None if reading.norm_type is None else inner(module)

    def read(*names: str) -> Tensor | None:
        # StableLM has a module for each head
        values = [part(norm, *names) for norm in part(source, "norms") or [source]]
        if any(value is None for value in values):
            return None
        # of queries and keys one for all heads, one for each group of heads, or all in a row
        rows = upcast(torch.stack(values)).to(like).reshape(-1, like.shape[-1])
        return rows.repeat_interleave(like.numel() // rows.numel(), 0).reshape(like.shape)

    gain, bias = read("weight", "w"), read("bias", "b")
    return NormWeights(
        norm_type=reading.norm_type,
        gain=torch.ones_like(like) if gain is None else gain + reading.shift,
        bias=torch.zeros_like(like) if bias is None else bias,
        eps=reading.eps,
        axes=reading.axes,
    )


def norms_of(module: Any, cfg: Any, like: Float[Tensor, " d_model"]) -> list[NormWeights]:
    """The norms that a module may hold by :func:`norm_readings`, "no norm" left out."""
    readings = norm_readings(module, cfg)[:-1]
    return [read_norm(module, reading, like) for reading in readings]


def no_norm(like: Float[Tensor, " d_model"], times: float = 1.0) -> NormWeights:
    """No norm; ``times`` multiplies what goes through it."""
    none = read_norm(None, NormReading(None), like)
    return replace(none, gain=none.gain * times)
