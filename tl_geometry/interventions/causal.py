"""Does the term that explains a head's scores do the work? Loss with the term removed and kept
alone, beside the removal of other terms, a swap with other prompts, and a shrinking of the
scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.intervals import FEWEST, Interval, t_quantile
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.effects import MEASURES, Effects, averaged, measured
from tl_geometry.interventions.terms import (
    Change,
    HeadsLike,
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
"""Cosine of a term and the same term of another prompt above which a swap says nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NecessitySufficiency(Effects):
    """:class:`Effects` of a term at some heads: clean, bias terms only, keep, remove, and the
    controls: ``swap`` (mean over its draws), ``shrink``, and ``remove ...`` for each other term.

    ``remove_p`` in the table is :meth:`removal_p` of the removal against the condition of its row.
    ``swap_cosine`` is the mean cosine of the term and its swap: near one (a term of position hardly
    differs between prompts) the swap changes nothing. ``shrunk`` is the largest share by which a
    head's scores were shrunk (mean over prompts).
    """

    version: ClassVar[int] = 2
    heads: tuple[tuple[int, int], ...]
    term: tuple[str, ...]
    swap_cosine: float
    shrunk: float

    @property
    def necessity(self) -> dict[str, float]:
        """Loss and induction loss that removing the term costs, in nats."""
        clean, removed = self.of("clean"), self.of("remove")
        return {k: removed[k] - clean[k] for k in MEASURES[:2]}

    @property
    def sufficiency(self) -> dict[str, float]:
        """Share of the loss and of the induction loss that the term alone brings back, beyond the
        bias terms; NaN where nothing is lost with the bias terms alone, as for a term that is one
        of them."""
        inside = all("bias" in name.split("-") for name in self.term)
        return {k: math.nan if inside else self.survival("keep", measure=k) for k in MEASURES[:2]}

    def removal_p(self, control: str, measure: str = "loss") -> float:
        """P-value of the null that the removal of the term and a control (or ``"clean"``) could
        change places in every prompt (:meth:`Effects.p_value`)."""
        return self.p_value("remove", measure, against=control)

    def columns(self) -> Sequence[str]:
        names = list(super().columns())
        at = names.index("induction_loss")
        return (*names[:at], "loss_remove_p", *names[at:-1], "induction_remove_p", "kl")

    def rows(self) -> Sequence[Sequence[object]]:
        at = list(super().columns()).index("induction_loss")
        out: list[list[object]] = []
        for row in super().rows():
            name = str(row[0])
            loss, copied = (self.removal_p(name, m) for m in MEASURES[:2])
            out.append([*row[:at], loss, *row[at:-1], copied, row[-1]])
        return out


@dataclass(frozen=True, eq=False, kw_only=True)
class Dominance(Effects):
    """:class:`Effects` of keeping only dominant terms, beside a random term of each head.

    ``drawn`` is the loss of each draw of random terms, whose mean is the condition ``"random
    term"``.
    """

    version: ClassVar[int] = 1
    drawn: Float[Tensor, " row"]

    def saved(self) -> Interval:
        """What the dominant terms save over random ones (nats per token).

        The 95% interval is over prompts (paired) and over what one more draw of random terms would
        cost; there is none below 10 prompts or two draws.
        """
        gap, draws = self.change("random term", against="dominant term"), len(self.drawn)
        one_more = torch.full_like(gap.value, torch.nan)
        if draws > 1:
            quantile = t_quantile(torch.tensor(draws - 1.0))
            one_more = quantile * self.drawn.std() * (1 + 1 / draws) ** 0.5
        reach = torch.hypot(gap.value - gap.low, one_more)
        return Interval(gap.value, gap.value - reach, gap.value + reach, gap.error)

    def columns(self) -> Sequence[str]:
        return (*super().columns(), "saved", "saved_low", "saved_high")

    def rows(self) -> Sequence[Sequence[object]]:
        saved = [float(x) for x in self.saved()[:3]]
        unknown = [math.nan] * 3
        return [[*r, *(saved if r[0] == "dominant term" else unknown)] for r in super().rows()]


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
    """Loss when a term is removed from the scores of some heads and when it is kept alone, beside
    controls.

    The term is necessary where its removal costs more than each control: ``swap``, the same term of
    another prompt in its place (mean of ``draws``), which tells nothing for a term that hardly
    differs between prompts; ``shrink``, all scores smaller so that the same covariance with them
    goes; and the removal of every other term. It is sufficient where keeping only it (with the
    bias terms) costs little, against the bias terms alone. Effects are paired over prompts, with
    intervals and p-values from 10 prompts on. All chosen heads are edited at once, in the running
    forward pass (:mod:`tl_geometry.interventions.terms`).

    Raises ``UnsupportedModelError`` for encoders and for models without a trained output head.
    """
    view = as_view(model)
    require_basis(basis)
    require_output(view, "necessity_sufficiency")
    _require_same_vocabulary(view, "necessity_sufficiency")
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
    require(
        len(rows) >= 2 and draws >= 1,
        "tokens",
        expected="at least 2 prompts, and a swap",
        got=f"{len(rows)} and {draws} draws",
    )
    names = terms_of(term)
    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    cosines: list[float] = []
    shares: list[Tensor] = []
    changes: dict[str, Change] = {
        "bias terms only": keeping(()),
        "keep": keeping(names),
        "remove": removing(names),
    }
    for i in range(draws):
        changes[f"swap {i}"] = swapping(names, seed + i, lambda c: cosines.append(float(c.mean())))
    note = lambda share: shares.append(share.mean(0).cpu())  # noqa: E731
    changes["shrink"] = shrinking(names, basis.window[0], note)
    others = [n for n in term_names(PARTS, alibi=_has_alibi(view)) if n not in names]
    changes |= {f"remove {other}": removing((other,)) for other in others}
    made: dict[str, Any] = {"clean": nullcontext}
    made |= {name: _edited(view, basis, chosen, change) for name, change in changes.items()}
    found = measured(view, basis, rows, made, 1234 + seed, progress)
    conditions, values = averaged(found, tuple(made), "swap")
    result = NecessitySufficiency(
        provenance=view.provenance(rows, window=basis.window, seed=seed),
        conditions=conditions,
        **values,
        heads=chosen,
        term=names,
        swap_cosine=sum(cosines) / len(cosines),
        shrunk=float(torch.stack([share.max() for share in shares]).max()),
    )
    flags = (*_flags(result), *basis.remarks(view))
    return dataclasses.replace(result, provenance=result.provenance.flagged(*flags))


def _flags(found: NecessitySufficiency) -> list[str]:
    """What a reader of the table must know."""
    flags: list[str] = []
    if found.swap_cosine > NEARLY:
        flags.append(
            f"the term hardly differs between prompts (cosine {found.swap_cosine:.2f}): "
            "its swap is no control, the other rows are"
        )
    if found.shrunk > 1:
        flags.append(f"shrink turns the sign of scores (share {found.shrunk:.2f} above 1)")
    if math.isnan(found.sufficiency["loss"]):
        inside = all("bias" in name.split("-") for name in found.term)
        why = "the term is one of the bias terms" if inside else "nothing is lost without it"
        flags.append(f"no sufficiency: {why}")
    if found.losses.shape[1] < FEWEST:
        flags.append(f"fewer than {FEWEST} prompts: no intervals of the loss")
    return flags


def _has_alibi(view: ModelView) -> bool:
    """Whether scores have a bias of position."""
    return view.position == ALIBI


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

    Every head of every layer keeps the term (or the group) with its largest covariance share, with
    all terms that have bias on either side; beside it the bias terms alone, uniform attention, and
    as control a term drawn at random for each head (mean of ``draws``). A label of dominance is no
    summary of a model: on SmolLM2-135M (12 windows of Wikipedia, loss 4.21 nats) keeping the
    dominant terms gives 5.43 and random ones 5.55 (95% interval of the difference -0.23 to 0.01).
    ``result.survival("dominant term")`` is ``(L_bias - L_dominant) / (L_bias - L_clean)``.
    ``table`` is a finished :func:`tl_geometry.sweep_heads` of the model, by default made from the
    same prompts.
    """
    view = as_view(model)
    require_basis(basis)
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
    found = measured(view, basis, rows, made, 1234 + seed, progress)
    conditions, values = averaged(found, tuple(made), "random term")
    at = [i for i, name in enumerate(made) if name in random]
    return Dominance(
        provenance=view.provenance(rows, window=basis.window, seed=seed),
        conditions=conditions,
        drawn=found["losses"][at].mean(1),
        **values,
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
