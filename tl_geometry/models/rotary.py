"""Which coordinates of a head turn together, and how fast? The rotary planes of an attention layer,
read from the tables of cosines and sines that its forward pass used; splits and edits by plane ask.

A rotary embedding turns plane m of every query and key by the angle ``theta_m t`` at position t, so
that plane m of a score depends on the offset ``i - j`` through ``theta_m (i - j)``. Two coordinates
make a plane: (m, m + d_rot / 2) or (2m, 2m + 1). What is not turned, coordinates beyond d_rot and
pairs of frequency zero, is one more plane, the last.

Frequencies are measured from the tables, not taken from a configuration: scaled bases (linear,
dynamic, YaRN, Llama 3), local and global bases, and a length that changes them, are in them as they
were used. Tables that are not ``a cos(theta_m t)`` and ``a sin(theta_m t)`` for one theta_m per
plane of the layer's own pairing are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.attention import Rotation

ROUNDOFF = 2**-24
"""Angles are computed in float32 by most models, whatever their dtype."""


@dataclass(frozen=True, eq=False)
class RotaryPlanes:
    """Which plane each coordinate of a head lies in, and how fast each plane turns.

    ``plane[e]`` is the plane of coordinate e, ``theta[m]`` its frequency in radians per token, in
    the order of the pairs; what is not turned is the last plane, of frequency zero.
    """

    plane: Int[Tensor, " d_head"]
    theta: Float[Tensor, " plane"]

    @property
    def wavelength(self) -> Float[Tensor, " plane"]:
        """Tokens per turn, ``2 pi / |theta|``; infinite for what is not turned."""
        return 2 * math.pi / self.theta.abs()


def pair_of(d_rot: int, pairing: str) -> Int[Tensor, " d_rot"]:
    """The plane of each of the first ``d_rot`` coordinates.

    >>> pair_of(6, "half").tolist(), pair_of(6, "adjacent").tolist()
    ([0, 1, 2, 0, 1, 2], [0, 0, 1, 1, 2, 2])
    """
    index = torch.arange(d_rot)
    return index % (d_rot // 2) if pairing == "half" else index // 2


def frequencies(
    cos: Float[Tensor, "position d_rot"], sin: Float[Tensor, "position d_rot"]
) -> Float[Tensor, " d_rot"]:
    """Radians per position, from the unwrapped angle at the last one (float64; zero for a single
    position).

    >>> angle = torch.arange(40.0).double().unsqueeze(1) * torch.tensor([1.0, 0.01])
    >>> frequencies(angle.cos(), angle.sin())
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    # a plane turns by less than half a turn from one position to the next, so that no turn is lost
    angle = np.unwrap(torch.atan2(sin.double(), cos.double()).numpy(), axis=0)
    return torch.from_numpy(angle[-1] / max(1, len(angle) - 1))


def planes_of_tables(
    rotation: Rotation | None, d_head: int, *, roundoff: float = ROUNDOFF, what: str = "rotation"
) -> RotaryPlanes:
    """The planes of a rotation, whose tables must be those of one frequency per plane to a few
    times ``roundoff``; without a rotation all coordinates are one plane of frequency zero."""
    if rotation is None:
        nothing = torch.zeros(d_head, dtype=torch.int64)
        return RotaryPlanes(nothing, torch.zeros(1, dtype=torch.float64))
    cos, sin = (table.detach().double().cpu() for table in (rotation.cos, rotation.sin))
    length, d_rot = cos.shape
    pair = pair_of(d_rot, rotation.pairing)
    theta = frequencies(cos, sin)[: d_rot // 2 if rotation.pairing == "half" else None]
    theta = theta if rotation.pairing == "half" else theta[::2]
    size = float(torch.hypot(cos[0], sin[0]).amax())
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * theta[pair]
    # a table rounds by itself, and its angle, computed in float32, by its own size: 16 units of
    # both
    bound = 16 * (max(roundoff, ROUNDOFF) + ROUNDOFF * angle.abs()) * size
    error = torch.maximum((size * angle.cos() - cos).abs(), (size * angle.sin() - sin).abs())
    fits = bool((error <= bound).all())
    expected = "cosines and sines of one frequency for each plane"
    got, instead = f"tables that are off by {float(error.max()):.2g}", "check_model(model)"
    require(fits, what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    turned = theta != 0
    number = turned.cumsum(0) - 1  # planes that turn, in their order, then the rest
    still = int(turned.sum())
    plane = torch.full((d_head,), still, dtype=torch.int64)
    plane[:d_rot] = torch.where(turned, number, still)[pair]
    rest = [0.0] if bool((plane == still).any()) else []
    return RotaryPlanes(plane, torch.cat([theta[turned], theta.new_tensor(rest)]))
