"""Interventions on a live model: take the very term that was measured out of the scores, keep only
it, or project the stream.

Context managers (``remove_term``, ``keep_term``, ``mean_term``, ``remove_planes``, ``keep_planes``,
``swap_planes``, ``remove_edge``, ``swap_edge``, ``project_stream``, ``surrogate``) leave the model
as it was, and are lists of hooks too: ``model.run_with_hooks(tokens, fwd_hooks=edit.hooks())``
(:class:`~tl_geometry.interventions.LiveEdit`). Functions (``necessity_sufficiency``,
``dominant_only``, ``edge_necessity``, ``surrogate_effect``) use them and return tables.
"""

from __future__ import annotations

from tl_geometry.interventions.causal import (
    Dominance,
    NecessitySufficiency,
    dominant_only,
    necessity_sufficiency,
)
from tl_geometry.interventions.edge_effects import EdgeNecessity, edge_necessity
from tl_geometry.interventions.edges import remove_edge, swap_edge
from tl_geometry.interventions.effects import Effects
from tl_geometry.interventions.planes import keep_planes, remove_planes, swap_planes
from tl_geometry.interventions.stream import project_stream
from tl_geometry.interventions.surrogates import surrogate, surrogate_effect
from tl_geometry.interventions.terms import keep_term, mean_term, remove_term
from tl_geometry.models.hook_lists import LiveEdit

__all__ = [
    "Dominance",
    "EdgeNecessity",
    "Effects",
    "LiveEdit",
    "NecessitySufficiency",
    "dominant_only",
    "edge_necessity",
    "keep_planes",
    "keep_term",
    "mean_term",
    "necessity_sufficiency",
    "project_stream",
    "remove_edge",
    "remove_planes",
    "remove_term",
    "surrogate",
    "surrogate_effect",
    "swap_edge",
    "swap_planes",
]
