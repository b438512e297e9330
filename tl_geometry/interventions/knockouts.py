"""What does each head do to the output, and do attributions see it? :func:`head_knockouts` runs the
live model without each head (or set of heads) and compares a metric prompt by prompt.

Several knockouts share one forward pass: its batch is (knockout, prompt), and each row has its own
heads replaced. Beside a knockout stand random sets of as many heads, and on request what three
attributions give to the same replacement (:mod:`tl_geometry.interventions.head_attributions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.interventions.effects import BesideControls
from tl_geometry.interventions.head_attributions import head_attributions
from tl_geometry.interventions.head_edits import (
    Heads,
    HeadsLike,
    by_layer,
    derangement,
    mixed_values,
    replaced_in_sets,
    require_several,
)
from tl_geometry.interventions.head_removal import REPLACEMENTS, mean_outputs
from tl_geometry.interventions.output_metrics import (
    OutputMetric,
    Targets,
    UserMetric,
    output_metric,
)
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import StreamEdit, edit_of_outputs, edited_scores
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import output_batch, require_output
from tl_geometry.models.reader import as_view

CONTROLS = 8
"""Random sets of heads beside chosen ones, by default."""
ATTRIBUTIONS = ("direct", "value_paths", "all_paths")
"""Columns of attributions, in the order of :func:`head_attributions`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadKnockouts(BesideControls):
    """What knockouts of heads do to a metric of the output: one row for each head, or set of heads
    (:class:`~tl_geometry.interventions.BesideControls`). Rows of one size share the random
    sets.

    - ``direct``, ``value_paths``, ``all_paths``: what three attributions say that the heads
      contribute. Where an attribution is all that a head does, ``effect = -attribution``.
    - ``disagrees``: rows in which effect and direct contribution do not cancel. The 95% interval of
      their sum lies farther from zero than half of the larger of the two.

    With a soft cap on the output logits, effects are measured after it and attributions before it.
    """

    conditions: tuple[str, ...]
    direct: Float[Tensor, "condition context"] | None = None
    value_paths: Float[Tensor, "condition context"] | None = None
    all_paths: Float[Tensor, "condition context"] | None = None
    table_axes = ("condition",)

    @property
    def by_head(self) -> dict[tuple[int, int], int]:
        """The row of each head that is knocked out alone."""
        return {heads[0]: row for row, heads in enumerate(self.sets) if len(heads) == 1}

    @property
    def disagrees(self) -> Bool[Tensor, " condition"] | None:
        """Rows in which the effect of the knockout is not minus the direct contribution."""
        if self.direct is None:
            return None
        _, low, high, _ = paired_interval((self.effects + self.direct).mT)
        larger = torch.maximum(self.effects.mean(1).abs(), self.direct.mean(1).abs())
        return (low > larger / 2) | (high < -larger / 2)

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        attributions = {name: getattr(self, name) for name in ATTRIBUTIONS}
        columns = {name: v.mean(1) for name, v in attributions.items() if v is not None}
        columns |= {} if self.disagrees is None else {"disagrees": self.disagrees}
        added = {name: (values, self.table_axes) for name, values in columns.items()}
        return {**super().table_numbers(), **added}


def head_knockouts(
    model: ModelLike,
    prompts: TokensLike,
    metric: str | UserMetric = "difference",
    *,
    targets: Targets | None = None,
    position: int | str = -1,
    heads: HeadsLike | Mapping[str, HeadsLike] = None,
    by: str = "mean",
    reference: TokensLike | None = None,
    controls: int | None = None,
    attributions: bool = False,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> HeadKnockouts:
    """Effect on the output of taking each head out of the live model, beside what attributions say.

    Args:
        prompts: of one length, at least 2 (10 for intervals).
        metric: ``"difference"`` of the logits of each prompt's two targets, ``"probability"`` of
            its first, the next-token ``"loss"``, or a function of the logits of all prompts
            ``[batch position d_vocab]`` that gives one number for each.
        targets: ``[(right, wrong), ...]``, one pair for each prompt, as ids or texts of one token
            (``"probability"`` takes one token each).
        position: where these logits are read, a number or a name.
        heads: a row for each of them (all by default), or a mapping from names to sets of heads
            that are knocked out together.
        by: what stands in place of a head's mixed values, as in :func:`remove_heads`: ``"mean"``
            over ``reference`` (by default the prompts themselves) at the same position, ``"zero"``,
            or ``"prompt"``, those of another of the prompts, run without the same heads.
        controls: random sets of as many heads beside each row, drawn from the heads that no row
            has; by default 8, and none where all heads are rows.
        attributions: also the direct contribution to the difference of logits, that along value
            paths, and that along all paths, of the same replacement.

    Raises ``GeometryError`` for attributions of a metric other than ``"difference"``, for a
    reference shorter than the prompts, and for controls where too few heads are left;
    ``UnsupportedModelError`` for encoders and without a trained output head.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=4)
    >>> effects = tlg.interventions.head_knockouts(model, prompts, "loss", progress=False)
    >>> effects.conditions[:2], effects.effects.shape
    (('L0H0', 'L0H1'), torch.Size([16, 4]))
    """
    checks.choice(by, REPLACEMENTS, "by")
    view = as_view(model)
    require_output(view, "head_knockouts")
    rows = token_rows(view, prompts, prepend_bos=prepend_bos)
    require_several(len(rows), "prompts")
    named_sets = head_sets(view, heads)
    sets = list(named_sets.values())
    measured = output_metric(view, rows, metric, targets, position)
    got = f"the metric {measured.name}"
    has_paths = measured.name == "difference" and measured.ids is not None
    instead = 'metric="difference"'
    what, expected = "attributions", "a difference of two logits"
    require(has_paths or not attributions, what, expected=expected, got=got, instead=instead)
    means = reference_means(view, rows, by, reference, prepend_bos)
    every_head = checks.heads(None, view.n_layers, view.n_heads)
    drawn = control_sets(sets, every_head, controls, seed)
    order = derangement(len(rows), seed)
    runs = _Runs(view, measured, by, means, order, progress)
    fields: dict[str, Any] = {}
    if drawn:
        by_size = {size: runs.effects(draws) for size, draws in drawn.items()}
        # [row draw prompt]: rows of one size share their draws
        by_row = torch.stack([by_size[len(row_heads)] for row_heads in sets])
        fields = {"control": by_row.mean(1), "control_draws": by_row.mean(2)}
    if attributions:
        fields |= runs.attributions(sets)
    return HeadKnockouts(
        provenance=view.provenance(rows, seed=seed),
        conditions=tuple(named_sets),
        sets=tuple(tuple(row_heads) for row_heads in sets),
        metric=measured.name,
        by=by,
        clean=runs.clean,
        effects=runs.effects(sets),
        **fields,
    )


def head_sets(view: ModelView, heads: Any) -> dict[str, Heads]:
    """The heads of each row by its name: each head alone, or the sets of a mapping."""
    if not isinstance(heads, Mapping):
        alone = checks.heads(heads, view.n_layers, view.n_heads)
        return {checks.head_name(head): [head] for head in alone}
    require(len(heads) > 0, "heads", expected="at least one set of heads", got="none")
    return {
        str(name): checks.heads(row_heads, view.n_layers, view.n_heads)
        for name, row_heads in heads.items()
    }


def reference_means(
    view: ModelView, rows: TokenWindows, by: str, reference: Any, prepend_bos: bool | None
) -> Float[Tensor, "layer position head d_head"] | None:
    """Mean mixed values of all heads over the reference, at the positions of the prompts."""
    require(by == "mean" or reference is None, "reference", expected='by="mean"', got=f'by="{by}"')
    if by != "mean":
        return None
    length = rows.tokens.shape[1]
    if reference is not None:
        rows = token_rows(view, reference, prepend_bos=prepend_bos)
    seen = rows.tokens.shape[1]
    expected = f"prompts of at least {length} tokens, as those that are run"
    require(seen >= length, "reference", expected=expected, got=f"prompts of {seen} tokens")
    all_heads = tuple(range(view.n_heads))
    means = mean_outputs(view, rows.tokens, dict.fromkeys(range(view.n_layers), all_heads))
    return torch.stack([means[l][:length] for l in range(view.n_layers)])


def control_sets(
    chosen: Sequence[Heads], heads: Heads, controls: Any, seed: int
) -> dict[int, list[Heads]]:
    """Random sets of heads, ``controls`` of each size that a row has, drawn from those of ``heads``
    that no row has. There are none with ``controls=0``, nor by default where every head has a
    row."""
    taken = {head for row in chosen for head in row}
    others = [head for head in heads if head not in taken]
    by_default = CONTROLS if others else 0
    count = by_default if controls is None else checks.whole(controls)
    if count is None or count < 0:
        fail("controls", expected="a number of random sets", got=repr(controls))
    if count == 0:
        return {}
    generator = torch.Generator().manual_seed(seed)
    sets: dict[int, list[Heads]] = {}
    for size in sorted({len(row) for row in chosen}):
        expected, got = f"at least {size} heads that no row has", len(others)
        require(got >= size, "controls", expected=expected, got=got, instead="controls=0")
        orders = [torch.randperm(got, generator=generator)[:size] for _ in range(count)]
        sets[size] = [[others[i] for i in order.tolist()] for order in orders]
    return sets


class _Runs:
    """Runs knockouts, several in one pass, and measures them. ``means`` replace mixed values for
    ``by="mean"``; ``order`` says which prompt each prompt gets for ``by="prompt"``."""

    def __init__(
        self,
        view: ModelView,
        metric: OutputMetric,
        by: str,
        means: Float[Tensor, "layer position head d_head"] | None,
        order: Tensor,
        progress: bool,
    ) -> None:
        self.view, self.metric, self.by, self.means = view, metric, by, means
        self.order, self.progress = order, progress
        count, length = metric.tokens.shape
        at_once = output_batch(view, length, all_positions=metric.position is None)
        # a user's function sees all prompts, and another prompt may be any of them
        together = metric.own is not None or by == "prompt"
        self.prompts = count if together else min(count, at_once)
        self.knockouts = max(1, at_once // self.prompts)
        no_heads: list[Heads] = [[]]
        self.clean = torch.cat([self._run(no_heads, rows)[0] for rows in self._parts()]).cpu()

    def _parts(self) -> list[slice]:
        """The prompts of each pass."""
        count = len(self.metric.tokens)
        return [slice(at, at + self.prompts) for at in range(0, count, self.prompts)]

    def effects(self, sets: Sequence[Heads]) -> Float[Tensor, "condition context"]:
        """The metric without each set of heads, less that of the clean run."""
        # neighbouring layers share a pass, so that few layers of it are edited
        order = sorted(range(len(sets)), key=lambda i: min(sets[i], default=(0, 0)))
        values = torch.zeros(len(sets), len(self.metric.tokens), dtype=torch.float64)
        starts = range(0, len(order), self.knockouts)
        for start in tqdm(starts, disable=not self.progress, desc=self.view.name, unit="pass"):
            chosen = order[start : start + self.knockouts]
            for rows in self._parts():
                values[chosen, rows] = self._run([sets[i] for i in chosen], rows).cpu()
        return values - self.clean

    def _run(self, sets: Sequence[Heads], rows: slice) -> Float[Tensor, "condition batch"]:
        """The metric of some prompts without each set of heads."""
        tokens = self.metric.tokens[rows].repeat(len(sets), 1)
        layers = by_layer([head for heads in sets for head in heads])
        edits = [self._edit(layer, sets) for layer in layers]
        with edited_scores(self.view, edits):
            logits = self.view.logits(tokens, {}, self.metric.position)
        by_set = rearrange(logits, "(c b) i v -> c b i v", c=len(sets))
        return torch.stack([self.metric.of(set_logits, rows) for set_logits in by_set])

    def _edit(self, layer: int, sets: Sequence[Heads]) -> StreamEdit:
        """Other mixed values in the rows of the batch whose set has heads of this layer."""
        new = partial(self._replacement, layer=layer)
        change = partial(replaced_in_sets, sets=sets, layer=layer, new=new)
        return edit_of_outputs(self.view, layer, range(self.view.n_heads), change)

    def _replacement(
        self, z: Float[Tensor, "*sample batch position head d_head"], layer: int
    ) -> Tensor:
        """What stands in place of the mixed values of a layer."""
        if self.by == "prompt":
            return z.index_select(-4, self.order.to(z.device))
        return torch.zeros_like(z) if self.means is None else self.means[layer].to(z).expand_as(z)

    def _outputs(self) -> Float[Tensor, "layer batch position head d_head"]:
        """Mixed values of all heads in the clean run."""

        def of_prompts(tokens: Tensor) -> Float[Tensor, "layer batch position head d_head"]:
            z: list[Tensor] = []

            def on_layer(layer: LayerView) -> None:
                z.append(mixed_values(self.view, layer))

            self.view.run_layers(tokens, range(self.view.n_layers), on_layer, verify=False)
            return torch.stack(z)

        return torch.cat([of_prompts(self.metric.tokens[rows]) for rows in self._parts()], 1)

    def attributions(self, sets: Sequence[Heads]) -> dict[str, Float[Tensor, "condition context"]]:
        """What attributions give to the same replacements, summed over the heads of each set."""
        view, tokens, position = self.view, self.metric.tokens, self.metric.position
        if self.metric.ids is None or position is None:
            raise RuntimeError("attributions are of a difference of two logits")
        outputs = self._outputs()
        new = [self._replacement(z, layer) for layer, z in enumerate(outputs)]
        removed, values = outputs - torch.stack(new), []
        for row in tqdm(range(len(tokens)), disable=not self.progress, desc="attributions"):
            right, wrong = self.metric.ids[row].tolist()
            prompt = tokens[row : row + 1]
            by_head = head_attributions(view, prompt, removed[:, row], position, (right, wrong))
            sums = [
                by_head[:, [layer for layer, _ in heads], [head for _, head in heads]].sum(1)
                for heads in sets
            ]
            values.append(torch.stack(sums, 1))
        return dict(zip(ATTRIBUTIONS, torch.stack(values, -1), strict=True))
