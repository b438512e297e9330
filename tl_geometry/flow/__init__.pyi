from .alignment import fit_aligned_bases as fit_aligned_bases
from .ensemble import Trajectories as Trajectories
from .ensemble import trajectories as trajectories
from .langevin import LangevinModel as LangevinModel
from .noise import fit_noise_law as fit_noise_law
from .reports import FlowReport as FlowReport
from .reports import compare_ensembles as compare_ensembles
from .reports import flow_report as flow_report
from .residuals import fit_map as fit_map
from .residuals import flow_map as flow_map
from .separation import ensembles_apart as ensembles_apart
from .separation import separability as separability
from .separation import true_against_extrapolated as true_against_extrapolated
from .skipping import SkipMap as SkipMap
from .skipping import skip_map as skip_map
from .truncation import TruncationCurve as TruncationCurve
from .truncation import truncation_kl as truncation_kl

__all__: list[str]
