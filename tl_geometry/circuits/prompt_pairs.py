"""Which prompts are compared with which counterfactuals, and what is measured on them? Edge scores
and pruned runs ask here. A pair has equal numbers of tokens; pairs of several lengths go through
the model by length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.checks import count, describe, finite
from tl_geometry.base.errors import require
from tl_geometry.circuits.arithmetic import Live
from tl_geometry.circuits.edge_layout import EdgeLayout
from tl_geometry.circuits.runner import BlockRun, Runner, States, stream_at
from tl_geometry.corpus.prompt_sets import Prompts
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_view import ModelView

BATCH_BYTES = 2**30
"""Bytes of the writes that are held for one batch of pairs."""
UserMetric = Callable[[Float[Tensor, "batch position d_vocab"]], Float[Tensor, " batch"]]
"""A number for each prompt of a batch, from the batch's logits."""


def share_of(value: Any, name: str) -> float:
    """A share above 0, at most 1, of any type of number.

    >>> share_of(0.5, "keep"), share_of(torch.tensor(1), "keep")
    (0.5, 1.0)
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    share = float(number) if is_number else torch.nan
    require(0 < share <= 1, name, expected="a share above 0, at most 1", got=repr(value))
    return share


def measured(
    logits: Float[Tensor, "batch position d_vocab"],
    metric: UserMetric | None,
    tokens: Sequence[Tensor] = (),
) -> Float[Tensor, " batch"]:
    """A metric of each prompt: the user's, of all logits, or the logit of a token for each prompt
    at the last position, less that of a second one."""
    if metric is None:
        last = logits[:, -1]
        chosen = [last.gather(1, ids.to(last.device).unsqueeze(1))[:, 0] for ids in tokens]
        return chosen[0] - sum(chosen[1:])
    values: Any = metric(logits)
    fits = isinstance(values, Tensor) and values.shape == (len(logits),)
    expected = f"one number for each of {len(logits)} prompts"
    require(fits, "metric", expected=expected, got=describe(values))
    return finite(values, "metric")


def pairs_of(view: ModelView, prompts: Prompts, metric: UserMetric | None) -> Prompts:
    """Prompts with their counterfactuals, and without a ``metric`` with the tokens that are
    compared: by default the most likely one after each run of a pair."""
    expected, instead = "a counterfactual for each prompt", "counterfactual="
    missing = prompts.counterfactual_ids is None
    require(not missing, "prompts", expected=expected, got="none", instead=instead)
    prompts = dataclasses.replace(prompts, rows=torch.arange(len(prompts)))
    if metric is not None:
        require(callable(metric), "metric", expected="a function of logits", got=describe(metric))
        one, what = prompts.answers is None, "metric, answer"
        require(one, what, expected="one of them", got="both")
        return prompts
    if prompts.answers is None:
        answers, others = (torch.empty(len(prompts), dtype=torch.int64) for _ in range(2))
        for group in prompts.groups():
            assert group.counterfactuals is not None
            size = batch_of(None, group.tokens.shape[1], view.device)
            for into, tokens in ((answers, group.tokens), (others, group.counterfactuals)):
                logits = [view.logits(part, position=-1)[:, 0] for part in tokens.split(size)]
                into[group.rows] = torch.cat(logits).argmax(-1).cpu()
        prompts = dataclasses.replace(prompts, answers=answers, others=others)
    alike = prompts.answers == prompts.others
    same = alike.nonzero()[:, 0].tolist() if isinstance(alike, Tensor) else []
    what, instead = f"answer, other of prompt pairs {same}", "answer=[(answer, other), ...]"
    require(not same, what, expected="two different tokens", got="one twice", instead=instead)
    return prompts


@dataclass(frozen=True, eq=False)
class Batch:
    """Pairs of one length, the runner for that length, and what is measured; ``place`` is where
    logits are needed: at the last position, or everywhere (``None``) for a metric of one's own."""

    runner: Runner
    layout: EdgeLayout
    pairs: Prompts
    metric: UserMetric | None

    @property
    def place(self) -> int | None:
        """Where logits are needed."""
        return -1 if self.metric is None else None

    def measured(self, logits: Float[Tensor, "batch position d_vocab"]) -> Float[Tensor, " batch"]:
        """The metric of each pair from its logits."""
        tokens = [ids for ids in (self.pairs.answers, self.pairs.others) if ids is not None]
        return measured(logits, self.metric, tokens)

    def slope(
        self, logits: Float[Tensor, "batch position d_vocab"], at: Float[Tensor, "batch ..."]
    ) -> Float[Tensor, "batch ..."]:
        """The gradient of each pair's metric by what its logits were made of."""
        values = self.measured(logits)
        got, instead = "one without a gradient", "a function of the logits in torch"
        expected = "a differentiable function"
        require(values.requires_grad, "metric", expected=expected, got=got, instead=instead)
        found = torch.autograd.grad(values.sum(), at)[0]
        wrong = int((~found.isfinite()).flatten(1).any(1).sum())
        got = f"NaN or infinity in {wrong} of {len(found)} prompts"
        require(wrong == 0, "metric", expected="a finite gradient", got=got)
        return found

    def read(self, last: Float[Tensor, "batch position d_model"], arithmetic: Live) -> Tensor:
        """Logits of last states, where they are needed."""
        return self.runner.logits(stream_at(last, self.place), arithmetic)

    @torch.no_grad()
    def both_runs(
        self, arithmetic: Callable[[], Live], pick: Callable[[Tensor], Tensor]
    ) -> tuple[States, Float[Tensor, "pair writer position d_model"], list[Float[Tensor, " pair"]]]:
        """One pass over pairs, prompts first and then counterfactuals; what every writer wrote, as
        ``pick`` takes it from both halves of the batch; and the metric of both."""
        assert self.pairs.counterfactuals is not None
        writes = [torch.empty(0)]

        def on_block(run: BlockRun) -> None:
            writes.append(pick(run.heads.transpose(0, 1)))
            if run.mlp is not None:
                writes.append(pick(run.mlp).unsqueeze(1))

        tokens = torch.cat([self.pairs.tokens, self.pairs.counterfactuals])
        states = self.runner.verified(tokens, arithmetic, position=self.place, on_block=on_block)
        writes[0] = pick(states.streams[0]).unsqueeze(1)
        values = [self.measured(logits) for logits in states.logits.chunk(2)]
        return states, torch.cat(writes, 1), values


def batches(
    view: ModelView,
    layout: EdgeLayout,
    pairs: Prompts,
    metric: UserMetric | None,
    batch_size: int | None,
    progress: bool = False,
) -> Iterator[Batch]:
    """Pairs of one length, as many as fit."""
    size = None if batch_size is None else count(batch_size, "batch_size")
    with tqdm(total=len(pairs), unit="pair", disable=not progress, desc=view.name) as bar:
        for group in pairs.groups():
            length = group.tokens.shape[1]
            # in half precision too numbers are float32 here
            needed = len(layout.writers) * length * view.d_model * max(4, view.dtype.itemsize)
            step = size or max(1, BATCH_BYTES // (2 * needed))
            runner = Runner.of(view, group.tokens[:1])
            for start in range(0, len(group), step):
                some = group[start : start + step]
                yield Batch(runner, layout, some, metric)
                bar.update(len(some))
