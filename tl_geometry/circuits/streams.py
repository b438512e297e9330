"""What do the readers of a block read, and where does what is written go? :class:`Shared` is the
ordinary stream; pruned runs (:mod:`tl_geometry.circuits.kept_edges`) have one of their own."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Reads = Float[Tensor, "batch position reader d_model"]
"""What some readers read: one entry for each, or one for all."""
Stream = Float[Tensor, "batch position d_model"]
"""The residual stream."""
Write = Float[Tensor, "position d_model"]
"""What one writer wrote in one context, or a gradient there."""


class Shared:
    """Gives each reader its input and takes what is written: the ordinary stream, of which every
    reader reads all."""

    def __init__(self, total: Stream) -> None:
        self.total = total

    def read(self, which: str) -> Reads:
        """The input of readers ``"q"``, ``"k"``, ``"v"`` or ``"mlp"``, once for all of a kind."""
        return self.total.unsqueeze(2)

    def add(self, writes: Float[Tensor, "writer batch position d_model"]) -> None:
        """Add to what every reader reads."""
        self.total = self.total + writes.sum(0)


class Apart(Shared):
    """The ordinary stream, whose queries, keys and values are read from copies that no gradient
    leaves: gradients at the copies tell the paths through each of them apart."""

    def read(self, which: str) -> Reads:
        """The stream; of an MLP with its past."""
        read = super().read(which)
        return read if which == "mlp" else read.detach().requires_grad_(torch.is_grad_enabled())
