"""How do logits follow from the last state, what does a token's loss come to, and how far are two
next-token distributions apart? Everything that measures an effect on the output asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.models.norms import NormWeights
from tl_geometry.models.softmax import soft_cap


class OutputHead(NamedTuple):
    """Logits of a last state h: ``norm(h) W_U + b_U``, through ``c tanh(logit / c)`` where there is
    a soft cap c."""

    norm: NormWeights
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"]
    softcap: float | None = None

    def logits(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        """Logits of last states, in their dtype."""
        readout = einsum(self.norm.apply(h), self.W_U.to(h), "... d_model, d_model v -> ... v")
        return soft_cap(readout + self.b_U.to(h), self.softcap)

    def directions(self, ids: Sequence[int] | None = None) -> Float[Tensor, "token d_model"]:
        """One row per token (of ``ids``), ``A diag(gain) W_U`` with A the norm's centring: its dot
        product with what is written into the stream, over the norm's scale, is the direct effect on
        the logit before any cap."""
        columns = self.W_U if ids is None else self.W_U[:, list(ids)]
        rows = rearrange(columns, "d_model token -> token d_model").to(self.norm.gain)
        return self.norm.centre(rows * self.norm.gain)


def token_losses(
    log_p: Float[Tensor, "*batch d_vocab"], targets: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """``-log p(target)`` in nats, on the device of the log-probabilities.

    >>> import torch
    >>> token_losses(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([0])).exp().tolist()
    [2.0]
    """
    return -log_p.gather(-1, targets.to(log_p.device).unsqueeze(-1)).squeeze(-1)


def next_token_losses(
    logits: Float[Tensor, "batch position d_vocab"], tokens: Int[Tensor, "batch position"]
) -> Float[Tensor, "batch position-1"]:
    """Loss in nats of each token after the first, from the logits of the position before it.

    >>> import torch
    >>> next_token_losses(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).exp().tolist()
    [[4.0, 4.0]]
    """
    return token_losses(logits[:, :-1].float().log_softmax(-1), tokens[:, 1:])


class Distances(NamedTuple):
    """How far apart two next-token distributions are, for each row: ``changed`` by an edit, and the
    model's ``own``."""

    kl: Float[Tensor, "*batch"]
    """``KL(changed | own)``, nats."""
    kl_reverse: Float[Tensor, "*batch"]
    """``KL(own | changed)``, nats."""
    top1: Float[Tensor, "*batch"]
    """1 where the most likely tokens agree."""
    top5: Float[Tensor, "*batch"]
    """Tokens among the five most likely of both (0 to 5)."""


def distances(
    changed: Float[Tensor, "*batch d_vocab"], own: Float[Tensor, "*batch d_vocab"]
) -> Distances:
    """Compare log-probabilities.

    >>> p = Tensor([[0.5, 0.25, 0.25]]).log()
    >>> float(distances(p, p).kl), float(distances(p, p).top1)
    (0.0, 1.0)
    """
    gap = changed - own
    kl = (changed.exp() * gap).sum(-1).clamp(min=0)
    reverse = -(own.exp() * gap).sum(-1).clamp(max=0)
    k = min(5, own.shape[-1])
    first, second = changed.topk(k, dim=-1).indices, own.topk(k, dim=-1).indices
    shared = (first[..., :, None] == second[..., None, :]).any(-1).sum(-1)
    return Distances(kl, reverse, (first[..., 0] == second[..., 0]).to(kl), shared.to(kl))
