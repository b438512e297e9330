"""A norm layer as a projection onto a sphere, and the paths of tokens along it."""

from __future__ import annotations

from tl_geometry.sphere.paths import TokenPaths, token_paths
from tl_geometry.sphere.projection import (
    norm_geometry,
    path_geometry,
    principal_projection,
    token_approach,
    umap_coordinates,
    update_split,
)

__all__ = [
    "TokenPaths",
    "norm_geometry",
    "path_geometry",
    "principal_projection",
    "token_approach",
    "token_paths",
    "umap_coordinates",
    "update_split",
]
