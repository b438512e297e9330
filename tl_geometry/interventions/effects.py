"""What do edits of a live model do to its output, prompt by prompt? Losses and divergences of
several conditions, and paired intervals and p-values of their differences.
:mod:`~tl_geometry.interventions.causal` and :mod:`~tl_geometry.interventions.edge_effects` measure
with it; knockouts and paths take the interval of an effect beyond random controls from here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import Interval, paired_interval, sign_flip_p, t_quantile
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
"""Sequences of repeated random tokens behind an induction loss: more than the 10 that an interval
needs."""
Condition = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which the model is run: the edit of a condition."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Conditions(Result):
    """Loss (nats) of each condition and prompt; the first condition is the clean run. Changes are
    paired over prompts, with Student's 95% interval from 10 prompts on.

    Take one prompt of each text: intervals and tests count prompts as independent. With 4 prompts
    of each text, whose changes had a correlation of 0.5, the 95% intervals held the true change in
    80% of the cases, and tests of level 5% rejected a true null in 30%.
    """

    conditions: tuple[str, ...]
    losses: Float[Tensor, "condition context"]

    table_axes = ("condition",)

    def by_prompt(self, measure: str = "loss") -> Float[Tensor, "condition sample"]:
        """A measure of every condition and prompt: ``"loss"``."""
        checks.choice(measure, MEASURES[:1], "measure")
        return self.losses

    @property
    def loss(self) -> Float[Tensor, " condition"]:
        """Mean loss of each condition (nats)."""
        return self.losses.mean(1)

    def row(self, condition: str) -> int:
        """The row of a condition."""
        return self.conditions.index(checks.choice(condition, self.conditions, "condition"))

    def _paired(self, condition: str, against: str, measure: str) -> Float[Tensor, " sample"]:
        values = self.by_prompt(measure)
        return values[self.row(condition)] - values[self.row(against)]

    def change(self, condition: str, measure: str = "loss", *, against: str = "clean") -> Interval:
        """Mean paired difference of two conditions with its 95% interval (NaN below 10 prompts)."""
        return paired_interval(self._paired(condition, against, measure))

    def p_value(self, condition: str, measure: str = "loss", *, against: str = "clean") -> float:
        """Two-sided p-value of the paired differences of two conditions, by random sign flips. The
        null is that the two could change places in every prompt
        (:func:`tl_geometry.base.intervals.sign_flip_p`; NaN below 10 prompts)."""
        return sign_flip_p(self._paired(condition, against, measure))

    def p_values(self, condition: str, measure: str = "loss") -> Float[Tensor, " condition"]:
        """:meth:`p_value` of one condition against every one."""
        p = [self.p_value(condition, measure, against=other) for other in self.conditions]
        return torch.tensor(p, dtype=torch.float64)

    def column_values(self) -> dict[str, Float[Tensor, " condition"]]:
        """The columns of the table."""
        raise NotImplementedError

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        return {name: (values, ("condition",)) for name, values in self.column_values().items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Effects(Conditions):
    """Effect of each condition on the output: one row per condition, the first the clean run.

    - ``loss``: mean next-token loss on the prompts (nats).
    - ``induction_loss``: the same on random tokens where they repeat, which only copying can
      predict.
    - ``kl``: mean KL(clean || condition) of the next-token distribution on the prompts (nats).

    The tensors hold each prompt's part, weighted so that the mean over prompts is the mean over
    tokens.
    """

    induction_losses: Float[Tensor, "condition sample"]
    kls: Float[Tensor, "condition context"]

    def by_prompt(self, measure: str = "loss") -> Float[Tensor, "condition sample"]:
        """``"loss"``, ``"induction_loss"`` or ``"kl"`` of every condition and prompt."""
        tensors = {"loss": self.losses, "induction_loss": self.induction_losses, "kl": self.kls}
        return tensors[checks.choice(measure, MEASURES, "measure")]

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
        at = self.row(condition)
        return {name: float(getattr(self, name)[at]) for name in MEASURES}

    def survival(self, kept: str, nothing: str = "bias terms only", measure: str = "loss") -> float:
        """Share of a loss that survives: ``(L_nothing - L_kept) / (L_nothing - L_clean)``; NaN
        where the condition ``nothing`` does not raise the loss."""
        L_clean, L_kept, L_nothing = (self.of(row)[measure] for row in ("clean", kept, nothing))
        return (L_nothing - L_kept) / (L_nothing - L_clean) if L_nothing > L_clean else math.nan

    def measure_columns(self, measure: str) -> dict[str, Float[Tensor, " condition"]]:
        """The columns of the table about one measure."""
        values = self.by_prompt(measure)
        change = paired_interval((values - values[0]).mT)
        ends = {"change": change.value, "low": change.low, "high": change.high}
        columns = {f"{measure}_{end}": column for end, column in ends.items()}
        return {measure: values.mean(1)} | columns

    def column_values(self) -> dict[str, Float[Tensor, " condition"]]:
        loss, induction_loss = (self.measure_columns(measure) for measure in MEASURES[:2])
        return loss | induction_loss | {"kl": self.kl}


def measure_effects(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    conditions: Sequence[Condition],
    *,
    counted: Bool[Tensor, "batch position"],
    progress: bool = False,
) -> tuple[Float[Tensor, "condition batch"], Float[Tensor, "condition batch"]]:
    """Loss, and KL from clean, of each condition and prompt over its ``counted`` tokens.

    They are weighted so that the mean over prompts is the mean over tokens. The first condition is
    clean.
    """
    # at least 2 prompts in every batch: a swap takes its term from another prompt of the batch
    size = max(2, output_batch(view, tokens.shape[1], all_positions=True))
    n_batches = max(1, min(math.ceil(len(tokens) / size), len(tokens) // 2))
    batches = zip(tokens.tensor_split(n_batches), counted.tensor_split(n_batches), strict=True)
    sums: list[Tensor] = []
    with tqdm(
        total=n_batches * len(conditions), disable=not progress, desc=view.name, unit="run"
    ) as bar:
        for batch, batch_counted in batches:
            clean: Tensor | None = None
            batch_sums: list[Tensor] = []
            for condition in conditions:
                with condition():
                    log_p = log_probabilities(view, batch, {}, position=None)
                clean = log_p if clean is None else clean
                batch_sums.append(_summed(log_p, clean, batch, batch_counted))
                bar.update(1)
            sums.append(torch.stack(batch_sums, dim=1))
    # divided by the mean count of a prompt, not its own: then every token has the same weight
    losses, kls = torch.cat(sums, dim=-1) / counted[:, 1:].sum(1).double().mean()
    return losses, kls


def _summed(
    log_p: Tensor, clean: Tensor, tokens: Tensor, counted: Tensor
) -> Float[Tensor, "2 batch"]:
    """Loss and KL from clean of each prompt, summed over the ``counted`` tokens, from
    log-probabilities ``[batch position d_vocab]``."""
    counted = counted[:, 1:].to(log_p.device)
    log_p, clean = log_p[:, :-1], clean[:, :-1]
    losses = token_losses(log_p.flatten(0, 1), tokens[:, 1:].to(log_p.device).flatten())
    kl = (clean.exp() * (clean - log_p)).sum(-1, dtype=torch.float64)
    both = torch.stack([losses.unflatten(0, counted.shape).double(), kl])
    return torch.where(counted, both, 0).sum(-1).cpu()


def repeated_for(
    view: ModelView, basis: PositionContext, batch: int, seed: int
) -> tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]:
    """Rows of random tokens that repeat, and which of them only copying can predict: those after a
    repeated one.

    Rows have different periods. A term swapped in from another row then copies from wrong places,
    as a control must.
    """
    bos_id = view.bos_id if basis.provenance.has_bos else None
    low, high = token_range(view.d_vocab, [view.bos_id])
    longest = period_for(min(view.n_ctx, basis.length), high - low, bos=bos_id is not None)
    needed = 4 if bos_id is None else 5
    expected, instead = f"at least {needed} positions", "decompose(...) on longer windows"
    require(longest >= 2, "basis", expected=expected, got=basis.length, instead=instead)
    base = repeated_random_tokens(longest, 1, batch, low=low, high=high, seed=seed)
    # periods from the longest down to just above its half: every row repeats once or more
    periods = (longest - torch.arange(batch) % max(1, longest // 2)).unsqueeze(1)
    position = torch.arange(2 * longest).expand(batch, -1)
    tokens, counted = base.gather(1, position % periods), position > periods
    if bos_id is not None:
        tokens = torch.cat([torch.full((batch, 1), bos_id), tokens], dim=1)
        counted = torch.cat([torch.zeros(batch, 1, dtype=torch.bool), counted], dim=1)
    return tokens, counted


def measured(
    view: ModelView,
    basis: PositionContext,
    rows: TokenWindows,
    conditions: Sequence[Condition],
    seed: int,
    progress: bool,
) -> dict[str, Float[Tensor, "condition sample"]]:
    """Losses, induction losses and divergences of each condition and prompt, by field of
    :class:`Effects`."""
    length = rows.tokens.shape[1]
    require(length >= 2, "tokens", expected="prompts of at least 2 tokens", got=length)
    all_tokens = torch.ones_like(rows.tokens, dtype=torch.bool)
    losses, kls = measure_effects(
        view, rows.tokens, conditions, counted=all_tokens, progress=progress
    )
    repeated, counted = repeated_for(view, basis, REPEATED, seed)
    induction_losses, _ = measure_effects(view, repeated, conditions, counted=counted)
    return {"losses": losses, "induction_losses": induction_losses, "kls": kls}


@dataclass(frozen=True, eq=False, kw_only=True)
class BesideControls(Result):
    """Effects of edits on a metric of the output, for each prompt, beside those of random edits.

    - ``sets`` are the heads of each row; ``clean`` is the metric of the clean run.
    - ``effects``: the metric under an edit minus that of the clean run. The table has its mean with
      Student's 95% interval (NaN below 10 prompts).
    - ``control``: mean effect of random sets of as many heads; ``control_draws`` are the means over
      prompts of each set.
    - ``excess``: effect minus control. Its interval covers chance over prompts and the spread of
      one more random set.
    """

    sets: tuple[tuple[tuple[int, int], ...], ...]
    metric: str
    by: str
    clean: Float[Tensor, " context"]
    effects: Float[Tensor, "*batch context"]
    control: Float[Tensor, "*batch context"] | None = None
    control_draws: Float[Tensor, "*batch sample"] | None = None

    @property
    def effect(self) -> Interval:
        """Mean effect of each row with its interval."""
        return paired_interval(self.effects.movedim(-1, 0))

    @property
    def excess(self) -> Interval | None:
        """What each row does beyond random sets of as many heads."""
        if self.control is None or self.control_draws is None:
            return None
        return excess_over(self.effects - self.control, self.control_draws)

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        columns = self.effect.columns("effect")
        if self.control is not None and self.excess is not None:
            columns |= {"control": self.control.mean(-1), **self.excess.columns("excess")}
        return {name: (values, self.table_axes) for name, values in columns.items()}


def excess_over(
    gaps: Float[Tensor, "*batch context"], draws: Float[Tensor, "*batch sample"]
) -> Interval:
    """How much more chosen edits do than random controls, with a 95% interval.

    ``gaps`` are the effects minus the mean effects of the controls, for each prompt. The half-width
    of the interval joins two independent errors, as the root of their squares: Student's interval
    over prompts, and the prediction interval ``t sd sqrt(1 + 1 / R)`` of one more of R random draws
    (``draws``: each draw's mean over prompts). It is NaN below 10 prompts or 2 draws.
    """
    gap, count = paired_interval(gaps.movedim(-1, 0)), draws.shape[-1]
    one_more = half_width = torch.full_like(gap.value, torch.nan)
    if count > 1:
        one_more = draws.std(-1) * (1 + 1 / count) ** 0.5
        quantile = float(t_quantile(torch.tensor(count - 1.0)))
        half_width = torch.hypot(gap.value - gap.low, quantile * one_more)
    error = torch.hypot(gap.error, one_more)
    return Interval(gap.value, gap.value - half_width, gap.value + half_width, error)
