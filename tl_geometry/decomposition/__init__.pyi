from .from_model import decompose as decompose
from .from_model import decompose_activations as decompose_activations
from .moments import Parts as Parts
from .position_context import PositionContext as PositionContext
from .position_context import require_basis as require_basis
from .variance import Anova as Anova

__all__: list[str]
