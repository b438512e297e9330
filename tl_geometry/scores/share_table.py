"""How much of each head's scores does each term, and each group of terms, explain? The table that
``split.shares()`` returns, and the base of the table of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.errors import fail
from tl_geometry.base.intervals import Interval
from tl_geometry.base.results import Result
from tl_geometry.scores.labels import Dominant, dominant
from tl_geometry.scores.leave_out import Resampled
from tl_geometry.scores.plane_tables import PlaneTable
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.sums import ShareSums
from tl_geometry.scores.terms import GROUPS, TermResult, group_of, term_names, term_pairs

COLUMNS = (
    *("layer", "head", "term", "group", "cs", "gs", "es", "dominant", "margin", "gain_margin"),
    *("flag", "dropped_mass", "numerator", "gain", "energy", "total", "cells"),
)
"""Columns of a share table without intervals."""
INTERVAL = ("corrected", "low", "high")
"""Suffixes of the columns of an interval, after the name of the share: ``cs_low``, ``gs_high``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Marginals(Result):
    """Shares of each part on the query side (summed over key parts) and on the key side (summed
    over query parts): what :meth:`ShareTable.marginals` returns.

    ``cs`` and ``gs`` sum to one over the parts of a side; ``dropped_mass`` is the attention paid to
    positions that were left out (:class:`ShareTable`).
    """

    sides: ClassVar = ("query", "key")
    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    dropped_mass: Float[Tensor, " head"]
    table_axes, table_values = ("head", "side", "part"), ("cs", "gs", "dropped_mass")


class Level(NamedTuple):
    """One level of the table, terms or groups of terms: names, sums, and where intervals were asked
    for the shares with groups of contexts left out."""

    names: tuple[str, ...]
    sums: ShareSums
    resampled: Resampled | None

    @property
    def interval(self) -> Interval | None:
        """Interval of the covariance shares."""
        return self.resampled and self.resampled.interval(self.resampled.cs)

    @property
    def gain_interval(self) -> Interval | None:
        """Interval of the gain shares."""
        return self.resampled and self.resampled.interval(self.resampled.gs)

    def dominant(self) -> Dominant:
        """Label of each head."""
        certain = (None, None)
        if self.resampled is not None and len(self.names) > 1:
            resampled = (self.resampled.cs, self.resampled.gs)
            shares = (self.sums.cs, self.sums.gs)
            certain_cs, certain_gs = (
                self._certain(*pair) for pair in zip(shares, resampled, strict=True)
            )
            certain = (certain_cs, certain_gs)
        return dominant(self.sums.cs, self.sums.gs, self.names, certain=certain)

    def _certain(self, shares: Tensor, samples: Tensor) -> Bool[Tensor, " head"]:
        """Heads for which the interval of the margin (largest share minus the second) excludes
        zero. ``shares [head term]`` say which two terms are first, ``samples [head sample term]``
        give the margin of these two in each sample."""
        order = shares.nan_to_num(-torch.inf).argsort(dim=-1, descending=True, stable=True)
        top_two = samples.gather(2, order[:, None, :2].expand(-1, samples.shape[1], -1))
        assert self.resampled is not None
        return self.resampled.interval(top_two[..., 0] - top_two[..., 1]).low > 0

    def columns(self) -> list[Tensor]:
        """Columns ``[head name]``: shares, each followed by its interval where there is one, then
        the sums behind them. The order is that of :data:`COLUMNS`."""
        cs, gs = ([] if x is None else list(x[:3]) for x in (self.interval, self.gain_interval))
        sums = self.sums
        shares = [sums.cs, *cs, sums.gs, *gs, sums.es]
        return [*shares, sums.numerators, sums.gains, sums.energies]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareTable(TermResult):
    """Shares of every term, and of the groups position, content and mixed, for each head.

    ``cs = numerators / total`` and ``gs = gains / gain_total`` of the pooled ``sums`` add up to one
    over the terms and over the groups; ``es = energies / (sum of energies)``, for a group the sum
    over its terms (NaN for writers, and in a sweep without ``detail="energy"``). Terms are pairs of
    ``parts``, then ALiBi where there is one. The first ``drop`` queries and keys were left out;
    ``dropped_mass`` is the attention that the other queries pay to these keys (mean over queries),
    which no share describes. A uniform head has NaN shares.

    Labels need the same name first by covariance and by gain
    (:func:`tl_geometry.scores.labels.dominant`); where the two disagree the row has a ``flag``.

    Where intervals were asked for, ``resampled`` holds the shares with groups of contexts left out
    (:mod:`tl_geometry.scores.leave_out`). Then :attr:`intervals`, :attr:`gain_intervals` and those
    of the groups exist, and a head has a label only where the intervals of both margins exclude
    zero. ``head_planes`` are the rotary planes of the sums by plane, where these were asked for
    (:meth:`planes`).
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    sums: ShareSums
    drop: int = 0
    dropped_mass: Float[Tensor, " head"] | None = None
    resampled: Resampled | None = None
    head_planes: HeadPlanes | None = None

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
    def _alibi(self) -> bool:
        return self.sums.numerators.shape[-1] > len(self.parts) ** 2

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms, in the order of the term axis."""
        return term_names(self.parts, alibi=self._alibi)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(query part, key part) of each term."""
        return term_pairs(self.parts, alibi=self._alibi)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups present: none when the parts are the user's own."""
        return GROUPS if all(group_of(t) for t in self.terms) else ()

    @property
    def _terms(self) -> Level:
        return Level(self.terms, self.sums, self.resampled)

    @property
    def _groups(self) -> Level:
        groups, terms = self.groups, self.terms
        member = torch.tensor([[group_of(t) == g for g in groups] for t in terms]).to(self.cs)
        member = member.reshape(len(terms), len(groups))  # without groups the tensor lacks an axis
        summed = ("numerators", "energies", "gains")
        sums = self.sums.mapped(lambda name, x: x @ member if name in summed else x)
        return Level(groups, sums, self.resampled and self.resampled.grouped(member))

    @property
    def group_cs(self) -> Float[Tensor, "head group"]:
        """Covariance shares of the groups, in the order of :attr:`groups`."""
        return self._groups.sums.cs

    @property
    def group_gs(self) -> Float[Tensor, "head group"]:
        """Gain shares of the groups."""
        return self._groups.sums.gs

    @property
    def group_es(self) -> Float[Tensor, "head group"]:
        """Energy shares of the groups (sums over their terms)."""
        return self._groups.sums.es

    @property
    def intervals(self) -> Interval | None:
        """Covariance shares ``[head term]`` corrected for the bias of an estimated basis, with 95%
        bounds and standard errors; ``None`` where they were not asked for.

        The corrected shares sum to one as the shares do. A share itself may lie outside its
        interval, which is about the corrected value.
        """
        return self._terms.interval

    @property
    def gain_intervals(self) -> Interval | None:
        """The same for the gain shares ``[head term]``."""
        return self._terms.gain_interval

    @property
    def group_intervals(self) -> Interval | None:
        """Covariance shares of the groups ``[head group]`` with their intervals."""
        return self._groups.interval

    @property
    def group_gain_intervals(self) -> Interval | None:
        """Gain shares of the groups ``[head group]`` with their intervals."""
        return self._groups.gain_interval

    @property
    def by_term(self) -> Dominant:
        """Dominant term of each head; ``"unclear"`` where none is, ``"uniform"`` where there is
        nothing to explain."""
        return self._terms.dominant()

    @property
    def by_group(self) -> Dominant:
        """Dominant group of each head; ``"unclear"`` where none is (``"mixed"`` is the group of
        position-content terms)."""
        return self._groups.dominant()

    @property
    def dominant(self) -> tuple[str, ...]:
        """Dominant term of each head."""
        return self.by_term.labels

    @property
    def margin(self) -> Float[Tensor, " head"]:
        """Largest covariance share of a term minus the second largest."""
        return self.by_term.margin

    def marginals(self) -> Marginals:
        """Shares of each part by side: on the query side summed over the key parts, on the key side
        over the query parts. ALiBi counts as a part on both."""
        names = tuple(dict.fromkeys(part for pair in self.pairs for part in pair))
        member = [[[pair[side] == n for n in names] for side in (0, 1)] for pair in self.pairs]
        weight = torch.tensor(member).to(self.cs)
        cs, gs = (
            einsum(shares, weight, "head term, term side part -> head side part")
            for shares in (self.cs, self.gs)
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

        A split's shares have them, a sweep's with ``detail="planes"``. A model without rotation has
        one plane, which holds all of each term.
        """
        numerators, gains = self.sums.plane_numerators, self.sums.plane_gains
        if numerators is None or gains is None or self.head_planes is None:
            instead = 'sweep_heads(..., detail="planes"), or split_scores(...).shares()'
            fail("planes", expected="sums by plane", got="a table without", instead=instead)
        sums = self.sums
        return PlaneTable(
            provenance=self.provenance,
            heads=self.heads,
            # without ALiBi, the last term, which is in no plane
            terms=self.terms[: len(self.parts) ** 2],
            head_planes=self.head_planes,
            cs=numerators / sums.known(sums.total)[:, None, None],
            gs=gains / sums.known(sums.gain_total)[:, None, None],
            bias_label=self.bias_label,
        )

    def _mass(self) -> Float[Tensor, " head"]:
        """Attention paid to keys that were left out: zero if there are none, NaN if unknown."""
        unknown = torch.full_like(self.sums.total, torch.nan if self.drop else 0.0)
        return unknown if self.dropped_mass is None else self.dropped_mass

    def columns(self) -> Sequence[str]:
        ends = () if self.resampled is None else INTERVAL
        intervals = {share: [f"{share}_{end}" for end in ends] for share in ("cs", "gs")}
        return [column for name in COLUMNS for column in (name, *intervals.get(name, ()))]

    def rows(self) -> Sequence[Sequence[object]]:
        levels = [self._terms, *([self._groups] if self.groups else [])]
        columns = [[column.tolist() for column in level.columns()] for level in levels]
        labels = [level.dominant() for level in levels]
        mass, total, cells = (x.tolist() for x in (self._mass(), self.sums.total, self.sums.cells))
        table_rows: list[Sequence[object]] = []
        for h, (layer, head) in enumerate(self.heads):
            for level_index, level in enumerate(levels):
                best = labels[level_index]
                label = (float(best.margin[h]), float(best.gain_margin[h]), best.flags[h], mass[h])
                for t, name in enumerate(level.names):
                    # columns "term" and "group": a row has one of them
                    names = (None, name) if level_index else (name, None)
                    *shares, numerator, gain, energy = (
                        column[h][t] for column in columns[level_index]
                    )
                    sums = (numerator, gain, energy, total[h], cells[h])
                    table_rows.append(
                        (layer, head, *names, *shares, best.labels[h] == name, *label, *sums)
                    )
        return table_rows
