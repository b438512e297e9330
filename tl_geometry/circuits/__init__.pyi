from .dictionaries import Dictionary as Dictionary
from .dictionaries import dictionary as dictionary
from .edge_attribution import EdgeScores as EdgeScores
from .edge_attribution import NodeScores as NodeScores
from .edge_attribution import edge_scores as edge_scores
from .edge_files import read_mib as read_mib
from .edge_layout import EdgeLayout as EdgeLayout
from .features import FeatureShares as FeatureShares
from .features import feature_shares as feature_shares
from .graph_comparison import EdgePairs as EdgePairs
from .graph_comparison import GraphComparison as GraphComparison
from .graph_means import AverageGraph as AverageGraph
from .graph_means import MeanTable as MeanTable
from .graph_means import average_graphs as average_graphs
from .logit_graph import LogitGraph as LogitGraph
from .logit_graph import TokenTable as TokenTable
from .logit_means import LogitMeans as LogitMeans
from .logit_means import explain_logits as explain_logits
from .logits import LogitExplanation as LogitExplanation
from .logits import explain_logit as explain_logit
from .pruned_runs import Faithfulness as Faithfulness
from .pruned_runs import faithfulness as faithfulness
from .trace import trace_logit as trace_logit
from .writer_edges import Composition as Composition
from .writer_edges import composition as composition
from .writer_sweep import WriterSweep as WriterSweep

__all__: list[str]
