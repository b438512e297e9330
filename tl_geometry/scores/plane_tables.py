"""Which frequencies carry the scores of a rotary model? Tables of the shares of rotary planes and
of bands of wavelengths. ``.planes()`` of a split's shares and of a sweep returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.results import Result
from tl_geometry.scores.labels import dominant
from tl_geometry.scores.planes import PASS, Band, HeadPlanes, default_bands
from tl_geometry.scores.terms import TermResult


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadBands(Result):
    """Shares of bands of wavelengths, one row for each head: what :meth:`BandTable.by_head`
    returns."""

    heads: tuple[tuple[int, int], ...]
    bands: tuple[str, ...]
    dominant: tuple[str, ...]
    cs: Float[Tensor, "head band"]
    gs: Float[Tensor, "head band"]

    def columns(self) -> Sequence[str]:
        shares = [f"{share}_{band}" for share in ("cs", "gs") for band in self.bands]
        return ("layer", "head", "dominant", *shares)

    def rows(self) -> Sequence[Sequence[object]]:
        shares = torch.cat([self.cs, self.gs], 1).tolist()
        return [
            (layer, head, self.dominant[h], *shares[h])
            for h, (layer, head) in enumerate(self.heads)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class BandTable(TermResult):
    """Shares of bands of wavelengths, by term, for each head: what :meth:`PlaneTable.by_band`
    returns.

    ``cs`` and ``gs`` sum over bands and terms to one, less the share of planes in no band and of
    ALiBi.
    """

    heads: tuple[tuple[int, int], ...]
    bands: tuple[str, ...]
    terms: tuple[str, ...]
    cs: Float[Tensor, "head band term"]
    gs: Float[Tensor, "head band term"]
    table_axes, table_values = ("head", "band", "term"), ("cs", "gs")

    @property
    def total_cs(self) -> Float[Tensor, "head band"]:
        """Covariance shares of the bands, all terms together."""
        return self.cs.sum(-1)

    @property
    def total_gs(self) -> Float[Tensor, "head band"]:
        """Gain shares of the bands, all terms together."""
        return self.gs.sum(-1)

    @property
    def dominant(self) -> tuple[str, ...]:
        """The band of each head that is first by covariance and by gain, each with a clear lead
        (:func:`tl_geometry.scores.labels.dominant`), else ``"unclear"``; ``"uniform"`` for a head
        without scores to explain."""
        return dominant(self.total_cs, self.total_gs, self.bands).labels

    def by_head(self) -> HeadBands:
        """The same with one row for each head, all terms together."""
        return HeadBands(
            provenance=self.provenance,
            heads=self.heads,
            bands=self.bands,
            dominant=self.dominant,
            cs=self.total_cs,
            gs=self.total_gs,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class PlaneTable(TermResult):
    """Shares of each rotary plane, by term, for each head: what :meth:`ShareTable.planes` returns.

    ``cs = sum X~^(m) . S~ / sum S~^2`` and ``gs = sum (p - u) . X^(m) / sum (p - u) . S`` for plane
    m of each term X (:mod:`tl_geometry.scores.sums`). Each sums to one over planes and terms; with
    ALiBi, whose term is in no plane, to one less its share. ``wavelength`` is in tokens (infinite
    for what is not rotated); ``head_planes`` are the planes themselves, in prompts of ``length``
    tokens, which the default bands depend on.
    """

    heads: tuple[tuple[int, int], ...]
    terms: tuple[str, ...]
    head_planes: HeadPlanes
    cs: Float[Tensor, "head plane term"]
    gs: Float[Tensor, "head plane term"]

    @property
    def length(self) -> int:
        """Positions of a prompt."""
        return self.head_planes.length

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

    def by_band(self, bands: Mapping[str, Band] | None = None) -> BandTable:
        """Sums over bands of wavelengths: ``near`` (up to 16 tokens), ``middle`` (up to the
        prompt's length), ``far`` and ``pass`` (not rotated), or bands of your own."""
        chosen = default_bands(self.length) if bands is None else dict(bands)
        member = {name: self.head_planes.inside(Band(*band)) for name, band in chosen.items()}
        # a Band never contains what is not rotated, so that is always a band of its own
        member |= {PASS: self.head_planes.chosen(PASS)}
        weight = torch.stack(list(member.values()), 1).to(self.cs)
        cs, gs = (
            einsum(weight, x, "head band plane, head plane term -> head band term")
            for x in (self.cs, self.gs)
        )
        return BandTable(
            provenance=self.provenance,
            heads=self.heads,
            bands=tuple(member),
            terms=self.terms,
            cs=cs,
            gs=gs,
            bias_label=self.bias_label,
        )

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "plane", "wavelength", "band", "term", "cs", "gs")

    def rows(self) -> Sequence[Sequence[object]]:
        cs, gs, waves = self.cs.tolist(), self.gs.tolist(), self.wavelength.tolist()
        bands = self.head_planes.bands()
        return [
            (layer, head, m, waves[h][m], bands[h][m], term, cs[h][m][t], gs[h][m][t])
            for h, (layer, head) in enumerate(self.heads)
            for m in range(len(waves[h]))
            # a head may have fewer planes than the widest one
            if bands[h][m]
            for t, term in enumerate(self.terms)
        ]
