from .layer_view import LayerView as LayerView
from .loading import from_hf as from_hf
from .loading import load as load
from .model_like import ModelLike as ModelLike
from .model_view import ModelView as ModelView
from .reader import view as view
from .support import ModelReport as ModelReport
from .support import check_model as check_model
from .untrained import reinitialized as reinitialized

__all__: list[str]
