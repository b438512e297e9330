"""Trajectories of tokens through the layers as a stochastic flow: rotation, stretch and noise."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
