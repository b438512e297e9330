"""Rotary planes of heads: pairs of coordinates that rotate together, how they are chosen, and their
shares of the scores. Splits, sweeps, views and edits by plane ask here.

With rotated queries and keys ``q~, k~`` plane m of a term is

    X_ab^(m)[i, j] = sum_{e in plane m} q~_a[i, e] k~_b[j, e],   sum_m X_ab^(m) = X_ab

For constant q and k it is proportional to ``cos(theta_m (i - j) + phase)``, a function of the
offset, whose wavelength ``2 pi / theta_m`` is in tokens. Planes are chosen by their number, by a
pair ``(over, up_to)`` of wavelengths, or by the name of a band:

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
from typing import TypeGuard, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.tables import Table
from tl_geometry.models.rotary import RotaryPlanes
from tl_geometry.scores.labels import dominant
from tl_geometry.scores.terms import TermResult

NEAR = 16
"""The longest wavelength, in tokens, of the band ``near``."""
PASS = "pass"
"""Name of the band of coordinates that are not rotated."""
BANDS = ("near", "middle", "far", PASS)
"""Every plane is in one of these."""
Band = tuple[float, float]
"""Planes with ``over < wavelength <= up_to`` (tokens). Coordinates that are not rotated are in no
band of wavelengths."""
PlanesLike = int | str | Band | Sequence[int | str | Band]
"""Planes by number, by the name of a band, by a band of wavelengths (two floats), or several."""


def default_bands(length: int) -> dict[str, Band]:
    """The bands of wavelengths for prompts of ``length`` tokens.

    >>> default_bands(128)["middle"]
    (16.0, 128.0)
    """
    # in a prompt no longer than NEAR the middle band is empty, not reversed
    near, middle = float(NEAR), float(max(NEAR, length))
    return {"near": (0.0, near), "middle": (near, middle), "far": (middle, math.inf)}


def is_band(planes: PlanesLike) -> TypeGuard[Band]:
    """Whether a choice of planes is a pair of wavelengths: ``(0.0, 16.0)`` is, ``(0, 16)`` are two
    numbers of planes.

    >>> is_band((0.0, 16.0)), is_band((0, 16))
    (True, False)
    """
    pair = isinstance(planes, tuple) and len(planes) == 2
    return pair and any(isinstance(x, float) for x in cast("Sequence[object]", planes))


@dataclass(frozen=True, eq=False)
class HeadPlanes(Guarded):
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
        each = [HeadPlanes(p.plane[None], p.theta.double()[None], length) for p in planes]
        return HeadPlanes.beside(each)

    @staticmethod
    def beside(parts: Sequence[HeadPlanes]) -> HeadPlanes:
        """The planes of several sets of heads, one after another."""
        most = max(p.theta.shape[1] for p in parts)
        theta = [pad(p.theta, (0, most - p.theta.shape[1]), value=torch.nan) for p in parts]
        return HeadPlanes(torch.cat([p.plane for p in parts]), torch.cat(theta), parts[0].length)

    @property
    def wavelength(self) -> Float[Tensor, "head plane"]:
        """Tokens per turn; infinite for what is not rotated, NaN where there is no such plane."""
        return 2 * math.pi / self.theta.abs()

    def chosen(self, planes: PlanesLike) -> Bool[Tensor, "head plane"]:
        """The planes of each head that a choice means; planes that a head lacks are never
        chosen."""
        if isinstance(planes, str):
            if checks.choice(planes, BANDS, "planes") == PASS:
                return self.theta == 0
            return self.chosen(default_bands(self.length)[planes])
        if is_band(planes):
            over, up_to = planes
            expected = "0 <= over <= up_to"
            require(0 <= over <= up_to, "planes", expected=expected, got=planes)
            # NaN, the frequency of a plane that the head lacks, compares false
            turned = self.theta.abs() > 0
            return turned & (self.wavelength > over) & (self.wavelength <= up_to)
        if not isinstance(planes, Sequence):
            count, number = self.theta.shape[1], checks.whole(planes)
            expected = f"planes 0 to {count - 1}, two wavelengths, or near, middle, far, pass"
            fits = number is not None and 0 <= number < count
            require(fits, "planes", expected=expected, got=planes)
            return (torch.arange(count) == number) & ~self.theta.isnan()
        chosen = torch.zeros(self.theta.shape, dtype=torch.bool)
        for choice in cast("Sequence[PlanesLike]", planes):
            chosen |= self.chosen(choice)
        return chosen

    def coordinates(self, chosen: Bool[Tensor, "head plane"]) -> Bool[Tensor, "head d_head"]:
        """Which coordinates lie in the chosen planes."""
        return chosen.gather(1, self.plane)

    def select(self, heads: Int[Tensor, " head"]) -> HeadPlanes:
        """The same for some heads, in the given order."""
        return HeadPlanes(self.plane[heads], self.theta[heads], self.length)


def describe_planes(planes: PlanesLike) -> str:
    """The name of a choice of planes in captions and flags.

    >>> describe_planes(["near", 7]), describe_planes((0.0, 16.0))
    ('near, 7', 'wavelengths over 0 up to 16')
    """
    if isinstance(planes, str) or not isinstance(planes, Sequence):
        return str(planes)
    if is_band(planes):
        return "wavelengths over {:g} up to {:g}".format(*planes)
    return ", ".join(describe_planes(choice) for choice in cast("Sequence[PlanesLike]", planes))


@dataclass(frozen=True, eq=False, kw_only=True)
class PlaneTable(TermResult):
    """Shares of each rotary plane, by term, for each head: what ``.planes()`` of a split or a sweep
    returns.

    ``cs = sum X~^(m) . S~ / sum S~^2`` and ``gs = sum (p - u) . X^(m) / sum (p - u) . S`` for plane
    m of each term X (:mod:`tl_geometry.scores.sums`). Each sums to one over planes and terms; with
    ALiBi, whose term is in no plane, to one less its share. A model without rotation has one plane.
    """

    heads: tuple[tuple[int, int], ...]
    terms: tuple[str, ...]
    head_planes: HeadPlanes
    cs: Float[Tensor, "head plane term"]
    gs: Float[Tensor, "head plane term"]
    table_axes = ("head", "plane", "term")
    table_values = ("wavelength", "cs", "gs")

    @property
    def wavelength(self) -> Float[Tensor, "head plane"]:
        """Tokens per turn of each plane."""
        return self.head_planes.wavelength

    @property
    def total_cs(self) -> Float[Tensor, "head plane"]:
        """Covariance shares of the planes, all terms together."""
        return self.cs.sum(-1)

    @property
    def total_gs(self) -> Float[Tensor, "head plane"]:
        """Gain shares of the planes, all terms together."""
        return self.gs.sum(-1)

    def table_mask(self) -> Tensor:
        """A head may have fewer planes than the widest one."""
        return ~self.head_planes.theta.isnan().unsqueeze(-1).expand_as(self.cs)

    def by_band(self) -> Table:
        """Shares of the bands of wavelengths ``near``, ``middle``, ``far`` and ``pass``, all terms
        together, one row for each head; ``dominant`` is the band that is first by covariance (with
        more than half) and by gain, each with a clear lead, else ``"unclear"``."""
        member = torch.stack([self.head_planes.chosen(band) for band in BANDS], -1).to(self.cs)
        cs, gs = ((x.unsqueeze(-1) * member).sum(1) for x in (self.total_cs, self.total_gs))
        layers, heads = zip(*self.heads, strict=True)
        columns = {"layer": layers, "head": heads, "dominant": dominant(cs, gs, BANDS).labels}
        for share, values in (("cs", cs), ("gs", gs)):
            columns |= {f"{share}_{band}": x for band, x in zip(BANDS, values.mT, strict=True)}
        return Table.of(columns, self.provenance)
