from . import corpus as corpus
from .embedded_model import NAME as NAME
from .embedded_model import card as card
from .embedded_model import default_windows as default_windows
from .embedded_model import directory as directory
from .embedded_model import embedded as embedded
from .embedded_model import tokenizer as tokenizer
from .pretrained import minilm as minilm
from .pretrained import smollm2 as smollm2

__all__: list[str]
