"""Calibration of the measures of a basis: shares of variance with windows in topic blocks, errors
of the reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchmarks.calibration import Outcome, covered, outcome
from benchmarks.planted import TOPIC, D, T, World
from tl_geometry.base.intervals import Interval, t_quantile
from tl_geometry.decomposition import PositionContext, decompose_activations
from tl_geometry.measures import contextual_report, positional_report
from tl_geometry.measures.state_measures import StateMeasures

SHARES = ("pos", "ctx", "resid")
Draw = Callable[[int, torch.Generator], Tensor]


def topics(contexts: int, generator: torch.Generator, *, size: float = 0.8) -> Tensor:
    """Windows in order, each :data:`TOPIC` of which have one topic in common."""
    white = torch.randn(-(-contexts // TOPIC), 1, D, generator=generator)
    shared = white.repeat_interleave(TOPIC, 0)[:contexts]
    return World(context=0.0).draw(contexts, generator) + size * shared


def independent(contexts: int, generator: torch.Generator) -> Tensor:
    """Windows of unrelated texts."""
    return World().draw(contexts, generator)


DRAWS: dict[str, Draw] = {"independent windows": independent, "topics of 8 windows": topics}


def anova_shares(name: str, contexts: int, repeats: int) -> list[Outcome]:
    """Intervals of the shares of variance (those that are printed) against the shares of 20,000
    contexts."""
    start, draw, hits = time.perf_counter(), DRAWS[name], []
    far = draw(20_000, torch.Generator().manual_seed(99))
    big = decompose_activations(far, window=(0, T), second_moments=False).anova().shares
    truth = torch.stack([big[n][0] for n in SHARES])
    for seed in range(repeats):
        h = draw(contexts, torch.Generator().manual_seed(seed))
        table = decompose_activations(h, window=(0, T), second_moments=False).anova()
        value, low, high = torch.stack([table.intervals[n][0] for n in SHARES]).unbind(1)
        hits.append(covered(Interval(value, low, high, low), truth))
    found = torch.stack(hits)
    printed = [i for i in range(3) if bool(found[:, i].isfinite().any())]
    shown = "" if len(printed) == 3 else f" ({', '.join(SHARES[i] for i in printed)} alone)"
    label = f"share of variance{shown}, {name}, C = {contexts}"
    return [outcome(label, found[:, printed], start)]


def report_errors(
    name: str,
    draw: Callable[[int, int], PositionContext],
    contexts: int,
    repeats: int,
    make: Callable[[PositionContext], StateMeasures],
) -> list[Outcome]:
    """``measure +- t error`` of every measure that has one, against the mean over repeats."""
    start, values, reaches, names = time.perf_counter(), [], [], []
    for seed in range(repeats):
        report = make(draw(contexts, seed))
        names = list(report.errors)
        t = float(t_quantile(torch.tensor(report.blocks - 1.0)))
        values.append(torch.cat([report[n] for n in names]))
        reaches.append(t * torch.cat([report.errors[n] for n in names]))
    value, reach = torch.stack(values), torch.stack(reaches)
    hits = ((value - value.mean(0)).abs() <= reach).double()
    hits = torch.where(reach.isfinite(), hits, torch.nan)
    found = outcome(f"{name}, C = {contexts}", hits, start)
    states = value.shape[1] // len(names)
    each = hits.nanmean(0).reshape(len(names), states)
    REPORTED[found.name] = {n: each[i].tolist() for i, n in enumerate(names)}
    return [found]


REPORTED: dict[str, dict[str, list[float]]] = {}
"""Coverage of each measure of a row, state by state."""


def planted_basis(name: str) -> Callable[[int, int], PositionContext]:
    """Bases of planted states."""

    def draw(contexts: int, seed: int) -> PositionContext:
        h = DRAWS[name](contexts, torch.Generator().manual_seed(seed))
        return decompose_activations(h, window=(0, T))

    return draw


@cache
def real_states() -> Tensor:
    """States of the embedded model on 600 windows, ``[state context position d_model]``."""
    import tl_geometry as tlg

    model = tlg.zoo.embedded()
    view = tlg.view(model)
    ids = tlg.zoo.default_windows(model, 24, n=600).tokens
    samples = tlg.decompose(view, ids, keep=600, progress=False).samples
    assert samples is not None
    return samples.transpose(0, 1)


def real_basis(contexts: int, seed: int) -> PositionContext:
    """The basis of some windows of the embedded model, drawn at random."""
    chosen = torch.randperm(600, generator=torch.Generator().manual_seed(seed))[:contexts]
    return decompose_activations(real_states()[:, chosen], window=(1, 24))


def positional(basis: PositionContext) -> StateMeasures:
    """Measures of position with their errors."""
    return positional_report(basis, nulls=False)


def contextual(basis: PositionContext) -> StateMeasures:
    """Measures of context with their errors."""
    return contextual_report(basis, nulls=False)


def simulations(n: Callable[[int], int]) -> list[Callable[[], list[Outcome]]]:
    """The rows of this part of the table; ``n`` scales the repeats."""
    return [
        *(
            lambda name=name, c=c: anova_shares(name, c, n(400))
            for name in DRAWS
            for c in (10, 16, 32, 64)
        ),
        *(
            lambda name=name, c=c: report_errors(
                f"measures of position, {name}", planted_basis(name), c, n(300), positional
            )
            for name in DRAWS
            for c in (10, 16, 32, 64)
        ),
        *(
            lambda c=c: report_errors(
                "measures of position, embedded model", real_basis, c, n(80), positional
            )
            for c in (10, 16, 32)
        ),
        lambda: report_errors(
            "measures of context, embedded model", real_basis, 32, n(80), contextual
        ),
    ]
