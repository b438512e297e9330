from . import corpus as corpus
from .embedded_model import NAME as NAME
from .embedded_model import by_name as by_name
from .embedded_model import card as card
from .embedded_model import default_windows as default_windows
from .embedded_model import directory as directory
from .embedded_model import embedded as embedded
from .embedded_model import hugging_face as hugging_face
from .embedded_model import tokenizer as tokenizer
from .known_models import KnownModel as KnownModel
from .known_models import known as known
from .pretrained import minilm as minilm
from .pretrained import minilm_directory as minilm_directory
from .pretrained import smollm2 as smollm2
from .pretrained import smollm2_hugging_face as smollm2_hugging_face

__all__: list[str]
