from .dictionaries import Dictionary as Dictionary
from .dictionaries import dictionary as dictionary
from .edge_layout import EdgeLayout as EdgeLayout
from .features import FeatureShares as FeatureShares
from .features import feature_shares as feature_shares
from .kept_edges import Faithfulness as Faithfulness
from .kept_edges import faithfulness as faithfulness
from .logit_graph import LogitGraph as LogitGraph
from .logit_graph import mean_graph as mean_graph
from .scored_edges import EdgeScores as EdgeScores
from .scored_edges import edge_scores as edge_scores
from .trace import trace_logit as trace_logit
from .writer_edges import Composition as Composition
from .writer_edges import composition as composition
from .writer_sweep import WriterSweep as WriterSweep

__all__: list[str]
