from . import corpus as corpus
from .embedded_model import default_windows as default_windows
from .embedded_model import embedded as embedded
from .pretrained import minilm as minilm
from .pretrained import smollm2 as smollm2

__all__: list[str]
