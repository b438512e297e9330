from .head_types import HeadTypes as HeadTypes
from .head_types import head_type_scores as head_type_scores
from .head_types import repeated_random_tokens as repeated_random_tokens
from .head_types import token_range as token_range
from .planes import HeadPlanes as HeadPlanes
from .planes import PlaneTable as PlaneTable
from .relative import OffsetProfile as OffsetProfile
from .relative import offset_profile as offset_profile
from .score_split import ScoreSplit as ScoreSplit
from .share_table import ShareTable as ShareTable
from .share_table import SweepTable as SweepTable
from .split import split_scores as split_scores
from .sums import ShareSums as ShareSums
from .sums import share_sums as share_sums
from .sweep import sweep_heads as sweep_heads
from .values import ValueSplit as ValueSplit
from .values import split_values as split_values

__all__: list[str]
