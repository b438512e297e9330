"""Which mean, positional and context vectors do a model's states have over a corpus? The result of
``decompose``, which every function that takes a ``basis`` reads. It is computed from sums that
merge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Result
from tl_geometry.decomposition import merge_parts
from tl_geometry.decomposition.from_activations import Parts, parts_about
from tl_geometry.decomposition.groups import jackknife_blocks
from tl_geometry.decomposition.largest import (
    Largest,
    LargestTokens,
    Sinks,
    median_norm,
    merged_texts,
    sinks_of,
    top_share,
)
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.reservoir import Reservoir
from tl_geometry.decomposition.variance import (
    LOW_RELIABILITY,
    Anova,
    analysis,
    anova_intervals,
    spans,
)
from tl_geometry.models.model_view import ModelView

RAW = "basis of raw activations: its model is not known"
"""Flag of results for a model that use a basis without a fingerprint: whether the basis belongs to
that model cannot be checked."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionContext(Result):
    """Positional and context basis of a model's states over a corpus: what
    :func:`tl_geometry.decompose` returns.

    Position sums are kept for every position seen (:meth:`pos_at`); mean, ctx, analysis of variance
    and second moments use ``window``, half-open in absolute positions. Everything is float64 on the
    CPU; the sampled states are float32.

    Groups of contexts are contiguous blocks (:attr:`group_of`). ``context_means`` are the means of
    h over the window of each context (``ctx`` plus the mean). ``labels`` are the numbers of the
    contexts' documents, ``names`` what the numbers mean. ``reservoir`` holds sampled contexts.
    ``token_hashes`` has one hash for each context (``None`` for activations), ``largest`` the
    tokens of largest norm (:meth:`largest_tokens`, :meth:`sinks`). A basis of normalised states
    (``provenance.normalized``) is about these alone: give :meth:`transform` states normed in the
    same way, since their values do not show whether they are.

    Its table (``to_dataframe``, ``to_latex``) is that of :meth:`anova`.
    """

    states: tuple[int, ...]
    moments: Moments
    context_means: Float[Tensor, "state context d_model"] | None = None
    labels: Int[Tensor, " context"] | None = None
    names: tuple[str, ...] = ()
    reservoir: Reservoir | None = None
    token_hashes: Int[Tensor, " context"] | None = None
    largest: Largest
    largest_texts: tuple[tuple[str, ...], ...] = ()

    @property
    def window(self) -> tuple[int, int]:
        """Half-open window of absolute positions that the statistics use."""
        return self.moments.window

    @property
    def contexts(self) -> int:
        """Number of contexts."""
        return self.moments.contexts

    @property
    def length(self) -> int:
        """Number of positions seen, inside the window or not."""
        return self.moments.sums.shape[2]

    @property
    def group_sums(self) -> Float[Tensor, "group state position d_model"]:
        """Sum of h over the contexts of each group, for every position."""
        return self.moments.sums

    @property
    def group_counts(self) -> Int[Tensor, " group"]:
        """Contexts of each group."""
        return self.moments.counts

    @property
    def group_of(self) -> Int[Tensor, " context"]:
        """Number of each context's group; groups are contiguous blocks."""
        return torch.repeat_interleave(torch.arange(len(self.group_counts)), self.group_counts)

    @property
    def samples(self) -> Float[Tensor, "sample state position d_model"] | None:
        """States of the sampled contexts at all positions (float32); ``None`` where no context was
        kept."""
        return None if self.reservoir is None else self.reservoir.states

    @cached_property
    def mean(self) -> Float[Tensor, "state d_model"]:
        """Mean of h over contexts and window positions."""
        return self.moments.window_sum() / (self.contexts * (self.window[1] - self.window[0]))

    @cached_property
    def pos_seen(self) -> Float[Tensor, "state position d_model"]:
        """Mean over contexts of h - mean, for every position seen."""
        return self.moments.sums.sum(0) / self.contexts - self.mean.unsqueeze(1)

    @property
    def pos(self) -> Float[Tensor, "state position d_model"]:
        """The positional basis: a row for each position of the window."""
        return self.pos_seen[:, self.window[0] : self.window[1]]

    def pos_at(self, position: int) -> Float[Tensor, "state d_model"]:
        """Positional vector of one absolute position; every position seen has one, inside the
        window or not."""
        return self.pos_seen[:, checks.index(position, self.length, "position")]

    @property
    def ctx(self) -> Float[Tensor, "state context d_model"] | None:
        """The context basis, mean over a context's window of h - mean - pos, or ``None`` where it
        was not kept."""
        return None if self.context_means is None else self.context_means - self.mean.unsqueeze(1)

    def index(self, state: int) -> int:
        """Row of ``state`` in every array with a state axis."""
        expected, instead = f"one of {self.states}", "decompose(..., states=None) for all"
        require(state in self.states, "state", expected=expected, got=repr(state), instead=instead)
        return self.states.index(state)

    @property
    def has_second_moments(self) -> bool:
        """Whether second moments were kept."""
        return self.moments.second is not None

    def second_moment(
        self, state: int, *, centered: bool = True
    ) -> Float[Tensor, "d_model d_model"]:
        """``sum (h - mean)(h - mean)^T`` over contexts and window positions, or ``sum h h^T`` with
        ``centered=False``.

        Centred it equals ``C pos^T pos + T ctx^T ctx + resid^T resid``, with a row for each
        position, context or token (all cross terms vanish).
        """
        if self.moments.second is None:
            instead = "decompose(..., second_moments=True)"
            fail("second_moment", expected="second moments", got="a basis without", instead=instead)
        row = self.index(state)
        mean = self.mean[row]
        return self.moments.centred_second(row, mean if centered else torch.zeros_like(mean))

    def anova(self, *, null: PositionContext | None = None) -> Anova:
        """The analysis of variance table; ``null`` is the basis of windows spliced from random
        places (see :func:`tl_geometry.corpus.splice`).

        Degenerate designs have defined values: with one context ctx and resid are zero,
        ``identifiable`` is false and the shares of pos are NaN; with one position pos and resid are
        zero.
        """
        if null is not None:
            require_basis(null, "null")
            same_states = null.states == self.states
            require(
                same_states, "null", expected=f"a basis of states {self.states}", got=null.states
            )
        values = analysis(self.moments)
        reliability = dict(zip(self.states, values["pos_reliability"].tolist(), strict=True))
        low = [state for state, r in reliability.items() if r < LOW_RELIABILITY]
        unsure = f"split-half reliability of pos below {LOW_RELIABILITY} in states {spans(low)}"
        flags = [unsure] if low else []
        null_table = None if null is None else null.anova()
        intervals = anova_intervals(self.moments)
        if intervals and null_table is not None and null_table.intervals:
            intervals["ctx_null"] = null_table.intervals["ctx"]
        return Anova(
            provenance=self.provenance.flagged(*self.flags(), *flags),
            states=self.states,
            contexts=self.contexts,
            positions=self.window[1] - self.window[0],
            **values,
            ctx_null=None if null_table is None else null_table.shares["ctx"],
            identifiable=self.contexts > 1,
            top_share=self._top_share(),
            remarks=tuple(self._remark(state, r) for state, r in reliability.items()),
            intervals=intervals,
            blocks=len(jackknife_blocks(self.group_counts)),
        )

    def _remark(self, state: int, reliability: float) -> str:
        """What a reader of the row of one state should be careful about."""
        remarks = [
            "one context: position and content together" if self.contexts == 1 else "",
            f"reliability below {LOW_RELIABILITY}" if reliability < LOW_RELIABILITY else "",
            self.sinks(state).remark,
        ]
        return "; ".join(filter(None, remarks))

    def _top_share(self) -> Float[Tensor, " state"]:
        return top_share(self.moments.tail, self.largest.norm)

    def sinks(self, state: int) -> Sinks:
        """How much of a state's sum of squares its largest tokens hold, in numbers and words.

        >>> h = torch.ones(4, 50, 3)
        >>> h[:, 1] += 99
        >>> from tl_geometry import decompose_activations
        >>> held = decompose_activations(h).sinks(0)
        >>> held.tokens, held.of, round(held.share, 2), held.positions
        (1, 200, 0.25, (1,))
        """
        row = self.index(state)
        texts = self.largest_texts[row] if self.largest_texts else ()
        return sinks_of(self.moments.tail[row], self.largest, row, texts)

    def flags(self) -> tuple[str, ...]:
        """What a reader of anything made from this basis should know: states in which few tokens
        hold most, a single context."""
        single = "one context: position and content cannot be told apart"
        flags = [] if self.contexts > 1 else [single]
        sinks_by_state = {state: self.sinks(state) for state in self.states}
        sinks = {state: held for state, held in sinks_by_state.items() if held.remark}
        if sinks:
            worst = max(sinks, key=lambda state: sinks[state].share)
            remark = f"in state {worst} {sinks[worst].remark}"
            flags.append(f"in states {spans(list(sinks))} few tokens hold much: {remark}")
        return tuple(flags)

    def largest_tokens(self) -> LargestTokens:
        """The tokens of largest norm in the window, a row per state and token; see :meth:`sinks`
        for what they do to sums."""
        tail = self.moments.tail
        total = tail[:, 1].sum(-1, keepdim=True)
        filled = int((self.largest.context >= 0).sum(1).max())
        largest = self.largest.select(slice(filled), "kept")
        share = largest.norm.square() / torch.where(total > 0, total, torch.nan)
        return LargestTokens(
            provenance=self.provenance.flagged(*self.flags()),
            states=self.states,
            tokens=int(tail[0, 0].sum()),
            share=share,
            median=median_norm(tail),
            top_share=self._top_share(),
            str_tokens=self.largest_texts,
            **largest.tensors(),
        )

    def require_identifiable(self, what: str) -> None:
        """Raise unless there are two contexts: with one, position and content cannot be told
        apart."""
        reason = "with one, position and content cannot be told apart"
        expected, instead = f"a basis of at least 2 contexts ({reason})", "more windows"
        enough, got = self.contexts >= 2, f"{self.contexts}"
        require(enough, what, expected=expected, got=got, instead=f"decompose(model, {instead})")

    def require_raw(self, what: str) -> None:
        """Raise for a basis of normalised states where ``what`` needs one of raw states."""
        raw, got = not self.provenance.normalized, "one of normalised states"
        instead = "decompose(..., normalize=False)"
        require(raw, what, expected="a basis of raw states", got=got, instead=instead)

    def transform(
        self,
        activations: Float[Tensor, "state batch position d_model"]
        | Float[Tensor, "batch position d_model"],
        positions: Sequence[int] | Int[Tensor, " position"] | None = None,
    ) -> Parts:
        """Parts of new activations, relative to this basis: ``ctx_c = mean over the given positions
        of h - mean - pos_t``.

        ``activations`` has one row per state of the basis (or no state axis, with a basis of one
        state). ``positions`` are the absolute positions on its position axis, by default the window
        where its length is that of the window, else 0, 1, ... The context vector equals
        ``mean of h - mean`` on full windows and stays right on a part of one, where pos does not
        average to zero.
        """
        single = activations.dim() == 3
        h = activations.unsqueeze(0) if single else activations
        states, d_model = self.mean.shape
        fits = h.dim() == 4 and h.shape[0] == states and h.shape[3] == d_model
        expected = f"[state batch position d_model] with {states} states and d_model {d_model}"
        got, instead = describe(activations), "basis.states to see which states it holds"
        require(fits, "activations", expected=expected, got=got, instead=instead)
        checks.finite(h, "activations")
        if positions is None:
            window_wide = h.shape[2] == self.window[1] - self.window[0]
            positions = range(*self.window) if window_wide else range(h.shape[2])
        places = torch.as_tensor(list(positions))
        fits = len(places) == h.shape[2] and bool(((places >= 0) & (places < self.length)).all())
        expected = f"{h.shape[2]} from 0 to {self.length - 1}"
        got = f"{len(places)}: {places.tolist()[:8]}"
        require(fits, "positions", expected=expected, got=got)
        parts = parts_about(h, self.mean.to(h.device), self.pos_seen[:, places].to(h.device))
        return Parts(*(part[0] for part in parts)) if single else parts

    def check_model(self, view: ModelView, has_bos: bool | None = None) -> None:
        """Raise unless this basis was computed from the weights of ``view`` (and with the same BOS
        setting, where it is known).

        :meth:`remarks` says what is accepted but should be shown with the result.
        """
        fingerprint, bos = self.provenance.fingerprint, self.provenance.has_bos
        fits, got = fingerprint in (None, view.fingerprint), f"{view.name} ({view.fingerprint})"
        expected = f"the model it was computed from, {self.provenance.model} ({fingerprint})"
        require(fits, "basis", expected=expected, got=got, instead="decompose(model, tokens)")
        fits, instead = None in (has_bos, bos) or has_bos == bos, "the same prepend_bos= for both"
        expected, got = f"has_bos={bos}, as in the basis", f"has_bos={has_bos}"
        require(fits, "tokens", expected=expected, got=got, instead=instead)
        width, expected = self.mean.shape[1], f"d_model {view.d_model} of {view.name}"
        fits, instead = width == view.d_model, "its own activations"
        require(fits, "basis", expected=expected, got=width, instead=instead)

    def remarks(self, view: ModelView) -> tuple[str, ...]:
        """Flags of a result that uses this basis with a model: an unknown model, hooks that were
        active on one side only, and :meth:`flags`."""
        fitted_under, active = set(self.provenance.hooks), set(view.hooked())
        flags = [RAW] if self.provenance.fingerprint is None else []
        differing = {"without these": active - fitted_under, "under other": fitted_under - active}
        for how, hooks in differing.items():
            flags += [f"basis fitted {how} hooks ({', '.join(sorted(hooks))})"] if hooks else []
        return (*flags, *self.flags())

    @staticmethod
    def merge(parts: Iterable[PositionContext]) -> PositionContext:
        """One basis from partial results over disjoint contexts (shards of a corpus), in the given
        order.

        Mean, pos and ctx equal those of a single run to 1e-10, second moments to 1e-6 of their
        trace. Contexts are renumbered in the given order. There are as many contiguous groups as
        the part with the most has. Equal label names get one number.

        Raises ``GeometryError`` for parts of different models or settings, and for a part given
        twice.
        """
        # strings are iterable: a path would be taken for a sequence of letters
        single = isinstance(parts, PositionContext | str | Path) or not isinstance(parts, Iterable)
        instead = "merge([first, second, ...])"
        require(not single, "merge", expected="bases", got=describe(parts), instead=instead)
        for i, part in enumerate(parts := tuple(parts)):
            require_basis(part, f"merge: part {i}")
        require(parts, "merge", expected="at least one basis", got="none")
        first = parts[0]
        for other in parts[1:]:
            merge_parts.require_one_setting(first, other)
        labels, names = merge_parts.merged_labels(parts)
        starts = [0, *accumulate(p.contexts for p in parts[:-1])]
        sums, hashes = [p.moments for p in parts], [p.token_hashes for p in parts]
        tops = [p.largest for p in parts]
        samples = [p.reservoir for p in parts if p.reservoir is not None]
        moments, largest = merge_parts.joined(sums), Largest.merge(tops, starts)
        return PositionContext(
            provenance=merge_parts.merged_provenance(
                [p.provenance for p in parts],
                moments.contexts,
                merge_parts.same_contexts(sums, hashes),
            ),
            states=first.states,
            moments=moments,
            context_means=merge_parts.together([p.context_means for p in parts], dim=1),
            labels=labels,
            names=names,
            reservoir=Reservoir.merge(samples, starts) if len(samples) == len(parts) else None,
            token_hashes=merge_parts.together(hashes),
            largest=largest,
            largest_texts=merged_texts(largest, tops, [p.largest_texts for p in parts]),
        )

    @cached_property
    def _table(self) -> Anova:
        return self.anova()

    def columns(self) -> Sequence[str]:
        return self._table.columns()

    def rows(self) -> Sequence[Sequence[object]]:
        return self._table.rows()

    @property
    def kept(self) -> str:
        """What is held besides sums, in words for the repr."""
        parts = ["second moments"] if self.has_second_moments else []
        parts += ["ctx"] if self.ctx is not None else []
        parts += [f"{len(self.samples)} sampled contexts"] if self.samples is not None else []
        return ", ".join(parts) or "sums"

    def __repr__(self) -> str:
        outside = self.length - (self.window[1] - self.window[0])
        excluded = f"{outside} of {self.length} positions outside the window"
        note = excluded if outside else "all positions in the statistics"
        states = f"states {self.states[0]}..{self.states[-1]}"
        shown = [self.provenance.line(), states, note, f"kept: {self.kept}"]
        return f"PositionContext({'; '.join(shown)})"

    def _repr_html_(self) -> str:
        return self._table._repr_html_()


def require_basis(value: object, what: str = "basis") -> None:
    """Raise unless ``value`` is a :class:`PositionContext` (a path or a table in its place is a
    common slip): the one check of every public function that takes a basis."""
    if not isinstance(value, PositionContext):
        is_path = isinstance(value, str | Path)
        instead = "PositionContext.load(path)" if is_path else "decompose(model, tokens)"
        fail(what, expected="a PositionContext", got=describe(value), instead=instead)
