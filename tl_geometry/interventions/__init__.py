"""Does the model use what was measured? Edits of a live model: remove, keep or replace a term of
attention scores, rotary planes, an edge, W_QK, a head's output, or a subspace of the stream.

Context managers (``remove_term``, ``keep_term``, ``mean_term``, ``remove_planes``, ``keep_planes``,
``swap_planes``, ``remove_edge``, ``swap_edge``, ``remove_heads``, ``project_stream``,
``surrogate``) leave the model as it was. Each is a list of hooks too:
``model.run_with_hooks(tokens, fwd_hooks=edit.hooks())``
(:class:`~tl_geometry.interventions.LiveEdit`).

Functions (``necessity_sufficiency``, ``dominant_only``, ``edge_necessity``, ``surrogate_effect``,
``head_knockouts``, ``head_paths``) run a model under such edits and return tables;
``beside_knockouts`` sets knockouts beside a table of attributions.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
