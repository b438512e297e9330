from .paths import norm_geometry as norm_geometry
from .paths import path_geometry as path_geometry
from .paths import token_paths as token_paths

__all__: list[str]
