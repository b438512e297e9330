from .basis import fourier as fourier
from .basis import gram as gram
from .basis import measure_curves as measure_curves
from .basis import spirals as spirals
from .basis import variance_shares as variance_shares
from .circuits import composition_figure as composition_figure
from .circuits import faithfulness_curve as faithfulness_curve
from .circuitsvis import attention_heads as attention_heads
from .circuitsvis import induction as induction
from .flow import baseline_figure as baseline_figure
from .flow import bundle_3d as bundle_3d
from .flow import noise_figure as noise_figure
from .flow import skip_figure as skip_figure
from .flow import truncation_figure as truncation_figure
from .graph_view import graph_page as graph_page
from .graph_view import token_attribution as token_attribution
from .head_view import head_planes as head_planes
from .head_view import head_shares as head_shares
from .head_view import heads as heads
from .plotting import plot as plot
from .split_view import split as split
from .weights import effect_bars as effect_bars
from .weights import sphere_paths as sphere_paths
from .weights import weight_blocks as weight_blocks

__all__: list[str]
