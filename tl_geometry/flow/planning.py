"""How many chunks an ensemble of trajectories needs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from tl_geometry.base.errors import require
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.batches import default_batch
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import Hook
from tl_geometry.models.reader import as_view


@dataclass(frozen=True)
class ChunkPlan:
    """How many chunks to follow: ``n`` of the ``wanted``, about ``seconds`` of forward passes (NaN
    where nothing was timed)."""

    n: int
    wanted: int
    seconds: float

    @property
    def note(self) -> str:
        """One sentence for a report."""
        took = "" if math.isnan(self.seconds) else f", about {self.seconds:.0f} s"
        few = (
            "" if self.n >= self.wanted else f" of {self.wanted} wanted (twice d_model and a tenth)"
        )
        return f"{self.n} chunks{few}{took}"


def plan_chunks(
    model: ModelLike, tokens: TokensLike, *, budget: float | None = None, share: float = 0.5
) -> ChunkPlan:
    """How many of these chunks an ensemble needs, and how many of them a budget of seconds allows.

    Maps and directions are fitted on a ``share`` of the trajectories, which should be more than
    d_model: ``n >= 1.1 d_model / share``. With a budget two batches are run to see what a chunk
    costs. At least 32 chunks (or all there are) are planned.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.flow.planning.plan_chunks(model, tlg.zoo.default_windows(model, 16, n=40)).n
    40
    """
    view = as_view(model)
    source = TokenSource.of(view, tokens, None, None)
    known = source.contexts is not None
    require(
        known,
        "tokens",
        expected="chunks whose number is known",
        got="an iterable",
        instead="a tensor of token ids",
    )
    require(budget is None or budget > 0, "budget", expected="seconds above 0", got=budget)
    require(0 < share < 1, "share", expected="a share between 0 and 1", got=share)
    there, wanted = source.contexts or 0, math.ceil(1.1 * view.d_model / share)
    n, each = min(there, wanted), math.nan
    if budget is not None:
        rows = next(iter(source.batches(default_batch(source.length, view.device))))
        hooks: dict[str, Hook] = {view.state_hooks[-1]: lambda h: None}
        view.run(rows, hooks)  # the first pass of a process pays for what later ones find ready
        before = time.perf_counter()
        view.run(rows, hooks)
        each = (time.perf_counter() - before) / len(rows)
        n = min(n, max(min(32, there), int(budget / each)))
    return ChunkPlan(n, wanted, n * each)
