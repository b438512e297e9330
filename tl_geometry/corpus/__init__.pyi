from .prompt_sets import Prompts as Prompts
from .prompt_sets import as_prompts as as_prompts
from .prompt_sets import prompts as prompts
from .sources import as_tokens as as_tokens
from .texts import gibberish as gibberish
from .texts import pseudo_sentences as pseudo_sentences
from .texts import repeated_random_tokens as repeated_random_tokens
from .texts import splice as splice
from .texts import windows as windows
from .token_windows import TokensLike as TokensLike
from .token_windows import TokenWindows as TokenWindows

__all__: list[str]
