from .attribution_tables import AttributionTable as AttributionTable
from .attribution_tables import beside_knockouts as beside_knockouts
from .causal import Dominance as Dominance
from .causal import NecessitySufficiency as NecessitySufficiency
from .causal import dominant_only as dominant_only
from .causal import necessity_sufficiency as necessity_sufficiency
from .edge_effects import EdgeNecessity as EdgeNecessity
from .edge_effects import edge_necessity as edge_necessity
from .edges import remove_edge as remove_edge
from .edges import swap_edge as swap_edge
from .effects import Effects as Effects
from .head_removal import remove_heads as remove_heads
from .knockouts import HeadKnockouts as HeadKnockouts
from .knockouts import head_knockouts as head_knockouts
from .paths import HeadPaths as HeadPaths
from .paths import head_paths as head_paths
from .planes import keep_planes as keep_planes
from .planes import remove_planes as remove_planes
from .planes import swap_planes as swap_planes
from .stream import project_stream as project_stream
from .surrogates import surrogate as surrogate
from .surrogates import surrogate_effect as surrogate_effect
from .terms import LiveEdit as LiveEdit
from .terms import keep_term as keep_term
from .terms import mean_term as mean_term
from .terms import remove_term as remove_term

__all__: list[str]
