"""What does the norm in front of a projection compute? Centring, scale, gain and bias, written out
once; layers, writers, the output head and the sphere use these formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor


def remove_mean(
    x: Float[Tensor, "*batch d_model"], norm_type: str | None = "LN"
) -> Float[Tensor, "*batch d_model"]:
    """``x A``: without its mean over d_model for ``"LN"``, unchanged for ``"RMS"`` and ``None``."""
    return x - reduce(x, "... d_model -> ... 1", "mean") if norm_type == "LN" else x


@dataclass(frozen=True, eq=False, kw_only=True)
class NormWeights:
    """The norm in front of a projection: ``x = ((h A) / s) * gain + bias``, A centring over d_model
    for ``"LN"``, identity for ``"RMS"``.

    ``norm_type`` ``None`` is no norm (``x = h``); ``s = sqrt(mean((hA)^2) + eps)``.
    """

    norm_type: str | None
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    eps: float

    def centre(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``h A``: deviations from the mean over d_model for ``"LN"``, ``h`` itself otherwise."""
        return remove_mean(h, self.norm_type)

    def scale(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """``s = sqrt(mean((h A)^2) + eps)`` of each token; one where there is no norm."""
        return (
            torch.ones_like(h[..., 0])
            if self.norm_type is None
            else (self.centre(h).square().mean(-1) + self.eps).sqrt()
        )

    def normalize(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``h A / s``: the norm without gain and bias."""
        return self.centre(h) / self.scale(h).unsqueeze(-1)

    def apply(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``(h A / s) * gain + bias``: the whole norm (``h`` itself where there is none)."""
        return (
            h if self.norm_type is None else self.normalize(h) * self.gain.to(h) + self.bias.to(h)
        )
