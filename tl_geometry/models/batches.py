"""How many contexts one forward pass takes, and which of them is verified by itself: every function
that streams a corpus asks here."""

from __future__ import annotations

import torch

from tl_geometry.base.checks import count
from tl_geometry.models.model_view import ModelView

ELEMENTS = 2**27
"""Logits of one forward pass, at most (0.5 GiB in float32)."""


def default_batch(positions: int, device: torch.device) -> int:
    """Contexts of ``positions`` tokens in one forward pass: about 4,096 tokens on a CPU, 16,384 on
    a GPU."""
    return max(1, (4096 if device.type == "cpu" else 16384) // positions)


def batch_of(batch_size: int | None, positions: int, device: torch.device) -> int:
    """The batch size that was asked for, if it is one, or the default."""
    size = default_batch(positions, device) if batch_size is None else batch_size
    return count(size, "batch_size", instead="batch_size=None for the default")


def output_batch(view: ModelView, positions: int, *, all_positions: bool) -> int:
    """Rows of one forward pass whose logits are wanted, at all ``positions`` or at one."""
    fit = ELEMENTS // (view.d_vocab * (positions if all_positions else 1))
    return max(1, min(default_batch(positions, view.device), fit))


def another_row(last: int, rows: int, draws: torch.Generator) -> int:
    """The row of the next batch of ``rows`` contexts that is verified: a random one other than
    ``last``, the row verified before, because a hook may leave some rows alone. Callers begin with
    ``last=0``: row 0 of the first batch is not taken unless it is alone.

    >>> another_row(0, 2, torch.Generator().manual_seed(0)), another_row(7, 1, torch.Generator())
    (1, 0)
    """
    if rows == 1:
        return 0
    return (last + 1 + int(torch.randint(rows - 1, (), generator=draws))) % rows
