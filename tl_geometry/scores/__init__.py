"""Attention scores as a sum of terms, and the share of each term in what a head attends to."""

from __future__ import annotations

from tl_geometry.corpus.nulls import repeated_random_tokens
from tl_geometry.scores.composing import Composition, composition
from tl_geometry.scores.dictionaries import Dictionary, dictionary
from tl_geometry.scores.features import FeatureShares, feature_shares
from tl_geometry.scores.head_types import HeadTypes, head_type_scores, token_range
from tl_geometry.scores.logits import LogitExplanation, explain_logit
from tl_geometry.scores.plane_tables import BandTable, PlaneTable
from tl_geometry.scores.planes import Band, HeadPlanes, default_bands
from tl_geometry.scores.relative import OffsetProfile, RelativeKernel, relative_kernel
from tl_geometry.scores.split import ScoreSplit, split_scores
from tl_geometry.scores.sums import ShareSums, share_sums, share_sums_dense
from tl_geometry.scores.sweep import sweep_heads
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.scores.tables import ShareTable
from tl_geometry.scores.values import ValueSplit, split_values
from tl_geometry.scores.writers import WriterSweep

__all__ = [
    "Band",
    "BandTable",
    "Composition",
    "Dictionary",
    "FeatureShares",
    "HeadPlanes",
    "HeadTypes",
    "LogitExplanation",
    "OffsetProfile",
    "PlaneTable",
    "RelativeKernel",
    "ScoreSplit",
    "ShareSums",
    "ShareTable",
    "SweepTable",
    "ValueSplit",
    "WriterSweep",
    "composition",
    "default_bands",
    "dictionary",
    "explain_logit",
    "feature_shares",
    "head_type_scores",
    "relative_kernel",
    "repeated_random_tokens",
    "share_sums",
    "share_sums_dense",
    "split_scores",
    "split_values",
    "sweep_heads",
    "token_range",
]
