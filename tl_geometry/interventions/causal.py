"""Does the term that explains a head's scores do the work? Loss with the term removed, kept alone,
and with a matched placebo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions.terms import (
    Change,
    HeadsLike,
    Term,
    edits_for,
    keeping,
    per_head,
    placebo,
    removing,
    terms_of,
    uniform,
)
from tl_geometry.models.describing import as_view
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live import edited_scores
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import token_losses
from tl_geometry.models.outputs import log_probabilities, output_batch, require_output
from tl_geometry.scores.head_types import period_for, repeated_random_tokens, token_range
from tl_geometry.scores.sweep import SweepTable, sweep_heads

CONDITIONS = ("clean", "bias terms only", "keep", "remove")
"""Conditions of :func:`necessity_sufficiency` beside the placebos."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Effects(Result):
    """Effect of each condition on the output: one row per condition.

    ``loss`` is the mean next-token loss (nats) on the prompts, ``induction_loss`` that on repeated
    random tokens where they repeat, which only copying can predict; ``kl`` the mean divergence
    KL(clean || condition) of the next-token distribution (nats) on the prompts.
    """

    conditions: tuple[str, ...]
    loss: Float[Tensor, " row"]
    induction_loss: Float[Tensor, " row"]
    kl: Float[Tensor, " row"]

    def of(self, condition: str) -> dict[str, float]:
        """The numbers of one condition."""
        at = self.conditions.index(checks.choice(condition, self.conditions, "condition"))
        return {name: float(getattr(self, name)[at]) for name in ("loss", "induction_loss", "kl")}

    def survival(self, kept: str, nothing: str = "bias terms only", measure: str = "loss") -> float:
        """Share of a loss that survives: ``(L_nothing - L_kept) / (L_nothing - L_clean)``; NaN
        where nothing is lost without it."""
        clean, with_it, without = (self.of(c)[measure] for c in ("clean", kept, nothing))
        return (without - with_it) / (without - clean) if without > clean else math.nan

    def columns(self) -> Sequence[str]:
        return ("condition", "loss", "loss_change", "induction_loss", "induction_loss_change", "kl")

    def rows(self) -> Sequence[Sequence[object]]:
        loss, copied = self.loss - self.loss[0], self.induction_loss - self.induction_loss[0]
        return [
            [
                name,
                float(self.loss[i]),
                float(loss[i]),
                float(self.induction_loss[i]),
                float(copied[i]),
                float(self.kl[i]),
            ]
            for i, name in enumerate(self.conditions)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class NecessitySufficiency(Effects):
    """:class:`Effects` of a term at some heads: clean, bias terms only, keep, remove, and the
    placebo (mean over its seeds).

    ``placebo_loss``, ``placebo_induction_loss`` and ``placebo_kl`` have one entry per seed.
    ``placebo_cosine`` is the mean cosine of the term and its placebo: near one (pos-pos without
    rotation hardly differs between prompts) the placebo is the term itself and tells nothing.
    """

    heads: tuple[tuple[int, int], ...]
    term: tuple[str, ...]
    placebo_loss: Float[Tensor, " sample"]
    placebo_induction_loss: Float[Tensor, " sample"]
    placebo_kl: Float[Tensor, " sample"]
    placebo_cosine: float

    @property
    def necessity(self) -> dict[str, float]:
        """Loss and induction loss that removing the term costs, in nats."""
        clean, removed = self.of("clean"), self.of("remove")
        return {k: removed[k] - clean[k] for k in ("loss", "induction_loss")}

    @property
    def sufficiency(self) -> dict[str, float]:
        """Share of the loss and of the induction loss that the term alone brings back, beyond the
        bias terms."""
        return {k: self.survival("keep", measure=k) for k in ("loss", "induction_loss")}

    def p_value(self, measure: str = "loss") -> float:
        """Share of placebos (and the term itself) that cost at least as much as removing the term:
        ``(1 + #) / (1 + seeds)``."""
        placebos = getattr(
            self, f"placebo_{checks.choice(measure, ('loss', 'induction_loss', 'kl'), 'measure')}"
        )
        return (1 + int((placebos >= self.of("remove")[measure]).sum())) / (1 + len(placebos))


@dataclass
class _Sums:
    """Sums of losses and divergences of one condition."""

    loss: float = 0.0
    kl: float = 0.0
    count: int = 0

    def add(self, log_p: Tensor, clean: Tensor, tokens: Tensor, counted: Tensor) -> None:
        """Take in predictions of the ``counted`` tokens, from log-probabilities
        ``[batch position d_vocab]``."""
        counted = counted[:, 1:].to(log_p.device)
        seen, base = log_p[:, :-1][counted], clean[:, :-1][counted]
        targets = tokens[:, 1:].to(log_p.device)[counted]
        self.loss += float(token_losses(seen, targets).sum(dtype=torch.float64))
        self.kl += float((base.exp() * (base - seen)).sum(dtype=torch.float64))
        self.count += int(counted.sum())


def measure_effects(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    conditions: Mapping[str, Any],
    *,
    counted: Bool[Tensor, "batch position"],
    progress: bool = False,
) -> dict[str, tuple[float, float]]:
    """(loss, KL from clean) over the ``counted`` tokens for each condition, a function that makes a
    context manager; the first is clean."""
    size = max(2, output_batch(view, tokens.shape[1], all_columns=True))
    parts = max(1, min(math.ceil(len(tokens) / size), len(tokens) // 2))
    sums = {name: _Sums() for name in conditions}
    bar = tqdm(total=parts * len(conditions), disable=not progress, desc=view.name, unit="run")
    with bar:
        for batch, chosen in zip(
            tokens.tensor_split(parts), counted.tensor_split(parts), strict=True
        ):
            clean: Tensor | None = None
            for name, make in conditions.items():
                with make():
                    log_p = log_probabilities(view, batch, {}, column=None)
                clean = log_p if clean is None else clean
                sums[name].add(log_p, clean, batch, chosen)
                bar.update(1)
    return {name: (s.loss / s.count, s.kl / s.count) for name, s in sums.items()}


def _require_same_vocabulary(view: ModelView, what: str) -> None:
    """Refuse models whose outputs are not tokens (``d_vocab_out``): they have no next-token
    loss."""
    outputs = view.unembed().shape[-1]
    require(
        outputs == view.d_vocab,
        what,
        expected=f"one output for each of {view.d_vocab} tokens",
        got=f"{outputs} of {view.name}",
        instead="remove_term(...) and your own measure",
        error=UnsupportedModelError,
    )


def repeated_for(
    view: ModelView, basis: PositionContext, batch: int, seed: int
) -> tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]:
    """Repeated random tokens made for the model, and the tokens that only copying can predict:
    those after a repeated one.

    Each row has a period of its own, so that the same term of another row (the placebo) copies from
    the wrong places.
    """
    bos = bool(basis.provenance.has_bos) and view.bos_id is not None
    low, high = token_range(view.d_vocab, [view.bos_id])
    longest = period_for(min(view.n_ctx, basis.length), high - low, bos=bos)
    require(
        longest >= 2,
        "basis",
        expected="at least 4 positions",
        got=basis.length,
        instead="decompose(...) on longer windows",
    )
    base = repeated_random_tokens(longest, 1, batch, low=low, high=high, seed=seed)
    periods = (longest - torch.arange(batch) % max(1, longest // 2)).unsqueeze(1)
    column = torch.arange(2 * longest).expand(batch, -1)
    tokens, counted = base.gather(1, column % periods), column > periods
    if bos:
        tokens = torch.cat([torch.full((batch, 1), view.bos_id or 0), tokens], dim=1)
        counted = torch.cat([torch.zeros(batch, 1, dtype=torch.bool), counted], dim=1)
    return tokens, counted


def _measured(
    view: ModelView,
    basis: PositionContext,
    rows: TokenWindows,
    conditions: Mapping[str, Any],
    seed: int,
    progress: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, induction loss and KL ``[condition]``."""
    require(
        rows.tokens.shape[1] >= 2,
        "tokens",
        expected="prompts of at least 2 tokens",
        got=rows.tokens.shape[1],
    )
    every = torch.ones_like(rows.tokens, dtype=torch.bool)
    own = measure_effects(view, rows.tokens, conditions, counted=every, progress=progress)
    repeated, counted = repeated_for(view, basis, 8, seed)
    copied = measure_effects(view, repeated, conditions, counted=counted)
    found = [
        [own[n][0] for n in conditions],
        [copied[n][0] for n in conditions],
        [own[n][1] for n in conditions],
    ]
    loss, induction, kl = (torch.tensor(v, dtype=torch.float64) for v in found)
    return loss, induction, kl


def necessity_sufficiency(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext,
    heads: HeadsLike,
    term: Term,
    *,
    seeds: int = 20,
    placebos: str = "prompt",
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> NecessitySufficiency:
    """Loss when a term is removed from the scores of some heads, kept alone, and replaced by a
    matched placebo.

    The term is necessary where removing it costs more than removing a placebo: the same term of
    another prompt, row-centred and rescaled to equal energy (``seeds`` draws), or with
    ``placebos="positions"`` the term with its keys at permuted positions, for positional terms,
    which hardly differ between prompts. It is sufficient where keeping only it (with the bias
    terms) costs little, against the bias terms alone. All chosen heads are edited at once, in the
    running forward pass (:mod:`tl_geometry.interventions.terms`).

    Raises ``UnsupportedModelError`` for encoders and for models without a trained output head.
    """
    view = as_view(model)
    require_output(view, "necessity_sufficiency")
    _require_same_vocabulary(view, "necessity_sufficiency")
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
    require(
        len(rows) >= 2 and seeds >= 1,
        "tokens",
        expected="at least 2 prompts, and a placebo",
        got=f"{len(rows)} and {seeds} seeds",
    )
    names = terms_of(term)
    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    cosines: list[float] = []

    def note(layer: LayerView, at: tuple[int, ...], cosine: Tensor) -> None:
        cosines.append(float(cosine.mean()))

    changes = {"bias terms only": keeping(()), "keep": keeping(names), "remove": removing(names)}
    for i in range(seeds):
        changes[f"placebo {i}"] = placebo(names, 1000 * seed + i, placebos, note)
    made: dict[str, Any] = {"clean": nullcontext}
    for name, change in changes.items():
        made[name] = _edited(view, basis, chosen, change)
    loss, induction, kl = _measured(view, basis, rows, made, 1234 + seed, progress)
    n = len(CONDITIONS)
    similar = sum(cosines) / len(cosines)
    flags = (
        [f"the placebo is nearly the term (cosine {similar:.2f}): see placebos='positions'"]
        if similar > 0.9
        else []
    )
    return NecessitySufficiency(
        provenance=view.provenance(
            rows, window=basis.window, seed=seed, flags=(*flags, *basis.remarks(view))
        ),
        conditions=(*CONDITIONS, "placebo"),
        loss=torch.cat([loss[:n], loss[n:].mean(0, keepdim=True)]),
        induction_loss=torch.cat([induction[:n], induction[n:].mean(0, keepdim=True)]),
        kl=torch.cat([kl[:n], kl[n:].mean(0, keepdim=True)]),
        heads=chosen,
        term=names,
        placebo_loss=loss[n:],
        placebo_induction_loss=induction[n:],
        placebo_kl=kl[n:],
        placebo_cosine=similar,
    )


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
) -> Effects:
    """How much of the model's loss survives if every head keeps only its dominant term.

    Every head of every layer keeps the term (or the group) with its largest covariance share, with
    all terms that have bias on either side; beside it the bias terms alone, uniform attention, and
    as control a term drawn at random for each head (mean of ``draws``).
    ``result.survival("dominant term")`` is ``(L_bias - L_dominant) / (L_bias - L_clean)``.
    ``table`` is a finished :func:`tl_geometry.sweep_heads` of the model, by default made from the
    same prompts.
    """
    view = as_view(model)
    require_output(view, "dominant_only")
    _require_same_vocabulary(view, "dominant_only")
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    table = sweep_heads(view, rows, basis, progress=progress) if table is None else table
    _require_all_heads(view, table)

    def kept(shares: Tensor, names: Sequence[str]) -> Change:
        return per_head(_largest_terms(table, shares, names))

    generator = torch.Generator().manual_seed(seed)
    before = {
        "dominant term": kept(table.cs, table.terms),
        "dominant group": kept(table.group_cs, table.groups),
    }
    random = {
        f"random term {i}": kept(torch.rand(table.cs.shape, generator=generator), table.terms)
        for i in range(draws)
    }
    after = {"bias terms only": keeping(()), "uniform attention": uniform()}
    made: dict[str, Any] = {"clean": nullcontext}
    for name, change in (before | random | after).items():
        made[name] = _edited(view, basis, table.heads, change)
    measured = _measured(view, basis, rows, made, 1234 + seed, progress)
    first, last = 1 + len(before), 1 + len(before) + draws
    loss, induction, kl = (
        torch.cat([v[:first], v[first:last].mean(0, keepdim=True), v[last:]]) for v in measured
    )
    return Effects(
        provenance=view.provenance(rows, window=basis.window, seed=seed),
        conditions=("clean", *before, "random term", *after),
        loss=loss,
        induction_loss=induction,
        kl=kl,
    )


def _edited(view: ModelView, basis: PositionContext, heads: HeadsLike, change: Change) -> Any:
    """A condition: a function that makes the context manager of an edit."""
    edits = edits_for(view, basis, heads, change)
    return lambda: edited_scores(view, edits)


def _require_all_heads(view: ModelView, table: SweepTable) -> None:
    """Refuse a sweep of another model, or of some heads."""
    again, mark = "sweep_heads(model, tokens, basis)", table.provenance.fingerprint
    require(
        mark in (None, view.fingerprint),
        "table",
        expected=f"a sweep of {view.name} ({view.fingerprint})",
        got=f"a sweep of {table.provenance.model} ({mark})",
        instead=again,
    )
    everything = checks.heads(None, view.n_layers, view.n_heads)
    missing = [head for head in everything if head not in table.heads]
    got = f"none for {missing[:4]}"
    require(not missing, "table", expected="a row for every head", got=got, instead=again)


def _largest_terms(
    table: SweepTable, shares: Tensor, names: Sequence[str]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """The term or group of the largest share of each head, none for uniform heads."""
    top = torch.where(torch.isnan(shares), -torch.inf, shares).argmax(-1).tolist()
    is_uniform = torch.isnan(shares).any(-1).tolist()
    found = zip(table.heads, top, is_uniform, strict=True)
    return {head: () if nothing else terms_of(names[i]) for head, i, nothing in found}
