"""Trajectories of tokens through the layers as a stochastic flow: rotation, stretch and noise."""

from __future__ import annotations

from tl_geometry.flow.alignment import fit_aligned_bases
from tl_geometry.flow.ensemble import Trajectories, trajectories
from tl_geometry.flow.langevin import LangevinModel
from tl_geometry.flow.noise import fit_noise_law
from tl_geometry.flow.planning import plan_chunks
from tl_geometry.flow.reports import FlowReport, compare_ensembles, flow_report
from tl_geometry.flow.residuals import fit_map, flow_map
from tl_geometry.flow.separation import ensembles_apart, separability, true_against_extrapolated
from tl_geometry.flow.skipping import SkipMap, skip_map
from tl_geometry.flow.truncation import TruncationCurve, truncation_kl

__all__ = [
    "FlowReport",
    "LangevinModel",
    "SkipMap",
    "Trajectories",
    "TruncationCurve",
    "compare_ensembles",
    "ensembles_apart",
    "fit_aligned_bases",
    "fit_map",
    "fit_noise_law",
    "flow_map",
    "flow_report",
    "plan_chunks",
    "separability",
    "skip_map",
    "trajectories",
    "true_against_extrapolated",
    "truncation_kl",
]
