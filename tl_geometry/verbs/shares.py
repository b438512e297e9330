"""The table of shares that a split and a sweep return: what each term and each group of terms explains of each head's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.attention import GROUPS, ShareSums, group_of
from tl_geometry.results import Result


class Dominant(NamedTuple):
    """Label of each head, its share, and the distance to the runner-up."""

    labels: tuple[str, ...]
    share: Float[Tensor, " head"]
    margin: Float[Tensor, " head"]


def dominant(
    shares: Float[Tensor, "head term"], names: Sequence[str], *, none: str = "mixed", share_over: float = 0.5, margin_over: float = 0.1
) -> Dominant:
    """The name with the largest share, if that is over ``share_over`` and leads by more than ``margin_over``, else ``none``.

    Heads whose shares are NaN are ``"uniform"``.

    >>> dominant(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), ["pos-pos", "cvec-cvec"]).labels
    ('pos-pos', 'mixed')
    """
    if not names:
        nothing = torch.full(shares.shape[:1], torch.nan, dtype=shares.dtype)
        return Dominant(("",) * len(shares), nothing, nothing)
    top, order = shares.sort(dim=-1, descending=True, stable=True)
    margin = top[:, 0] - top[:, 1] if shares.shape[1] > 1 else torch.full_like(top[:, 0], torch.inf)
    clear = (top[:, 0] > share_over) & (margin > margin_over)
    uniform = torch.isnan(shares).any(-1)
    choice = zip(order[:, 0].tolist(), clear.tolist(), uniform.tolist(), strict=True)
    labels = tuple("uniform" if u else str(names[i]) if c else none for i, c, u in choice)
    blank = torch.where(uniform, torch.nan, 0.0)
    return Dominant(labels, top[:, 0] + blank, margin + blank)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareTable(Result):
    """Shares of every term, and of the groups position, content and mixed, for each head.

    ``cs = numerators / total`` sums to one over the terms and over the groups; ``es = energies / (sum of energies)``, that of a group
    being the sum over its terms. ``drop`` first queries and keys were left out; ``dropped_mass`` is the attention paid to them
    (mean over the other queries). A uniform head has NaN shares. ``low`` and ``high`` are bootstrap bounds of ``cs`` where asked for.
    """

    heads: tuple[tuple[int, int], ...]
    terms: tuple[str, ...]
    numerators: Float[Tensor, "head term"]
    energies: Float[Tensor, "head term"]
    total: Float[Tensor, " head"]
    floor: Float[Tensor, " head"]
    rows_used: float
    cells: float
    drop: int = 0
    dropped_mass: Float[Tensor, " head"] | None = None
    low: Float[Tensor, "head term"] | None = None
    high: Float[Tensor, "head term"] | None = None
    share_over: float = 0.5
    margin_over: float = 0.1

    @property
    def sums(self) -> ShareSums:
        """The pooled sums."""
        count = self.total.new_tensor
        return ShareSums.of([self.numerators, self.energies, self.total, self.floor, count(self.rows_used), count(self.cells)])

    @property
    def cs(self) -> Float[Tensor, "head term"]:
        """Covariance shares of the terms."""
        return self.sums.cs

    @property
    def es(self) -> Float[Tensor, "head term"]:
        """Energy shares of the terms."""
        return self.sums.es

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups present: none when the parts are the user's own."""
        return GROUPS if all(group_of(t) for t in self.terms) else ()

    def _grouped(self, values: Tensor) -> Float[Tensor, "head group"]:
        member = torch.tensor([[group_of(t) == g for g in self.groups] for t in self.terms], dtype=values.dtype)
        return values @ member.reshape(len(self.terms), len(self.groups))

    @property
    def group_cs(self) -> Float[Tensor, "head group"]:
        """Covariance shares of the groups, in the order of :attr:`groups`."""
        return self._grouped(self.cs)

    @property
    def group_es(self) -> Float[Tensor, "head group"]:
        """Energy shares of the groups (sums over their terms)."""
        return self._grouped(self.es)

    @property
    def by_term(self) -> Dominant:
        """Dominant term of each head; ``"mixed"`` where none is clear, ``"uniform"`` where there is nothing to explain."""
        return dominant(self.cs, self.terms, share_over=self.share_over, margin_over=self.margin_over)

    @property
    def by_group(self) -> Dominant:
        """Dominant group of each head; ``"none"`` where none is clear (``"mixed"`` is the group)."""
        return dominant(self.group_cs, self.groups, none="none", share_over=self.share_over, margin_over=self.margin_over)

    @property
    def dominant(self) -> tuple[str, ...]:
        """Dominant term of each head."""
        return self.by_term.labels

    @property
    def margin(self) -> Float[Tensor, " head"]:
        """Distance of the largest share to the second."""
        return self.by_term.margin

    @staticmethod
    def of(sums: ShareSums, heads: Sequence[tuple[int, int]], names: Sequence[str], **fields: object) -> ShareTable:
        """From sums (pooled here); ``fields`` are the remaining fields, ``provenance`` among them."""
        s = sums.to("cpu").pooled()
        return ShareTable(
            heads=tuple(heads), terms=tuple(names), numerators=s.numerators, energies=s.energies, total=s.total, floor=s.floor,
            rows_used=float(s.rows), cells=float(s.cells), **fields,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    def columns(self) -> Sequence[str]:
        interval = ["cs_low", "cs_high"] if self.low is not None else []
        names = ["layer", "head", "term", "group", "cs", *interval, "es", "numerator", "energy", "total", "dominant", "margin", "cells"]
        return [*names, "dropped_mass"] if self.dropped_mass is not None else names

    def rows(self) -> Sequence[Sequence[object]]:
        kinds = [(self.by_term, self.terms, self.cs, self.es, self.numerators, self.energies, self.low, self.high)]
        grouped = self._grouped(self.numerators), self._grouped(self.energies)
        if self.groups:
            kinds.append((self.by_group, self.groups, self.group_cs, self.group_es, *grouped, None, None))
        out: list[list[object]] = []
        for h, (layer, head) in enumerate(self.heads):
            tail = [] if self.dropped_mass is None else [float(self.dropped_mass[h])]
            for kind, (best, names, cs, es, numerators, energies, low, high) in enumerate(kinds):
                for t, name in enumerate(names):
                    label = [None, name] if kind else [name, None]
                    bounds = [torch.nan if b is None else float(b[h, t]) for b in (low, high)] if self.low is not None else []
                    values = [float(v[h, t]) for v in (es, numerators, energies)]
                    mark = [float(self.total[h]), best.labels[h] == name, float(best.margin[h]), self.cells]
                    out.append([layer, head, *label, float(cs[h, t]), *bounds, *values, *mark, *tail])
        return out
