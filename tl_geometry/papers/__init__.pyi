from .arithmetic import addition as addition
from .characters import nanogpt as nanogpt
from .experiments import experiment as experiment
from .lines_of_thought import sarfati as sarfati
from .outcome import Claim as Claim
from .outcome import Outcome as Outcome
from .outcome import Table as Table
from .protocol import Settings as Settings
from .protocol import settings_for as settings_for
from .published import Reproduction as Reproduction
from .published import published_tables as published_tables
from .published import song_zhong as song_zhong
from .random_tokens import randomisation as randomisation
from .reproduction import reproduce as reproduce
from .setup import Setup as Setup
from .topics import topic_bases as topic_bases
from .topics import topic_windows as topic_windows
from .traveling_words import molina as molina

__all__: list[str]
