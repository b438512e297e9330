"""Shares of every term and group of terms for each head: the table that ``split.shares()`` returns,
and the base of the table of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import choice, fail
from tl_geometry.base.intervals import Interval, LeftOut, jackknife_interval
from tl_geometry.base.results import Result
from tl_geometry.scores.labels import Dominant, dominant
from tl_geometry.scores.planes import HeadPlanes, PlaneTable
from tl_geometry.scores.sums import ShareSums
from tl_geometry.scores.terms import GROUPS, TermResult, group_of, term_names, term_pairs

COLUMNS = (
    *("layer", "head", "term", "group", "cs", "gs", "dominant", "margin", "gain_margin", "flag"),
    *("dropped_mass", "total"),
)
"""Columns of a share table without intervals."""
INTERVAL = ("corrected", "low", "high")
"""Suffixes of the columns of an interval, after the name of the share: ``cs_low``, ``gs_high``."""
SHARES = ("cs", "gs")
"""Covariance and gain share."""
LEVELS = ("term", "group")
"""A table is about terms, and about groups of terms."""


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


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareTable(TermResult):
    """Shares of every term, and of the groups position, content, token and mixed, for each head.

    ``cs`` and ``gs`` (:mod:`tl_geometry.scores.sums`) add up to one over the terms and over the
    groups; ``total`` is ``sum S~^2`` of each head and ``gain_total`` its gain. Terms are pairs of
    ``parts``, then ALiBi where there is one. ``dropped_mass`` is the attention that queries pay to
    the keys that were left out (mean over queries), which no share describes. A uniform head has
    NaN shares. ``by_plane`` are the shares of rotary planes (axis ``weight``: cs, gs), where these
    were asked for, and ``head_planes`` the planes (:meth:`planes`).

    Labels need the same name first by covariance and by gain
    (:func:`tl_geometry.scores.labels.dominant`); where the two disagree the row has a ``flag``.

    Where intervals were asked for, ``samples`` holds for each kind of share the shares themselves,
    then the shares without each group of contexts of the basis, then without each block of windows;
    ``sizes`` are the shares of the contexts in these, jackknife by jackknife
    (:mod:`tl_geometry.scores.resampling`). Then :meth:`interval` gives intervals, and a head has a
    label only where the intervals of both margins exclude zero.
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    cs: Float[Tensor, "head term"]
    gs: Float[Tensor, "head term"]
    total: Float[Tensor, " head"]
    gain_total: Float[Tensor, " head"]
    dropped_mass: Float[Tensor, " head"]
    by_plane: Float[Tensor, "head weight plane pair"] | None = None
    head_planes: HeadPlanes | None = None
    samples: Mapping[str, Float[Tensor, "head sample term"]] = field(default_factory=dict)
    sizes: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls: type[T], sums: ShareSums, **fields: Any) -> T:
        """The table of finished sums."""
        by_plane = None
        if sums.by_plane is not None:
            totals = torch.stack([sums.total, sums.gain_total])
            by_plane = sums.by_plane / totals.masked_fill(sums.uniform, torch.nan)[..., None, None]
            by_plane = by_plane.transpose(0, 1)
        shares = {name: getattr(sums, name) for name in (*SHARES, "total", "gain_total")}
        return cls(**shares, by_plane=by_plane, **fields)

    @property
    def _alibi(self) -> bool:
        return self.cs.shape[-1] > len(self.parts) ** 2

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

    def names(self, by: str) -> tuple[str, ...]:
        """Names of the terms, or of the groups."""
        return self.terms if choice(by, LEVELS, "by") == "term" else self.groups

    def _summed(self, values: Tensor, by: str) -> Tensor:
        """Values of terms (the last axis) as they are, or summed to groups."""
        if by == "term":
            return values
        member = [[group_of(term) == group for group in self.groups] for term in self.terms]
        return values @ torch.tensor(member).reshape(len(self.terms), -1).to(values)

    @property
    def group_cs(self) -> Float[Tensor, "head group"]:
        """Covariance shares of the groups, in the order of :attr:`groups`."""
        return self._summed(self.cs, "group")

    @property
    def group_gs(self) -> Float[Tensor, "head group"]:
        """Gain shares of the groups."""
        return self._summed(self.gs, "group")

    def interval(self, share: str = "cs", by: str = "group") -> Interval | None:
        """Shares ``[head group]`` (or ``[head term]``) corrected for the bias of an estimated
        basis, with 95% bounds and standard errors; ``None`` where they were not asked for.

        The corrected shares sum to one as the shares do. A share itself may lie outside its
        interval, which is about the corrected value.
        """
        samples = self.samples.get(choice(share, SHARES, "share"))
        return None if samples is None else self._jackknife(self._summed(samples, by))

    def _jackknife(self, values: Float[Tensor, "head sample ..."]) -> Interval:
        """Interval of a linear function of the shares, from its value in each sample."""
        left_out = values[:, 1:].split([len(sizes) for sizes in self.sizes], dim=1)
        jackknives = [
            LeftOut(sample.transpose(0, 1), values.new_tensor(sizes))
            for sample, sizes in zip(left_out, self.sizes, strict=True)
        ]
        return jackknife_interval(values[:, 0], jackknives)

    def dominant_by(self, by: str) -> Dominant:
        """Label of each head, by term or by group."""
        names = self.names(by)
        shares = [self._summed(getattr(self, share), by) for share in SHARES]
        certain: list[Tensor | None] = [None, None]
        if self.samples and len(names) > 1:
            samples = [self._summed(self.samples[share], by) for share in SHARES]
            certain = [self._leads(*pair) for pair in zip(shares, samples, strict=True)]
        return dominant(shares[0], shares[1], names, certain=(certain[0], certain[1]))

    def _leads(self, shares: Tensor, samples: Tensor) -> Bool[Tensor, " head"]:
        """Heads for which the interval of the margin (largest share minus the second) excludes
        zero. ``shares [head term]`` say which two terms are first, ``samples [head sample term]``
        give the margin of these two in each sample."""
        order = shares.nan_to_num(-torch.inf).argsort(dim=-1, descending=True, stable=True)
        first, second = samples.gather(
            2, order[:, None, :2].expand(-1, samples.shape[1], -1)
        ).unbind(2)
        return self._jackknife(first - second).low > 0

    @property
    def by_term(self) -> Dominant:
        """Dominant term of each head; ``"unclear"`` where none is, ``"uniform"`` where there is
        nothing to explain."""
        return self.dominant_by("term")

    @property
    def by_group(self) -> Dominant:
        """Dominant group of each head; ``"unclear"`` where none is."""
        return self.dominant_by("group")

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
            dropped_mass=self.dropped_mass,
        )

    def planes(self) -> PlaneTable:
        """Shares of each rotary plane, by term: which frequencies carry the scores.

        A split has them, a sweep with ``planes=True``. A model without rotation has one plane,
        which holds all of each term.
        """
        if self.by_plane is None or self.head_planes is None:
            instead = "sweep_heads(..., planes=True), or split_scores(...).planes()"
            fail("planes", expected="shares of planes", got="a table without", instead=instead)
        return PlaneTable(
            provenance=self.provenance,
            heads=self.heads,
            # without ALiBi, the last term, which is in no plane
            terms=self.terms[: len(self.parts) ** 2],
            head_planes=self.head_planes,
            cs=self.by_plane[:, 0],
            gs=self.by_plane[:, 1],
            bias_label=self.bias_label,
        )

    def select(self: T, rows: Int[Tensor, " head"]) -> T:
        """Some of the heads, in the given order."""
        changed: dict[str, Any] = {"heads": tuple(self.heads[i] for i in rows.tolist())}
        for name in (f.name for f in dataclasses.fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                changed[name] = value[rows]
            elif isinstance(value, HeadPlanes):
                changed[name] = value.select(rows)
            elif isinstance(value, Mapping):
                changed[name] = {
                    k: v[rows] if isinstance(v, Tensor) else v for k, v in value.items()
                }
        return dataclasses.replace(self, **changed)

    def columns(self) -> Sequence[str]:
        ends = INTERVAL if self.samples else ()
        intervals = {share: [f"{share}_{end}" for end in ends] for share in SHARES}
        return [column for name in COLUMNS for column in (name, *intervals.get(name, ()))]

    def _numbers(self, by: str) -> list[list[list[float]]]:
        """Shares of one level ``[head name column]``, each followed by its interval."""
        columns: list[Tensor] = []
        for share in SHARES:
            columns += [self._summed(getattr(self, share), by)]
            columns += (self.interval(share, by) or ())[:3]
        return torch.stack(columns, -1).tolist()

    def rows(self) -> Sequence[Sequence[object]]:
        levels = [(by, self.dominant_by(by), self._numbers(by)) for by in LEVELS if self.names(by)]
        mass, total = self.dropped_mass.tolist(), self.total.tolist()
        rows: list[Sequence[object]] = []
        for h, head in enumerate(self.heads):
            for by, best, numbers in levels:
                margins = float(best.margin[h]), float(best.gain_margin[h])
                for n, name in enumerate(self.names(by)):
                    # columns "term" and "group": a row has one of them
                    named = (name, None) if by == "term" else (None, name)
                    label = (best.labels[h] == name, *margins, best.flags[h])
                    rows.append((*head, *named, *numbers[h][n], *label, mass[h], total[h]))
        return rows


T = TypeVar("T", bound=ShareTable)
