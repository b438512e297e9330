"""Which number of a model's output is compared between two runs? One of these, for each prompt;
:func:`head_knockouts` and :func:`head_paths` compare it.

- ``difference``: logit of the right token minus that of the wrong one, at one position
- ``probability``: probability of the right token, at one position
- ``loss``: mean next-token loss over the prompt (nats)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.scores.values import target_ids

METRICS = ("difference", "probability", "loss")
"""Metrics by name."""
Targets = Sequence[int | str | Sequence[int | str]]
"""One for each prompt: the right token, or the right and the wrong one, as ids or texts of one
token each."""
UserMetric = Callable[[Float[Tensor, "batch position d_vocab"]], Float[Tensor, " batch"]]
"""A user's own: one number for each prompt from the logits of all prompts."""


@dataclass(frozen=True, eq=False)
class OutputMetric:
    """A metric of a set of prompts. ``ids`` are the right and the wrong token of each prompt,
    ``position`` the only one that is looked at (``None``: all), ``own`` a user's function."""

    name: str
    tokens: Int[Tensor, "batch position"]
    ids: Int[Tensor, "batch side"] | None = None
    position: int | None = None
    own: UserMetric | None = None

    def of(
        self, logits: Float[Tensor, "batch position d_vocab"], rows: slice
    ) -> Float[Tensor, " batch"]:
        """The metric of some prompts from their logits (at :attr:`position` alone, where there is
        one)."""
        if self.own is not None:
            values, count = self.own(logits), len(logits)
            fits = isinstance(values, Tensor) and values.shape == (count,)
            expected = f"one number for each of {count} prompts"
            require(fits, "metric", expected=expected, got=describe(values))
            return values.detach().double()
        if self.ids is None:
            return next_token_losses(logits, self.tokens[rows].to(logits.device)).double().mean(1)
        last, ids = logits[:, 0].double(), self.ids[rows].to(logits.device)
        chosen = last.softmax(-1) if self.name == "probability" else last
        values = chosen.gather(1, ids)
        return values[:, 0] - values[:, 1] if self.name == "difference" else values[:, 0]


def output_metric(
    view: ModelView,
    rows: TokenWindows,
    metric: str | UserMetric,
    targets: Targets | None,
    position: int | str,
) -> OutputMetric:
    """A metric by name, or a user's function, for these prompts."""
    at = rows.position(position)
    if isinstance(metric, str):
        checks.choice(metric, METRICS, "metric")
    else:
        expected = f"one of {', '.join(METRICS)}, or a function of logits"
        require(callable(metric), "metric", expected=expected, got=repr(metric))
    needs_targets = metric in METRICS[:2]
    default = "position=-1, as this metric looks at all positions"
    require(needs_targets or position == -1, "position", expected=default, got=repr(position))
    expected = "none"
    if metric == "difference":
        expected = f"a pair (right, wrong) for each of {len(rows)} prompts"
    elif needs_targets:
        expected = f"a token for each of {len(rows)} prompts, or a pair for each"
    given = None if targets is None else list(targets)
    text = "none" if given is None else repr(given)
    got = text if len(text) <= 80 else f"{text[:80]} and more"  # a message shows the first few
    require((given is not None) == needs_targets, "targets", expected=expected, got=got)
    if given is None:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
        return OutputMetric(name, rows.tokens, own=None if isinstance(metric, str) else metric)
    targets_of = [[target] if isinstance(target, int | str) else list(target) for target in given]
    sizes = (2,) if metric == "difference" else (1, 2)
    fits = len(targets_of) == len(rows) and all(len(pair) in sizes for pair in targets_of)
    require(fits, "targets", expected=expected, got=got)
    # a probability is that of the first token alone
    tokens_read = 2 if metric == "difference" else 1
    ids = torch.tensor([target_ids(view, pair[:tokens_read]) for pair in targets_of])
    return OutputMetric(str(metric), rows.tokens, ids, at)
