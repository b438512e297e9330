"""Geometry of transformer activations, attention scores and weights, exactly, for TransformerLens models.

Names load where they are first used, so that importing the package costs nothing: torch comes with the first function,
TransformerLens, circuitsvis, matplotlib and pandas with the first that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tl_geometry.errors import BudgetError, ClosingError, GeometryError, UnsupportedModelError

if TYPE_CHECKING:
    from tl_geometry import adapters as adapters
    from tl_geometry import experiments as experiments
    from tl_geometry import interventions as interventions
    from tl_geometry import render as render
    from tl_geometry import report as report
    from tl_geometry import reproduce as reproduce
    from tl_geometry import zoo as zoo
    from tl_geometry.adapters import view
    from tl_geometry.decomposition import Anova, Parts, PositionContext, decompose_tensor
    from tl_geometry.langevin import LangevinModel
    from tl_geometry.records import ModelView, TokenWindows
    from tl_geometry.results import Provenance, Result
    from tl_geometry.verbs.check import check_model
    from tl_geometry.verbs.comparison import compare_bases
    from tl_geometry.verbs.decompose import decompose, decompose_activations, glue, windows
    from tl_geometry.verbs.ensemble import gibberish, pseudo_sentences, trajectories
    from tl_geometry.verbs.flows import flow_report
    from tl_geometry.verbs.measures import contextual_report, positional_report
    from tl_geometry.verbs.nulls import reinitialized
    from tl_geometry.verbs.paths import token_paths
    from tl_geometry.verbs.probes import noun_probe
    from tl_geometry.verbs.skipping import skip_map
    from tl_geometry.verbs.split import split_scores
    from tl_geometry.verbs.sweep import sweep_heads
    from tl_geometry.verbs.truncation import truncation_kl
    from tl_geometry.verbs.values import split_values
    from tl_geometry.verbs.weights import token_readout, weight_geometry

__version__ = "0.1.0"
_HOME = {
    "adapters": ("view",),
    "decomposition": ("Anova", "Parts", "PositionContext", "decompose_tensor"),
    "langevin": ("LangevinModel",),
    "records": ("ModelView", "TokenWindows"),
    "results": ("Provenance", "Result"),
    "verbs.check": ("check_model",),
    "verbs.comparison": ("compare_bases",),
    "verbs.decompose": ("decompose", "decompose_activations", "glue", "windows"),
    "verbs.ensemble": ("gibberish", "pseudo_sentences", "trajectories"),
    "verbs.flows": ("flow_report",),
    "verbs.measures": ("contextual_report", "positional_report"),
    "verbs.nulls": ("reinitialized",),
    "verbs.paths": ("token_paths",),
    "verbs.probes": ("noun_probe",),
    "verbs.skipping": ("skip_map",),
    "verbs.split": ("split_scores",),
    "verbs.sweep": ("sweep_heads",),
    "verbs.truncation": ("truncation_kl",),
    "verbs.values": ("split_values",),
    "verbs.weights": ("token_readout", "weight_geometry"),
}
"""Module -> the public names that live there."""
_LAZY = {name: f"tl_geometry.{module}" for module, names in _HOME.items() for name in names}
__all__ = [
    "Anova",
    "BudgetError",
    "ClosingError",
    "GeometryError",
    "LangevinModel",
    "ModelView",
    "Parts",
    "PositionContext",
    "Provenance",
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
    "glue",
    "noun_probe",
    "positional_report",
    "pseudo_sentences",
    "reinitialized",
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
_PACKAGES = ("adapters", "interventions", "render", "zoo", "experiments", "report", "reproduce")
"""Subpackages that load on first use."""

if not TYPE_CHECKING:  # a type checker reads the imports above, and would take every unknown name for Any

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"tl_geometry.{name}")
        if name in _LAZY:
            globals()[name] = found = getattr(importlib.import_module(_LAZY[name]), name)
            return found
        known = ", ".join(__all__)
        raise AttributeError(f"module 'tl_geometry' has no attribute {name!r}. Public names: {known}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
