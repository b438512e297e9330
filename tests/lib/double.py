"""Tiny models in float64 throughout.

Hugging Face's code computes norms, rotations and softmaxes in float32 even in a float64 model, and
so hides every error below 1e-7. Under :class:`InDouble` these places compute in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.lib.models import bridge_of, hf_model


class InDouble(TorchFunctionMode):
    """Code that asks for float32 gets float64. The library's own casts are left as they are: among
    them is the one that tells whether a pattern was computed in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asks = func is torch.Tensor.float
        for x in (*args, *kwargs.values()):  # every operation comes by here
            asks = asks or x is torch.float32
        if asks and not sys._getframe(1).f_globals.get("__name__", "").startswith("tl_geometry"):
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = tuple(_wide(x) for x in args)
            kwargs = {name: _wide(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def double_hf(architecture: str, **changes: Any) -> Any:
    """The Hugging Face model in float64 (its rotary frequencies too). BLOOM's own gelu has
    0.79788456 for sqrt(2 / pi): PyTorch's takes its place."""
    with InDouble():
        model = hf_model(architecture, torch.float64, **changes)
    for module in model.modules():
        if type(module).__name__ == "BloomGelu":
            module.forward = partial(functional.gelu, approximate="tanh")
    return model


@cache
def exact(architecture: str) -> Any:
    """A bridge round it; to be run under :class:`InDouble`, and not to be edited."""
    with InDouble():
        return bridge_of(double_hf(architecture), name=f"exact-{architecture}")
