from .nulls import gibberish as gibberish
from .nulls import pseudo_sentences as pseudo_sentences
from .nulls import repeated_random_tokens as repeated_random_tokens
from .templates import aligned_prompts as aligned_prompts
from .texts import splice as splice
from .texts import windows as windows
from .token_windows import TokensLike as TokensLike
from .token_windows import TokenWindows as TokenWindows

__all__: list[str]
