"""What are the four parts of activations held in memory, h = mean + pos + ctx + resid (Song & Zhong
2023, Eq. 2 and 3)? ``PositionContext.transform`` calls :func:`parts_about`; the public function
:func:`decompose_tensor` is the plain form of ``decompose``.

This is a two-way analysis of variance in d_model dimensions: with contexts c and positions t,

    mean = average of h over c and t          pos_t = average over c of h - mean
    ctx_c = average over t of h - mean        resid = h - mean - pos_t - ctx_c
                                              cvec  = ctx + resid

Every context contributes every position once, so the four parts are orthogonal and their squared
norms add up.
"""

from __future__ import annotations

from typing import NamedTuple

from einops import reduce
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


def decompose_tensor(h: Float[Tensor, "*state context position d_model"]) -> Parts:
    """The four parts of a tensor of activations held in memory (Song & Zhong 2023, Eq. 2 and 3), in
    float64.

    >>> import torch
    >>> h = torch.arange(12.0).view(2, 3, 2)
    >>> parts = decompose_tensor(h)
    >>> bool(torch.allclose(parts.total(), h.double())), parts.mean.tolist()
    (True, [5.0, 6.0])
    """
    h = h.double()
    mean = reduce(h, "... context position d_model -> ... d_model", "mean")
    pos = reduce(h, "... context position d_model -> ... position d_model", "mean")
    return parts_about(h, mean, pos - mean.unsqueeze(-2))


def parts_about(
    h: Float[Tensor, "*state batch position d_model"],
    mean: Float[Tensor, "*state d_model"],
    pos: Float[Tensor, "*state position d_model"],
) -> Parts:
    """The parts of activations (float64), given a mean and a positional basis:
    ``ctx = average over t of h - mean - pos_t``, ``resid`` the remainder."""
    cvec = h.double() - mean[..., None, None, :] - pos.unsqueeze(-3)
    ctx = reduce(cvec, "... position d_model -> ... d_model", "mean")
    return Parts(mean, pos, ctx, cvec - ctx.unsqueeze(-2))
