"""How much does each part of a report compute? The shape of the model and the word of ``--budget``
decide, never the clock. So one command gives the same numbers on every machine, however busy it is.
:mod:`tl_geometry.report.build` and the sections ask here.

A part takes as many windows as fit into its share of the budget. The price of a window is a number
of forward passes over it. The price of a pass grows with the number of weights in the blocks::

    windows = share * seconds / (passes * tokens * WEIGHT * 12 * n_layers * d_model**2)

All prices were measured once, with SmolLM2-135M on two cores. A run may take more or less time than
its budget, which is no deadline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tl_geometry.report.contents import BUDGETS

WEIGHT = 1.6e-11
"""Seconds that one weight costs for one token: 1.9 ms for a token of SmolLM2-135M on two cores."""
PARTS = {
    "position and context": (0.22, 1.1),
    "the null of spliced windows": (0.09, 1.1),
    "the sweep over all heads": (0.16, 5.2),
    "rotary planes": (0.06, 4.0),
    "surrogates of W_QK in the live model": (0.1, 37.0),
    "trajectories": (0.095, 11.4),
    "truncated states": (0.032, 19.3),
    "skipped layers": (0.033, 8.6),
}
"""Part -> its share of the budget, and how many forward passes one of its windows costs. A part has
its share whichever sections are asked for, so that ``heads`` and ``report`` give the same numbers.
The shares leave some of the budget to work that has no size to choose: measures, weights, drawing.
Surrogates "at every offset" are those of a rotary model, which has a W_QK for each offset."""
NARROW = 512
"""Width of a model below which threads cost more time than they save: on two busy cores the report
of a model 128 wide took 234 s on two threads and 65 s on one."""
PATIENCE = 2.0
"""The smallest useful size is run even if it costs up to this many times the share of its part."""


@contextmanager
def threads_for(d_model: int) -> Iterator[None]:
    """A context manager that uses one thread where the model is narrow. A number that the user has
    set (``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) stays."""
    # the setting holds for the whole process, so it is restored for the caller
    previous = torch.get_num_threads()
    user_set = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if d_model < NARROW and not user_set:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


class Budget:
    """The sizes that a word of ``--budget`` (quick, default or full) allows for a model of this
    shape.

    >>> sizes = (Budget(word, n_layers=30, d_model=576) for word in ("quick", "default", "full"))
    >>> [budget.windows("trajectories", 50, most=384) for budget in sizes]
    [10, 47, 384]
    """

    def __init__(self, word: str = "default", *, n_layers: int = 0, d_model: int = 0) -> None:
        self.word, self.seconds = word, BUDGETS[word]
        # a block of width d has about 12 d^2 weights
        self.token_seconds = WEIGHT * 12 * n_layers * d_model**2

    def windows(self, part: str, length: int, most: int, least: int = 1) -> int:
        """How many windows of ``length`` tokens a part may take: ``least`` to ``most``, or 0 if
        ``least`` would cost more than :data:`PATIENCE` times the share of the part."""
        share, passes = PARTS[part]
        window_seconds = passes * length * self.token_seconds
        allowed = share * self.seconds
        if most * window_seconds <= allowed:
            return most
        count = int(allowed / window_seconds)
        if count >= least:
            return count
        return min(least, most) if least * window_seconds <= PATIENCE * allowed else 0
