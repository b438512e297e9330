"""Calibration of the nulls of :func:`tl_geometry.composition` (what an untrained model, whose heads
know nothing of what is written, gives beside them) and of its intervals."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.calibration_outcomes import (
    HALF,
    SIZE,
    Origin,
    Outcome,
    covered,
    lag_one,
    outcome,
)
from tl_geometry.base.intervals import Interval, t_quantile
from tl_geometry.circuits.writer_edges import Composition, composition
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition import decompose
from tl_geometry.models.untrained import reinitialized

FAINT = 0.003
"""What the output weights of heads are multiplied by: what they write is then too small to have a
share by its own size."""


@cache
def model_and_rows() -> tuple[Any, TokenWindows]:
    """The embedded model and 64 windows."""
    import tl_geometry as tlg

    model = tlg.zoo.embedded()
    return model, tlg.zoo.default_windows(model, 16, n=64)


@cache
def untrained_autocorrelation() -> float:
    """Of the states of the model with random weights."""
    model, rows = model_and_rows()
    with reinitialized(model, seed=0) as null:
        samples = decompose(null, rows, keep=len(rows), progress=False).sample_states
    assert samples is not None
    return lag_one(samples.transpose(0, 1))


def untrained(seed: int, faint: bool, windows: int) -> Composition:
    """Composition of the last block of the embedded model with random weights."""
    model, rows = model_and_rows()
    with reinitialized(model, seed=seed):
        for name, weight in model.named_parameters():
            if faint and name.endswith(".attn.o._original_component.weight"):
                weight.data.mul_(FAINT)
        heads = [f"L3H{h}" for h in range(4)]
        return composition(model, rows[:windows], heads=heads, progress=False, seed=seed)


def writer_nulls(windows: int, repeats: int) -> list[Outcome]:
    """How often a writer's share is beyond Student's reach of its random null, and above that of
    another context: of heads that write next to nothing, and of writers as they are, whose share of
    the stream alone gives them a share of the scores."""
    alike = f"{untrained_autocorrelation():.2f} (text)"
    origin = Origin("embedded model, random weights", alike, f"{windows} windows")
    start = time.perf_counter()
    beyond: dict[str, list[Tensor]] = {
        name: [] for name in ("faint heads", "heads", "other writers")
    }
    above: list[Tensor] = []
    for seed in range(repeats):
        for faint in (True, False):
            found = untrained(seed, faint, windows)
            reach = float(t_quantile(torch.tensor(float(found.draws))))
            heads = torch.tensor(found.writer_heads) >= 0
            far = (found.cs.abs() > reach * found.random_cs).double()
            far = far.mean(0)  # heads of one block share what they read: side by part
            if faint:
                beyond["faint heads"].append(far[:, heads].flatten())
                more = (found.cs > found.other_cs).double().mean(0)
                above.append(more[:, heads].flatten())
            else:
                beyond["heads"].append(far[:, heads].flatten())
                others = [found.parts.index(n) for n in ("embed", "mlp0", "mlp1", "mlp2")]
                beyond["other writers"].append(far[:, others].flatten())
    about = {"heads": " (by size alone)", "other writers": ": embedding, MLPs (by size alone)"}
    rows = [
        outcome(
            f"share beyond its random null, {name}{about.get(name, '')}",
            torch.stack(hits),
            start,
            origin,
            goal=SIZE,
            promised=name == "faint heads",
        )
        for name, hits in beyond.items()
    ]
    name = "share above that of another context, faint heads"
    return [*rows, outcome(name, torch.stack(above), start, origin, goal=HALF)]


POPULATION = 2048
"""Windows of which all together give the true shares, and from which prompts are drawn."""


@cache
def population() -> tuple[Tensor, Composition]:
    """Windows, and the shares of all of them together."""
    import tl_geometry as tlg

    rows = tlg.zoo.default_windows(model_and_rows()[0], 16, n=POPULATION).tokens
    return rows, last_block(rows)


def last_block(rows: Tensor) -> Composition:
    """Composition of the last block of the embedded model."""
    heads = [f"L3H{h}" for h in range(4)]
    model, _ = model_and_rows()
    return composition(model, rows, heads=heads, draws=1, drop=1, progress=False)


def writer_intervals(prompts: int, repeats: int) -> list[Outcome]:
    """Coverage of the shares of a population of windows, from prompts drawn at random."""
    rows, truth = population()
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    hits: dict[str, list[Tensor]] = {"cs": [], "gs": []}
    for _ in range(repeats):
        found = last_block(rows[torch.randint(len(rows), (prompts,), generator=generator)])
        for share, inside in hits.items():
            value, low, high = (getattr(found, f"{share}{end}") for end in ("", "_low", "_high"))
            # writers that a head does not read, and constants that it lacks, have no spread
            spread = high > low
            interval = Interval(value[spread], low[spread], high[spread], value[spread])
            inside.append(covered(interval, getattr(truth, share)[spread]))
    origin = Origin("embedded model", "none (drawn)", f"{prompts} prompts")
    return [
        outcome(f"{share} of writers, {prompts} prompts", torch.stack(inside), start, origin)
        for share, inside in hits.items()
    ]


def simulations(n: Callable[[int], int]) -> list[Callable[[], list[Outcome]]]:
    """The rows of this part of the table; ``n`` scales the repeats."""
    return [
        lambda: writer_nulls(16, n(60)),
        lambda: writer_intervals(16, n(100)),
        lambda: writer_intervals(64, n(100)),
    ]
