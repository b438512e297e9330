"""Measures of position and context in a basis, and the comparison of two bases."""

from __future__ import annotations

from tl_geometry.measures.comparison import BasisComparison, compare_bases
from tl_geometry.measures.context_report import ContextualReport, contextual_report
from tl_geometry.measures.differences import dct_vectors, smoothness, theorem1
from tl_geometry.measures.factorisation import kernel_gaps
from tl_geometry.measures.position_report import PositionalReport, positional_report
from tl_geometry.measures.rank import denoise, screenot, usable_k

__all__ = [
    "BasisComparison",
    "ContextualReport",
    "PositionalReport",
    "compare_bases",
    "contextual_report",
    "dct_vectors",
    "denoise",
    "kernel_gaps",
    "positional_report",
    "screenot",
    "smoothness",
    "theorem1",
    "usable_k",
]
