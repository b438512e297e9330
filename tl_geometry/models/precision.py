"""How does a half-precision model run in float32 for a while? Inside a ``with`` block the weights
are the same numbers, and the arithmetic is exact enough to check. Probes, inference and the checks
of layers and row blocks call this.

In half precision a fault below about 1% (a scale, a table, an eps) hides in the rounding. So such a
model is probed with its weights widened, its layers' specifications are inferred from that probe,
and each is verified on it with the bound of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

LIMIT = 2**32
"""Bytes that the widened weights may take (4 GiB, a billion parameters); larger models are verified
in their own precision only."""
HALF = (torch.float16, torch.bfloat16)
T = TypeVar("T")


def is_half(model: Any) -> bool:
    """Whether a model's weights are in half precision."""
    return next(iter(model.parameters())).dtype in HALF


def can_widen(model: Any) -> bool:
    """Whether widened weights stay below :data:`LIMIT`."""
    return 4 * sum(p.numel() for p in model.parameters() if p.dtype in HALF) <= LIMIT


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """The model in float32 inside ``with``; afterwards its weights are the very tensors that they
    were, also on exceptions."""
    cfg: Any = model.cfg
    with ExitStack() as stack:
        stack.callback(setattr, cfg, "dtype", cfg.dtype)  # HookedTransformer casts to it
        cfg.dtype = torch.float32
        # a bridge shares modules with the model that it was made from: these are wide by then
        for root in (model, getattr(model, "original_model", None)):
            if isinstance(root, nn.Module):
                stack.enter_context(with_single_weights(root))
        yield


@contextmanager
def with_single_weights(module: nn.Module) -> Iterator[None]:
    """One module in float32 inside ``with``, by tensors in place of its parameters: what was
    computed inside keeps them, so that gradients can be taken afterwards."""
    with ExitStack() as stack:
        for part in module.modules():
            for which in ("_parameters", "_buffers"):
                table: dict[str, Any] = vars(part)[which]
                for name, value in table.items():
                    if value is not None and value.dtype in HALF:
                        stack.callback(table.__setitem__, name, value)
                        table[name] = value.detach().float()
        yield


def in_single(model: nn.Module, run: Callable[[], T]) -> tuple[T, torch.dtype]:
    """What ``run`` gives of a model, and the precision it had: a half-precision model runs in
    float32 where its widened weights are not too large."""
    if is_half(model) and can_widen(model):
        try:
            with widened(model):
                return run(), torch.float32
        # a model that casts by itself cannot run in float32: it is checked in its own precision
        except RuntimeError:
            pass
    return run(), next(model.parameters()).dtype
