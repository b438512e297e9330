from .from_model import decompose as decompose
from .from_model import decompose_activations as decompose_activations
from .position_context import PositionContext as PositionContext

__all__: list[str]
