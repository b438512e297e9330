"""Does the term that explains a head's scores do the work? :func:`necessity_sufficiency` measures
the loss with the term removed, and with it kept alone. Controls are the removal of other terms, the
same term of another prompt, and scores that are only made smaller.

Does a model get by on its heads' dominant terms? :func:`dominant_only` measures the loss when every
head keeps only that one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.intervals import FEWEST, Interval
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.effects import (
    MEASURES,
    Condition,
    Effects,
    excess_over,
    measured,
)
from tl_geometry.interventions.head_edits import Heads, HeadsLike
from tl_geometry.interventions.terms import (
    BIAS_TERMS,
    Change,
    Term,
    edits_for,
    keeping,
    per_head,
    removing,
    shrinking,
    swapping,
    terms_of,
    uniform,
)
from tl_geometry.models.live_edits import edited_scores
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import require_output
from tl_geometry.models.reader import as_view
from tl_geometry.scores.projection import PARTS
from tl_geometry.scores.sweep import SweepTable, sweep_heads
from tl_geometry.scores.terms import ALIBI, term_names

NEARLY = 0.9
"""A swap is flagged as no control where the term and that of the other prompt have a larger mean
cosine: they are nearly the same, so that the swap changes nearly nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NecessitySufficiency(Effects):
    """:class:`Effects` of a term at some heads, one row per condition: ``clean``, ``bias terms
    only``, ``keep``, ``remove``, and the controls ``swap`` (mean over its draws), ``shrink`` and
    ``remove ...`` for each other term.

    In the table ``loss_remove_p`` and ``induction_remove_p`` are :meth:`removal_p`: the removal
    against the condition of the row. ``swap_cosine`` is the mean cosine of the term and that of the
    other prompt. Near one the swap changes nothing, as for a term of position, which hardly differs
    between prompts. ``shrunk`` is the largest share by which the scores of a head were shrunk (mean
    over prompts).
    """

    heads: tuple[tuple[int, int], ...]
    term: tuple[str, ...]
    swap_cosine: float
    shrunk: float

    @property
    def controls(self) -> tuple[str, ...]:
        """The conditions that are controls, and the constants alone."""
        return tuple(c for c in self.conditions if c not in ("clean", "keep", "remove"))

    @property
    def necessity(self) -> dict[str, float]:
        """By how much removing the term raises the loss and the induction loss (nats)."""
        clean, removed = self.of("clean"), self.of("remove")
        return {measure: removed[measure] - clean[measure] for measure in MEASURES[:2]}

    @property
    def sufficiency(self) -> dict[str, float]:
        """Share of the loss (and of the induction loss) between bias terms only and clean that
        keeping the term saves (:meth:`Effects.survival`). It is NaN where bias terms alone lose
        nothing, and for a term that is itself one of them."""
        if set(self.term) <= set(BIAS_TERMS):
            return dict.fromkeys(MEASURES[:2], math.nan)
        return {measure: self.survival("keep", measure=measure) for measure in MEASURES[:2]}

    def removal_p(self, control: str, measure: str = "loss") -> float:
        """P-value of removing the term against a control (or ``"clean"``), paired over prompts. The
        null is that the two could change places in every prompt (:meth:`Effects.p_value`)."""
        return self.p_value("remove", measure, against=control)

    def measure_columns(self, measure: str) -> dict[str, Float[Tensor, " condition"]]:
        p = {f"{measure.removesuffix('_loss')}_remove_p": self.p_values("remove", measure)}
        return super().measure_columns(measure) | p


@dataclass(frozen=True, eq=False, kw_only=True)
class Dominance(Effects):
    """:class:`Effects` of keeping only dominant terms, beside a random term of each head.

    ``drawn`` is the mean loss of each draw of random terms; the condition ``"random term"`` is the
    mean over draws.
    """

    drawn: Float[Tensor, " row"]

    @property
    def controls(self) -> tuple[str, ...]:
        """The conditions that are controls, and the constants alone."""
        kept = ("clean", "dominant term", "dominant group")
        return tuple(c for c in self.conditions if c not in kept)

    def saved(self) -> Interval:
        """How much less loss the dominant terms have than random ones (nats per token), with a 95%
        interval over prompts and draws (NaN below 10 prompts or two draws)."""
        gaps = self.losses[self.row("random term")] - self.losses[self.row("dominant term")]
        return excess_over(gaps, self.drawn)

    def column_values(self) -> dict[str, Float[Tensor, " condition"]]:
        columns, row = super().column_values(), self.row("dominant term")
        for name, number in self.saved().columns("saved").items():
            columns[name] = torch.full_like(self.loss, math.nan)
            columns[name][row] = number
        return columns


def necessity_sufficiency(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext,
    heads: HeadsLike,
    term: Term,
    *,
    draws: int = 3,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> NecessitySufficiency:
    """Do some heads need a term of their scores, and is it enough? The loss with the term removed,
    and with it kept alone, beside controls.

    The term is necessary where removing it costs more than each control:

    - ``swap``: the same term of another prompt in its place (mean of ``draws``). It tells nothing
      for a term that hardly differs between prompts.
    - ``shrink``: all scores made smaller, so that as much of their covariance goes as with the
      term.
    - ``remove ...``: every other term removed in its place.

    It is sufficient where keeping only it (with the bias terms) costs little, compared with the
    bias terms alone. All chosen heads are edited at once, in the running forward pass
    (:mod:`tl_geometry.interventions.terms`). Effects are paired over prompts, with intervals and
    p-values from 10 prompts on.

    Raises ``UnsupportedModelError`` for encoders and for models without a trained output head.
    """
    view, rows = _prompts(model, tokens, basis, "necessity_sufficiency", prepend_bos)
    basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
    require(len(rows) >= 2, "tokens", expected="at least 2 prompts", got=len(rows))
    require(draws >= 1, "draws", expected="at least one swap", got=draws)
    names = terms_of(term)
    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    cosines: list[Tensor] = []
    shares: list[Tensor] = []
    swaps = [swapping(names, seed + i, cosines.append) for i in range(draws)]
    all_names = term_names(PARTS, alibi=view.position == ALIBI)
    others = [name for name in all_names if name not in names]
    changes: dict[str, list[Change]] = {
        "bias terms only": [keeping(())],
        "keep": [keeping(names)],
        "remove": [removing(names)],
        "swap": swaps,
        "shrink": [shrinking(names, basis.window[0], shares.append)],
        **{f"remove {other}": [removing((other,))] for other in others},
    }
    effects = _effects(view, basis, rows, chosen, changes, seed, progress)
    result = NecessitySufficiency(
        provenance=view.provenance(rows, window=basis.window, seed=seed),
        **_mean_over_draws(effects, changes),
        heads=chosen,
        term=names,
        swap_cosine=sum(float(cosine.mean()) for cosine in cosines) / len(cosines),
        shrunk=max(float(share.mean(0).max()) for share in shares),
    )
    flags = (*_flags(result), *basis.remarks(view))
    return dataclasses.replace(result, provenance=result.provenance.flagged(*flags))


def _prompts(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext,
    what: str,
    prepend_bos: bool | None,
) -> tuple[ModelView, TokenWindows]:
    """The model's view and its prompts; models without a next-token loss are refused: encoders,
    those without a trained head, and those whose outputs are not tokens (``d_vocab_out``)."""
    view = as_view(model)
    require_basis(basis)
    require_output(view, what)
    outputs = view.unembed().shape[-1]
    require(
        outputs == view.d_vocab,
        what,
        expected=f"one output for each of {view.d_vocab} tokens",
        got=f"{outputs} of {view.name}",
        instead="remove_term(...) and your own measure",
        error=UnsupportedModelError,
    )
    return view, token_rows(view, tokens, prepend_bos=prepend_bos)


def _effects(
    view: ModelView,
    basis: PositionContext,
    rows: TokenWindows,
    heads: Heads,
    changes: Mapping[str, Sequence[Change]],
    seed: int,
    progress: bool,
) -> dict[str, Float[Tensor, "condition sample"]]:
    """Measures of the clean run and of every draw of every change, in this order, by field of
    :class:`Effects`."""

    def edited(change: Change) -> Condition:
        edits = edits_for(view, basis, heads, change)
        return lambda: edited_scores(view, edits)

    conditions = [nullcontext, *(edited(change) for draws in changes.values() for change in draws)]
    # another seed than that of the draws, so that repeated tokens and swaps are independent
    return measured(view, basis, rows, conditions, 1234 + seed, progress)


def _mean_over_draws(
    effects: Mapping[str, Tensor], changes: Mapping[str, Sequence[Change]]
) -> dict[str, Any]:
    """Fields of :class:`Effects` with one row for each condition: the clean run, then for each
    change the mean over its draws."""
    sizes = [1, *(len(draws) for draws in changes.values())]
    means = {
        name: torch.stack([draws.mean(0) for draws in values.split(sizes)])
        for name, values in effects.items()
    }
    return {"conditions": ("clean", *changes), **means}


def _flags(result: NecessitySufficiency) -> list[str]:
    """Warnings for a reader of the table."""
    flags: list[str] = []
    if result.swap_cosine > NEARLY:
        flags.append(
            f"the term hardly differs between prompts (cosine {result.swap_cosine:.2f}): "
            "its swap is no control, the other rows are"
        )
    if result.shrunk > 1:
        flags.append(f"shrink turns the sign of scores (share {result.shrunk:.2f} above 1)")
    if math.isnan(result.sufficiency["loss"]):
        is_bias = set(result.term) <= set(BIAS_TERMS)
        why = "the term is one of the bias terms" if is_bias else "nothing is lost without it"
        flags.append(f"no sufficiency: {why}")
    if result.losses.shape[1] < FEWEST:
        flags.append(f"fewer than {FEWEST} prompts: no intervals of the loss")
    return flags


def dominant_only(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext,
    *,
    table: SweepTable | None = None,
    draws: int = 5,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Dominance:
    """How much of the model's loss survives if every head keeps only its dominant term.

    In every head of every layer the term (or the group) with the largest covariance share stays,
    with all terms that have bias on either side. Beside it stand the bias terms alone, uniform
    attention, and as control a term drawn at random for each head (mean of ``draws``).
    ``result.survival("dominant term")`` is ``(L_bias - L_dominant) / (L_bias - L_clean)``.
    ``table`` is a finished :func:`tl_geometry.sweep_heads` of the model, by default made from the
    same prompts.

    Dominant terms do not sum up a model: on SmolLM2-135M (12 windows of Wikipedia, loss 4.21 nats)
    keeping them gives 5.43 and keeping random ones 5.55 (95% interval of the difference -0.23 to
    0.01).
    """
    view, rows = _prompts(model, tokens, basis, "dominant_only", prepend_bos)
    require(draws >= 1, "draws", expected="at least 1", got=draws)
    table = sweep_heads(view, rows, basis, progress=progress) if table is None else table
    _require_all_heads(view, table)
    generator = torch.Generator().manual_seed(seed)
    # a uniform head keeps no term, here too: its terms cancel, and one alone would not be uniform
    random = [
        torch.rand(table.cs.shape, generator=generator).where(~table.cs.isnan(), torch.nan)
        for _ in range(draws)
    ]
    changes = {
        "dominant term": [_largest(table, table.cs, table.terms)],
        "dominant group": [_largest(table, table.group_cs, table.groups)],
        "random term": [_largest(table, shares, table.terms) for shares in random],
        "bias terms only": [keeping(())],
        "uniform attention": [uniform()],
    }
    effects = _effects(view, basis, rows, table.heads, changes, seed, progress)
    first = 3  # the draws of "random term" follow clean, dominant term and dominant group
    return Dominance(
        provenance=view.provenance(rows, window=basis.window, seed=seed),
        **_mean_over_draws(effects, changes),
        drawn=effects["losses"][first : first + draws].mean(1),
    )


def _require_all_heads(view: ModelView, table: SweepTable) -> None:
    """Refuse a sweep of another model, or of some heads."""
    instead, fingerprint = "sweep_heads(model, tokens, basis)", table.provenance.fingerprint
    fits = fingerprint in (None, view.fingerprint)
    expected = f"a sweep of {view.name} ({view.fingerprint})"
    got = f"a sweep of {table.provenance.model} ({fingerprint})"
    require(fits, "table", expected=expected, got=got, instead=instead)
    all_heads = checks.heads(None, view.n_layers, view.n_heads)
    missing = [head for head in all_heads if head not in table.heads]
    got = f"none for {missing[:4]}"
    require(not missing, "table", expected="a row for every head", got=got, instead=instead)


def _largest(table: SweepTable, shares: Tensor, names: Sequence[str]) -> Change:
    """Each head keeps its term or group of the largest share. Uniform heads, whose shares are NaN,
    keep none."""
    top = shares.nan_to_num(-torch.inf).argmax(-1).tolist()
    is_uniform = shares.isnan().any(-1).tolist()
    rows = zip(table.heads, top, is_uniform, strict=True)
    return per_head({head: () if flat else terms_of(names[best]) for head, best, flat in rows})
