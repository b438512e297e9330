from .dictionaries import dictionary as dictionary
from .features import feature_shares as feature_shares
from .kept_edges import faithfulness as faithfulness
from .logit_graph import LogitGraph as LogitGraph
from .logit_graph import mean_graph as mean_graph
from .scored_edges import edge_scores as edge_scores
from .trace import trace_logit as trace_logit
from .writer_edges import composition as composition

__all__: list[str]
