from .loading import from_hf as from_hf
from .loading import load as load
from .reader import view as view
from .support import check_model as check_model
from .untrained import reinitialized as reinitialized

__all__: list[str]
