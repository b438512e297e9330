"""Shares of every term and group of terms for each head: the table that ``split.shares()`` returns,
one row per head and term, and the table of a sweep, what drives each head in one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.errors import choice, fail
from tl_geometry.base.intervals import Interval, LeftOut, jackknife_interval
from tl_geometry.base.results import wanted
from tl_geometry.base.tables import Table
from tl_geometry.scores.head_types import HEAD_TYPES
from tl_geometry.scores.labels import Dominant, dominant
from tl_geometry.scores.planes import HeadPlanes, PlaneTable
from tl_geometry.scores.sums import SHARES, ShareSums
from tl_geometry.scores.terms import GROUPS, TermResult, group_of, key_of, term_names, term_pairs

COLUMNS = (
    *("layer", "head", "term", "group", "cs", "gs", "dominant", "margin", "gain_margin", "flag"),
    *("dropped_mass", "total"),
)
"""Columns of a share table."""
LABEL = (
    *("dominant_{}", "{}_by_cs", "{}_share", "{}_margin"),
    *("{}_by_gs", "{}_gain", "{}_gain_margin", "{}_flag"),
)
"""Columns of a label, with "group" or "term" for the braces: the fields of
:class:`tl_geometry.scores.labels.Dominant`, in their order."""
READ = (
    *("layer", "head", "dominant_group", "group_share", "group_gain", "dropped_mass"),
    *("induction", "previous", "group_by_cs", "group_by_gs", "dominant_term"),
)
"""Columns that are shown where there is no room for all, the most important first."""
SHOWN = 8
"""How many of them plain text has: about 100 characters."""


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
        """Groups present: none where a part has a name of the user's own."""
        return GROUPS if all(group_of(t) for t in self.terms) else ()

    @property
    def levels(self) -> tuple[str, ...]:
        """The table is about terms, and about groups of terms where there are any."""
        return ("term", "group") if self.groups else ("term",)

    def names(self, by: str) -> tuple[str, ...]:
        """Names of the terms, or of the groups, where there are any."""
        return self.terms if choice(by, self.levels, "by") == "term" else self.groups

    def _summed(self, values: Tensor, by: str) -> Tensor:
        """Values of terms (the last axis) as they are, or summed to groups."""
        if self.names(by) == self.terms:
            return values
        member = [[group_of(term) == group for group in self.groups] for term in self.terms]
        return values @ torch.tensor(member).to(values)

    def share(self, share: str = "cs", by: str = "group") -> Float[Tensor, "head name"]:
        """Covariance (``"cs"``) or gain (``"gs"``) shares of the groups, or with ``"term"`` of the
        terms, in the order of :meth:`names`."""
        return self._summed(getattr(self, choice(share, SHARES, "share")), by)

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
        names, certain = self.names(by), list[Tensor]()
        shares = [self.share(share, by) for share in SHARES]
        if self.samples and len(names) > 1:
            samples = [self._summed(self.samples[share], by) for share in SHARES]
            certain = [self._leads(*pair) for pair in zip(shares, samples, strict=True)]
        return dominant(shares[0], shares[1], names, certain=certain)

    def _leads(self, shares: Tensor, samples: Tensor) -> Bool[Tensor, " head"]:
        """Heads for which the interval of the margin (largest share minus the second) excludes
        zero. ``shares [head term]`` say which two terms are first, ``samples [head sample term]``
        give the margin of these two in each sample."""
        order = shares.nan_to_num(-torch.inf).argsort(dim=-1, descending=True, stable=True)
        first, second = torch.take_along_dim(samples, order[:, None, :2], dim=2).unbind(2)
        return self._jackknife(first - second).low > 0

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
                of_heads = {k: v[rows] for k, v in value.items() if isinstance(v, Tensor)}
                changed[name] = {**value, **of_heads}
        return dataclasses.replace(self, **changed)

    def columns(self) -> Sequence[str]:
        return COLUMNS

    def rows(self) -> Sequence[Sequence[object]]:
        """Of each head its groups, then its terms, the largest covariance shares first."""
        rows: list[list[Sequence[object]]] = [[] for _ in self.heads]
        ends = torch.stack([self.dropped_mass, self.total], 1).tolist()
        for by in reversed(self.levels):
            best, shares = self.dominant_by(by), [self.share(share, by) for share in SHARES]
            margins = torch.stack([best.margin, best.gain_margin], 1).tolist()
            names = self.names(by)
            order = shares[0].nan_to_num().abs().argsort(descending=True, stable=True).tolist()
            for h, head in enumerate(self.heads):
                for n in order[h]:
                    name, values = names[n], [float(x[h, n]) for x in shares]
                    # columns "term" and "group": a row has one of them
                    named = (name, None) if by == "term" else (None, name)
                    label = (best.labels[h] == name, *margins[h], best.flags[h])
                    rows[h].append((*head, *named, *values, *label, *ends[h]))
        return [row for of_head in rows for row in of_head]


T = TypeVar("T", bound=ShareTable)


@dataclass(frozen=True, eq=False, kw_only=True)
class SweepTable(ShareTable):
    """One row per head: the dominant group and term, shares of all, head-type scores with
    baselines.

    ``dominant_group`` is the group that is first by covariance (``group_by_cs``, with its share
    ``group_share`` and its lead ``group_margin``) and by gain (``group_by_gs``, ``group_gain``,
    ``group_gain_margin``), each with a clear lead, and has more than half of the covariance; else
    ``"unclear"``. ``group_flag`` says where covariance and gain name different groups. Likewise for
    terms. ``dropped_mass`` is the attention to left-out keys, which no share describes.

    ``types[name]`` are the head-type scores on repeated random tokens
    (:mod:`tl_geometry.scores.head_types`), ``baselines[name]`` what uniform attention would score,
    ``type_errors`` standard errors of the scores over twelve sequences (in a large vocabulary each
    from another range of ids). With intervals ``nulls`` holds the share that position has by noise
    alone (mean and 95% quantile), the p-value of the share of position, and that p-value adjusted
    for the number of heads (Benjamini and Hochberg 1995).
    """

    types: Mapping[str, Float[Tensor, " head"]]
    baselines: Mapping[str, float]
    type_errors: Mapping[str, Float[Tensor, " head"]]
    nulls: Mapping[str, Float[Tensor, " head"]] = field(default_factory=dict)

    def columns(self) -> Sequence[str]:
        return list(self._cells())

    def rows(self) -> Sequence[Sequence[object]]:
        return list(zip(*self._cells().values(), strict=True))

    def _cells(self) -> dict[str, list[Any]]:
        """All columns by name, each with a value per head."""
        layers, heads = zip(*self.heads, strict=True)
        cells: dict[str, Any] = {"layer": layers, "head": heads}
        for level in ("group", "term"):
            best = self.dominant_by(level)
            cells |= {c.format(level): values for c, values in zip(LABEL, best, strict=True)}
        cells["dropped_mass"] = self.dropped_mass
        for name in HEAD_TYPES:
            cells |= {name: self.types[name], f"{name}_se": self.type_errors[name]}
            cells[f"{name}_uniform"] = [self.baselines[name]] * len(self.heads)
        for share in SHARES:
            values = torch.cat([self.share(share, by) for by in ("group", "term")], 1)
            names = [f"{share}_{name}" for name in (*self.groups, *self.terms)]
            cells |= dict(zip(names, values.unbind(1), strict=True))
        for share in SHARES:
            interval = self.interval(share)
            if interval is not None:
                for g, group in enumerate(self.groups):
                    of_group = Interval(*(values[:, g] for values in interval))
                    cells |= of_group.columns(f"{share}_{group}_corrected")
        cells |= dict(sorted(self.nulls.items()))
        return {k: v.tolist() if isinstance(v, Tensor) else list(v) for k, v in cells.items()}

    def top(  # type: ignore[override]
        self, column: str | int | None = None, n: int | None = None
    ) -> SweepTable:
        """The ``n`` heads with the largest values of a numeric column (``"induction"``,
        ``"cs_pos-pos"``, ...), largest first, NaN last. The name of a group or term alone means its
        covariance share: ``"position"``. Names are taken as they are shown, too: ``"mean-mean"``.
        ``.top(5)`` are the heads whose first group has the largest share.
        """
        by, most = wanted(column, n)
        cells, key = self._cells(), key_of("group_share" if by is None else by)
        key = f"cs_{key}" if key in (*self.groups, *self.terms) else key
        numeric = [c for c, values in cells.items() if not isinstance(values[0], str)]
        choice(key, numeric, "column")
        values = torch.tensor(cells[key], dtype=torch.float64).nan_to_num(-torch.inf)
        return self.select(values.argsort(descending=True, stable=True)[:most])

    def text(self, limit: int | None = None) -> str:
        """The first columns of :data:`READ` as aligned plain text. Where ``limit`` hides heads that
        are in the model's order, those whose first group has the largest share come first."""
        # which begins with "Table("
        return f"Sweep{self._read(SHOWN, limit).text(limit)}"

    def _repr_html_(self) -> str:
        return self._read(len(READ), html.MOST_ROWS)._repr_html_()

    def _read(self, count: int, limit: int | None) -> Table:
        """The first ``count`` columns of :data:`READ`, with a flag that says where all are."""
        # heads in another order than the model's were sorted by whoever asks
        hides = limit is not None and limit < len(self.heads)
        by_share = hides and list(self.heads) == sorted(self.heads)
        cells = (self.top(len(self.heads)) if by_share else self)._cells()
        flags = [f"{count} of {len(cells)} columns (all: .to_dataframe(), render.heads)"]
        flags += ["the largest shares first"] if by_share else []
        columns = [map(self.readable, cells[column]) for column in READ[:count]]
        rows: Any = tuple(zip(*columns, strict=True))
        return Table(provenance=self.provenance.flagged(*flags), names=READ[:count], cells=rows)
