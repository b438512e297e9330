from .paths import token_paths as token_paths
from .projection import norm_geometry as norm_geometry
from .projection import path_geometry as path_geometry

__all__: list[str]
