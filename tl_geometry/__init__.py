"""Geometry of transformer activations, attention scores and weights, exactly, for TransformerLens
models.

Names load where they are first used (``__init__.pyi`` lists them), so that importing the package
costs nothing: torch comes with the first function, TransformerLens, circuitsvis, matplotlib and
pandas with the first that needs them.
"""

from __future__ import annotations

import importlib
import sys
import warnings

import lazy_loader

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

if "ipykernel" in sys.modules:  # tqdm warns where widgets are missing; a bar of text is as good
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        importlib.import_module("tqdm.auto")
