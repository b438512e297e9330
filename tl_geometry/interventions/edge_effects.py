"""Is an edge needed? Loss of each prompt with a writer taken out of some heads' inputs, with
another prompt's writer in its place, and with other writers taken out instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, describe
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import Interval, paired_interval, sign_flip_p
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.edges import CleanRun, clean_run, edge_edits
from tl_geometry.interventions.terms import derangement
from tl_geometry.models.describing import as_view
from tl_geometry.models.live import edited_scores
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.models.outputs import output_batch, require_output
from tl_geometry.scores.sweep import sweep_heads

CLEAN, REMOVE, SWAP = "clean", "remove", "swap"
"""Conditions of :func:`edge_necessity` beside the controls, which are named by their writers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeNecessity(Result):
    """Loss (nats) of each condition and prompt: the clean run, the edge removed, another prompt's
    writer swapped in, and each of the other writers removed in its place.

    Rows have the mean over prompts, its change from clean with Student's 95% interval of the paired
    differences, and how much more removing the edge costs than this condition (``excess``) with
    interval and sign-flip p-value; intervals and p-values are NaN below 10 prompts. ``share`` is
    the mean covariance share of the writer in the chosen heads on that side (NaN for values).
    """

    writer: str
    heads: tuple[tuple[int, int], ...]
    side: str
    conditions: tuple[str, ...]
    losses: Float[Tensor, "condition context"]
    share: Float[Tensor, " condition"]
    version: ClassVar[int] = 1

    @property
    def loss(self) -> Float[Tensor, " condition"]:
        """Mean loss of each condition."""
        return self.losses.mean(1)

    def of(self, condition: str) -> float:
        """Mean loss of one condition."""
        return float(self.loss[self._row(condition)])

    def change(self, condition: str, *, against: str = CLEAN) -> Interval:
        """Mean paired difference of two conditions with its interval."""
        return paired_interval(self.losses[self._row(condition)] - self.losses[self._row(against)])

    def p_value(self, condition: str, *, against: str = CLEAN) -> float:
        """Sign-flip p-value of the paired differences of two conditions."""
        return sign_flip_p(self.losses[self._row(condition)] - self.losses[self._row(against)])

    def _row(self, condition: str) -> int:
        return self.conditions.index(checks.choice(condition, self.conditions, "condition"))

    def columns(self) -> Sequence[str]:
        found = [f"{name}{end}" for name in ("change", "excess") for end in ("", "_low", "_high")]
        return ("condition", "share", "loss", *found, "p")

    def rows(self) -> Sequence[Sequence[object]]:
        found: list[Sequence[object]] = []
        for i, name in enumerate(self.conditions):
            change, excess = self.change(name), self.change(REMOVE, against=name)
            numbers = [float(x) for x in (*change[:3], *excess[:3])]
            p = self.p_value(REMOVE, against=name)
            found.append((name, float(self.share[i]), float(self.loss[i]), *numbers, p))
        return found


def edge_necessity(
    model: ModelLike,
    tokens: TokensLike,
    writer: str,
    heads: Sequence[Head] | Head,
    *,
    side: str = "key",
    counted: Bool[Tensor, "..."] | None = None,
    controls: Sequence[str] | int = 6,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> EdgeNecessity:
    """What it costs to take ``writer`` out of the ``side`` input of ``heads``, beside the controls:
    the same writer's output of another prompt, and the removal of other writers.

    Args:
        tokens: at least 2 prompts (10 for intervals).
        counted: tokens whose loss counts, ``[position]`` or ``[batch position]`` (for repeated
            random tokens those of the second copy); all by default.
        controls: names of other writers, or how many of the heads, MLPs and embeddings with the
            largest absolute share in the chosen heads on that side.

    Raises ``UnsupportedModelError`` for encoders and without a trained output head,
    ``GeometryError`` for a writer that does not come before every reader.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=4)
    >>> found = tlg.interventions.edge_necessity(model, windows, "L0H0", "L1H0", controls=1)
    >>> found.conditions[:3], found.losses.shape
    (('clean', 'remove', 'swap'), torch.Size([4, 4]))
    """
    view = as_view(model)
    require_output(view, "edge_necessity")
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    require(len(rows) >= 2, "tokens", expected="at least 2 prompts", got=len(rows))
    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    layers = {layer for layer, _ in chosen}
    shares = _shares(view, rows.tokens, chosen, side)
    others = _controls(controls, shares, writer)
    names = (CLEAN, REMOVE, SWAP, *others)
    keep = torch.ones_like(rows.tokens, dtype=torch.bool) if counted is None else counted
    fits = keep.dtype == torch.bool and keep.shape[-1] == rows.tokens.shape[1]
    require(fits, "counted", expected="bool [batch position]", got=describe(keep))
    keep = keep.expand(rows.tokens.shape)[:, 1:]
    require(bool(keep.any(1).all()), "counted", expected="tokens of every prompt", got="none")
    size = max(1, output_batch(view, rows.tokens.shape[1], all_columns=True))
    order, found = derangement(len(rows), seed), []
    for at in torch.arange(len(rows)).split(size):
        run = clean_run(view, rows.tokens[at], [writer, *others], layers)
        away = clean_run(view, rows.tokens[order[at]], [writer], layers)
        losses = [_losses(view, run, name, writer, chosen, side, away) for name in names]
        each = torch.stack(losses) * keep[at].to(losses[0])
        found.append(each.sum(-1) / keep[at].sum(-1).to(each))
    nothing = float("nan")
    known = [nothing, *[shares.get(n, nothing) for n in (writer, writer, *others)]]
    return EdgeNecessity(
        provenance=view.provenance(rows, seed=seed),
        writer=writer,
        heads=chosen,
        side=side,
        conditions=names,
        losses=torch.cat(found, 1).cpu(),
        share=torch.tensor(known, dtype=torch.float64),
    )


def _losses(
    view: ModelView,
    run: CleanRun,
    condition: str,
    writer: str,
    heads: Sequence[tuple[int, int]],
    side: str,
    away: CleanRun,
) -> Float[Tensor, "batch position"]:
    """Loss of every token after the first under one condition."""
    if condition == CLEAN:
        return next_token_losses(view.logits(run.tokens), run.tokens).double()
    name = writer if condition in (REMOVE, SWAP) else condition
    edits = edge_edits(run, name, heads, side, away if condition == SWAP else None)
    with edited_scores(view, edits):
        return next_token_losses(view.logits(run.tokens), run.tokens).double()


def _shares(
    view: ModelView, tokens: Tensor, heads: Sequence[tuple[int, int]], side: str
) -> dict[str, float]:
    """Mean covariance share of each writer in some heads, on the query or key side (the key side's
    for values)."""
    layers = sorted({layer for layer, _ in heads})
    sweep = sweep_heads(view, tokens, parts="writers", layers=layers, progress=False)
    rows = [sweep.heads.index(head) for head in heads]
    values = sweep.cs[rows, 0 if side == "query" else 1].nanmean(0)
    before = {
        part: float(value)
        for part, value, wrote in zip(sweep.parts, values, sweep.wrote, strict=True)
        if wrote < layers[0]
    }
    return {part: value for part, value in before.items() if part not in ("bias", "alibi")}


def _controls(
    controls: Sequence[str] | int, shares: dict[str, float], writer: str
) -> tuple[str, ...]:
    """Other writers: those named, or the largest."""
    if not isinstance(controls, int):
        return tuple(controls)
    ranked = sorted(shares, key=lambda name: -abs(shares[name]))
    return tuple(name for name in ranked if name not in (writer, "constants"))[:controls]
