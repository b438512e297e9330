"""The mean decomposition of residual stream states: h = mean + pos + ctx + resid (Song & Zhong
2023, Eq. 2 and 3).

A two-way analysis of variance in d_model dimensions: with contexts c and positions t,

    mean = average of h over c and t          pos_t = average over c of h - mean
    ctx_c = average over t of h - mean        resid = h - mean - pos_t - ctx_c        cvec = ctx +
    resid

Every context contributes every position once, so the four parts are orthogonal and their squared
norms add up.
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

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import (
    UNCHECKED,
    Provenance,
    read_file,
    refuse_unknown,
    write_atomically,
)
from tl_geometry.decomposition.largest import (
    Largest,
    LargestTokens,
    Sinks,
    median_norm,
    merged_texts,
    sinks_of,
    top_share,
)
from tl_geometry.decomposition.merging import joined, same_contexts
from tl_geometry.decomposition.moments import SETTINGS, Moments, Reservoir
from tl_geometry.decomposition.variance import LOW_RELIABILITY, Anova, analysis, half_pos, spans
from tl_geometry.models.model_view import ModelView

RAW = "basis of raw activations: its model is not known"
"""Flag of results that use a basis without a fingerprint with a model."""


class Parts(NamedTuple):
    """Additive parts of states: ``h = mean + pos + ctx + resid``; ``cvec = ctx + resid``. Shapes as
    the activations given."""

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
    """The four parts of a tensor of activations held in memory (Song & Zhong 2023, Eq. 2 and 3), in
    float64.

    >>> h = torch.arange(12.0).view(2, 3, 2)
    >>> parts = decompose_tensor(h)
    >>> bool(torch.allclose(parts.total(), h.double())), parts.mean.tolist()
    (True, [5.0, 6.0])
    """
    h = h.double()
    mean = h.mean((-3, -2))
    pos = h.mean(-3) - mean.unsqueeze(-2)
    ctx = h.mean(-2) - mean.unsqueeze(-2)
    return Parts(
        mean, pos, ctx, h - mean[..., None, None, :] - pos.unsqueeze(-3) - ctx.unsqueeze(-2)
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionContext:
    """Positional and context basis of a model's states over a corpus: what
    :func:`tl_geometry.decompose` returns.

    Position sums are kept for every column seen (:meth:`pos_at`); mean, ctx, analysis of variance
    and second moments use ``window``, half-open in absolute columns. Everything is float64 on the
    CPU; the sampled states are float32.

    ``groups`` of contexts are contiguous blocks (:attr:`group_of`), ``token_hashes`` one hash for
    each context (``None`` for activations), ``largest`` the tokens of largest norm
    (:meth:`largest_tokens`, :meth:`sinks`). A basis of normalised states
    (``provenance.normalized``) holds no raw ones: :meth:`transform` takes states normed in the same
    way, which cannot be told by their values.
    """

    provenance: Provenance
    states: tuple[int, ...]
    moments: Moments
    context_means: Float[Tensor, "state context d_model"] | None = None
    labels: Int[Tensor, " context"] | None = None
    names: tuple[str, ...] = ()
    reservoir: Reservoir | None = None
    token_hashes: Int[Tensor, " context"] | None = None
    largest: Largest | None = None
    largest_texts: tuple[tuple[str, ...], ...] = ()
    contiguous: bool = True

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
    def group_of(self) -> Int[Tensor, " context"] | None:
        """Group of each context: contiguous blocks (``None`` for merged files of earlier versions,
        which do not say)."""
        if self.contiguous:
            return torch.repeat_interleave(torch.arange(len(self.group_counts)), self.group_counts)
        found = torch.arange(self.contexts) % len(self.group_counts)
        known = torch.equal(
            torch.bincount(found, minlength=len(self.group_counts)), self.group_counts
        )
        return found if known else None

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
        """Positional vector of one absolute column; every column seen has one, inside the window or
        not."""
        return self.pos_columns[:, checks.index(position, self.columns, "position")]

    @property
    def ctx(self) -> Float[Tensor, "state context d_model"] | None:
        """The context basis, mean over a context's window of h - mean - pos, or ``None`` where it
        was not kept."""
        return None if self.context_means is None else self.context_means - self.mean.unsqueeze(1)

    def index(self, state: int) -> int:
        """Row of ``state`` in every array with a state axis."""
        require(
            state in self.states,
            "state",
            expected=f"one of {self.states}",
            got=repr(state),
            instead="decompose(..., states=None) for all",
        )
        return self.states.index(state)

    @property
    def has_second_moments(self) -> bool:
        """Whether second moments were kept."""
        return self.moments.second is not None

    def second_moment(
        self, state: int, *, centred: bool = True
    ) -> Float[Tensor, "d_model d_model"]:
        """``sum (h - mean)(h - mean)^T`` over contexts and window columns, or ``sum h h^T`` with
        ``centred=False``.

        Equals ``C pos^T pos + T ctx^T ctx + resid^T resid`` (all cross terms vanish).
        """
        if self.moments.second is None:
            fail(
                "second_moment",
                expected="second moments",
                got="a basis without",
                instead="decompose(..., second_moments=True)",
            )
        row = self.index(state)
        return self.moments.centred_second(
            row, self.mean[row] if centred else torch.zeros_like(self.mean[row])
        )

    def anova(self, *, null: PositionContext | None = None) -> Anova:
        """The analysis of variance table; ``null`` is the basis of windows spliced from random
        places (see :func:`tl_geometry.corpus.splice`).

        Degenerate designs have defined values: with one context ctx and resid are zero,
        ``identifiable`` is false and the shares of pos are NaN; with one position pos and resid are
        zero.
        """
        values, held = analysis(self.moments), self._top_share()
        reliability = values["pos_reliability"]
        remarks = [self._remark(row, float(reliability[row])) for row in range(len(self.states))]
        low = [
            s for s, r in zip(self.states, reliability.tolist(), strict=True) if r < LOW_RELIABILITY
        ]
        flags = (
            [f"split-half reliability of pos below {LOW_RELIABILITY} in states {spans(low)}"]
            if low
            else []
        )
        return Anova(
            provenance=self.provenance.flagged(*self.flags(), *flags),
            states=self.states,
            contexts=self.contexts,
            positions=self.window[1] - self.window[0],
            **values,
            ctx_null=None if null is None else null.anova().shares["ctx"],
            identifiable=self.contexts > 1,
            top_share=held,
            remarks=tuple(remarks),
        )

    def _remark(self, row: int, reliability: float) -> str:
        """What makes the row of one state hard to read."""
        found = ["one context: position and content together"] if self.contexts == 1 else []
        found += [f"reliability below {LOW_RELIABILITY}"] if reliability < LOW_RELIABILITY else []
        held = self.sinks(self.states[row])
        return "; ".join([*found, *([held.remark] if held is not None and held.remark else [])])

    def _top_share(self) -> Float[Tensor, " state"]:
        if self.moments.tail is None or self.largest is None:
            return torch.full((len(self.states),), torch.nan, dtype=torch.float64)
        return top_share(self.moments.tail, self.largest.norm)

    def sinks(self, state: int) -> Sinks | None:
        """How much of a state's sum of squares its largest tokens hold, in numbers and words;
        ``None`` for files of before.

        >>> h = torch.ones(4, 50, 3)
        >>> h[:, 1] += 99
        >>> from tl_geometry import decompose_activations
        >>> held = decompose_activations(h).sinks(0)
        >>> held.tokens, held.of, round(held.share, 2), held.positions
        (1, 200, 0.25, (1,))
        """
        row = self.index(state)
        if self.moments.tail is None or self.largest is None:
            return None
        return sinks_of(
            self.moments.tail[row],
            self.largest,
            row,
            self.largest_texts[row] if self.largest_texts else (),
        )

    def flags(self) -> tuple[str, ...]:
        """What a reader of anything made from this basis should know: states in which few tokens
        hold most, a single context."""
        found = {
            s: held for s in self.states if (held := self.sinks(s)) is not None and held.remark
        }
        flags = (
            [] if self.contexts > 1 else ["one context: position and content cannot be told apart"]
        )
        if found:
            worst = max(found, key=lambda s: found[s].share)
            flags.append(
                f"in states {spans(list(found))} few tokens hold much: in state {worst} {found[worst].remark}"
            )
        return tuple(flags)

    def largest_tokens(self) -> LargestTokens:
        """The tokens of largest norm in the window, a row per state and token; see :meth:`sinks`
        for what they do to sums."""
        tail, largest = self.moments.tail, self.largest
        if tail is None or largest is None:
            fail(
                "largest_tokens",
                expected="a basis that holds them",
                got="one of an earlier version",
                instead="decompose(...) again",
            )
        total = tail[:, 1].sum(-1, keepdim=True)
        kept = int((largest.context >= 0).sum(1).max())
        values = {name: v[:, :kept] for name, v in largest.tensors().items()}
        share = values["norm"].square() / torch.where(total > 0, total, torch.nan)
        return LargestTokens(
            provenance=self.provenance.flagged(*self.flags()),
            states=self.states,
            tokens=int(tail[0, 0].sum()),
            share=share,
            median=median_norm(tail),
            top_share=self._top_share(),
            str_tokens=self.largest_texts,
            **values,
        )

    def require_identifiable(self, what: str) -> None:
        """Raise unless there are two contexts: with one, position and content cannot be told
        apart."""
        require(
            self.contexts >= 2,
            what,
            expected="a basis of at least 2 contexts (with one, position and content cannot be told apart)",
            got=f"{self.contexts}",
            instead="decompose(model, more windows)",
        )

    def require_raw(self, what: str) -> None:
        """Raise for a basis of normalised states where raw ones are meant."""
        got = "one of normalised states"
        require(
            not self.provenance.normalized,
            what,
            expected="a basis of raw states",
            got=got,
            instead="decompose(..., normalize=False)",
        )

    def half_pos(
        self,
    ) -> (
        tuple[Float[Tensor, "state position d_model"], Float[Tensor, "state position d_model"]]
        | None
    ):
        """The positional basis from every other group of contexts and from the rest, or ``None``
        when there is only one group."""
        return half_pos(self.moments)

    def transform(
        self,
        activations: Float[Tensor, "state batch position d_model"]
        | Float[Tensor, "batch position d_model"],
        positions: Sequence[int] | Int[Tensor, " position"] | None = None,
    ) -> Parts:
        """Parts of new activations, relative to this basis: ``ctx_c = mean over the given positions
        of h - mean - pos_t``.

        ``activations`` has one row per state of the basis (or no state axis, with a basis of one
        state); ``positions`` are the absolute columns of its position axis, by default the window
        (or 0, 1, ... when the width differs). The context vector equals the textbook form on full
        windows and stays exact on a part of one.
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
        checks.finite(h, "activations")
        if positions is None:
            whole = h.shape[2] == self.window[1] - self.window[0]
            positions = range(*self.window) if whole else range(h.shape[2])
        columns = torch.as_tensor(list(positions))
        inside = len(columns) == h.shape[2] and bool(
            ((columns >= 0) & (columns < self.columns)).all()
        )
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
        """Raise unless this basis was computed from the weights of ``view`` (and with the same BOS
        setting, where it is known).

        What can be used and should be said with the result is :meth:`remarks`.
        """
        known = self.provenance.fingerprint
        same = known is None or known == view.fingerprint
        names = (f"{self.provenance.model} ({known})", f"{view.name} ({view.fingerprint})")
        require(
            same,
            "basis",
            expected=f"the model it was computed from, {names[0]}",
            got=names[1],
            instead="decompose(model, tokens)",
        )
        require(
            has_bos is None
            or self.provenance.has_bos is None
            or has_bos == self.provenance.has_bos,
            "tokens",
            expected=f"has_bos={self.provenance.has_bos}, as in the basis",
            got=f"has_bos={has_bos}",
            instead="the same prepend_bos= for both",
        )
        width = self.mean.shape[1]
        require(
            width == view.d_model,
            "basis",
            expected=f"d_model {view.d_model} of {view.name}",
            got=width,
            instead="its own activations",
        )

    def remarks(self, view: ModelView) -> tuple[str, ...]:
        """Flags of a result that uses this basis with a model: hooks of one that the other did not
        have, an unknown model."""
        mine, theirs = set(self.provenance.hooks), set(view.hooked())
        flags = [RAW] if self.provenance.fingerprint is None else []
        flags += (
            [f"basis fitted without these hooks ({', '.join(sorted(theirs - mine))})"]
            if theirs - mine
            else []
        )
        flags += (
            [f"basis fitted under other hooks ({', '.join(sorted(mine - theirs))})"]
            if mine - theirs
            else []
        )
        return (*flags, *self.flags())

    @staticmethod
    def merge(parts: Sequence[PositionContext]) -> PositionContext:
        """One basis from partial results over disjoint contexts (shards of a corpus), in the given
        order.

        Mean, pos and ctx equal the single run's to 1e-10, second moments to 1e-6 of their trace.
        Contexts are renumbered in the given order, and groups joined to as many contiguous ones as
        the part with most has.

        Raises ``GeometryError`` for parts of other models, settings or states, and for the same
        contexts twice.
        """
        require(len(parts) > 0, "merge", expected="at least one basis", got="none")
        first = parts[0]
        for other in parts[1:]:
            for field in ("model", "fingerprint", "has_bos", "dtype", "hooks", "normalized"):
                a, b = getattr(first.provenance, field), getattr(other.provenance, field)
                require(
                    a == b,
                    f"merge: {field}",
                    expected=repr(a),
                    got=repr(b),
                    instead="partial results of one model and one setting",
                )
            require(
                first.states == other.states,
                "merge: states",
                expected=first.states,
                got=other.states,
            )
            same = first.contiguous == other.contiguous
            require(
                same,
                "merge: groups",
                expected="files of one version",
                got="contiguous and interleaved",
                instead="decompose again",
            )
            require(
                first.names == other.names,
                "merge: document names",
                expected=first.names,
                got=other.names,
            )
        sums, known = [p.moments for p in parts], [p.token_hashes for p in parts]
        starts = [sum(p.contexts for p in parts[:i]) for i in range(len(parts))]
        moments = joined(sums, contiguous=first.contiguous)
        flags = [flag for p in parts for flag in p.provenance.flags] + same_contexts(sums, known)
        reservoir = first.reservoir
        for part, start in zip(parts[1:], starts[1:], strict=True):
            if reservoir is not None and part.reservoir is not None:
                reservoir = Reservoir.merge(reservoir, part.reservoir, start)
        means = [p.context_means for p in parts]
        labels = [p.labels for p in parts]
        hashes = (
            "+".join(str(p.provenance.token_hash) for p in parts)
            if len(parts) > 1
            else first.provenance.token_hash
        )
        tops = [p.largest for p in parts if p.largest is not None]
        largest = Largest.merge(tops, starts) if len(tops) == len(parts) else None
        texts = merged_texts(largest, tops, [p.largest_texts for p in parts])
        return PositionContext(
            provenance=dataclasses.replace(
                first.provenance, token_hash=hashes, contexts=moments.contexts
            ).flagged(*flags),
            states=first.states,
            moments=moments,
            context_means=None
            if any(m is None for m in means)
            else torch.cat([m for m in means if m is not None], dim=1),
            labels=None
            if any(v is None for v in labels)
            else torch.cat([v for v in labels if v is not None]),
            names=first.names,
            reservoir=reservoir,
            token_hashes=None
            if any(v is None for v in known)
            else torch.cat([v for v in known if v is not None]),
            largest=largest,
            largest_texts=texts,
            contiguous=first.contiguous,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is stored as a tensor, by name."""
        found = {f"moments|{k}": v for k, v in self.moments.tensors().items()}
        optional: dict[str, Tensor | None] = {
            "context_means": self.context_means,
            "labels": self.labels,
        }
        optional |= {"token_hashes": self.token_hashes}
        optional |= (
            {}
            if self.largest is None
            else {f"largest|{k}": v for k, v in self.largest.tensors().items()}
        )
        if self.reservoir is not None and self.reservoir.states is not None:
            fields = dataclasses.asdict(self.reservoir)
            optional |= {
                f"reservoir|{k}": fields[k] for k in ("priorities", "contexts", "states", "tokens")
            }
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
            "largest_texts": self.largest_texts,
            "contiguous": self.contiguous,
        }

    def save(self, path: str | Path) -> Path:
        """Write to one safetensors file (written aside, then moved into place) and return its
        path."""
        write_atomically(
            Path(path), self.tensors(), {k: json.dumps(v) for k, v in self.header().items()}
        )
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> PositionContext:
        """Read a file that :meth:`save` wrote; a truncated, altered or foreign file, and one of a
        newer version, is refused."""
        header, tensors = read_file(path, SCHEMA, OLD_SCHEMA)
        refuse_unknown(path, header, HEADER, "fields")
        refuse_unknown(path, tensors, TENSORS, "tensors")
        return PositionContext.of(header, tensors)

    @staticmethod
    def of(header: dict[str, Any], tensors: dict[str, Tensor]) -> PositionContext:
        """A basis from :meth:`header` and :meth:`tensors`."""
        moments = {
            k.removeprefix("moments|"): v for k, v in tensors.items() if k.startswith("moments|")
        }
        sample: dict[str, Any] = {
            k.removeprefix("reservoir|"): v
            for k, v in tensors.items()
            if k.startswith("reservoir|")
        }
        top = {
            k.removeprefix("largest|"): v for k, v in tensors.items() if k.startswith("largest|")
        }
        product_dtype = getattr(
            torch, header.get("product_dtype", "float32")
        )  # files of earlier versions do not say
        provenance = Provenance.of(header["provenance"])
        return PositionContext(
            provenance=provenance if "checksum" in header else provenance.flagged(UNCHECKED),
            states=tuple(header["states"]),
            moments=Moments.of(header["window"], moments, product_dtype),
            context_means=tensors.get("context_means"),
            labels=tensors.get("labels"),
            names=tuple(header["names"]),
            reservoir=Reservoir(**header["reservoir"], **sample)
            if header["reservoir"]["size"]
            else None,
            token_hashes=tensors.get("token_hashes"),
            largest=Largest(**top) if top else None,
            largest_texts=tuple(tuple(row) for row in header.get("largest_texts", ())),
            contiguous=header.get(
                "contiguous", False
            ),  # groups of files of before are the index modulo their number
        )

    def __repr__(self) -> str:
        kept = [
            name
            for name, there in (
                ("second moments", self.has_second_moments),
                ("ctx", self.ctx is not None),
            )
            if there
        ]
        kept += [f"{len(self.samples)} sampled contexts"] if self.samples is not None else []
        outside = [c for c in range(self.columns) if not self.window[0] <= c < self.window[1]]
        note = (
            f"{len(outside)} of {self.columns} columns outside the window"
            if outside
            else "all columns in the statistics"
        )
        states = f"states {self.states[0]}..{self.states[-1]}"
        return f"PositionContext({self.provenance.line()}; {states}; {note}; kept: {', '.join(kept) or 'sums'})"

    def _repr_html_(self) -> str:
        return self.anova()._repr_html_()


def require_basis(value: object) -> None:
    """Raise unless ``value`` is a :class:`PositionContext` (a path or a table in its place is a
    common slip)."""
    ok = isinstance(value, PositionContext)
    instead = (
        "PositionContext.load(path)"
        if isinstance(value, str | Path)
        else "decompose(model, tokens)"
    )
    require(ok, "basis", expected="a PositionContext", got=describe(value), instead=instead)


SCHEMA, OLD_SCHEMA = "tl_geometry/PositionContext/2", "tl_geometry/PositionContext/1"
"""File format identifiers of :class:`PositionContext`: the one that is written, and one that can be
read (with a flag)."""
HEADER = (
    "schema",
    "provenance",
    "states",
    "window",
    "names",
    "product_dtype",
    "reservoir",
    "largest_texts",
    "contiguous",
    "checksum",
)
"""Fields of its header."""
TENSORS = (
    "context_means",
    "labels",
    "token_hashes",
    *(f"reservoir|{k}" for k in ("priorities", "contexts", "states", "tokens")),
    *(f"largest|{f.name}" for f in dataclasses.fields(Largest)),
    *(f"moments|{f.name}" for f in dataclasses.fields(Moments) if f.name not in SETTINGS),
)
"""Names of its tensors."""
