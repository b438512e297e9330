"""The whole analysis of a model on a corpus, written to a folder: ``report.html``, CSV tables,
safetensors results and ``run.json``. The command ``tl-geometry report`` makes it.

Start with :mod:`tl_geometry.report.build`, which prepares an analysis, and
:mod:`tl_geometry.report.analysis`, which makes its sections."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
