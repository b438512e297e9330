"""The mean decomposition of residual stream states: h = mean + pos + ctx + resid (Song & Zhong 2023, Eq. 2 and 3).

A two-way analysis of variance in d_model dimensions: with contexts c and positions t,

    mean = average of h over c and t          pos_t = average over c of h - mean
    ctx_c = average over t of h - mean        resid = h - mean - pos_t - ctx_c        cvec = ctx + resid

Every context contributes every position once, so the four parts are orthogonal and their squared norms add up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry import _check
from tl_geometry._check import describe, fail, require
from tl_geometry.moments import Moments, Reservoir, half_width
from tl_geometry.records import ModelView
from tl_geometry.results import Provenance, Result, read_file, write_atomically


class Parts(NamedTuple):
    """Additive parts of states: ``h = mean + pos + ctx + resid``; ``cvec = ctx + resid``. Shapes as the activations given."""

    mean: Float[Tensor, "*state d_model"]
    pos: Float[Tensor, "*state position d_model"]
    ctx: Float[Tensor, "*state batch d_model"]
    resid: Float[Tensor, "*state batch position d_model"]

    @property
    def cvec(self) -> Float[Tensor, "*state batch position d_model"]:
        """``ctx + resid``: everything that depends on the context."""
        return self.ctx.unsqueeze(-2) + self.resid

    def total(self) -> Float[Tensor, "*state batch position d_model"]:
        """The sum of the parts: the activations again."""
        return self.mean[..., None, None, :] + self.pos.unsqueeze(-3) + self.cvec


def decompose_tensor(h: Float[Tensor, "*state context position d_model"]) -> Parts:
    """The four parts of a tensor of activations held in memory (Song & Zhong 2023, Eq. 2 and 3), in float64.

    >>> h = torch.arange(12.0).view(2, 3, 2)
    >>> parts = decompose_tensor(h)
    >>> bool(torch.allclose(parts.total(), h.double())), parts.mean.tolist()
    (True, [5.0, 6.0])
    """
    h = h.double()
    mean = h.mean((-3, -2))
    pos = h.mean(-3) - mean.unsqueeze(-2)
    ctx = h.mean(-2) - mean.unsqueeze(-2)
    return Parts(mean, pos, ctx, h - mean[..., None, None, :] - pos.unsqueeze(-3) - ctx.unsqueeze(-2))


@dataclass(frozen=True, eq=False, kw_only=True)
class Anova(Result):
    """Analysis of variance of each state: sums of squares, degrees of freedom, shares, and how far to trust them.

    Sums of squares (units of the activations squared): ``total = pos + ctx + resid``. Degrees of freedom per coordinate: pos
    T - 1, ctx C - 1, resid (C - 1)(T - 1). ``pos_debiased`` is the share of pos after subtracting what C contexts of noise
    leave in an average, ``max(0, SS_pos - (T - 1) SS_resid / ((C - 1)(T - 1)))``; it assumes residuals independent across
    contexts. ``pos_reliability`` is the mean cosine of pos from two disjoint halves of the contexts.

    The context share has no such correction, because residuals are correlated along a text: any slowly varying text has a
    large one. ``ctx_agreement`` is the correlation of a context's means over the first and last part of the window (a quarter
    left out between); ``ctx_null`` the context share of windows glued from random places of the same corpus, where it was asked for.
    """

    states: tuple[int, ...]
    contexts: int
    positions: int
    total: Float[Tensor, " state"]
    pos: Float[Tensor, " state"]
    ctx: Float[Tensor, " state"]
    resid: Float[Tensor, " state"]
    pos_debiased: Float[Tensor, " state"]
    pos_reliability: Float[Tensor, " state"]
    ctx_agreement: Float[Tensor, " state"]
    ctx_null: Float[Tensor, " state"] | None = None
    identifiable: bool = True

    @property
    def degrees_of_freedom(self) -> dict[str, int]:
        """Degrees of freedom per coordinate of each sum of squares."""
        c, t = self.contexts - 1, self.positions - 1
        return {"pos": t, "ctx": c, "resid": c * t, "total": self.contexts * self.positions - 1}

    @property
    def shares(self) -> dict[str, Float[Tensor, " state"]]:
        """Each sum of squares over the total (NaN where the total is zero); they add up to one."""
        return {k: getattr(self, k) / torch.where(self.total > 0, self.total, torch.nan) for k in ("pos", "ctx", "resid")}

    def columns(self) -> Sequence[str]:
        names = ["state", "ss_total", "pos", "ctx", "resid", "pos_debiased", "pos_reliability", "ctx_agreement"]
        return [*names, "ctx_null"] if self.ctx_null is not None else names

    def rows(self) -> Sequence[Sequence[object]]:
        values = [self.total, *self.shares.values(), self.pos_debiased, self.pos_reliability, self.ctx_agreement]
        values += [self.ctx_null] if self.ctx_null is not None else []
        return [[s, *(float(v[i]) for v in values)] for i, s in enumerate(self.states)]


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionContext:
    """Positional and context basis of a model's states over a corpus: what :func:`tl_geometry.decompose` returns.

    Position sums are kept for every column seen (:meth:`pos_at`); mean, ctx, analysis of variance and second moments use
    ``window``, half-open in absolute columns. Everything is float64 on the CPU; the sampled states are float32.
    """

    provenance: Provenance
    states: tuple[int, ...]
    moments: Moments
    context_means: Float[Tensor, "state context d_model"] | None = None
    labels: Int[Tensor, " context"] | None = None
    names: tuple[str, ...] = ()
    reservoir: Reservoir | None = None

    @property
    def window(self) -> tuple[int, int]:
        """Half-open window of absolute columns that the statistics use."""
        return self.moments.window

    @property
    def contexts(self) -> int:
        """Number of contexts."""
        return self.moments.contexts

    @property
    def columns(self) -> int:
        """Number of columns seen (positions of the input, the window inside them)."""
        return self.moments.sums.shape[2]

    @property
    def group_sums(self) -> Float[Tensor, "group state column d_model"]:
        """Sum of h over the contexts of each group, for every column."""
        return self.moments.sums

    @property
    def group_counts(self) -> Int[Tensor, " group"]:
        """Contexts of each group."""
        return self.moments.counts

    @property
    def label_sums(self) -> Float[Tensor, "label state d_model"] | None:
        """Sum of h over window columns and contexts of each label."""
        return self.moments.label_sums

    @property
    def label_counts(self) -> Int[Tensor, " label"] | None:
        """Contexts of each label."""
        return self.moments.label_counts

    @property
    def samples(self) -> Float[Tensor, "sample state column d_model"] | None:
        """States of the sampled contexts, whole."""
        return None if self.reservoir is None else self.reservoir.states

    @property
    def sample_contexts(self) -> Int[Tensor, " sample"] | None:
        """Context index of each sample."""
        return None if self.reservoir is None else self.reservoir.contexts

    @property
    def sample_tokens(self) -> Int[Tensor, "sample column"] | None:
        """Token ids of each sample."""
        return None if self.reservoir is None else self.reservoir.tokens

    @cached_property
    def mean(self) -> Float[Tensor, "state d_model"]:
        """Mean of h over contexts and window columns."""
        return self.moments.window_sum() / (self.contexts * (self.window[1] - self.window[0]))

    @cached_property
    def pos_columns(self) -> Float[Tensor, "state column d_model"]:
        """Mean over contexts of h - mean, for every column seen."""
        return self.moments.sums.sum(0) / self.contexts - self.mean.unsqueeze(1)

    @property
    def pos(self) -> Float[Tensor, "state position d_model"]:
        """The positional basis: a row for each column of the window."""
        return self.pos_columns[:, self.window[0] : self.window[1]]

    def pos_at(self, position: int) -> Float[Tensor, "state d_model"]:
        """Positional vector of one absolute column; every column seen has one, inside the window or not."""
        return self.pos_columns[:, _check.index(position, self.columns, "position")]

    @property
    def ctx(self) -> Float[Tensor, "state context d_model"] | None:
        """The context basis, mean over a context's window of h - mean - pos, or ``None`` where it was not kept."""
        return None if self.context_means is None else self.context_means - self.mean.unsqueeze(1)

    def index(self, state: int) -> int:
        """Row of ``state`` in every array with a state axis."""
        require(
            state in self.states, "state", expected=f"one of {self.states}", got=repr(state), instead="decompose(..., states=None) for all"
        )
        return self.states.index(state)

    @property
    def has_second_moments(self) -> bool:
        """Whether second moments were kept."""
        return self.moments.second is not None

    def second_moment(self, state: int, *, centred: bool = True) -> Float[Tensor, "d_model d_model"]:
        """``sum (h - mean)(h - mean)^T`` over contexts and window columns, or ``sum h h^T`` with ``centred=False``.

        Equals ``C pos^T pos + T ctx^T ctx + resid^T resid`` (all cross terms vanish).
        """
        if self.moments.second is None:
            fail("second_moment", expected="second moments", got="a basis without", instead="decompose(..., second_moments=True)")
        row = self.index(state)
        return self.moments.centred_second(row, self.mean[row] if centred else torch.zeros_like(self.mean[row]))

    def anova(self, *, null: PositionContext | None = None) -> Anova:
        """The analysis of variance table; ``null`` is the basis of windows glued from random places (see :func:`tl_geometry.glue`).

        Degenerate designs have defined values: with one context ctx and resid are zero and ``identifiable`` is false; with one
        position pos and resid are zero.
        """
        m, c, t = self.moments, self.contexts, self.window[1] - self.window[0]
        inside = slice(*self.window)
        squares = self.mean.square().sum(-1)
        clip = lambda x: torch.where(x > 1e-12 * m.squares[:, :, inside].sum((0, 2)), x, 0.0)  # noqa: E731 (rounding of the difference)
        total = clip(m.squares[:, :, inside].sum((0, 2)) - c * t * squares)
        pos = torch.minimum(c * self.pos.square().sum((1, 2)), total) if t > 1 else torch.zeros_like(total)
        ctx = torch.minimum(clip(t * (m.context_squares.sum(0) - c * squares)), total) if c > 1 else torch.zeros_like(total)
        resid = (total - pos - ctx).clamp(min=0) if c > 1 and t > 1 else torch.zeros_like(total)
        if c == 1 or t == 1:
            pos, ctx = (total, ctx) if c == 1 and t > 1 else (pos, total)
        noise = resid / max(1, c - 1)
        share = (pos - noise).clamp(min=0) / torch.where(total > 0, total, torch.nan)
        return Anova(
            provenance=self.provenance,
            states=self.states,
            contexts=c,
            positions=t,
            total=total,
            pos=pos,
            ctx=ctx,
            resid=resid,
            pos_debiased=share,
            pos_reliability=self._reliability(),
            ctx_agreement=self._agreement(),
            ctx_null=None if null is None else null.anova().shares["ctx"],
            identifiable=c > 1,
        )

    def half_pos(self) -> tuple[Float[Tensor, "state position d_model"], Float[Tensor, "state position d_model"]] | None:
        """The positional basis from the even and from the odd groups of contexts, or ``None`` when one of them is empty."""
        halves = []
        for part in (slice(0, None, 2), slice(1, None, 2)):
            count = self.group_counts[part].sum()
            if count == 0:
                return None
            mean = self.group_sums[part, :, slice(*self.window)].sum(0) / count
            halves.append(mean - mean.mean(1, keepdim=True))
        return halves[0], halves[1]

    def _reliability(self) -> Float[Tensor, " state"]:
        halves = self.half_pos()
        if halves is None:
            return torch.full((len(self.states),), torch.nan, dtype=torch.float64)
        return torch.nan_to_num(torch.cosine_similarity(*halves, dim=-1), nan=0.0).mean(-1)

    def _agreement(self) -> Float[Tensor, " state"]:
        """Correlation over contexts of the means of the window's two ends, summed over coordinates."""
        start, end = self.window
        part, c = half_width(end - start), self.contexts
        sums = self.moments.sums.sum(0)
        if part == 0 or c < 2:
            return torch.full((len(self.states),), torch.nan, dtype=torch.float64)
        a, b = sums[:, start : start + part].mean(1) / c, sums[:, end - part : end].mean(1) / c
        aa, bb, ab = self.moments.halves.sum(0).unbind(-1)
        var_a, var_b = aa - c * a.square().sum(-1), bb - c * b.square().sum(-1)
        floor = 1e-12 * (aa + bb)  # below it the difference is rounding
        known = (var_a > floor) & (var_b > floor)
        return torch.where(known, (ab - c * (a * b).sum(-1)) / (var_a * var_b).clamp(min=1e-300).sqrt(), torch.nan)

    def transform(
        self,
        activations: Float[Tensor, "state batch position d_model"] | Float[Tensor, "batch position d_model"],
        positions: Sequence[int] | Int[Tensor, " position"] | None = None,
    ) -> Parts:
        """Parts of new activations, relative to this basis: ``ctx_c = mean over the given positions of h - mean - pos_t``.

        ``activations`` has one row per state of the basis (or no state axis, with a basis of one state); ``positions`` are the
        absolute columns of its position axis, by default the window (or 0, 1, ... when the width differs). The context vector
        equals the textbook form on full windows and stays exact on a part of one.
        """
        single = activations.dim() == 3
        h = activations.unsqueeze(0) if single else activations
        require(
            h.dim() == 4 and h.shape[0] == len(self.states) and h.shape[3] == self.mean.shape[1],
            "activations",
            expected=f"[state batch position d_model] with {len(self.states)} states and d_model {self.mean.shape[1]}",
            got=describe(activations),
            instead="basis.states to see which states it holds",
        )
        _check.finite(h, "activations")
        if positions is None:
            whole = h.shape[2] == self.window[1] - self.window[0]
            positions = range(*self.window) if whole else range(h.shape[2])
        columns = torch.as_tensor(list(positions))
        inside = len(columns) == h.shape[2] and bool(((columns >= 0) & (columns < self.columns)).all())
        require(
            inside,
            "positions",
            expected=f"{h.shape[2]} columns from 0 to {self.columns - 1}",
            got=f"{len(columns)}: {columns.tolist()[:8]}",
        )
        pos = self.pos_columns[:, columns].to(h.device)
        mean = self.mean.to(h.device)
        cvec = h.double() - mean[:, None, None] - pos.unsqueeze(1)
        ctx = cvec.mean(2)
        parts = Parts(mean, pos, ctx, cvec - ctx.unsqueeze(2))
        return Parts(*(p[0] for p in parts)) if single else parts

    def check_model(self, view: ModelView, has_bos: bool | None = None) -> None:
        """Raise unless this basis was computed from the weights of ``view`` (and with the same BOS setting, where it is known)."""
        known = self.provenance.fingerprint
        same = known is None or known == view.fingerprint
        names = (f"{self.provenance.model} ({known})", f"{view.name} ({view.fingerprint})")
        require(same, "basis", expected=f"the model it was computed from, {names[0]}", got=names[1], instead="decompose(model, tokens)")
        require(
            has_bos is None or self.provenance.has_bos is None or has_bos == self.provenance.has_bos,
            "tokens",
            expected=f"has_bos={self.provenance.has_bos}, as in the basis",
            got=f"has_bos={has_bos}",
            instead="the same prepend_bos= for both",
        )

    @staticmethod
    def merge(parts: Sequence[PositionContext]) -> PositionContext:
        """One basis from partial results over disjoint contexts (shards of a corpus), in the given order.

        Mean, pos and ctx equal the single run's to 1e-10, second moments to 1e-6 of their trace. Contexts are renumbered in
        the given order; groups are joined group by group.
        """
        require(len(parts) > 0, "merge", expected="at least one basis", got="none")
        first = parts[0]
        moments, reservoir = first.moments, first.reservoir
        for other in parts[1:]:
            for field in ("model", "fingerprint", "has_bos", "dtype"):
                a, b = getattr(first.provenance, field), getattr(other.provenance, field)
                require(a == b, f"merge: {field}", expected=repr(a), got=repr(b), instead="partial results of one model and one setting")
            require(first.states == other.states, "merge: states", expected=first.states, got=other.states)
            require(first.names == other.names, "merge: document names", expected=first.names, got=other.names)
            if reservoir is not None and other.reservoir is not None:
                reservoir = Reservoir.merge(reservoir, other.reservoir, moments.contexts)
            moments = Moments.merge(moments, other.moments)
        means = [p.context_means for p in parts]
        labels = [p.labels for p in parts]
        hashes = "+".join(str(p.provenance.token_hash) for p in parts) if len(parts) > 1 else first.provenance.token_hash
        flags = [flag for p in parts for flag in p.provenance.flags]
        return PositionContext(
            provenance=dataclasses.replace(first.provenance, token_hash=hashes, contexts=moments.contexts).flagged(*flags),
            states=first.states,
            moments=moments,
            context_means=None if any(m is None for m in means) else torch.cat([m for m in means if m is not None], dim=1),
            labels=None if any(v is None for v in labels) else torch.cat([v for v in labels if v is not None]),
            names=first.names,
            reservoir=reservoir,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is stored as a tensor, by name."""
        found = {f"moments|{k}": v for k, v in self.moments.tensors().items()}
        optional: dict[str, Tensor | None] = {"context_means": self.context_means, "labels": self.labels}
        if self.reservoir is not None and self.reservoir.states is not None:
            fields = dataclasses.asdict(self.reservoir)
            optional |= {f"reservoir|{k}": fields[k] for k in ("priorities", "contexts", "states", "tokens")}
        return found | {k: v for k, v in optional.items() if v is not None}

    def header(self) -> dict[str, Any]:
        """Everything that is stored in the JSON header."""
        size, seed = (self.reservoir.size, self.reservoir.seed) if self.reservoir else (0, 0)
        return {
            "schema": SCHEMA,
            "provenance": dataclasses.asdict(self.provenance),
            "states": self.states,
            "window": self.window,
            "names": self.names,
            "product_dtype": str(self.moments.product_dtype).removeprefix("torch."),
            "reservoir": {"size": size, "seed": seed},
        }

    def save(self, path: str | Path) -> Path:
        """Write to one safetensors file (written aside, then moved into place) and return its path."""
        write_atomically(Path(path), self.tensors(), {k: json.dumps(v) for k, v in self.header().items()})
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> PositionContext:
        """Read a file that :meth:`save` wrote; a truncated or foreign file is refused."""
        return PositionContext.of(*read_file(path, SCHEMA))

    @staticmethod
    def of(header: dict[str, Any], tensors: dict[str, Tensor]) -> PositionContext:
        """A basis from :meth:`header` and :meth:`tensors`."""
        moments = {k.removeprefix("moments|"): v for k, v in tensors.items() if k.startswith("moments|")}
        sample: dict[str, Any] = {k.removeprefix("reservoir|"): v for k, v in tensors.items() if k.startswith("reservoir|")}
        product_dtype = getattr(torch, header.get("product_dtype", "float32"))  # files of earlier versions do not say
        return PositionContext(
            provenance=Provenance.of(header["provenance"]),
            states=tuple(header["states"]),
            moments=Moments.of(header["window"], moments, product_dtype),
            context_means=tensors.get("context_means"),
            labels=tensors.get("labels"),
            names=tuple(header["names"]),
            reservoir=Reservoir(**header["reservoir"], **sample) if header["reservoir"]["size"] else None,
        )

    def __repr__(self) -> str:
        kept = [name for name, there in (("second moments", self.has_second_moments), ("ctx", self.ctx is not None)) if there]
        kept += [f"{len(self.samples)} sampled contexts"] if self.samples is not None else []
        outside = [c for c in range(self.columns) if not self.window[0] <= c < self.window[1]]
        note = f"{len(outside)} of {self.columns} columns outside the window" if outside else "all columns in the statistics"
        states = f"states {self.states[0]}..{self.states[-1]}"
        return f"PositionContext({self.provenance.line()}; {states}; {note}; kept: {', '.join(kept) or 'sums'})"

    def _repr_html_(self) -> str:
        return self.anova()._repr_html_()


SCHEMA = "tl_geometry/PositionContext/1"
"""File format identifier of :class:`PositionContext`."""
