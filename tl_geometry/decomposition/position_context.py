"""Which mean, positional and context vectors do a model's states have over a corpus? The result of
``decompose``, which every function that takes a ``basis`` reads. It is computed from sums that
merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from einops import reduce
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Result
from tl_geometry.base.tables import Table
from tl_geometry.decomposition import merge_parts
from tl_geometry.decomposition.groups import jackknife_blocks
from tl_geometry.decomposition.largest import Places, Sinks, sinks_of
from tl_geometry.decomposition.moments import Moments, Parts
from tl_geometry.decomposition.variance import (
    LOW_RELIABILITY,
    Anova,
    anova_intervals,
    reliability,
    spans,
    sums_of_squares,
)
from tl_geometry.models.model_view import ModelView

RAW = "basis of raw activations: its model is not known"
"""Flag of results for a model that use a basis without a fingerprint: whether the basis belongs to
that model cannot be checked."""
KEEPS = "basis.save(path, full=True) before, or the basis that decompose returned"
"""What keeps what a file leaves out."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionContext(Guarded, Result):
    """Positional and context basis of a model's states over a corpus: what
    :func:`tl_geometry.decompose` returns.

    Position sums are kept for every position seen (:meth:`pos_at`); mean, ctx, analysis of variance
    and second moments use ``window``, half-open in absolute positions. Everything is float64 on the
    CPU; the sampled states are float32. What a basis hands out are copies, but for ``moments``.

    Groups of contexts are contiguous blocks (:attr:`group_counts`). ``context_means`` are the means
    of h over the window of each context (``ctx`` plus the mean). ``labels`` are the numbers of the
    contexts' documents, ``label_names`` what the numbers mean. ``sampled`` are the numbers of the
    contexts whose states are kept (``sample_states``). ``token_hashes`` has one hash for each
    context (``None`` for activations), ``largest`` the places of the tokens of largest norm
    (:meth:`largest_tokens`, :meth:`sinks`), and ``token_texts`` these tokens as text, by id.
    ``lean`` says that it was read from a file without groups, contexts, samples and second moments.
    A basis of normalised states (``provenance.normalized``) is about these alone: give
    :meth:`transform` states normed in the same way, since their values do not show whether they
    are.

    Its table is that of :meth:`anova`.
    """

    states: tuple[int, ...]
    moments: Moments
    context_means: Float[Tensor, "state context d_model"] | None = None
    labels: Int[Tensor, " context"] | None = None
    label_names: tuple[str, ...] = ()
    sampled: Int[Tensor, " sample"] | None = None
    sample_states: Float[Tensor, "sample state position d_model"] | None = None
    token_hashes: Int[Tensor, " context"] | None = None
    largest: Places
    token_texts: Mapping[str, str] = field(default_factory=dict)
    lean: bool = False

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
    def group_counts(self) -> Int[Tensor, " group"]:
        """Contexts of each group."""
        return self.moments.counts.clone()

    @cached_property
    def mean(self) -> Float[Tensor, "state d_model"]:
        """Mean of h over contexts and window positions."""
        return self.moments.window_mean()

    @cached_property
    def _pos_seen(self) -> Float[Tensor, "state position d_model"]:
        return self.moments.sums.sum(0) / self.contexts - self.mean.unsqueeze(1)

    @property
    def pos_seen(self) -> Float[Tensor, "state position d_model"]:
        """Mean over contexts of h - mean, for every position seen."""
        return self._pos_seen.clone()

    @property
    def pos(self) -> Float[Tensor, "state position d_model"]:
        """The positional basis: a row for each position of the window."""
        return self._pos_seen[:, slice(*self.window)].clone()

    def pos_at(self, position: int) -> Float[Tensor, "state d_model"]:
        """Positional vector of one absolute position; every position seen has one, inside the
        window or not."""
        return self._pos_seen[:, checks.index(position, self.length, "position")].clone()

    def of_state(
        self, state: int, length: int
    ) -> tuple[Float[Tensor, " d_model"], Float[Tensor, "position d_model"]]:
        """Mean and positional vectors of one state at the first ``length`` positions."""
        row = self.index(state)
        return self.mean[row], self._pos_seen[row, :length].clone()

    @property
    def ctx(self) -> Float[Tensor, "state context d_model"] | None:
        """The context basis, mean over a context's window of h - mean - pos, or ``None`` where it
        was not kept."""
        means = vars(self)["context_means"]
        return None if means is None else means - self.mean.unsqueeze(1)

    def index(self, state: int) -> int:
        """Row of ``state`` in every array with a state axis."""
        expected, instead = f"one of {self.states}", "decompose(..., states=None) for all"
        number = checks.whole(state)
        if number not in self.states:
            fail("state", expected=expected, got=repr(state), instead=instead)
        return self.states.index(number)

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
        row = self.index(state)
        if not self.has_second_moments:
            instead = KEEPS if self.lean else "decompose(..., second_moments=True)"
            fail("second_moment", expected="second moments", got="a basis without", instead=instead)
        mean, tokens = self.mean[row], self.contexts * (self.window[1] - self.window[0])
        about_zero = self.moments.products(row)
        return about_zero - tokens * torch.outer(mean, mean) if centered else about_zero

    # ---- what it says

    def anova(self, *, null: PositionContext | None = None) -> Anova:
        """The analysis of variance table; ``null`` is the basis of windows spliced from random
        places (see :func:`tl_geometry.corpus.splice`), with the same states among its own.

        Degenerate designs have defined values: with one context ctx and resid are zero,
        ``identifiable`` is false and the shares of pos are NaN; with one position pos and resid are
        zero.
        """
        agreement = reliability(self.moments)
        low = [s for s, r in zip(self.states, agreement.tolist()) if r < LOW_RELIABILITY]
        held = [self.sinks(state) for state in self.states]
        single = "" if self.contexts > 1 else "one context: position and content together"
        unsure = f"reliability below {LOW_RELIABILITY}"
        said = [(single, unsure * (s in low), h.remark) for s, h in zip(self.states, held)]
        flags = [f"split-half reliability of pos below {LOW_RELIABILITY} in states {spans(low)}"]
        flags = [*(flags if low else ()), *([f"no intervals: use {KEEPS}"] if self.lean else ())]
        intervals = anova_intervals(self.moments)
        ctx_null = None
        if null is not None:
            require_basis(null, "null")
            rows, beside = [null.index(state) for state in self.states], null.anova()
            ctx_null = beside.shares["ctx"][rows]
            if intervals and beside.intervals:
                intervals["ctx_null"] = beside.intervals["ctx"][rows]
        return Anova(
            provenance=self.provenance.flagged(*self.flags(), *flags),
            states=self.states,
            contexts=self.contexts,
            positions=self.window[1] - self.window[0],
            **sums_of_squares(self.moments),
            pos_reliability=agreement,
            ctx_null=ctx_null,
            identifiable=self.contexts > 1,
            top_share=torch.tensor([sinks.share for sinks in held], dtype=torch.float64),
            remarks=tuple("; ".join(filter(None, remarks)) for remarks in said),
            intervals=intervals,
            blocks=len(jackknife_blocks(self.group_counts)),
        )

    def _squares(self) -> Float[Tensor, " state"]:
        return self.moments.squares[:, :, slice(*self.window)].sum((0, 2))

    def sinks(self, state: int) -> Sinks:
        """How much of a state's sum of squares its largest tokens hold, in numbers and words.

        >>> h = torch.ones(4, 50, 3)
        >>> h[0, 1] += 99
        >>> from tl_geometry import decompose_activations
        >>> decompose_activations(h).sinks(0).remark
        '1 of 200 tokens hold 98% of the sum of squares (position 1)'
        """
        row, tokens = self.index(state), self.contexts * (self.window[1] - self.window[0])
        return sinks_of(self.largest, row, tokens, float(self._squares()[row]), self.token_texts)

    def flags(self) -> tuple[str, ...]:
        """What a reader of anything made from this basis should know: states in which few tokens
        hold most, a single context."""
        single = "one context: position and content cannot be told apart"
        flags = [] if self.contexts > 1 else [single]
        massive = {s: sinks for s in self.states if (sinks := self.sinks(s)).remark}
        if massive:
            worst = max(massive, key=lambda state: massive[state].share)
            remark = f"in state {worst}, {massive[worst].remark}"
            flags.append(f"in states {spans(list(massive))} few tokens hold much: {remark}")
        return tuple(flags)

    def largest_tokens(self) -> Table:
        """The tokens of largest norm inside the window, a row per state and token, descending
        within each state; see :meth:`sinks` for what they do to sums.

        ``share`` is the token's part of the state's raw sum of squares, ``rms`` the root mean
        square of the norms of all tokens, ``coordinate`` the index of the largest entry, ``token``
        an id (-1 where ids are not known).
        """
        import pandas as pd

        tokens, total = self.contexts * (self.window[1] - self.window[0]), self._squares()
        found: dict[str, Tensor] = {"norm": self.largest["norm"]}
        found["rms"] = (total / tokens).sqrt().unsqueeze(1)
        found["share"] = found["norm"].square() / torch.where(total > 0, total, torch.nan)[:, None]
        unknown = torch.full_like(self.largest["context"], -1)
        names = ("context", "position", "token", "coordinate")
        found |= {name: self.largest.get(name, unknown) for name in names}
        of = {"state": torch.tensor(self.states).unsqueeze(1)} | found
        frame = pd.DataFrame({n: v.expand_as(unknown).flatten().numpy() for n, v in of.items()})
        frame.insert(7, "text", [self.token_texts.get(str(i), "") for i in frame.token])
        return Table.of(frame, self.provenance.flagged(*self.flags()))

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
        require(fits, "activations", expected=expected, got=checks.describe(activations))
        checks.finite(h, "activations")
        if positions is None:
            window_wide = h.shape[2] == self.window[1] - self.window[0]
            positions = range(*self.window) if window_wide else range(h.shape[2])
        places = torch.tensor([checks.index(at, self.length, "positions") for at in positions])
        expected, got = f"{h.shape[2]} positions", len(places)
        require(got == h.shape[2], "positions", expected=expected, got=got)
        mean, pos = self.mean.to(h.device), self._pos_seen[:, places].to(h.device)
        cvec = h.double() - mean[:, None, None] - pos.unsqueeze(1)
        ctx = reduce(cvec, "... position d_model -> ... d_model", "mean")
        parts = Parts(mean, pos, ctx, cvec - ctx.unsqueeze(-2))
        return Parts(*(part[0] for part in parts)) if single else parts

    # ---- whom it fits

    def require_identifiable(self, what: str) -> None:
        """Raise unless there are two contexts: with one, position and content cannot be told
        apart."""
        expected = "at least 2 contexts: with one, position and content cannot be told apart"
        got, instead = self.contexts, "decompose(model, more windows)"
        require(got >= 2, what, expected=expected, got=got, instead=instead)

    def require_raw(self, what: str) -> None:
        """Raise for a basis of normalised states where ``what`` needs one of raw states."""
        raw, got = not self.provenance.normalized, "one of normalised states"
        instead = "decompose(..., normalize=False)"
        require(raw, what, expected="a basis of raw states", got=got, instead=instead)

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
        expected, got = f"d_model {view.d_model} of {view.name}", self.mean.shape[1]
        require(got == view.d_model, "basis", expected=expected, got=got)

    def remarks(self, view: ModelView) -> tuple[str, ...]:
        """Flags of a result that uses this basis with a model: an unknown model, hooks that were
        active on one side only, and :meth:`flags`."""
        fitted_under, active = set(self.provenance.hooks), set(view.hooked())
        flags = [RAW] if self.provenance.fingerprint is None else []
        differing = {"without these": active - fitted_under, "under other": fitted_under - active}
        for how, hooks in differing.items():
            flags += [f"basis fitted {how} hooks ({', '.join(sorted(hooks))})"] if hooks else []
        return (*flags, *self.flags())

    # ---- files and shards

    def save(self, path: str | Path, *, full: bool = False) -> Path:
        """Write to one safetensors file and return its path.

        By default mean, pos, the analysis of variance without intervals and reliability, and the
        largest tokens can be read from it: sums of all groups together (SmolLM2 with 128 positions:
        18 MB).
        ``full=True`` also keeps groups, context vectors, samples and second moments, which
        intervals, context reports and merging with intervals need.
        """
        if full:
            return super().save(path)
        pooled = dataclasses.replace(self.moments, second=None).pooled()
        nothing = {"context_means": None, "sampled": None, "sample_states": None, "lean": True}
        lean = dataclasses.replace(self, moments=pooled, **nothing)
        return Result.save(lean, path)

    @staticmethod
    def merge(parts: Iterable[PositionContext]) -> PositionContext:
        """One basis from partial results over disjoint contexts (shards of a corpus), in the given
        order.

        Mean, pos and ctx equal those of a single run to 1e-10, second moments to 1e-6 of their
        trace. Contexts are renumbered in the given order. There are as many contiguous groups as
        the part with the most has. Equal label names get one number. Documents without names are
        others in each part, so that one that two parts share counts twice: give names.

        Raises ``GeometryError`` for parts of different models or settings, and for a part given
        twice.
        """
        several, instead = isinstance(parts, Iterable), "merge([first, second, ...])"
        require(several, "merge", expected="bases", got=checks.describe(parts), instead=instead)
        for i, part in enumerate(parts := tuple(parts)):
            require_basis(part, f"merge: part {i}")
        require(parts, "merge", expected="at least one basis", got="none")
        return PositionContext(**merge_parts.merged(parts))

    @cached_property
    def _table(self) -> Anova:
        return self.anova()

    def columns(self) -> Sequence[str]:
        return self._table.columns()

    def rows(self) -> Sequence[Sequence[object]]:
        return self._table.rows()


def require_basis(value: object, what: str = "basis") -> None:
    """Raise unless ``value`` is a :class:`PositionContext` (a path or a table in its place is a
    common slip): the one check of every public function that takes a basis."""
    checks.require_default_device()
    if not isinstance(value, PositionContext):
        is_path = isinstance(value, str | Path)
        instead = "PositionContext.load(path)" if is_path else "decompose(model, tokens)"
        fail(what, expected="a PositionContext", got=checks.describe(value), instead=instead)
