from .prompt_sets import Prompts as Prompts
from .prompt_sets import prompts as prompts
from .texts import gibberish as gibberish
from .texts import pseudo_sentences as pseudo_sentences
from .texts import repeated_random_tokens as repeated_random_tokens
from .texts import splice as splice
from .texts import windows as windows
from .token_windows import TokenWindows as TokenWindows

__all__: list[str]
