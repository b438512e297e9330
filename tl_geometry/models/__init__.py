"""The only package that knows TransformerLens: model objects of every class become one
:class:`tl_geometry.models.model_view.ModelView`."""

from __future__ import annotations

from tl_geometry.models.checking import ModelReport, check_model
from tl_geometry.models.control import reinitialized
from tl_geometry.models.describing import view
from tl_geometry.models.layer_view import HeadWeights, LayerView
from tl_geometry.models.loading import from_hf, load
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.output_head import OutputHead
from tl_geometry.models.rotary import RotaryPlanes, rotary_planes
from tl_geometry.models.states import states_from_cache

__all__ = [
    "HeadWeights",
    "LayerView",
    "ModelLike",
    "ModelReport",
    "ModelView",
    "NormWeights",
    "OutputHead",
    "RotaryPlanes",
    "check_model",
    "from_hf",
    "load",
    "reinitialized",
    "rotary_planes",
    "states_from_cache",
    "view",
]
