from .from_activations import Parts as Parts
from .from_activations import decompose_tensor as decompose_tensor
from .from_model import decompose as decompose
from .from_model import decompose_activations as decompose_activations
from .position_context import PositionContext as PositionContext
from .variance import Anova as Anova

__all__: list[str]
