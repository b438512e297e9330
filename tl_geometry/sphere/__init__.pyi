from .paths import TokenPaths as TokenPaths
from .paths import token_paths as token_paths
from .projection import norm_geometry as norm_geometry
from .projection import path_geometry as path_geometry
from .projection import principal_projection as principal_projection
from .projection import token_approach as token_approach
from .projection import umap_coordinates as umap_coordinates
from .projection import update_split as update_split

__all__: list[str]
