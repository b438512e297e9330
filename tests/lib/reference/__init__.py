"""What the library computes, a second time: plain torch and numpy in float64 that import neither
the library nor TransformerLens, one formula after another.

:mod:`decoder` runs a Hugging Face model's weights with hooks at everything; :mod:`scores` splits
scores and values; :mod:`moments` has the mean decomposition and the jackknife; :mod:`contrast` is
the graph between two runs; :mod:`edits` has edge scores, pruned and patched runs, knockouts and
edited scores; :mod:`geometry` has ranks, weights and angles; :mod:`flow` lines of thought. Letters
A to P are the parts of the specification, whose symbols the docstrings use. (Of the graph of one
prompt Hugging Face's own gradients are the reference: :mod:`tests.lib.frozen_hf`.)
"""
