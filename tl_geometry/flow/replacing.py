"""What does the output lose when a map of an early state replaces a later state? Runs the live
model with the mapped states, many maps in one forward pass, and collects divergences and losses for
:func:`tl_geometry.flow.skip_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.flow.residuals import LayerMap
from tl_geometry.models.model_view import Hook, ModelView
from tl_geometry.models.next_token import PilotRuns, log_probabilities, pilot_runs
from tl_geometry.models.output_head import distances, token_losses

METRICS = ("kl", "kl_se", "top1", "top5", "loss_increase")
"""What is measured for every map, defined in :class:`tl_geometry.flow.SkipMap`."""
Pair = tuple[int, int]
"""States a < b: a map of state a replaces state b."""
Job = tuple[Pair, str]
"""A pair and the type of map."""
Key = tuple[str, str]
"""A type of map and a metric."""


def keep_last(into: dict[int, Tensor], state: int) -> Hook:
    """A hook that keeps a state at the last position, apart from the other positions."""

    def hook(h: Tensor) -> None:
        into[state] = h.detach()[:, -1].clone()

    return hook


def put(moved: Float[Tensor, "row d_model"], rows: slice) -> Hook:
    """A hook that replaces the last position of ``rows`` by ``moved``."""

    def hook(h: Tensor) -> Tensor:
        edited = h.clone()
        edited[rows, -1] = moved.to(h)
        return edited

    return hook


class SkipCosts:
    """The cost of each map, collected over batches of chunks.

    ``jobs`` are what is run, ``pairs`` all that were asked for: the constant map is run once for
    each end and recorded for every pair with that end. ``limit`` is the largest number of rows in
    one forward pass; ``bar`` counts chunks times jobs.
    """

    def __init__(
        self, view: ModelView, jobs: Sequence[Job], pairs: Sequence[Pair], limit: int, bar: Any
    ) -> None:
        self.view, self.jobs, self.pairs, self.limit, self.bar = view, jobs, pairs, limit, bar
        self.costs: dict[tuple[str, Pair], list[Tensor]] = {}
        self.loss: list[Tensor] = []

    def add(self, rows: Int[Tensor, "batch position"], maps: Mapping[Job, LayerMap]) -> None:
        """Measure all jobs on some chunks; the last token of each chunk is the target."""
        view, tokens, target = self.view, rows[:, :-1], rows[:, -1:]
        clean: dict[int, Tensor] = {}
        start_states = {a for (a, _), _ in self.jobs}
        kept = {view.state_hooks[s]: keep_last(clean, s) for s in start_states}
        clean_outputs = log_probabilities(view, tokens, kept, position=-1)
        clean_log_probs = clean_outputs[:, None]
        clean_loss = token_losses(clean_log_probs, target)
        self.loss.append(clean_loss.mean(1))
        runs = pilot_runs(view, tokens, clean_outputs, self.limit)
        for start in range(0, len(self.jobs), runs.copies):
            # sorted by end state: the hook of an end then replaces one contiguous slice of rows
            group = sorted(self.jobs[start : start + runs.copies], key=lambda job: job[0][1])
            changed = self._run(group, len(tokens), maps, clean, runs)[:, None]
            for job, job_log_probs in zip(group, changed.split(len(tokens)), strict=True):
                increase = token_losses(job_log_probs, target) - clean_loss
                self._record(job, job_log_probs, clean_log_probs, increase)
            self.bar.update(len(group) * len(tokens))

    def _run(
        self,
        group: Sequence[Job],
        n_chunks: int,
        maps: Mapping[Job, LayerMap],
        clean: Mapping[int, Tensor],
        runs: PilotRuns,
    ) -> Tensor:
        """Log-probabilities ``[job x chunk d_vocab]`` from one forward pass over one copy of the
        chunks for each job of ``group``, which is sorted by end state."""
        hooks: dict[str, Hook] = {}
        for end in {b for (_, b), _ in group}:
            copies_of_end = [i for i, ((_, b), _) in enumerate(group) if b == end]
            moved = [maps[group[i]](clean[group[i][0][0]]) for i in copies_of_end]
            rows = slice(copies_of_end[0] * n_chunks, (copies_of_end[-1] + 1) * n_chunks)
            hooks[self.view.state_hooks[end]] = put(torch.cat(moved), rows)
        return runs.log_probabilities(len(group), hooks)

    def _record(self, job: Job, changed: Tensor, clean_log_probs: Tensor, increase: Tensor) -> None:
        compared = distances(changed, clean_log_probs)
        k = min(5, clean_log_probs.shape[-1])
        # distances() counts the tokens in common; SkipMap reports their share of k
        costs = torch.stack(
            [compared.kl_reverse, compared.top1, compared.top5 / k, increase.to(compared.kl)]
        ).mean(2)
        pair, map_type = job
        pairs = [pair]
        if map_type == "mean":  # the constant map does not depend on the start
            pairs = [p for p in self.pairs if p[1] == pair[1]]
        for same_end in pairs:
            self.costs.setdefault((map_type, same_end), []).append(costs.double().cpu())

    def finish(self, map_types: Sequence[str]) -> tuple[dict[Key, Tensor], float]:
        """Means over chunks ``[state state]`` by map type and metric, and the model's own loss."""
        n_states = self.view.n_layers + 1
        values = {
            (map_type, metric): torch.full((n_states, n_states), torch.nan, dtype=torch.float64)
            for map_type in map_types
            for metric in METRICS
        }
        for (map_type, (a, b)), chunk_costs in self.costs.items():
            table = torch.cat(chunk_costs, dim=1)
            mean, error = table.mean(1), table[0].std() / table.shape[1] ** 0.5
            for metric, value in zip(METRICS, (mean[0], error, *mean[1:]), strict=True):
                values[map_type, metric][a, b] = value
        return values, float(torch.cat(self.loss).mean())
