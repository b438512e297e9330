"""Geometry of transformer activations, attention scores and weights, exactly, for TransformerLens models.

Import cost is that of torch: TransformerLens, circuitsvis, matplotlib and pandas are imported where they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tl_geometry.decomposition import Anova, Parts, PositionContext, decompose_tensor
from tl_geometry.errors import BudgetError, ClosingError, GeometryError, UnsupportedModelError
from tl_geometry.records import ModelView, TokenWindows
from tl_geometry.results import Provenance, Result
from tl_geometry.verbs.check import check_model
from tl_geometry.verbs.comparison import compare_bases
from tl_geometry.verbs.decompose import decompose, decompose_activations, glue, windows
from tl_geometry.verbs.ensemble import trajectories
from tl_geometry.verbs.measures import contextual_report, positional_report
from tl_geometry.verbs.split import split_scores
from tl_geometry.verbs.sweep import sweep_heads
from tl_geometry.verbs.values import split_values
from tl_geometry.verbs.weights import token_readout, weight_geometry

if TYPE_CHECKING:
    from tl_geometry.adapters import view
    from tl_geometry.langevin import LangevinModel
    from tl_geometry.verbs.ensemble import gibberish, pseudo_sentences
    from tl_geometry.verbs.flows import flow_report
    from tl_geometry.verbs.nulls import reinitialized
    from tl_geometry.verbs.paths import token_paths
    from tl_geometry.verbs.probes import noun_probe
    from tl_geometry.verbs.skipping import skip_map
    from tl_geometry.verbs.truncation import truncation_kl

__version__ = "0.1.0"
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
_LAZY = {
    "LangevinModel": "tl_geometry.langevin",
    "flow_report": "tl_geometry.verbs.flows",
    "gibberish": "tl_geometry.verbs.ensemble",
    "noun_probe": "tl_geometry.verbs.probes",
    "pseudo_sentences": "tl_geometry.verbs.ensemble",
    "reinitialized": "tl_geometry.verbs.nulls",
    "skip_map": "tl_geometry.verbs.skipping",
    "token_paths": "tl_geometry.verbs.paths",
    "truncation_kl": "tl_geometry.verbs.truncation",
    "view": "tl_geometry.adapters",
}
"""Public names that load on first use: the adapter imports TransformerLens."""
_ROOMS = ("adapters", "interventions", "render", "zoo", "experiments", "report", "reproduce")
"""Subpackages that load on first use."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"tl_geometry.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tl_geometry' has no attribute {name!r}. Public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
