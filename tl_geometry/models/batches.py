"""How many contexts one forward pass takes, and where sums live."""

from __future__ import annotations

import torch

from tl_geometry.base.checks import whole
from tl_geometry.base.errors import fail


def default_batch(columns: int, device: torch.device) -> int:
    """Contexts of one forward pass: about 4,096 tokens on a CPU, 16,384 on a GPU."""
    return max(1, (4096 if device.type == "cpu" else 16384) // columns)


def batch_of(batch_size: int | None, columns: int, device: torch.device) -> int:
    """The batch size that was asked for, if it is one, or the default."""
    if batch_size is None:
        return default_batch(columns, device)
    size = whole(batch_size)
    if size is None or size < 1:
        fail(
            "batch_size",
            expected="a whole number, at least 1",
            got=repr(batch_size),
            instead="batch_size=None for the default",
        )
    return size


SAMPLED = 32
"""Queries of a context that are looked at where all would cost too much."""


def another_row(last: int, rows: int, draws: torch.Generator) -> int:
    """The row of the next batch that is verified: any but the last one (and, of the first batch,
    but row 0), where there are several. A hook may spare some rows.

    >>> another_row(0, 2, torch.Generator().manual_seed(0)), another_row(7, 1, torch.Generator())
    (1, 0)
    """
    if rows == 1:
        return 0
    return (last + 1 + int(torch.randint(rows - 1, (), generator=draws))) % rows


def device_of(device: torch.device | str | None, otherwise: torch.device | str) -> torch.device:
    """Where the sums live, if that device is there."""
    try:
        chosen = torch.device(otherwise if device is None else device)
        return torch.empty(0, device=chosen).device
    except (RuntimeError, AssertionError, TypeError) as error:
        text = str(error).splitlines()[0][:120]
        fail(
            "device",
            expected="a device of this machine",
            got=f"{device!r} ({text})",
            instead='device="cpu"',
        )
