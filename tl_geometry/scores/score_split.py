"""Attention scores of some heads as an exact sum of terms: what ``split_scores`` returns. Views
draw it; tables of shares come from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail
from tl_geometry.models.reconstruction import Check, ReconstructionReport
from tl_geometry.scores.planes import HeadPlanes, PlanesLike, PlaneTable, describe_planes
from tl_geometry.scores.share_table import COLUMNS, ShareTable
from tl_geometry.scores.sums import BLOCK, ShareSums, share_sums
from tl_geometry.scores.terms import ALIBI, TermResult, key_of, term_names, term_pairs

ALL = slice(None)


class Terms(Mapping[tuple[str, str], Tensor]):
    """Terms ``[batch head query key]`` by (query part, key part) or by name, each computed when it
    is asked for: ``terms["pos", "cvec"]`` is ``terms["pos-cvec"]``."""

    def __init__(self, split: ScoreSplit) -> None:
        self._split, alibi = split, vars(split)["bias"] is not None
        names = term_names(split.parts, alibi=alibi)
        self._pairs = dict(zip(names, term_pairs(split.parts, alibi=alibi), strict=True))

    def __getitem__(self, term: tuple[str, str] | str) -> Float[Tensor, "batch head query key"]:
        query_part, key_part = self.pair(term)
        split, parts = vars(self._split), self._split.parts
        if query_part == ALIBI:
            # a copy, as all other terms are: writing to one leaves the split as it is
            return split["bias"].expand(split["q"].shape[1], -1, -1, -1).clone()
        return _products(split["q"][parts.index(query_part)], split["k"][parts.index(key_part)])

    def pair(self, term: tuple[str, str] | str) -> tuple[str, str]:
        """A term as (query part, key part)."""
        pair = self._found(term)
        if pair is None:
            shown = ", ".join([*self._pairs][:16])
            fail("terms", expected=f"one of {shown}", got=repr(term), instead="list(split.terms)")
        return pair

    def _found(self, term: tuple[str, str] | str) -> tuple[str, str] | None:
        name = term if isinstance(term, str) else "-".join(map(str, term))
        # a part of your own may be called "mean", so exact names come first
        return self._pairs.get(name) or self._pairs.get(key_of(name))

    def __contains__(self, term: object) -> bool:
        return isinstance(term, str | tuple) and self._found(term) is not None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreSplit(TermResult):
    """Attention scores of some heads as a sum of terms.

    ``q`` (with the score scale) and ``k`` are the projected parts, ``parts`` names them; ``heads``
    labels the head axis with (layer, head). ``bias`` is ALiBi, ``None`` without it. Query i may see
    the keys ``key_range[head, i, 0] <= j < key_range[head, i, 1]``. ``softcap`` is infinite and
    ``sinks`` (logits) minus infinite for heads without one. ``head_planes`` are the rotary planes:
    which coordinates turn together, and how fast (without a rotation all coordinates are one plane
    of frequency zero).

    ``checks`` are the reconstruction errors, ``reconstruction`` their summary. ``scale`` is A of
    the bounds, the largest product of the parts' absolute values
    (:func:`tl_geometry.models.reconstruction.reconstruction_bound`). Its table is that of
    :meth:`shares`.
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    q: Float[Tensor, "part batch query head d_head"]
    k: Float[Tensor, "part batch key head d_head"]
    bias: Float[Tensor, "head query key"] | None
    key_range: Int[Tensor, "head query side"]
    softcap: Float[Tensor, " head"]
    sinks: Float[Tensor, " head"]
    head_planes: HeadPlanes
    checks: tuple[Check, ...] = ()
    scale: float = 0.0
    str_tokens: tuple[str, ...] = ()

    @property
    def allowed(self) -> Bool[Tensor, "head query key"]:
        """The keys that each query may attend to."""
        return self._allowed(ALL)

    def _allowed(self, rows: slice, heads: int | slice = ALL) -> Bool[Tensor, "*head query key"]:
        keys = torch.arange(vars(self)["k"].shape[2])
        first, stop = vars(self)["key_range"][heads, rows].unsqueeze(-1).unbind(-2)
        return (keys >= first) & (keys < stop)

    @property
    def terms(self) -> Terms:
        """The terms, lazily: ``split.terms["pos", "cvec"]`` is ``[batch head query key]``, query
        part first."""
        return Terms(self)

    def summed(self, rows: slice = ALL) -> Float[Tensor, "batch head query key"]:
        """Sum of all terms at every cell, allowed or not; here and below of some queries
        (``rows``), so that long prompts can be read block by block."""
        own = vars(self)
        total = _products(own["q"][:, :, rows].sum(0), own["k"].sum(0))
        return total if own["bias"] is None else total + own["bias"][:, rows]

    def total(self, rows: slice = ALL) -> Float[Tensor, "batch head query key"]:
        """Sum of all terms: the model's scores before any soft cap, -inf outside ``allowed``."""
        return torch.where(self._allowed(rows), self.summed(rows), -torch.inf)

    def model_scores(self, rows: slice = ALL) -> Float[Tensor, "batch head query key"]:
        """Scores as they enter the softmax: ``c tanh(total / c)`` where there is a soft cap c."""
        total, cap = self.total(rows), self.softcap[:, None, None]
        # inf tanh(total / inf) is NaN, and c tanh(-inf / c) = -c would admit a forbidden key
        outside = torch.isinf(cap) | torch.isneginf(total)
        return torch.where(outside, total, cap * torch.tanh(total / cap))

    def pattern(self, rows: slice = ALL) -> Float[Tensor, "batch head query key"]:
        """Attention pattern: softmax over the allowed keys. Where a head has a sink, the sink takes
        part in the softmax and its share is left out, so that rows sum to less than one."""
        scores = self.model_scores(rows)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        pattern = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        nothing = torch.isneginf(scores).all(-1, keepdim=True)  # a row without an allowed key
        return pattern.masked_fill(nothing, 0.0)

    def on_planes(self, planes: PlanesLike) -> ScoreSplit:
        """The split restricted to some rotary planes: ``split.on_planes("near")``, ``"middle"``,
        ``"far"``, ``"pass"``, a number, a pair of floats ``(over, up_to)``, wavelengths in tokens,
        or several of these. Every term becomes the part of it that these planes carry; over
        disjoint choices that cover all planes these parts add up to the term. ALiBi is in no plane.
        Total, pattern and shares are those of this part; ``checks`` stay those of the whole.
        """
        # to restrict q is enough: a product is zero where one factor is
        q, chosen = vars(self)["q"], self.head_planes.chosen(planes)
        inside = self.head_planes.coordinates(chosen).to(q)
        provenance = self.provenance.flagged(f"rotary planes {describe_planes(planes)} alone")
        return dataclasses.replace(self, q=q * inside, bias=None, provenance=provenance)

    @property
    def reconstruction(self) -> ReconstructionReport:
        """The worst reconstruction error of each kind over the layers, with its bound."""
        return ReconstructionReport.of(self.checks, self.scale)

    def first(self, drop: int | None = None) -> int:
        """The first position that counts: after ``drop`` others, by default the first of the
        window of the basis."""
        if drop is None:
            return (self.provenance.window or (0, 0))[0]
        return checks.index(drop, vars(self)["q"].shape[2], "drop")

    def shares(self, drop: int | None = None) -> ShareTable:
        """Covariance and gain shares of terms and groups for each head
        (:mod:`tl_geometry.scores.sums`).

        The first ``drop`` queries and keys are left out (by default those before the window of the
        basis, and none for parts of your own without a basis); the attention paid to them stands
        beside the shares as ``dropped_mass``.
        """
        start, length = self.first(drop), vars(self)["q"].shape[2]
        layers = torch.tensor([layer for layer, _ in self.heads])
        of_layers = [torch.where(layers == layer)[0] for layer in layers.unique()]
        sums = ShareSums.beside([self._sums_of(heads, start) for heads in of_layers])
        # a few rows at a time, so that memory grows with the length
        rows = [slice(i, i + BLOCK) for i in range(0, length, BLOCK)]
        paid = [self.pattern(some)[..., :start].sum(-1) for some in rows]
        return ShareTable.of(
            # the sums are in the order of layers; `heads` may have another
            sums.select(torch.cat(of_layers).argsort(), "head"),
            provenance=self.provenance.flagged(window=(start, length)),
            heads=self.heads,
            parts=self.parts,
            dropped_mass=torch.cat(paid, 2)[:, :, start:].mean((0, 2)).double(),
            head_planes=self.head_planes,
            bias_label=self.bias_label,
        )

    def planes(self) -> PlaneTable:
        """Shares of each rotary plane, by term: which frequencies carry the scores."""
        return self.shares().planes()

    def _sums_of(self, heads: Int[Tensor, " head"], drop: int) -> ShareSums:
        """Sums of some heads of one layer, which share mask, soft cap and rotation."""
        own, at, first = vars(self), slice(drop, None), int(heads[0])
        cap = float(self.softcap[first])
        return share_sums(
            own["q"][:, :, at, heads],
            own["k"][:, :, at, heads],
            self._allowed(at, first)[:, at],
            bias=None if own["bias"] is None else own["bias"][heads, at, at],
            softcap=cap if math.isfinite(cap) else None,
            plane=self.head_planes.plane[first],
        )

    def columns(self) -> Sequence[str]:
        return COLUMNS

    def rows(self) -> Sequence[Sequence[object]]:
        return self.shares().rows()


def _products(q: Tensor, k: Tensor) -> Float[Tensor, "batch head query key"]:
    """Products of all queries with all keys."""
    return einsum(q, k, "batch query head e, batch key head e -> batch head query key")
