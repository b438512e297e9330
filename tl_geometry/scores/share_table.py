"""The table of shares that a split and a sweep return: what each term and each group of terms
explains of each head's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import fail
from tl_geometry.base.intervals import Interval, LeftOut, jackknife_interval
from tl_geometry.base.results import Result
from tl_geometry.scores.labels import MARGIN_OVER, SHARE_OVER, Dominant, dominant
from tl_geometry.scores.plane_tables import PlaneTable
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.sums import ShareSums
from tl_geometry.scores.terms import BIAS_BIAS, GROUPS, group_of, label, term_names, term_pairs

COLUMNS = (
    *("layer", "head", "term", "group", "cs", "gs", "es", "dominant", "margin", "gain_margin"),
    *("flag", "dropped_mass", "numerator", "gain", "energy", "total", "cells"),
)
"""Columns of a share table without intervals."""
INTERVAL = ("corrected", "low", "high")
"""Columns of an interval, behind the name of the share: ``cs_low``, ``gs_high``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Marginals(Result):
    """Shares of each part on the query side (summed over key parts) and on the key side: what
    :meth:`ShareTable.marginals` returns.

    ``cs`` and ``gs`` sum to one over the parts of a side; ``dropped_mass`` is that of the table.
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    dropped_mass: Float[Tensor, " head"]

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "side", "part", "cs", "gs", "dropped_mass")

    def rows(self) -> Sequence[Sequence[object]]:
        cs, gs, mass = self.cs.tolist(), self.gs.tolist(), self.dropped_mass.tolist()
        return [
            (layer, head, side, part, cs[h][s][p], gs[h][s][p], mass[h])
            for h, (layer, head) in enumerate(self.heads)
            for s, side in enumerate(("query", "key"))
            for p, part in enumerate(self.parts)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareTable(Result):
    """Shares of every term, and of the groups position, content and mixed, for each head.

    ``cs = numerators / total`` and ``gs = gains / gain_total`` sum to one over the terms and over
    the groups; ``es = energies / (sum of energies)``, that of a group being the sum over its terms
    (NaN for writers, and in a sweep without ``detail="energy"``). Terms are pairs of ``parts``,
    then ALiBi where there is one. ``drop`` first queries and keys were left out; ``dropped_mass``
    is the attention paid to them (mean over the other queries), which no share describes. A uniform
    head has NaN shares.

    Labels need the same name first by covariance and by gain
    (:func:`tl_geometry.scores.labels.dominant`); where the two disagree the row has a ``flag``.

    Where intervals were asked for, ``resampled`` and ``resampled_gains`` are covariance and gain
    shares with groups of contexts left out (:class:`tl_geometry.scores.leave_out.Resampled`;
    ``resampled_sizes`` the groups' shares of the contexts): :attr:`intervals`,
    :attr:`gain_intervals`, those of the groups, and labels only where the intervals of both margins
    exclude zero.

    ``bias_label`` is how (bias, bias) is shown (:func:`tl_geometry.scores.terms.bias_label`); its
    key is always the same. ``plane_numerators`` and ``plane_gains`` are those of the terms in each
    rotary plane, of frequency ``theta`` (radians per token), ``plane`` the plane of each coordinate
    and ``length`` the positions of a prompt, where planes were asked for (:meth:`planes`).
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    terms: tuple[str, ...]
    numerators: Float[Tensor, "head term"]
    energies: Float[Tensor, "head term"]
    gains: Float[Tensor, "head term"]
    total: Float[Tensor, " head"]
    gain_total: Float[Tensor, " head"]
    floor: Float[Tensor, " head"]
    rows_used: float
    cells: float
    drop: int = 0
    dropped_mass: Float[Tensor, " head"] | None = None
    resampled: Float[Tensor, "head sample term"] | None = None
    resampled_gains: Float[Tensor, "head sample term"] | None = None
    resampled_sizes: tuple[tuple[float, ...], ...] = ()
    share_over: float = SHARE_OVER
    margin_over: float = MARGIN_OVER
    bias_label: str = BIAS_BIAS
    plane_numerators: Float[Tensor, "head plane pair"] | None = None
    plane_gains: Float[Tensor, "head plane pair"] | None = None
    plane: Int[Tensor, "head d_head"] | None = None
    theta: Float[Tensor, "head plane"] | None = None
    length: int = 0
    version: ClassVar[int] = 4

    @property
    def sums(self) -> ShareSums:
        """The pooled sums."""
        count = self.total.new_tensor
        return ShareSums(
            numerators=self.numerators,
            energies=self.energies,
            gains=self.gains,
            total=self.total,
            gain_total=self.gain_total,
            floor=self.floor,
            rows=count(self.rows_used),
            cells=count(self.cells),
            plane_numerators=self.plane_numerators,
            plane_gains=self.plane_gains,
        )

    @property
    def cs(self) -> Float[Tensor, "head term"]:
        """Covariance shares of the terms."""
        return self.sums.cs

    @property
    def gs(self) -> Float[Tensor, "head term"]:
        """Gain shares of the terms: their part in where attention goes."""
        return self.sums.gs

    @property
    def es(self) -> Float[Tensor, "head term"]:
        """Energy shares of the terms."""
        return self.sums.es

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(query part, key part) of each term."""
        return term_pairs(self.parts, alibi=len(self.terms) > len(self.parts) ** 2)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups present: none when the parts are the user's own."""
        return GROUPS if all(group_of(t) for t in self.terms) else ()

    def _grouped(self, values: Tensor) -> Float[Tensor, "head ... group"]:
        member = torch.tensor(
            [[group_of(t) == g for g in self.groups] for t in self.terms], dtype=values.dtype
        )
        return values @ member.reshape(len(self.terms), len(self.groups))

    @property
    def group_cs(self) -> Float[Tensor, "head group"]:
        """Covariance shares of the groups, in the order of :attr:`groups`."""
        return self._grouped(self.cs)

    @property
    def group_gs(self) -> Float[Tensor, "head group"]:
        """Gain shares of the groups."""
        return self._grouped(self.gs)

    @property
    def group_es(self) -> Float[Tensor, "head group"]:
        """Energy shares of the groups (sums over their terms)."""
        return self._grouped(self.es)

    def _interval(self, resampled: Float[Tensor, "head sample *batch"] | None) -> Interval | None:
        """Interval of anything linear in the shares, from its values in the resampled ones."""
        if resampled is None:
            return None
        found, at = [], 1
        for sizes in self.resampled_sizes:
            values = resampled[:, at : at + len(sizes)].transpose(0, 1)
            found.append(LeftOut(values, resampled.new_tensor(sizes)))
            at += len(sizes)
        return jackknife_interval(resampled[:, 0], found)

    @property
    def intervals(self) -> Interval | None:
        """Covariance shares ``[head term]`` corrected for the bias of an estimated basis, with 95%
        bounds and standard errors; ``None`` where they were not asked for.

        The corrected shares sum to one as the shares do; a share itself may lie outside.
        """
        return self._interval(self.resampled)

    @property
    def gain_intervals(self) -> Interval | None:
        """The same for the gain shares ``[head term]``."""
        return self._interval(self.resampled_gains)

    @property
    def group_intervals(self) -> Interval | None:
        """Covariance shares of the groups ``[head group]`` with their intervals."""
        return self._interval(self._grouped_samples[0])

    @property
    def group_gain_intervals(self) -> Interval | None:
        """Gain shares of the groups ``[head group]`` with their intervals."""
        return self._interval(self._grouped_samples[1])

    @property
    def _grouped_samples(self) -> tuple[Tensor | None, Tensor | None]:
        """Covariance and gain shares of the groups with groups of contexts left out."""
        each = (self.resampled, self.resampled_gains)
        cs, gs = (None if x is None else self._grouped(x) for x in each)
        return cs, gs

    def _certain(self, shares: Tensor, resampled: Tensor | None) -> Bool[Tensor, " head"] | None:
        """Heads whose interval of the margin (largest share over the second) excludes zero."""
        if resampled is None or shares.shape[1] < 2:
            return None
        order = shares.nan_to_num(-torch.inf).argsort(dim=-1, descending=True, stable=True)
        two = resampled.gather(2, order[:, None, :2].expand(-1, resampled.shape[1], -1))
        margin = self._interval(two[..., 0] - two[..., 1])
        return None if margin is None else margin.low > 0

    @property
    def by_term(self) -> Dominant:
        """Dominant term of each head; ``"unclear"`` where none is, ``"uniform"`` where there is
        nothing to explain."""
        return self._dominant(self.cs, self.gs, self.terms, (self.resampled, self.resampled_gains))

    @property
    def by_group(self) -> Dominant:
        """Dominant group of each head; ``"unclear"`` where none is (``"mixed"`` is the group of
        position-content terms)."""
        return self._dominant(self.group_cs, self.group_gs, self.groups, self._grouped_samples)

    def _dominant(
        self,
        cs: Tensor,
        gs: Tensor,
        names: Sequence[str],
        resampled: tuple[Tensor | None, Tensor | None],
    ) -> Dominant:
        over = {"share_over": self.share_over, "margin_over": self.margin_over}
        certain = (self._certain(cs, resampled[0]), self._certain(gs, resampled[1]))
        return dominant(cs, gs, names, certain=certain, **over)

    @property
    def dominant(self) -> tuple[str, ...]:
        """Dominant term of each head."""
        return self.by_term.labels

    @property
    def margin(self) -> Float[Tensor, " head"]:
        """Distance of the largest share to the second."""
        return self.by_term.margin

    def marginals(self) -> Marginals:
        """Shares of each part by side: on the query side summed over the key parts, on the key side
        over the query parts."""
        names = tuple(dict.fromkeys(part for pair in self.pairs for part in pair))
        member = torch.tensor(
            [[[pair[side] == n for n in names] for side in (0, 1)] for pair in self.pairs]
        ).to(self.cs)
        cs, gs = (
            einsum(x, member, "head term, term side part -> head side part")
            for x in (self.cs, self.gs)
        )
        return Marginals(
            provenance=self.provenance,
            heads=self.heads,
            parts=names,
            cs=cs,
            gs=gs,
            dropped_mass=self._mass(),
        )

    def planes(self) -> PlaneTable:
        """Shares of each rotary plane, by term: which frequencies carry the scores.

        A model without rotation has one plane, which is all of each term. Of a split's shares, and
        of a sweep with ``detail="planes"``.
        """
        sums = (self.plane_numerators, self.plane_gains, self.plane, self.theta)
        numerators, gains, plane, theta = sums
        if numerators is None or gains is None or plane is None or theta is None:
            instead = 'sweep_heads(..., detail="planes"), or split_scores(...).shares()'
            fail("planes", expected="sums by plane", got="a table without", instead=instead)
        uniform = self.sums.uniform
        total, gained = (
            torch.where(uniform, torch.nan, x)[:, None, None] for x in (self.total, self.gain_total)
        )
        return PlaneTable(
            provenance=self.provenance,
            heads=self.heads,
            terms=self.terms[: len(self.parts) ** 2],
            plane=plane,
            theta=theta,
            length=self.length,
            cs=numerators / total,
            gs=gains / gained,
            bias_label=self.bias_label,
        )

    def label(self, term: str) -> str:
        """How a term, a group or a column about one is shown to a reader."""
        return label(term, self.bias_label)

    def readable(self, value: object) -> object:
        return self.label(value) if isinstance(value, str) else value

    def _mass(self) -> Float[Tensor, " head"]:
        """Attention paid to what was left out, NaN where it is not known."""
        unknown = torch.full_like(self.total, torch.nan if self.drop else 0.0)
        return unknown if self.dropped_mass is None else self.dropped_mass

    @staticmethod
    def of(
        sums: ShareSums,
        heads: Sequence[tuple[int, int]],
        parts: Sequence[str],
        planes: HeadPlanes | None = None,
        **fields: object,
    ) -> ShareTable:
        """From sums (pooled here) of the terms of ``parts``; ``fields`` are the remaining fields,
        ``provenance`` among them."""
        s = sums.to("cpu").pooled()
        return ShareTable(
            heads=tuple(heads),
            parts=tuple(parts),
            terms=term_names(parts, alibi=s.numerators.shape[-1] > len(parts) ** 2),
            numerators=s.numerators,
            energies=s.energies,
            gains=s.gains,
            total=s.total,
            gain_total=s.gain_total,
            floor=s.floor,
            rows_used=float(s.rows),
            cells=float(s.cells),
            plane_numerators=s.plane_numerators,
            plane_gains=s.plane_gains,
            plane=planes and planes.plane,
            theta=planes and planes.theta,
            length=planes.length if planes else 0,
            **fields,  # pyright: ignore[reportArgumentType]
        )

    def columns(self) -> Sequence[str]:
        if self.resampled is None:
            return COLUMNS
        with_interval = lambda name: (name, *(f"{name}_{end}" for end in INTERVAL))  # noqa: E731
        return tuple(
            column
            for name in COLUMNS
            for column in (with_interval(name) if name in ("cs", "gs") else (name,))
        )

    def rows(self) -> Sequence[Sequence[object]]:
        tables = [self._columns_of(grouped=False)]
        tables += [self._columns_of(grouped=True)] if self.groups else []
        mass, out = self._mass(), []
        for h, (layer, head) in enumerate(self.heads):
            for grouped, (best, names, shares, sums) in enumerate(tables):
                label = [float(best.margin[h]), float(best.gain_margin[h]), best.flags[h]]
                for t, name in enumerate(names):
                    what = [None, name] if grouped else [name, None]
                    winner = [best.labels[h] == name, *label, float(mass[h])]
                    values = [[float(v[h, t]) for v in of] for of in (shares, sums)]
                    last = [*values[1], float(self.total[h]), self.cells]
                    out.append([layer, head, *what, *values[0], *winner, *last])
        return out

    def _columns_of(
        self, *, grouped: bool
    ) -> tuple[Dominant, tuple[str, ...], list[Tensor], list[Tensor]]:
        """Labels, names, shares with their intervals, and sums of the terms or of the groups."""
        sums = [self.numerators, self.gains, self.energies]
        if grouped:
            best, names, sums = self.by_group, self.groups, [self._grouped(x) for x in sums]
            shares = [self.group_cs, self.group_gs, self.group_es]
            ends = (self.group_intervals, self.group_gain_intervals)
        else:
            best, names, shares = self.by_term, self.terms, [self.cs, self.gs, self.es]
            ends = (self.intervals, self.gain_intervals)
        cs, gs = ([] if found is None else list(found[:3]) for found in ends)
        return best, names, [shares[0], *cs, shares[1], *gs, shares[2]], sums
