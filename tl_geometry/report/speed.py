"""How fast this machine, as busy as it is, runs a model, and on how many threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tl_geometry.models.model_view import ModelView

TIMED = 512
"""Tokens of the forward pass that is timed."""
LENGTH = 128
"""Length of the windows that threads are timed with."""
SLOW = 2e-4
"""Seconds for each token above which they are timed once, else twice, for the smaller."""
WIDE = 2**17
"""Numbers of one state in all these windows."""
WORTH = 0.95
"""More threads are taken where a forward pass takes at most this part of the time."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a forward pass for each token, without (``token``) and with the output head
    (``output``), and of a singular value decomposition.

    ``svd`` is for each ``rows * columns * min(rows, columns)``.
    """

    token: float = 0.0
    output: float = 0.0
    svd: float = 2e-9


def token_cost(
    view: ModelView, tokens: torch.Tensor, *, logits: bool = False, about: int = TIMED
) -> float:
    """Seconds for each token of a forward pass of about so many tokens, after a short one that
    warms up."""
    rows, hook = tokens[: max(1, about // tokens.shape[1])], {view.state_hooks[-1]: lambda h: None}
    view.run(rows[:1, :8], hook, logits=logits)
    started = time.perf_counter()
    view.run(rows, hook, logits=logits)
    return (time.perf_counter() - started) / rows.numel()


def measured_costs(view: ModelView, tokens: torch.Tensor, token: float | None = None) -> Costs:
    """What forward passes and linear algebra cost now; ``token`` where it is known already."""
    token = token_cost(view, tokens) if token is None else token
    output = token_cost(view, tokens, logits=True) if view.causal and view.head_trained else token
    square = torch.randn(256, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.linalg.svdvals(square)
    started = time.perf_counter()
    torch.linalg.svd(square)  # noqa: TID251 (timed, not used)
    return Costs(
        token=token, output=max(token, output), svd=(time.perf_counter() - started) / 256**3
    )


@contextmanager
def own_threads(view: ModelView) -> Iterator[None]:
    """A block that runs on as many threads as the model gains by now, measured: all that there are,
    or fewer where the model is narrow or other work holds the cores.

    Threads that get no core make the others wait at every product: with both of two cores busy, two
    threads take up to three times as long as one on a model of 576 dimensions, up to twelve times
    on one of 128; on idle cores they take 0.6 of the time on the latter (measured). A number that
    the user has set (``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) stays.
    """
    if any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        yield
        return
    before = torch.get_num_threads()
    try:
        if view.device.type == "cpu":
            torch.set_num_threads(_fewest(view, before))
        yield
    finally:
        torch.set_num_threads(before)


def _fewest(view: ModelView, most: int) -> int:
    """Threads, halved as long as a forward pass does not gain by the more."""
    about, length = WIDE // view.d_model, min(view.n_ctx, LENGTH)
    tokens = torch.zeros(max(1, about // length), length, dtype=torch.long)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        found = token_cost(view, tokens, about=about)
        return found if found > SLOW else min(found, token_cost(view, tokens, about=about))

    last = seconds(most) if most > 1 else 0.0
    while most > 1:
        half = seconds(most // 2)
        if last <= WORTH * half:
            break
        most, last = most // 2, half
    return most
