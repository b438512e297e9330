"""The whole analysis of a model on a corpus, to a folder: ``report.html``, CSV tables, safetensors
results and ``run.json``. See :mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
