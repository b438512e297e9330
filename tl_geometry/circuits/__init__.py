"""Circuits: who wrote a logit, which edges matter, and what a head reads.

- one runner: ``runner`` (blocks, walks back), ``streams``, ``arithmetic`` (live, frozen, between
  two runs);
- the graph behind a logit, or behind its difference between two prompts: ``trace``, ``walk``,
  ``graph_edges``, ``logit_graph``; its file: ``graph_files``;
- which edges of the live model matter: ``edge_layout``, ``prompt_pairs``, ``scored_edges``,
  ``kept_edges``;
- what a head reads: ``writer_edges`` (composition), ``dictionaries`` and ``features`` (a sparse
  autoencoder).

An edge of ``logit_graph`` is a part of one logit; one of ``edge_layout`` is a wire of the model.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
