from .head_types import head_type_scores as head_type_scores
from .relative import offset_profile as offset_profile
from .score_split import ScoreSplit as ScoreSplit
from .share_table import SweepTable as SweepTable
from .split import split_scores as split_scores
from .sweep import sweep_heads as sweep_heads
from .values import split_values as split_values

__all__: list[str]
