"""How logits follow from the last state, what a token's loss comes to, and how far two next-token
distributions are apart. Everything that measures an effect on the output asks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.models.norms import NormReading, NormWeights, norm_readings, read_norm
from tl_geometry.models.parameters import part, upcast
from tl_geometry.models.reconstruction import nearest, reconstruction_bound
from tl_geometry.models.softmax import soft_cap

LogProbabilities = Float[Tensor, "*batch d_vocab"]


class OutputHead(NamedTuple):
    """Logits of a last state h: ``norm(h) W_U + b_U``, through ``c tanh(logit / c)`` where there is
    a soft cap c."""

    norm: NormWeights
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"]
    softcap: float | None = None

    def logits(self, h: Float[Tensor, "*batch d_model"]) -> LogProbabilities:
        """Logits of last states, in their dtype."""
        readout = einsum(self.norm.apply(h), self.W_U.to(h), "... d_model, d_model v -> ... v")
        return soft_cap(readout + self.b_U.to(h), self.softcap)

    def directions(self, ids: Sequence[int] | None = None) -> Float[Tensor, "token d_model"]:
        """One row per token (of ``ids``), ``A diag(gain) W_U`` with A the norm's centring: its dot
        product with what is written into the stream, over the norm's scale, is the direct effect on
        the logit before any cap (direct logit attribution)."""
        columns = self.W_U if ids is None else self.W_U[:, list(ids)]
        rows = rearrange(columns, "d_model token -> token d_model").to(self.norm.gain)
        return self.norm.centre(rows * self.norm.gain)


class HeadReading(NamedTuple):
    """How the output head is read: its norm, a factor of the unembedding, the cap on the logits."""

    norm: NormReading
    factor: float
    softcap: float | None


@torch.no_grad()
def infer_head(
    model: Any, logits: LogProbabilities, h: Float[Tensor, "*batch d_model"]
) -> HeadReading | None:
    """The reading that gives the model's ``logits`` of the last states ``h``, ``None`` where none
    does."""
    if model.W_U.shape[0] != h.shape[-1]:
        return None
    config, exact = getattr(part(model, "original_model"), "config", None), logits.double()
    cap = part(config, "final_logit_softcapping") or part(model.cfg, "output_logits_soft_cap")
    cap = float(cap) if cap and float(cap) > 0 else None
    # float64 here, the model's dtype there. The largest logit stands in for the absolute sum behind
    # it, hence 1000 times the bound; 1e-4 is for logits near zero. Another norm is off by far more
    u = unit_roundoff(logits.dtype)
    bound = 1e3 * reconstruction_bound(u, float(exact.abs().max())) + 1e-4
    # Cohere multiplies its logits, Granite divides them; processing folds the number into the
    # unembedding
    scales = float(part(config, "logit_scale") or 1), 1 / float(part(config, "logits_scaling") or 1)
    factors = dict.fromkeys((1.0, *scales))
    readings = norm_readings(part(model, "ln_final"), model.cfg)
    options = [HeadReading(norm, f, cap) for norm, f in itertools.product(readings, factors)]
    heads = (read_head(model, option, h.double()) for option in options)
    errors = (float((head.logits(h.double()) - exact).abs().max()) for head in heads)
    # in half precision several norms lie within the bound: the nearest is taken
    best, least = nearest(zip(options, errors), enough=bound if u <= 2**-24 else 0.0)
    return best if least <= bound else None


def unembedding(model: Any) -> tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, " d_vocab"]]:
    """Matrix and bias (zeros where there is none) of the unembedding, at least float32."""
    W_U, bias = upcast(model.W_U), part(model, "b_U")
    return W_U, W_U.new_zeros(W_U.shape[-1]) if bias is None else upcast(bias)


def read_head(model: Any, reading: HeadReading, like: Tensor) -> OutputHead:
    """The output head by one reading, its norm in the dtype of ``like [... d_model]``."""
    (W_U, bias), module = unembedding(model), part(model, "ln_final")
    if reading.factor != 1:
        W_U, bias = W_U * reading.factor, bias * reading.factor
    norm = read_norm(module, reading.norm, upcast(like).reshape(-1, like.shape[-1])[0])
    return OutputHead(norm, W_U, bias, reading.softcap)


def token_losses(
    log_p: LogProbabilities, targets: Int[Tensor, "*batch"]
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


def distances(changed: LogProbabilities, own: Float[Tensor, "*own d_vocab"]) -> Distances:
    """Compare log-probabilities with the model's own, which may be one row for several.

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
