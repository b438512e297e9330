"""What makes a head attend where it does? Attention scores as an exact sum of terms, and the share
of each term in them.

- parts of a layer's input: ``families``, ``projection``; terms of scores: ``terms``, ``sums``;
- a split of some heads: ``split``, ``splitter``, ``score_split``, ``planes``, ``relative``,
  ``values``; all heads over a corpus: ``sweep``, ``share_table``, ``labels``, ``head_types``,
  ``resampling`` (intervals and nulls);
- which writers a head reads: ``writer_sweep``, ``head_readers``.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
