"""Activations as mean + position + context + residual: sums that merge, one streaming loop, and the
basis they make."""

from __future__ import annotations

from tl_geometry.decomposition.decomposing import decompose, decompose_activations
from tl_geometry.decomposition.parts import Parts, decompose_tensor
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.variance import Anova

__all__ = [
    "Anova",
    "Parts",
    "PositionContext",
    "decompose",
    "decompose_activations",
    "decompose_tensor",
]
