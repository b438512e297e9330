from .lines_of_thought import sarfati as sarfati
from .published import song_zhong as song_zhong
from .splits import published_split as published_split
from .theorems import factorisation_gap as factorisation_gap
from .theorems import theorem1 as theorem1
from .traveling_words import molina as molina

__all__: list[str]
