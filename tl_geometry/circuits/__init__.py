"""Circuits: who wrote what, which edges matter, and what a head reads.

- who wrote a logit: ``logits``, ``logit_means`` (over prompts);
- the whole graph behind a logit: ``frozen`` (the linear model), ``graph_edges``, ``trace``,
  ``logit_graph``; why a head of it attended, pair by pair: ``query_key_pairs``; several graphs:
  ``graph_places``, ``graph_means``, ``graph_comparison``; files: ``graph_files``;
- which edges of the live model matter: ``edge_layout``, ``edge_pass``, ``prompt_pairs``,
  ``edge_attribution``, ``pruned_runs``, ``edge_files``;
- what a head reads: ``writer_sweep`` and ``writer_edges`` (writers; sums of both:
  ``head_readers``), ``dictionaries`` and ``features`` (a sparse autoencoder).

An edge of ``logit_graph`` is a part of a frozen pass: exact for values, first order for queries and
keys. An edge of ``edge_layout`` is a wire of the live model.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
