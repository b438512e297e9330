"""Edits of a live model, and one measurement of what they do: :func:`effects`.

:func:`term`, :func:`planes`, :func:`edge`, :func:`heads` (and :func:`each`), :func:`path` and
:func:`surrogate` each give an :class:`Edit`: ``with edit: model(tokens)``, or
``model.run_with_hooks(tokens, fwd_hooks=edit)``. The model is as before afterwards.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
