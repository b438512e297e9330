"""What are the four parts of activations, h = mean + pos + ctx + resid (Song & Zhong 2023, Eq. 2
and 3)? :class:`Parts`, which ``PositionContext.transform`` returns.

This is a two-way analysis of variance in d_model dimensions: with contexts c and positions t,

    mean = average of h over c and t          pos_t = average over c of h - mean
    ctx_c = average over t of h - mean        resid = h - mean - pos_t - ctx_c
                                              cvec  = ctx + resid

Every context contributes every position once, so the four parts are orthogonal and their squared
norms add up.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Parts(NamedTuple):
    """Additive parts of states: ``h = mean + pos + ctx + resid``; ``cvec = ctx + resid``. Each has
    the axes of the activations along which it varies, and ``state`` where they have one."""

    mean: Float[Tensor, "*state d_model"]
    pos: Float[Tensor, "*state position d_model"]
    ctx: Float[Tensor, "*state batch d_model"]
    resid: Float[Tensor, "*state batch position d_model"]

    @property
    def cvec(self) -> Float[Tensor, "*state batch position d_model"]:
        """``ctx + resid``: everything that depends on the context."""
        return self.ctx.unsqueeze(-2) + self.resid

    def total(self) -> Float[Tensor, "*state batch position d_model"]:
        """The sum of the parts: the activations again."""
        return self.mean[..., None, None, :] + self.pos.unsqueeze(-3) + self.cvec
