from .comparison import BasisComparison as BasisComparison
from .comparison import compare_bases as compare_bases
from .context_report import ContextualReport as ContextualReport
from .context_report import contextual_report as contextual_report
from .differences import smoothness as smoothness
from .position_report import PositionalReport as PositionalReport
from .position_report import positional_report as positional_report
from .rank import screenot as screenot
from .rank import usable_k as usable_k

__all__: list[str]
