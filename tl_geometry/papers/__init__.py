"""Do the numbers of three published works come out again? Each has one function, on any model, that
puts ours beside the published ones with a verdict: :func:`song_zhong`, :func:`sarfati`,
:func:`molina` (whose sources print none). The two theorems of Song & Zhong (:func:`theorem1`,
:func:`factorisation_gap`) and their split of scores (:func:`published_split`) are here too, and all
quirks of published code."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
