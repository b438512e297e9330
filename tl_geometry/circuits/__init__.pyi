from .dictionaries import Dictionary as Dictionary
from .dictionaries import dictionary as dictionary
from .edge_layout import EdgeLayout as EdgeLayout
from .edge_scores import EdgeScores as EdgeScores
from .edge_scores import edge_scores as edge_scores
from .faithfulness import Faithfulness as Faithfulness
from .faithfulness import faithfulness as faithfulness
from .features import FeatureShares as FeatureShares
from .features import feature_shares as feature_shares
from .logit_graph import LogitGraph as LogitGraph
from .logit_graph import mean_graph as mean_graph
from .trace import trace_logit as trace_logit
from .writer_edges import Composition as Composition
from .writer_edges import composition as composition
from .writer_sweep import WriterSweep as WriterSweep

__all__: list[str]
