from .comparison import compare_bases as compare_bases
from .context_report import contextual_report as contextual_report
from .context_report import learning_curve as learning_curve
from .position_report import positional_report as positional_report
from .positional import screenot as screenot
from .positional import smoothness as smoothness

__all__: list[str]
