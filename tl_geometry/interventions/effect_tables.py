"""What do edits of a live model do to its output, prompt by prompt? :func:`effects` runs a model
under each edit, and beside it under controls: the same edit of other heads, terms, planes,
directions or writers, or the same share of the scores taken from all terms evenly.

A head needs a term where removing it costs more than shrinking, than removing the other terms, and
than removing the same term in random heads. Wrong content (``how="swap"``) is printed beside them
and decides nothing: it costs more than removal in induction heads (SPEC "Version 2", O.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.errors import check_seed, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.intervals import FEWEST, Interval, paired_interval, sign_flip_p, t_quantile
from tl_geometry.base.tables import Table
from tl_geometry.circuits.prompt_pairs import UserMetric, measured
from tl_geometry.corpus.prompt_sets import Prompts, as_prompts
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.interventions.controls import Draw, draws_of
from tl_geometry.interventions.prompts import Edit, Known
from tl_geometry.models.batches import batch_of, output_batch
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.models.reader import as_view

CLEAN = None
"""The key of what was measured without an edit."""
NAMED = 3
"""Controls that a sentence names, so that it stays one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Effects(Guarded, Table):
    """What edits do to a metric, the largest change first: a row for each edit (and control).

    ``change`` is the mean over prompts of the metric under the edit minus that of the clean run;
    ``excess`` is how far it goes beyond a control; both with Student's 95% interval (NaN below 10
    prompts), that of the excess over random controls also for one more draw. ``p`` is that of
    random sign flips, against the control where there is one.

    ``edited [edit prompt]`` and ``clean [prompt]`` hold the metric, ``controls`` by (edit, control)
    that of every draw ``[draw prompt]``.

    Take one prompt of each text: intervals and tests count prompts as independent. With 4 prompts
    of each text, whose changes had a correlation of 0.5, the 95% intervals held the true change in
    80% of the cases, and tests of level 5% rejected a true null in 30%.
    """

    edits: tuple[str, ...]
    metric: str
    clean: Float[Tensor, " context"]
    edited: Float[Tensor, "condition context"]
    controls: Mapping[tuple[str, str], Float[Tensor, "sample context"]]

    @property
    def changes(self) -> Float[Tensor, "condition context"]:
        """The metric under each edit minus that of the clean run, by prompt."""
        return self.edited - self.clean

    def _about(self) -> str:
        return f"metric {self.metric}, {super()._about()}"

    def _row(self, edit: str) -> int:
        return self.edits.index(checks.choice(edit, self.edits, "edit"))

    def controls_of(self, edit: str) -> list[str]:
        """The names of an edit's controls."""
        return [control for name, control in vars(self)["controls"] if name == edit]

    def change(self, edit: str) -> Interval:
        """Mean change with its 95% interval."""
        return paired_interval(self.changes[self._row(edit)])

    def excess(self, edit: str, control: str) -> Interval:
        """How far an edit goes beyond a control, with a 95% interval over prompts and, where the
        control is drawn at random, one more draw (:func:`excess_over`)."""
        draws = self._draws(edit, control)
        gaps = self.edited[self._row(edit)] - draws.mean(0)
        return excess_over(gaps, draws.mean(1)) if len(draws) > 1 else paired_interval(gaps)

    def p(self, edit: str, control: str | None = None) -> float:
        """Two-sided p of the changes, or of the excess over a control, by random sign flips: the
        null is that the two could change places in every prompt."""
        against = self.clean if control is None else self._draws(edit, control).mean(0)
        return sign_flip_p(self.edited[self._row(edit)] - against)

    def _draws(self, edit: str, control: str) -> Float[Tensor, "draw prompt"]:
        names = tuple(self.controls_of(edit))
        return vars(self)["controls"][edit, checks.choice(control, names, "control")]

    def beyond(self, edit: str) -> bool | None:
        """Whether an edit does more than each of its controls, in the direction of its change and
        with the interval of the excess beyond zero; ``None`` without controls or intervals."""
        names = self.controls_of(edit) if len(self.clean) >= FEWEST else []
        up = float(self.change(edit).value) > 0
        found = [self.excess(edit, name) for name in names]
        return all(bool(x.low > 0 if up else x.high < 0) for x in found) if names else None

    def sentence(self, edit: str) -> str:
        """One edit in words: its change, and by how much it goes beyond each control, or beyond the
        nearest of many."""
        few, unit = len(self.clean) < FEWEST, " nats" * (self.metric == "loss")

        def said(x: Interval, unit: str = "") -> str:
            value, low, high = (f"{float(v):+.3g}".replace("-", "−") for v in x[:3])
            return f"{value}{unit}" if few else f"{value}{unit} (95% interval {low} to {high})"

        over = f"over {len(self.clean)} prompt{'s' * (len(self.clean) > 1)}"
        text = f"{edit} changes the {self.metric} by {said(self.change(edit), unit)} {over}"
        text += "; too few prompts for an interval" if few else ""
        names = self.controls_of(edit)
        if names:
            verdict = "more than its controls" if self.beyond(edit) else "not beyond its controls"
            near = sorted(names, key=lambda name: abs(float(self.excess(edit, name).value)))
            near = names if len(names) <= NAMED else near[:NAMED]
            draws = {n: len(vars(self)["controls"][edit, n]) for n in near}
            of = {n: f"{n} ({draws[n]} draws)" if draws[n] > 1 else n for n in near}
            beside = ", ".join(f"{said(self.excess(edit, n))} beyond {of[n]}" for n in near)
            beside += f" (the nearest of {len(names)})" if near is not names else ""
            text += f"; {beside}" if few else f", {verdict}: {beside}"
        return f"{text}."


class Metric(NamedTuple):
    """The name of a metric, the position of the logits that it reads (``None``: all), and a number
    for each prompt from logits and the numbers of the prompts."""

    name: str
    position: int | None
    of: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """Passes over prompts of one length."""

    known: Known
    metric: Metric
    batch_size: int | None

    def one(self, edit: Edit | None) -> Float[Tensor, " context"]:
        """The metric of each prompt under an edit, or of the clean run."""
        view, tokens, at = self.known.view, self.known.rows.tokens, self.metric.position
        size = batch_of(self.batch_size, tokens.shape[1], view.device)
        most = output_batch(view, tokens.shape[1], all_positions=at is None)
        size = size if self.batch_size else min(size, most)
        size = len(tokens) if edit is not None and edit.together else size
        values = []
        for rows in torch.arange(len(tokens)).split(size):
            with nullcontext() if edit is None else edit.attached():
                logits = view.logits(tokens[rows], position=at)
            values.append(self.metric.of(logits, rows).double().cpu())
        return checks.finite(torch.cat(values), f"metric {self.metric.name}")

    def all(
        self, edits: Mapping[str, Edit], drawn: Mapping[tuple[str, str], list[Draw]], bar: Any
    ) -> dict[Any, Float[Tensor, "... context"]]:
        """The metric of the clean run (:data:`CLEAN`), under each edit by its name, and under all
        draws of its controls by (edit, control)."""
        found, done = dict[Any, Tensor](), dict[Any, Tensor]()
        for name, edit in {CLEAN: None, **edits}.items():
            found[name] = self.one(edit)
            bar.update(1)
        for key, draws in drawn.items():
            for draw in draws:
                if draw.key not in done:  # edits with the same options share their draws
                    done[draw.key] = self.one(draw.make().given(self.known))
                bar.update(1)
            found[key] = torch.stack([done[draw.key] for draw in draws])
        return found


def excess_over(gaps: Float[Tensor, " context"], draws: Float[Tensor, " sample"]) -> Interval:
    """How much more a chosen edit does than random controls, with a 95% interval.

    ``gaps`` are the effects minus the mean effects of the controls, for each prompt. The half-width
    of the interval joins two independent errors, as the root of their squares: Student's interval
    over prompts, and the prediction interval ``t sd sqrt(1 + 1 / R)`` of one more of R random draws
    (``draws``: each draw's mean over prompts). It is NaN below 10 prompts.
    """
    gap, count = paired_interval(gaps), len(draws)
    one_more = draws.std() * (1 + 1 / count) ** 0.5
    quantile = float(t_quantile(torch.tensor(count - 1.0)))
    half_width = torch.hypot(gap.value - gap.low, quantile * one_more)
    error = torch.hypot(gap.error, one_more)
    return Interval(gap.value, gap.value - half_width, gap.value + half_width, error)


def effects(
    model: ModelLike,
    prompts: TokensLike,
    edits: Mapping[str, Edit],
    *,
    metric: str | UserMetric = "loss",
    counterfactual: TokensLike | None = None,
    answer: Any = None,
    other: Any = None,
    position: int | str = -1,
    control: str | Sequence[str] | None = None,
    draws: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Effects:
    """Ablation, activation patching and path patching, measured: what each edit does to a
    metric, beside controls.

    Args:
        prompts: of any lengths (a mean, or another prompt, is of those of one length);
            :class:`~tl_geometry.corpus.Prompts` hold counterfactuals and answers themselves. One
            works (but for a mean over prompts); intervals and p need 10.
        edits: by name (:func:`~tl_geometry.interventions.term`, ``planes``, ``edge``, ``heads``,
            ``path``, ``surrogate``, sums of them). Those that lack prompts get these, and
            ``counterfactual``.
        metric: the next-token ``"loss"`` (nats, mean over the prompt), the ``"difference"`` of the
            logits of ``answer`` and ``other`` at ``position``, or a function of logits
            ``[batch position d_vocab]`` that gives a number for each prompt.
        answer, other: tokens of the ``"difference"``, as ids or texts of one token, one for all
            prompts or one for each; ``answer`` may be a pair, or a list of pairs.
        control: ``"shrink"`` (the same share of the scores' covariance, from all terms evenly),
            ``"terms"`` (every other term), ``"heads"``, ``"planes"``, ``"directions"`` or
            ``"writers"`` (``draws`` random ones), one or several. An edit gets those that it has; a
            swap gets none.

    Raises ``GeometryError`` for a control that no edit has, for too few other heads, and for a
    metric that is not finite; ``UnsupportedModelError`` for a metric by name of an encoder or of a
    model without a trained output head.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=12)
    >>> edits = tlg.interventions.each(model, ["L0H0", "L1H2"], by="mean")
    >>> found = tlg.interventions.effects(model, prompts, edits, control="heads", draws=2)
    >>> sorted(found.df.edit), found.edited.shape
    (['L0H0', 'L1H2'], torch.Size([2, 12]))
    """
    view = as_view(model)
    seed, chosen = check_seed(seed, "seed"), _checked(view, edits)
    options = {"counterfactuals": counterfactual, "answers": answer, "others": other}
    reads_none = callable(metric) or metric == "loss"
    ignored = reads_none and (answer is not None or other is not None or position != -1)
    expected, got = 'metric="difference" beside it', "the loss, or a function, that reads no answer"
    require(not ignored, "answer, other, position", expected=expected, got=got)
    asked = as_prompts(view, prompts, **options, prepend_bos=prepend_bos)
    asked = replace(asked, rows=torch.arange(len(asked)))
    controls = [control] if isinstance(control, str) else list(control or ())
    drawn = draws_of(chosen, controls, draws, seed)  # refused before anything is run
    require(len(asked), "prompts", expected="at least one prompt", got="none")
    groups, runs = list(asked.groups()), list[Run]()
    # windows say more of themselves than their rows do
    windows = prompts if isinstance(prompts, TokenWindows) else None
    for group in groups:
        known = Known.of(view, windows or group, group.counterfactuals, are_run=True)
        runs.append(Run(known, _metric(view, known, group, metric, position), batch_size))
    given = [{name: edit.given(run.known) for name, edit in chosen.items()} for run in runs]
    count = len(runs) * (1 + len(chosen) + sum(map(len, drawn.values())))
    with tqdm(total=count, disable=not progress, desc=view.name, unit="run") as bar:
        parts = [run.all(of, drawn, bar) for run, of in zip(runs, given, strict=True)]
    # the prompts in their own order
    order = torch.cat([group.rows for group in groups]).argsort()
    found = {key: torch.cat([part[key] for part in parts], -1)[..., order] for key in parts[0]}
    copies = len(asked) - len({row.numpy().tobytes() for row in asked.ids})
    flags = [f"{copies} prompts are copies of others: intervals count them"] if copies else []
    flags += [flag for edit in chosen.values() for flag in edit.flags]
    rows = asked if windows is None else runs[0].known.rows
    provenance = view.provenance(rows, seed=seed, flags=tuple(dict.fromkeys(flags)))
    fields: dict[str, Any] = {"edits": tuple(chosen), "metric": runs[0].metric.name}
    fields |= {"clean": found[CLEAN], "edited": torch.stack([found[name] for name in chosen])}
    fields |= {"controls": {key: found[key] for key in drawn}}
    fields |= {"chance": "0 by chance, with 95% intervals over prompts"}
    return _with_table(Effects(provenance=provenance, names=(), cells=(), **fields))


def _checked(view: ModelView, edits: Any) -> dict[str, Edit]:
    """The edits by name."""
    fits = isinstance(edits, Mapping) and all(isinstance(e, Edit) for e in edits.values())
    expected, instead = "a mapping from names to edits", "{name: interventions.term(...)}"
    got = "none" if edits == {} else type(edits).__name__
    require(fits and edits, "edits", expected=expected, got=got, instead=instead)
    others = [name for name, edit in edits.items() if not edit.view.is_of_model(view)]
    expected = f"edits of {view.name} as it is now"
    require(not others, "edits", expected=expected, got=f"edits of another model: {others[:4]}")
    return {str(name): edit for name, edit in edits.items()}


def _with_table(found: Effects) -> Effects:
    """The same with the columns and rows of its table, the largest change first."""
    order = sorted(found.edits, key=lambda name: -abs(float(found.change(name).value)))
    names = ["edit", "change", "change_low", "change_high"]
    beside = ["control", "control_change", "excess", "excess_low", "excess_high"]
    drawn = found.controls
    names += [*(beside if drawn else []), "p"]
    cells: list[tuple[Any, ...]] = []
    for edit in order:
        row = (edit, *map(float, found.change(edit)[:3]))
        for control in found.controls_of(edit):
            mean = float((drawn[edit, control] - found.clean).mean())
            ends = map(float, found.excess(edit, control)[:3])
            cells.append((*row, control, mean, *ends, found.p(edit, control)))
        if not found.controls_of(edit):
            nothing = ("", *[float("nan")] * 4) if drawn else ()
            cells.append((*row, *nothing, found.p(edit)))
    return replace(found, names=tuple(names), cells=tuple(cells))


def _metric(
    view: ModelView, known: Known, group: Prompts, metric: str | UserMetric, position: int | str
) -> Metric:
    """A metric of prompts of one length, ``known`` and ``group``."""
    rows = known.rows
    if callable(metric):

        def own(logits: Tensor, chosen: Tensor) -> Tensor:
            return measured(logits, metric).detach()

        return Metric(getattr(metric, "__name__", "metric"), None, own)
    name = checks.choice(str(metric), ("loss", "difference"), "metric")
    view.require_output("effects")
    if name == "loss":
        require(rows.length > 1, "prompts", expected="2 tokens or more", got=rows.length)

        def loss(logits: Tensor, chosen: Tensor) -> Tensor:
            ids = rows.tokens[chosen].to(logits.device)
            return next_token_losses(logits, ids).double().mean(1)

        return Metric(name, None, loss)
    ids = [side for side in (group.answers, group.others) if side is not None]
    expected, instead = 'two tokens for metric="difference"', "answer=(answer, other)"
    require(len(ids) == 2, "answer", expected=expected, got=len(ids), instead=instead)
    places = known.place(position)
    at = int(places) if len(places) == 1 else None

    def difference(logits: Tensor, chosen: Tensor) -> Tensor:
        if at is None:  # a name that stands for another position in each prompt
            there = places[chosen].to(logits.device)
            logits = logits[torch.arange(len(there)), there].unsqueeze(1)
        return measured(logits.double(), None, [side[chosen] for side in ids])

    return Metric(name, at, difference)
