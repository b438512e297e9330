"""Bases of the tiny models, computed once for all tests of interventions, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tests.lib.models import tiny, tokens
from tl_geometry import decompose
from tl_geometry.decomposition.position_context import PositionContext


def basis_of(
    model_class: str,
    architecture: str = "gpt2",
    processed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PositionContext:
    """The basis of :func:`tests.lib.models.tiny` on 16 prompts of 18 tokens."""
    return _basis(model_class, architecture, processed, dtype)


@cache
def _basis(
    model_class: str, architecture: str, processed: bool, dtype: torch.dtype
) -> PositionContext:
    model = tiny(model_class, architecture, processed, dtype)
    return decompose(model, tokens(batch=16, length=18, seed=2), progress=False)


def rows_of(*values: Sequence[Any], times: int = 2) -> list[tuple[Any, ...]]:
    """Rows of a test with several parameters: not all products, but each value of the longest list
    so many ``times``, beside other values of the others each time."""
    longest = max(map(len, values))
    rows = [
        tuple(
            column[(i + place * (i // len(column))) % len(column)]
            for place, column in enumerate(values)
        )
        for i in range(times * longest)
    ]
    return list(dict.fromkeys(rows))
