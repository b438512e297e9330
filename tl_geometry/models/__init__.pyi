from .layer_view import HeadWeights as HeadWeights
from .layer_view import LayerView as LayerView
from .loaders import from_hf as from_hf
from .loaders import load as load
from .model_like import ModelLike as ModelLike
from .model_view import ModelView as ModelView
from .norms import NormWeights as NormWeights
from .output_head import OutputHead as OutputHead
from .reader import view as view
from .rotary import RotaryPlanes as RotaryPlanes
from .rotary import rotary_planes as rotary_planes
from .states import states_from_cache as states_from_cache
from .support import ModelReport as ModelReport
from .support import check_model as check_model
from .untrained import reinitialized as reinitialized

__all__: list[str]
