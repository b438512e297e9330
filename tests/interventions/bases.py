"""Bases of the tiny models, computed once for all tests of interventions."""

from __future__ import annotations

from functools import cache

import torch

from tests.tiny import tiny, tokens
from tl_geometry import decompose
from tl_geometry.decomposition.position_context import PositionContext


def basis_of(
    model_class: str,
    architecture: str = "gpt2",
    processed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PositionContext:
    """The basis of :func:`tests.tiny.tiny` on 16 prompts of 18 tokens."""
    return _basis(model_class, architecture, processed, dtype)


@cache
def _basis(
    model_class: str, architecture: str, processed: bool, dtype: torch.dtype
) -> PositionContext:
    model = tiny(model_class, architecture, processed, dtype)
    return decompose(model, tokens(batch=16, length=18, seed=2), progress=False)
