from . import circuits as circuits
from . import corpus as corpus
from . import decomposition as decomposition
from . import flow as flow
from . import interventions as interventions
from . import measures as measures
from . import models as models
from . import papers as papers
from . import render as render
from . import report as report
from . import scores as scores
from . import sphere as sphere
from . import weights as weights
from . import zoo as zoo
from .base.errors import BudgetError as BudgetError
from .base.errors import GeometryError as GeometryError
from .base.errors import ReconstructionError as ReconstructionError
from .base.errors import UnsupportedModelError as UnsupportedModelError
from .base.results import Provenance as Provenance
from .base.results import Result as Result
from .circuits.edge_attribution import edge_scores as edge_scores
from .circuits.logits import explain_logit as explain_logit
from .circuits.pruned_runs import faithfulness as faithfulness
from .circuits.trace import trace_logit as trace_logit
from .circuits.writer_edges import composition as composition
from .corpus import TokenWindows as TokenWindows
from .corpus import windows as windows
from .decomposition import PositionContext as PositionContext
from .decomposition import decompose as decompose
from .decomposition import decompose_activations as decompose_activations
from .flow import flow_report as flow_report
from .flow import skip_map as skip_map
from .flow import trajectories as trajectories
from .flow import truncation_kl as truncation_kl
from .measures import contextual_report as contextual_report
from .measures import positional_report as positional_report
from .models import check_model as check_model
from .models import view as view
from .scores import split_scores as split_scores
from .scores import split_values as split_values
from .scores import sweep_heads as sweep_heads
from .sphere import token_paths as token_paths
from .weights import token_readout as token_readout
from .weights import weight_geometry as weight_geometry

__version__: str

__all__: list[str]
