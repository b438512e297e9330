from .costs import directions_needed as directions_needed
from .costs import skip_costs as skip_costs
from .costs import truncation_kl as truncation_kl
from .ensemble import trajectories as trajectories
from .langevin import LangevinModel as LangevinModel
from .maps import fit_aligned_bases as fit_aligned_bases
from .maps import flow_map as flow_map
from .noise import fit_noise_law as fit_noise_law
from .noise import layer_anomalies as layer_anomalies
from .report import compare_ensembles as compare_ensembles
from .report import flow_report as flow_report
from .separation import separability as separability

__all__: list[str]
