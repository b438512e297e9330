"""Geometry of transformer activations, attention scores and weights, exactly, for TransformerLens
models.

Names load where they are first used, so that importing the package costs nothing: torch comes with
the first function, TransformerLens, circuitsvis, matplotlib and pandas with the first that needs
them.
"""

from __future__ import annotations

import importlib
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
    from tl_geometry.corpus.nulls import gibberish, pseudo_sentences
    from tl_geometry.corpus.texts import splice, windows
    from tl_geometry.corpus.token_windows import TokenWindows
    from tl_geometry.decomposition.decomposing import decompose, decompose_activations
    from tl_geometry.decomposition.position_context import Parts, PositionContext, decompose_tensor
    from tl_geometry.decomposition.variance import Anova
    from tl_geometry.flow.ensemble import trajectories
    from tl_geometry.flow.langevin import LangevinModel
    from tl_geometry.flow.reports import flow_report
    from tl_geometry.flow.skipping import skip_map
    from tl_geometry.flow.truncation import truncation_kl
    from tl_geometry.measures.comparison import compare_bases
    from tl_geometry.measures.reports import contextual_report, positional_report
    from tl_geometry.models.checking import check_model
    from tl_geometry.models.control import reinitialized
    from tl_geometry.models.describing import view
    from tl_geometry.models.model_view import ModelView
    from tl_geometry.scores.split import split_scores
    from tl_geometry.scores.sweep import sweep_heads
    from tl_geometry.scores.values import split_values
    from tl_geometry.sphere.paths import token_paths
    from tl_geometry.weights.heads import token_readout, weight_geometry
    from tl_geometry.weights.probes import noun_probe

__version__ = "0.1.0"
_HOME = {
    "models.describing": ("view",),
    "models.checking": ("check_model",),
    "models.control": ("reinitialized",),
    "models.model_view": ("ModelView",),
    "base.results": ("Provenance", "Result"),
    "corpus.token_windows": ("TokenWindows",),
    "corpus.texts": ("splice", "windows"),
    "corpus.nulls": ("gibberish", "pseudo_sentences"),
    "decomposition.decomposing": ("decompose", "decompose_activations"),
    "decomposition.position_context": ("Parts", "PositionContext", "decompose_tensor"),
    "scores.split": ("split_scores",),
    "scores.values": ("split_values",),
    "scores.sweep": ("sweep_heads",),
    "weights.heads": ("token_readout", "weight_geometry"),
    "weights.probes": ("noun_probe",),
    "sphere.paths": ("token_paths",),
    "measures.reports": ("contextual_report", "positional_report"),
    "measures.comparison": ("compare_bases",),
    "flow.ensemble": ("trajectories",),
    "flow.reports": ("flow_report",),
    "flow.langevin": ("LangevinModel",),
    "flow.skipping": ("skip_map",),
    "flow.truncation": ("truncation_kl",),
    "decomposition.variance": ("Anova",),
}
"""Module -> the public names that live there."""
_LAZY = {name: f"tl_geometry.{module}" for module, names in _HOME.items() for name in names}
__all__ = [
    "Anova",
    "BudgetError",
    "GeometryError",
    "LangevinModel",
    "ModelView",
    "Parts",
    "PositionContext",
    "Provenance",
    "ReconstructionError",
    "Result",
    "TokenWindows",
    "UnsupportedModelError",
    "check_model",
    "compare_bases",
    "contextual_report",
    "decompose",
    "decompose_activations",
    "decompose_tensor",
    "flow_report",
    "gibberish",
    "noun_probe",
    "positional_report",
    "pseudo_sentences",
    "reinitialized",
    "skip_map",
    "splice",
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

if (
    not TYPE_CHECKING
):  # a type checker reads the imports above, and would take every unknown name for Any

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
