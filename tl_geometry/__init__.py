"""Geometry of transformer activations, attention scores and weights, exactly, for TransformerLens
models.

Names load where they are first used, so that importing the package costs nothing: torch comes with
the first function, TransformerLens, circuitsvis, matplotlib and pandas with the first that needs
them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from tl_geometry.base.errors import (
    BudgetError,
    GeometryError,
    ReconstructionError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from tl_geometry import corpus as corpus
    from tl_geometry import decomposition as decomposition
    from tl_geometry import experiments as experiments
    from tl_geometry import flow as flow
    from tl_geometry import interventions as interventions
    from tl_geometry import measures as measures
    from tl_geometry import models as models
    from tl_geometry import render as render
    from tl_geometry import report as report
    from tl_geometry import reproduce as reproduce
    from tl_geometry import scores as scores
    from tl_geometry import sphere as sphere
    from tl_geometry import weights as weights
    from tl_geometry import zoo as zoo
    from tl_geometry.base.results import Provenance, Result
    from tl_geometry.corpus import TokenWindows, windows
    from tl_geometry.decomposition import PositionContext, decompose, decompose_activations
    from tl_geometry.flow import flow_report, skip_map, trajectories, truncation_kl
    from tl_geometry.measures import compare_bases, contextual_report, positional_report
    from tl_geometry.models import ModelView, check_model, view
    from tl_geometry.scores import (
        composition,
        explain_logit,
        split_scores,
        split_values,
        sweep_heads,
    )
    from tl_geometry.sphere import token_paths
    from tl_geometry.weights import token_readout, weight_geometry

__version__ = "0.1.0"
_HOME = {
    "models": ("ModelView", "check_model", "view"),
    "base.results": ("Provenance", "Result"),
    "corpus": ("TokenWindows", "windows"),
    "decomposition": ("PositionContext", "decompose", "decompose_activations"),
    "scores": ("composition", "explain_logit", "split_scores", "split_values", "sweep_heads"),
    "weights": ("token_readout", "weight_geometry"),
    "sphere": ("token_paths",),
    "measures": ("compare_bases", "contextual_report", "positional_report"),
    "flow": ("flow_report", "skip_map", "trajectories", "truncation_kl"),
}
"""Module -> the public names that live there."""
_LAZY = {name: f"tl_geometry.{module}" for module, names in _HOME.items() for name in names}
__all__ = [
    "BudgetError",
    "GeometryError",
    "ModelView",
    "PositionContext",
    "Provenance",
    "ReconstructionError",
    "Result",
    "TokenWindows",
    "UnsupportedModelError",
    "check_model",
    "compare_bases",
    "composition",
    "contextual_report",
    "decompose",
    "decompose_activations",
    "explain_logit",
    "flow_report",
    "positional_report",
    "skip_map",
    "split_scores",
    "split_values",
    "sweep_heads",
    "token_paths",
    "token_readout",
    "trajectories",
    "truncation_kl",
    "view",
    "weight_geometry",
    "windows",
]
_PACKAGES = (
    "models",
    "corpus",
    "decomposition",
    "scores",
    "weights",
    "sphere",
    "measures",
    "flow",
    "interventions",
    "zoo",
    "render",
    "reproduce",
    "report",
    "experiments",
)
"""Subpackages that load on first use."""

if "ipykernel" in sys.modules:  # tqdm warns where widgets are missing; a bar of text is as good
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        importlib.import_module("tqdm.auto")

# a type checker reads the imports above, and would take every unknown name for Any
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"tl_geometry.{name}")
        if name in _LAZY:
            globals()[name] = found = getattr(importlib.import_module(_LAZY[name]), name)
            return found
        known = ", ".join(__all__)
        raise AttributeError(
            f"module 'tl_geometry' has no attribute {name!r}. Public names: {known}"
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
