"""How do scores become attention? By the soft cap of Gemma 2, then the softmax over the keys that a
query may see. Layers, checks, edits and whatever else takes a pattern of scores call these two
functions.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def soft_cap(scores: Float[Tensor, "*batch"], cap: float | None) -> Float[Tensor, "*batch"]:
    """``c tanh(score / c)``, or the scores themselves where there is no cap c.

    >>> soft_cap(torch.tensor([0.0, 1e6]), 50.0).tolist()
    [0.0, 50.0]
    """
    return scores if cap is None else cap * torch.tanh(scores / cap)


def masked_softmax(
    scores: Float[Tensor, "*batch query key"], allowed: Bool[Tensor, "..."]
) -> Float[Tensor, "*batch query key"]:
    """Softmax of each row over the allowed keys, exactly zero elsewhere; a row that sees no key is
    zero, not NaN.

    >>> masked_softmax(torch.zeros(2, 2), torch.ones(2, 2).tril().bool()).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    # the least finite number, not minus infinity: a row of minus infinities has no softmax
    least = torch.finfo(scores.dtype).min
    return torch.where(allowed, torch.where(allowed, scores, least).softmax(-1), 0)
