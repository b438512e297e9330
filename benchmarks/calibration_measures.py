"""Calibration of the measures of a basis: shares of variance with windows in topic blocks, errors
of the reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchmarks.calibration_outcomes import (
    AT_MOST,
    SIZE,
    Origin,
    Outcome,
    covered,
    lag_one,
    outcome,
)
from benchmarks.planted import TOPIC, D, T, World
from tl_geometry.base.intervals import Interval, t_quantile
from tl_geometry.base.tables import Table
from tl_geometry.decomposition import PositionContext, decompose_activations
from tl_geometry.measures import compare_bases, contextual_report, positional_report

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


def planted(name: str, contexts: int, generator: str = "planted states") -> Origin:
    """Planted states, the autocorrelation of whose positions is that of :class:`World`."""
    alike = f"{World().along:g} (AR)" + (f", {name}" if "topics" in name else "")
    return Origin(generator, alike, f"{contexts} windows")


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
    return [outcome(label, found[:, printed], start, planted(name, contexts))]


def report_errors(
    name: str,
    draw: Callable[[int, int], PositionContext],
    contexts: int,
    repeats: int,
    make: Callable[[PositionContext], Table],
    origin: Origin,
) -> list[Outcome]:
    """``measure +- t error`` of every measure that has one, against the mean over repeats."""
    start, values, reaches, names = time.perf_counter(), [], [], []
    for seed in range(repeats):
        report = make(draw(contexts, seed)).df
        names = [n.removesuffix("_se") for n in report if n.endswith("_se")]
        t = float(t_quantile(torch.tensor(report["blocks"][0] - 1.0)))
        values.append(torch.cat([torch.tensor(report[n].to_numpy()) for n in names]))
        reaches.append(t * torch.cat([torch.tensor(report[f"{n}_se"].to_numpy()) for n in names]))
    value, reach = torch.stack(values), torch.stack(reaches)
    hits = ((value - value.mean(0)).abs() <= reach).double()
    hits = torch.where(reach.isfinite(), hits, torch.nan)
    found = outcome(f"{name}, C = {contexts}", hits, start, origin)
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
    samples = tlg.decompose(view, ids, keep=600, progress=False).sample_states
    assert samples is not None
    return samples.transpose(0, 1)


def real_basis(contexts: int, seed: int) -> PositionContext:
    """The basis of some windows of the embedded model, drawn at random."""
    chosen = torch.randperm(600, generator=torch.Generator().manual_seed(seed))[:contexts]
    return decompose_activations(real_states()[:, chosen], window=(1, 24))


def real(contexts: int) -> Origin:
    """Windows of the embedded model."""
    alike = f"{lag_one(real_states()):.2f} (text)"
    return Origin("embedded model", alike, f"{contexts} windows")


def positional(basis: PositionContext) -> Table:
    """Measures of position with their errors."""
    return positional_report(basis, nulls=False)


def contextual(basis: PositionContext) -> Table:
    """Measures of context with their errors."""
    return contextual_report(basis, nulls=False)


def clear(contexts: int, generator: torch.Generator) -> Tensor:
    """Windows of unrelated texts with so much position that halves of them agree."""
    return World(position=1.2).draw(contexts, generator)


def forms(contexts: int, generator: torch.Generator) -> Tensor:
    """Windows each :data:`TOPIC` of which have a curve of positions in common, as texts of one form
    have."""
    shared = torch.randn(-(-contexts // TOPIC), T, D, generator=generator)
    return clear(contexts, generator) + 0.8 * shared.repeat_interleave(TOPIC, 0)[:contexts]


TWO: dict[str, Draw] = {
    "independent windows": clear,
    "topics of 8 windows with their own curve": forms,
}


def two_bases(name: str, contexts: int, repeats: int) -> list[Outcome]:
    """How often two bases of one population are further apart than the floors of
    :func:`tl_geometry.measures.compare_bases`: by the difference, and by overlap and similarity."""
    start, far, unlike = time.perf_counter(), [], []
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        a, b = (decompose_activations(TWO[name](contexts, g), window=(0, T)) for _ in range(2))
        compared = compare_bases(a, b)
        found = {n: torch.tensor(compared.column(n)).double() for n in compared.names}
        below = [found[n] < found[f"{n}_floor"] for n in ("overlap", "procrustes")]
        printed = found["difference_floor"].isfinite()
        above = found["difference"] > found["difference_floor"]
        far.append(torch.where(printed, above, torch.nan))
        unlike.append(torch.where(printed, torch.stack(below).double(), torch.nan).flatten())
    origin, of = planted(name, contexts), f"{name}, C = {contexts}"
    rows = {"difference above its floor": far, "overlap, similarity below their floors": unlike}
    return [
        outcome(f"two bases, {what}, {of}", torch.stack(hits), start, origin, goal=AT_MOST)
        for what, hits in rows.items()
    ]


WIDE = 24
"""Positions and coordinates of the states of :func:`overlap_null`."""


def apart(contexts: int, turned: bool, topic: bool, generator: torch.Generator) -> Tensor:
    """States whose pos and ctx are drawn independently. Either three coordinates are six times as
    large as the others, or noise is largest along directions across the coordinates and pos has two
    directions."""
    g = generator
    noise = torch.randn(contexts, WIDE, WIDE, generator=g)
    rows = [noise[:, 0]]
    for i in range(1, WIDE):
        rows.append(0.95 * rows[-1] + (1 - 0.95**2) ** 0.5 * noise[:, i])
    noise, size = torch.stack(rows, 1), torch.ones(WIDE)
    if turned:
        fixed = torch.Generator().manual_seed(5)
        turn = torch.linalg.qr(torch.randn(WIDE, WIDE, generator=fixed)).Q
        noise = noise * torch.linspace(1, -1, WIDE).exp() @ turn.mT
    else:
        size[:3] = 6
    rank = 2 if turned else WIDE
    pos = torch.randn(WIDE, rank, generator=g) @ torch.randn(rank, WIDE, generator=g) / rank**0.5
    each = TOPIC if topic else 1
    ctx = torch.randn(-(-contexts // each), 1, WIDE, generator=g).repeat_interleave(each, 0)
    return (noise + pos + 0.6 * ctx[:contexts]) * size


def overlap_null(
    contexts: int, repeats: int, *, turned: bool, topic: bool = False
) -> list[Outcome]:
    """How often the overlap of independent pos and ctx is beyond its flipped null (one-sided, by
    the spread of the draws)."""
    start, hits = time.perf_counter(), []
    for seed in range(repeats):
        h = apart(contexts, turned, topic, torch.Generator().manual_seed(seed))
        report = contextual_report(decompose_activations(h), rank=5, jackknife=False, seed=seed).df
        # one more draw, one-sided 5%
        draws = float(report["draws"].iloc[0])
        reach = float(t_quantile(torch.tensor(draws - 1), 0.90)) * (1 + 1 / draws) ** 0.5
        above = report["overlap"] - report["overlap_flipped"]
        hits.append(
            torch.tensor((above > reach * report["overlap_flipped_sd"]).to_numpy()).double()
        )
    where = "noise along turned directions (not offered)" if turned else "outlier coordinates"
    where += ", topics of 8 windows" if topic else ""
    alike = f"0.95 (AR){f', topics of {TOPIC} windows' if topic else ''}"
    origin = Origin("planted states, pos and ctx apart", alike, f"{contexts} windows")
    name = f"overlap above its flipped null, {where}, C = {contexts}"
    return [outcome(name, torch.stack(hits), start, origin, goal=SIZE, promised=not turned)]


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
                f"measures of position, {name}",
                planted_basis(name),
                c,
                n(300),
                positional,
                planted(name, c),
            )
            for name in DRAWS
            for c in (10, 16, 32, 64)
        ),
        *(
            lambda c=c: report_errors(
                "measures of position, embedded model", real_basis, c, n(80), positional, real(c)
            )
            for c in (10, 16, 32)
        ),
        lambda: report_errors(
            "measures of context, embedded model", real_basis, 32, n(80), contextual, real(32)
        ),
        *(
            lambda name=name, c=c: two_bases(name, c, n(200))
            for name in TWO
            for c in (10, 16, 32, 64)
            if c >= 4 * TOPIC or "topics" not in name  # two texts: none is printed
        ),
        *(
            lambda c=c, turned=turned: overlap_null(c, n(200), turned=turned)
            for turned in (False, True)
            for c in (10, 32, 64)
        ),
        lambda: overlap_null(32, n(200), turned=True, topic=True),
    ]
