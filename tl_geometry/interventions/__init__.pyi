from .edge_edits import edge as edge
from .effect_tables import effects as effects
from .head_edits import each as each
from .head_edits import heads as heads
from .path_edits import path as path
from .surrogates import surrogate as surrogate
from .terms import planes as planes
from .terms import term as term

__all__: list[str]
