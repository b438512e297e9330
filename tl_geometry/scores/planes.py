"""Which coordinates of a head does a choice of rotary planes mean? A rotary plane is a pair of
coordinates that rotate together. Splits, tables, views and edits by plane ask here.

With rotated queries and keys ``q~, k~`` plane m of a term is

    X_ab^(m)[i, j] = sum_{e in plane m} q~_a[i, e] k~_b[j, e],   sum_m X_ab^(m) = X_ab

For constant q and k it is proportional to ``cos(theta_m (i - j) + phase)``, a function of the
offset, whose wavelength ``2 pi / theta_m`` is in tokens. Planes are chosen by their number, by a
:class:`Band` of wavelengths, or by the name of a default band:

    near    wavelength <= 16           turns within a few tokens
    middle  16 < wavelength <= T       turns at least once in a prompt of T tokens
    far     wavelength > T             no whole turn within the prompt
    pass    not rotated at all

(Barbero et al. 2024, arXiv:2410.06205, on what single frequencies do.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.models.rotary import RotaryPlanes

NEAR = 16
"""The longest wavelength, in tokens, of the default band ``near``."""
PASS = "pass"
"""Name of the band of coordinates that are not rotated."""


class Band(NamedTuple):
    """Planes with ``over < wavelength <= up_to`` (tokens). Coordinates that are not rotated are in
    no band of wavelengths."""

    over: float
    up_to: float


PlanesLike = int | str | Band | Sequence[int | str | Band]
"""Planes by number, by the name of a default band, by a band of wavelengths, or several of
these."""


def default_bands(length: int) -> dict[str, Band]:
    """The default bands for prompts of ``length`` tokens.

    >>> default_bands(128)["middle"]
    Band(over=16, up_to=128)
    """
    # in a prompt no longer than NEAR the middle band is empty, not reversed
    middle = max(NEAR, length)
    return {"near": Band(0, NEAR), "middle": Band(NEAR, middle), "far": Band(middle, math.inf)}


@dataclass(frozen=True, eq=False)
class HeadPlanes:
    """The planes of some heads in prompts of ``length`` tokens: the number of the ``plane`` of each
    coordinate, and the frequency ``theta`` of each plane in radians per token. Coordinates that are
    not rotated are one plane of frequency zero; ``theta`` is NaN where a head has fewer planes than
    others."""

    plane: Int[Tensor, "head d_head"]
    theta: Float[Tensor, "head plane"]
    length: int

    @staticmethod
    def of(planes: Sequence[RotaryPlanes], length: int) -> HeadPlanes:
        """The planes of heads, given those of each head's layer."""
        n_planes = max(len(p.theta) for p in planes)
        theta = torch.full((len(planes), n_planes), torch.nan, dtype=torch.float64)
        for row, layer_planes in zip(theta, planes, strict=True):
            row[: len(layer_planes.theta)] = layer_planes.theta
        return HeadPlanes(torch.stack([p.plane for p in planes]), theta, length)

    @property
    def wavelength(self) -> Float[Tensor, "head plane"]:
        """Tokens per turn; infinite for what is not rotated, NaN where there is no such plane."""
        return 2 * math.pi / self.theta.abs()

    def inside(self, band: Band) -> Bool[Tensor, "head plane"]:
        """Which planes a band holds."""
        # NaN, the frequency of a plane that the head lacks, compares false
        turned = self.theta.abs() > 0
        return turned & (self.wavelength > band.over) & (self.wavelength <= band.up_to)

    def chosen(self, planes: PlanesLike) -> Bool[Tensor, "head plane"]:
        """The planes of each head that a choice means; planes that a head lacks are never
        chosen."""
        if isinstance(planes, str):
            bands = default_bands(self.length)
            name = checks.choice(planes, (*bands, PASS), "planes")
            return self.theta == 0 if name == PASS else self.inside(bands[name])
        # a Band is a tuple, so it must be recognised before sequences
        if isinstance(planes, Band):
            expected, got = "over < up_to, both at least 0", tuple(planes)
            require(0 <= planes.over < planes.up_to, "planes", expected=expected, got=got)
            return self.inside(planes)
        if isinstance(planes, int):
            count = self.theta.shape[1]
            expected = f"planes 0 to {count - 1}, a Band of wavelengths, or near, middle, far, pass"
            require(0 <= planes < count, "planes", expected=expected, got=planes)
            numbered = torch.arange(count) == planes
            return numbered & ~self.theta.isnan()
        chosen = torch.zeros(self.theta.shape, dtype=torch.bool)
        for choice in planes:
            chosen |= self.chosen(choice)
        return chosen

    def coordinates(self, chosen: Bool[Tensor, "head plane"]) -> Bool[Tensor, "head d_head"]:
        """Which coordinates lie in the chosen planes."""
        return chosen.gather(1, self.plane)

    def bands(self) -> tuple[tuple[str, ...], ...]:
        """The default band of each plane of each head, ``""`` where there is none."""
        names = (*default_bands(self.length), PASS)
        table = torch.stack([self.chosen(name) for name in names], -1)
        return tuple(
            tuple(names[row.index(True)] if any(row) else "" for row in head)
            for head in table.tolist()
        )

    def select(self, heads: Int[Tensor, " head"]) -> HeadPlanes:
        """The same for some heads, in the given order."""
        return HeadPlanes(self.plane[heads], self.theta[heads], self.length)


def describe_planes(planes: PlanesLike) -> str:
    """The name of a choice of planes in captions and flags.

    >>> describe_planes(["near", 7]), describe_planes(Band(0, 16))
    ('near, 7', 'wavelengths over 0 up to 16')
    """
    if isinstance(planes, Band):
        return f"wavelengths over {planes.over:g} up to {planes.up_to:g}"
    if isinstance(planes, str | int):
        return str(planes)
    return ", ".join(describe_planes(choice) for choice in planes)
