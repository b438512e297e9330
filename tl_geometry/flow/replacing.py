"""What does the output lose when a map of an early state takes the place of a later one? Runs the
live model with the mapped states, many maps in one forward pass, and adds up divergences and losses
for :func:`tl_geometry.flow.skip_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.flow.residuals import LayerMap
from tl_geometry.models.forward import keep
from tl_geometry.models.model_view import Hook, ModelView
from tl_geometry.models.next_token import PilotRuns, log_probabilities, pilot_runs
from tl_geometry.models.output_head import distances, token_losses

METRICS = ("kl", "kl_se", "top1", "top5", "loss_increase")
"""What is measured of every map, see :class:`tl_geometry.flow.SkipMap`."""
Pair = tuple[int, int]
"""States a < b: the map of state a takes the place of state b."""
Job = tuple[Pair, str]
"""A pair and the type of map."""
Key = tuple[str, str, str]
"""A place (see :data:`tl_geometry.flow.skipping.PLACES`), a type of map and a metric."""


def keep_at(into: dict[int, Tensor], state: int, where: tuple[Tensor, Tensor]) -> Hook:
    """A hook that keeps a state at (row, position), in float32 on the CPU."""

    def hook(h: Tensor) -> None:
        row, position = (axis_index.to(h.device) for axis_index in where)
        into[state] = h.detach()[row, position].float().cpu()

    return hook


def put(moved: Float[Tensor, "row position d_model"], rows: slice) -> Hook:
    """A hook that replaces the last positions of some rows."""

    def hook(h: Tensor) -> Tensor:
        edited = h.clone()
        edited[rows, h.shape[1] - moved.shape[1] :] = moved.to(h)
        return edited

    return hook


class Measure:
    """What maps cost, added up chunk by chunk. ``jobs`` are run, ``pairs`` are all that were asked
    for (the constant map is run once for each end), ``limit`` is the most rows of one forward pass;
    ``bar`` counts passes."""

    def __init__(
        self, view: ModelView, jobs: Sequence[Job], pairs: Sequence[Pair], limit: int, bar: Any
    ) -> None:
        self.view, self.jobs, self.pairs, self.limit, self.bar = view, jobs, pairs, limit, bar
        self.costs: dict[tuple[str, str, Pair], list[Tensor]] = {}
        self.loss: dict[str, list[Tensor]] = {}

    def add(
        self, rows: Int[Tensor, "batch position"], place: str, maps: Mapping[Job, LayerMap]
    ) -> None:
        """Measure all jobs at a place on some chunks."""
        view, position = self.view, -1 if place == "pilot" else None
        tokens = rows[:, :-1]
        # a position predicts the next token; place "all" leaves position 0 out
        target = rows[:, -1:] if place == "pilot" else rows[:, 2:]
        clean: dict[int, Tensor] = {}
        start_states = {a for (a, _), _ in self.jobs}
        clean_outputs = log_probabilities(
            view,
            tokens,
            {view.state_hooks[s]: keep(clean, s) for s in start_states},
            position=position,
        )
        clean_log_probs = _at_place(clean_outputs, place)
        clean_loss = token_losses(clean_log_probs, target)
        self.loss.setdefault(place, []).append(clean_loss.mean(1))
        runs = pilot_runs(view, tokens, clean_outputs, self.limit) if place == "pilot" else None
        copies = max(1, self.limit // len(tokens)) if runs is None else runs.copies
        for start in range(0, len(self.jobs), copies):
            # jobs with one end next to each other, so that its hook replaces one slice of rows
            group = sorted(self.jobs[start : start + copies], key=lambda job: job[0][1])
            changed = _at_place(self._run(group, tokens, place, maps, clean, runs), place)
            for job, job_log_probs in zip(group, changed.split(len(tokens)), strict=True):
                increase = token_losses(job_log_probs, target) - clean_loss
                self._record(place, job, job_log_probs, clean_log_probs, increase)
            self.bar.update(len(group) * len(tokens))

    def _run(
        self,
        group: Sequence[Job],
        tokens: Tensor,
        place: str,
        maps: Mapping[Job, LayerMap],
        clean: Mapping[int, Tensor],
        runs: PilotRuns | None,
    ) -> Tensor:
        """One forward pass over a copy of the chunks for each job, in the order of their ends."""
        hooks: dict[str, Hook] = {}
        for end in {b for (_, b), _ in group}:
            copies_of_end = [i for i, ((_, b), _) in enumerate(group) if b == end]
            moved = torch.cat(
                [_moved(maps[group[i]], clean[group[i][0][0]], place) for i in copies_of_end]
            )
            hooks[self.view.state_hooks[end]] = put(
                moved, slice(copies_of_end[0] * len(tokens), (copies_of_end[-1] + 1) * len(tokens))
            )
        if runs is not None:
            return runs.log_probabilities(len(group), hooks)
        return log_probabilities(self.view, tokens.repeat(len(group), 1), hooks, position=None)

    def _record(
        self, place: str, job: Job, changed: Tensor, clean_log_probs: Tensor, increase: Tensor
    ) -> None:
        compared = distances(changed, clean_log_probs)
        k = min(5, clean_log_probs.shape[-1])
        # distances counts tokens in common; a SkipMap gives the share of them
        costs = torch.stack(
            [compared.kl_reverse, compared.top1, compared.top5 / k, increase.to(compared.kl)]
        ).mean(2)
        pair, map_type = job
        pairs = [pair]
        if map_type == "mean":  # the same from every start
            pairs = [p for p in self.pairs if p[1] == pair[1]]
        for same_end in pairs:
            self.costs.setdefault((place, map_type, same_end), []).append(costs.double().cpu())

    def finish(
        self, places: Sequence[str], map_types: Sequence[str]
    ) -> tuple[dict[Key, Tensor], tuple[float, float]]:
        """The maps, and the model's own loss at the pilot and at all positions."""
        n_states = self.view.n_layers + 1
        keys = [(p, t, m) for p in places for t in map_types for m in METRICS]
        values = {
            key: torch.full((n_states, n_states), torch.nan, dtype=torch.float64) for key in keys
        }
        for (place, map_type, (a, b)), chunk_costs in self.costs.items():
            table = torch.cat(chunk_costs, dim=1)
            mean, error = table.mean(1), table[0].std() / table.shape[1] ** 0.5
            for metric, value in zip(METRICS, (mean[0], error, *mean[1:]), strict=True):
                values[place, map_type, metric][a, b] = value
        loss = [
            float(torch.cat(self.loss[p]).mean()) if p in self.loss else float("nan")
            for p in ("pilot", "all")
        ]
        return values, (loss[0], loss[1])


def _moved(layer_map: LayerMap, state: Tensor, place: str) -> Tensor:
    """The mapped state at the positions of a place: the last, or all but the first."""
    return layer_map(state[:, -1:] if place == "pilot" else state[:, 1:])


def _at_place(values: Tensor, place: str) -> Tensor:
    """Values ``[batch position d_vocab]`` at the positions of a place: the last, or all but the
    first."""
    return values[:, None] if place == "pilot" else values[:, 1:]
