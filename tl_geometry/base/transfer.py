"""Tensors that results hold are on the CPU: :func:`on_cpu`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, detached."""
    return [x.detach().cpu() for x in tensors]
