"""How much a report computes: fixed by the shape of the model and the word of ``--budget``, so that
one command gives the same numbers on every machine, however busy.

Sizes are chosen by a price list, the seconds that forward passes and linear algebra took on two
cores (measured once). Factors in the cost functions of the sections are prices of whole steps,
timed and not derived from counts of operations. Each stage spends its share of the budget at these
prices. What it really takes may differ: the budget is no deadline.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tl_geometry.report.contents import BUDGETS

WEIGHT = 1.6e-11
"""Seconds that one weight costs for one token: 1.9 ms for a token of SmolLM2-135M on two cores."""
SHARES = {
    "decompose": 26.0,
    "overview": 1.0,
    "basis": 12.0,
    "heads": 34.0,
    "measures": 9.0,
    "weights": 19.0,
    "flow": 19.0,
}
"""Parts of the budget for each stage, whichever of them are asked for, so that ``heads`` and
``report`` give the same numbers. Heads have most: labels need intervals, and edits of the model."""
NARROW = 512
"""Width below which threads cost more than they give: on two busy cores the first report (128 wide)
took 234 s on two threads and 65 s on one."""
PATIENCE = 2.0
"""The smallest useful size is still run where it costs at most this many times what its stage has
left."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a forward pass for each token, without (``token``) and with the output head
    (``output``), and of a singular value decomposition.

    ``svd`` is for each ``rows * columns * min(rows, columns)``.
    """

    token: float = 0.0
    output: float = 0.0
    svd: float = 2e-9

    @staticmethod
    def of(n_layers: int, d_model: int, d_vocab: int) -> Costs:
        """The prices of a model of this shape (a block of width d has about 12 d^2 weights)."""
        token = WEIGHT * 12 * n_layers * d_model**2
        return Costs(token=token, output=token + WEIGHT * d_model * d_vocab)


@contextmanager
def threads_for(d_model: int) -> Iterator[None]:
    """A context manager: one thread where the model is narrow, decided by its width alone. A number
    that the user has set (``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) stays."""
    # the setting is of the whole process: it is put back for the caller
    previous = torch.get_num_threads()
    user_set = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if d_model < NARROW and not user_set:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


class Work:
    """A budget in stages: each thing computed takes from what its stage has left.

    >>> work = Work("quick")
    >>> work.begin("decompose")
    >>> work.take(1.0, 1000), work.take(1.0, 1000)
    (26, 0)
    """

    def __init__(self, budget: str = "default") -> None:
        self.budget, self.seconds, self.left = budget, BUDGETS[budget], 0.0

    @property
    def about(self) -> str:
        """What the word of ``--budget`` means."""
        if math.isinf(self.seconds):
            return "--budget full: nothing is made smaller"
        return f"--budget {self.budget}: sizes for {self.seconds / 60:.0f} min on two cores"

    def begin(self, stage: str) -> None:
        """Begin a stage with its share of the budget."""
        self.left = self.seconds * SHARES[stage] / sum(SHARES.values())

    def room(self, each: float, most: int, least: int = 1, *, share: float = 1.0) -> int:
        """How many items of ``each`` seconds fit into a share of what is left, ``least`` to
        ``most``; 0 where not even ``least`` do."""
        seconds = share * self.left
        count = int(min(max(0, most), seconds / max(each, 1e-9)))
        if count >= least:
            return count
        # a stage that just misses its smallest useful size is still worth running
        return min(least, most) if least * each <= PATIENCE * seconds else 0

    def take(self, each: float, most: int, least: int = 1, *, share: float = 1.0) -> int:
        """:meth:`room`, and it is spent."""
        count = self.room(each, most, least, share=share)
        self.spend(count * each)
        return count

    def spend(self, seconds: float) -> None:
        """Take work of so many seconds from the stage."""
        self.left = max(0.0, self.left - seconds)
