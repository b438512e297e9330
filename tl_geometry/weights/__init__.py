"""W_QK and W_OV in the geometry of a basis: structure, factor SVDs, token readouts, probes."""

from __future__ import annotations

from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.heads import TokenReadout, WeightGeometry, token_readout, weight_geometry
from tl_geometry.weights.probes import (
    bias_readout,
    embedding_distance_table,
    embedding_norm_table,
    noun_probe,
)

__all__ = [
    "Factors",
    "TokenReadout",
    "WeightGeometry",
    "bias_readout",
    "embedding_distance_table",
    "embedding_norm_table",
    "noun_probe",
    "token_readout",
    "weight_geometry",
]
