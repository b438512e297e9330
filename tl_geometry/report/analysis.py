"""What are the tables of a report computed from? :class:`Analysis` holds the model, the windows and
how many of them each part takes, and makes what several items share (the basis, the sweep over all
heads, the trajectories) when the first of them asks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from tl_geometry import corpus, flow, models
from tl_geometry.base.errors import GeometryError
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.variance import Anova
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.scores.sweep import sweep_heads

LENGTH = 128
"""Tokens of a window where the user gives no length: a longer one costs more and shows the same."""
FITTED, QUICK = 128, 64
"""Windows of the basis where the user gives no number, and of a ``quick`` report. A large model
takes three quarters of the first."""
SWEPT = 32
"""Windows of the sweep, which the basis has not seen: as many as its intervals need."""
GROUPED = 256
"""Fewest windows of which documents are kept apart: of fewer, groups of whole documents would be
too small for intervals."""
LARGE = 30_000_000
"""Weights in the blocks above which a model is large, and windows are fewer: so SmolLM2-135M takes
minutes."""
KEPT = 32
"""Windows whose states are kept whole, for the null without a context."""
COMPARED = 48
"""Most windows of nulls that have a basis of their own: spliced text, untrained weights."""
PROMPTS, SHORT = 12, 48
"""Prompts on which heads are removed, and most of their tokens. Intervals need 10 prompts."""
TESTED = 16
"""Most heads that are removed one by one: each costs a pass over the prompts."""
PILOTS, PILOT = 192, 50
"""Most windows whose last token is followed through the blocks, and tokens of each."""
SMALL: Mapping[str, Any] = {"keep_ctx": False, "second_moments": False, "progress": False}
"""Options of a basis of which only shares of variance are read."""


def is_large(view: ModelView) -> bool:
    """Whether a model is one of which less is computed."""
    return 12 * view.n_layers * view.d_model**2 > LARGE  # a block of width d has about 12 d^2


def sizes(view: ModelView, *, quick: bool = False) -> tuple[int, int]:
    """How many windows a report takes, and their length, where the user does not say."""
    fitted = QUICK if quick else FITTED * 3 // 4 if is_large(view) else FITTED
    return fitted + SWEPT, min(LENGTH, view.n_ctx)


def _short(rows: TokenWindows, length: int) -> TokenWindows:
    """The first tokens of each window; a negative length leaves out the last ones."""
    return dataclasses.replace(rows, tokens=rows.tokens[:, :length], str_tokens=())


@dataclass(eq=False, kw_only=True)
class Analysis:
    """A model and windows of a corpus, and the ``tables`` made so far, by item."""

    model: ModelLike
    windows: TokenWindows
    seed: int = 0
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)

    @cached_property
    def view(self) -> ModelView:
        return as_view(self.model)

    @property
    def held_out(self) -> int:
        """Windows that the basis has not seen."""
        return min(SWEPT, len(self.windows) // 2)

    @property
    def fitted(self) -> TokenWindows:
        """The windows of the basis."""
        rows = self.windows[: len(self.windows) - self.held_out]
        few = len(rows) < GROUPED
        return dataclasses.replace(rows, labels=None, label_names=()) if few else rows

    @property
    def swept(self) -> TokenWindows:
        """The windows of the sweep."""
        return self.windows[len(self.windows) - self.held_out :]

    @property
    def prompts(self) -> TokenWindows:
        """The prompts on which heads are removed: windows that the basis has not seen."""
        return _short(self.swept[: min(PROMPTS, self.held_out)], SHORT)

    @property
    def pilots(self) -> TokenWindows:
        """The windows whose last token is followed, evenly spaced."""
        last, most = len(self.windows) - 1, PILOTS // 2 if is_large(self.view) else PILOTS
        return _short(self.windows[torch.linspace(0, last, min(most, last + 1)).long()], PILOT)

    @property
    def followed(self) -> float:
        """Windows that cost as much as a pass over the pilots."""
        return self.pilots.tokens.numel() / self.windows.length

    @cached_property
    def seconds_per_window(self) -> float:
        """How long a pass over one window takes, measured once, after a pass that warms up."""
        rows, start = self.windows[:8], 0.0
        for _ in range(2):
            start = time.monotonic()
            decompose(self.view, rows, groups=1, **SMALL)
        return (time.monotonic() - start) / len(rows)

    @cached_property
    def basis(self) -> PositionContext:
        """Mean, position and context of every state."""
        return decompose(self.view, self.fitted, keep=KEPT, seed=self.seed, progress=False)

    @property
    def spliced(self) -> PositionContext:
        """The basis of windows spliced from random places: the null of the context share. It is
        read once and not kept."""
        rows = corpus.splice(self.fitted[:COMPARED], seed=self.seed)
        return decompose(self.view, rows, seed=self.seed, **SMALL)

    @cached_property
    def untrained(self) -> Anova:
        """Shares of variance of the same model with random weights: the null of the position
        share."""
        with models.reinitialized(self.model, seed=self.seed) as control:
            return decompose(control, self.fitted[:COMPARED], **SMALL).anova()

    @cached_property
    def sweep(self) -> Any:
        """Shares, labels and types of every head, with intervals."""
        options: dict[str, Any] = {"intervals": True, "seed": self.seed, "progress": False}
        return sweep_heads(self.model, self.swept, self.basis, **options)

    def follow(self, model: ModelLike, rows: TokenWindows) -> Trajectories:
        """Trajectories of the token before the last, which is left as a target."""
        states = range(self.view.n_layers + 1)
        return flow.trajectories(model, _short(rows, -1), states=states, progress=False)

    @cached_property
    def paths(self) -> Trajectories:
        """The trajectories of the pilots."""
        return self.follow(self.model, self.pilots)

    @property
    def fitted_and_tried(self) -> tuple[Trajectories, TokenWindows]:
        """The trajectories that maps and directions are fitted on, two thirds of them, and every
        second one of the other pilots."""
        fitted = 2 * len(self.paths) // 3
        return self.paths.pick(torch.arange(fitted)), self.pilots[fitted::2]

    def table(self, key: str) -> pd.DataFrame:
        """The table of an earlier item."""
        if key not in self.tables:
            raise GeometryError(f"it needs the table {key}.csv, which could not be made")
        return self.tables[key]
