"""What edits of a live model do to its output, prompt by prompt: losses, divergences, and paired
intervals and p-values of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import Interval, paired_interval, sign_flip_p
from tl_geometry.base.results import Result
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import log_probabilities, output_batch
from tl_geometry.models.output_head import token_losses
from tl_geometry.scores.head_types import period_for, repeated_random_tokens, token_range

MEASURES = ("loss", "induction_loss", "kl")
"""What is measured on the output."""
REPEATED = 12
"""Sequences of repeated random tokens behind an induction loss."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Conditions(Result):
    """Loss (nats) of each condition and prompt, the first condition the clean run. Changes are
    paired over prompts, with Student's 95% interval from 10 prompts on."""

    conditions: tuple[str, ...]
    losses: Float[Tensor, "condition context"]

    def by_prompt(self, measure: str = "loss") -> Float[Tensor, "condition sample"]:
        """A measure of every condition and prompt: ``"loss"``."""
        checks.choice(measure, MEASURES[:1], "measure")
        return self.losses

    @property
    def loss(self) -> Float[Tensor, " condition"]:
        """Mean loss of each condition (nats)."""
        return self.losses.mean(1)

    def _row(self, condition: str) -> int:
        return self.conditions.index(checks.choice(condition, self.conditions, "condition"))

    def _paired(self, condition: str, against: str, measure: str) -> Float[Tensor, " sample"]:
        values = self.by_prompt(measure)
        return values[self._row(condition)] - values[self._row(against)]

    def change(self, condition: str, measure: str = "loss", *, against: str = "clean") -> Interval:
        """Mean paired difference of two conditions with its 95% interval (NaN below 10 prompts)."""
        return paired_interval(self._paired(condition, against, measure))

    def p_value(self, condition: str, measure: str = "loss", *, against: str = "clean") -> float:
        """Two-sided p-value of the paired differences of two conditions under sign flips, of the
        null that they could change places in every prompt
        (:func:`tl_geometry.base.intervals.sign_flip_p`; NaN below 10 prompts)."""
        return sign_flip_p(self._paired(condition, against, measure))


@dataclass(frozen=True, eq=False, kw_only=True)
class Effects(Conditions):
    """Effect of each condition on the output: one row per condition, the first the clean run.

    ``loss`` is the mean next-token loss (nats) on the prompts, ``induction_loss`` that on repeated
    random tokens where they repeat, which only copying can predict; ``kl`` the mean divergence
    KL(clean || condition) of the next-token distribution (nats) on the prompts. The tensors hold
    each prompt's part, weighted so that the mean over prompts is the mean over tokens.
    """

    version: ClassVar[int] = 2
    induction_losses: Float[Tensor, "condition sample"]
    kls: Float[Tensor, "condition context"]

    def by_prompt(self, measure: str = "loss") -> Float[Tensor, "condition sample"]:
        """``"loss"``, ``"induction_loss"`` or ``"kl"`` of every condition and prompt."""
        of = {"loss": self.losses, "induction_loss": self.induction_losses, "kl": self.kls}
        return of[checks.choice(measure, MEASURES, "measure")]

    @property
    def induction_loss(self) -> Float[Tensor, " condition"]:
        """Mean loss of each condition where random tokens repeat (nats)."""
        return self.induction_losses.mean(1)

    @property
    def kl(self) -> Float[Tensor, " condition"]:
        """Mean KL(clean || condition) of each condition (nats)."""
        return self.kls.mean(1)

    def of(self, condition: str) -> dict[str, float]:
        """The numbers of one condition."""
        at = self._row(condition)
        return {name: float(getattr(self, name)[at]) for name in MEASURES}

    def survival(self, kept: str, nothing: str = "bias terms only", measure: str = "loss") -> float:
        """Share of a loss that survives: ``(L_nothing - L_kept) / (L_nothing - L_clean)``; NaN
        where nothing is lost without it."""
        clean, with_it, without = (self.of(c)[measure] for c in ("clean", kept, nothing))
        return (without - with_it) / (without - clean) if without > clean else math.nan

    def columns(self) -> Sequence[str]:
        changes = [f"{m}{part}" for m in MEASURES[:2] for part in ("", "_change", "_low", "_high")]
        return ("condition", *changes, "kl")

    def rows(self) -> Sequence[Sequence[object]]:
        out: list[list[object]] = []
        for i, name in enumerate(self.conditions):
            row: list[object] = [name]
            for measure in MEASURES[:2]:
                found = self.change(name, measure)
                row += [float(getattr(self, measure)[i]), *map(float, found[:3])]
            out.append([*row, float(self.kl[i])])
        return out


@dataclass
class _Sums:
    """Losses and divergences of one condition, prompt by prompt."""

    loss: list[Tensor]
    kl: list[Tensor]
    count: list[Tensor]

    def add(self, log_p: Tensor, clean: Tensor, tokens: Tensor, counted: Tensor) -> None:
        """Take in predictions of the ``counted`` tokens, from log-probabilities
        ``[batch position d_vocab]``."""
        counted = counted[:, 1:].to(log_p.device)
        seen, base = log_p[:, :-1], clean[:, :-1]
        losses = token_losses(seen.flatten(0, 1), tokens[:, 1:].to(log_p.device).flatten())
        apart = (base.exp() * (base - seen)).sum(-1, dtype=torch.float64)
        own = losses.unflatten(0, counted.shape).double()
        self.loss.append(torch.where(counted, own, 0).sum(1).cpu())
        self.kl.append(torch.where(counted, apart, 0).sum(1).cpu())
        self.count.append(counted.sum(1).cpu())

    def weighted(self) -> tuple[Tensor, Tensor]:
        """Each prompt's part of the means over tokens."""
        mean = torch.cat(self.count).double().mean()
        return torch.cat(self.loss) / mean, torch.cat(self.kl) / mean


def measure_effects(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    conditions: Mapping[str, Any],
    *,
    counted: Bool[Tensor, "batch position"],
    progress: bool = False,
) -> tuple[Float[Tensor, "condition batch"], Float[Tensor, "condition batch"]]:
    """(loss, KL from clean) of each condition and prompt over its ``counted`` tokens; a condition
    is a function that makes a context manager, the first is clean."""
    size = max(2, output_batch(view, tokens.shape[1], all_positions=True))
    parts = max(1, min(math.ceil(len(tokens) / size), len(tokens) // 2))
    sums = {name: _Sums([], [], []) for name in conditions}
    bar = tqdm(total=parts * len(conditions), disable=not progress, desc=view.name, unit="run")
    with bar:
        for batch, chosen in zip(
            tokens.tensor_split(parts), counted.tensor_split(parts), strict=True
        ):
            clean: Tensor | None = None
            for name, make in conditions.items():
                with make():
                    log_p = log_probabilities(view, batch, {}, position=None)
                clean = log_p if clean is None else clean
                sums[name].add(log_p, clean, batch, chosen)
                bar.update(1)
    found = [s.weighted() for s in sums.values()]
    return torch.stack([loss for loss, _ in found]), torch.stack([kl for _, kl in found])


def repeated_for(
    view: ModelView, basis: PositionContext, batch: int, seed: int
) -> tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]:
    """Repeated random tokens made for the model, and the tokens that only copying can predict:
    those after a repeated one.

    Each row has a period of its own, so that the same term of another row copies from the wrong
    places.
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


def measured(
    view: ModelView,
    basis: PositionContext,
    rows: TokenWindows,
    conditions: Mapping[str, Any],
    seed: int,
    progress: bool,
) -> dict[str, Tensor]:
    """Losses, induction losses and divergences of each condition and prompt, by field of
    :class:`Effects`."""
    require(
        rows.tokens.shape[1] >= 2,
        "tokens",
        expected="prompts of at least 2 tokens",
        got=rows.tokens.shape[1],
    )
    every = torch.ones_like(rows.tokens, dtype=torch.bool)
    losses, kls = measure_effects(view, rows.tokens, conditions, counted=every, progress=progress)
    repeated, counted = repeated_for(view, basis, REPEATED, seed)
    induction, _ = measure_effects(view, repeated, conditions, counted=counted)
    return {"losses": losses, "induction_losses": induction, "kls": kls}


def averaged(
    values: Mapping[str, Tensor], names: Sequence[str], prefix: str
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The rows whose name is ``prefix`` and a number become one row ``prefix``, their mean."""
    places: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        head, _, tail = name.rpartition(" ")
        places.setdefault(prefix if head == prefix and tail.isdigit() else name, []).append(i)
    out = {k: torch.stack([v[at].mean(0) for at in places.values()]) for k, v in values.items()}
    return tuple(places), out
