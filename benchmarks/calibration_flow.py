"""Calibration of trajectories: accuracy of a classifier, tests of residuals, anomalous layers, and
what :func:`tl_geometry.flow_report` says of a flow that is one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from benchmarks.calibration_outcomes import (
    AT_MOST,
    SIZE,
    Origin,
    Outcome,
    covered,
    lag_one,
    outcome,
)
from tl_geometry.base.intervals import Interval
from tl_geometry.base.results import Provenance
from tl_geometry.base.tables import Table
from tl_geometry.flow import flow_report, layer_anomalies, separability
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.noise import normality_p

FLOW_D = 12
"""Coordinates of a planted flow."""


def accuracy(repeats: int) -> list[Outcome]:
    """The interval of a classifier's accuracy against its mean over fresh data."""
    start, found = time.perf_counter(), []
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        a, b = torch.randn(60, 8, generator=g), torch.randn(60, 8, generator=g)
        b[:, 0] += 1.0
        found.append(separability(a, b, seed=seed))
    values = torch.tensor([f.accuracy for f in found])
    low, high = (torch.tensor([getattr(f, n) for f in found]) for n in ("low", "high"))
    hits = covered(Interval(values, low, high, low), values.mean()).unsqueeze(1)
    p = values
    wide = (p * (1 - p) / found[0].test).sqrt()
    old = torch.maximum((high - low) / 2 / 2.26, wide) * 1.96
    before = ((p - p.mean()).abs() <= old).double().unsqueeze(1)
    name, origin = "accuracy of a classifier", Origin("two Gaussian clouds", "none", "60 of each")
    return [
        outcome(name, hits, start, origin),
        outcome(f"{name}, floored (of before)", before, start, origin, promised=False),
    ]


def of_pairs(values: torch.Tensor) -> Table:
    """A table of a value ``[start end]`` for each pair of states, numbered from 1."""
    pairs = torch.triu_indices(values.shape[0], values.shape[1], 1).T.tolist()
    cells = tuple((i + 1, j + 1, float(values[i, j])) for i, j in pairs)
    return Table(names=("start", "end", "value"), cells=cells, provenance=Provenance())


def anomalies(states: int, repeats: int) -> list[Outcome]:
    """Null runs in which some layer is called anomalous."""
    start, g = time.perf_counter(), torch.Generator().manual_seed(states)
    t, hits, before = torch.arange(1, states + 1).double(), [], []
    for _ in range(repeats):
        tau = (t - t[:, None]).clamp(min=1)
        values = 0.2 * t - 0.1 * tau.log() + 0.3 * torch.randn(states, generator=g).double()
        found = layer_anomalies(of_pairs(values), ["value"])
        z = torch.tensor(found.column("z"))
        hits.append(torch.tensor([float(any(found.column("flagged")))]))
        before.append(torch.tensor([float((z.nan_to_num().abs() > 3.5).any())]))
    name, old = f"anomalous layers, {states} states", torch.stack(before)
    origin = Origin("a law of noise, Gaussian deviations", "none", f"{states} states")
    late = f"{name}, z above 3.5 (of before)"
    return [
        outcome(name, torch.stack(hits), start, origin, goal=SIZE),
        outcome(late, old, start, origin, goal=SIZE, promised=False),
    ]


def residual_tests(repeats: int) -> list[Outcome]:
    """p-values of normality, on Gaussian noise."""
    start, generators = time.perf_counter(), map(torch.Generator().manual_seed, range(repeats))
    p = [normality_p(torch.randn(100, 24, generator=g)) for g in generators]
    origin = Origin("Gaussian noise", "none", "100 trajectories")
    rejected = (torch.stack(p) <= 0.05).double()
    return [outcome("normality of residuals", rejected, start, origin, goal=SIZE)]


def flow_of(trajectories: int, states: int, generator: torch.Generator) -> Trajectories:
    """Paths of a linear flow: in each of ``states - 1`` blocks a rotation and a stretch of 1.05 (of
    all repeats), and isotropic Gaussian noise whose variance grows by e^0.3 a block."""
    fixed = torch.Generator().manual_seed(5)
    spread = torch.linspace(1, -1, FLOW_D).double().exp()
    x = torch.randn(trajectories, FLOW_D, generator=generator, dtype=torch.float64) * spread
    path = [x]
    for block in range(1, states):
        near_one = torch.eye(FLOW_D) + 0.1 * torch.randn(FLOW_D, FLOW_D, generator=fixed)
        turn = torch.linalg.qr(near_one.double()).Q
        noise = torch.randn(trajectories, FLOW_D, generator=generator, dtype=torch.float64)
        x = 1.05 * x @ turn.mT + 0.13 * math.exp(0.15 * block) * noise
        path.append(x)
    X, numbers = torch.stack(path, 1).float(), tuple(range(1, states + 1))
    return Trajectories(X=X, states=numbers, position=-1, provenance=Provenance())


def flow_reports(trajectories: int, states: int, repeats: int) -> list[Outcome]:
    """What a flow report says of noise that is isotropic and Gaussian, and of layers none of which
    is anomalous."""
    start = time.perf_counter()
    flagged, normal = [], []
    for seed in range(repeats):
        paths = flow_of(trajectories, states, torch.Generator().manual_seed(seed))
        report = flow_report(paths, seed=seed)
        odd = layer_anomalies(report)
        measures = dict.fromkeys(odd.column("measure"))
        found = [float(any(odd.column("flagged", measure=m))) for m in measures]
        flagged.append(torch.tensor(found, dtype=torch.float64))
        rejected = report.column("gaussian_rejected_raw")
        normal.append(torch.tensor(rejected, dtype=torch.float64))
    first = flow_of(trajectories, states, torch.Generator().manual_seed(0))
    alike = f"{lag_one(first.X):.2f} (from state to state)"
    origin = Origin("linear flow, isotropic noise", alike, f"{trajectories} trajectories")
    of = f"flow report, {states} states of {trajectories} paths"
    return [
        outcome(f"anomalous layers, {of}", torch.stack(flagged), start, origin, goal=AT_MOST),
        outcome(f"normality held out, {of}", torch.stack(normal), start, origin, goal=SIZE),
    ]


def simulations(n: Callable[[int], int]) -> list[Callable[[], list[Outcome]]]:
    """The rows of this part of the table; ``n`` scales the repeats."""
    return [
        lambda: accuracy(n(150)),
        lambda: anomalies(6, n(300)),
        lambda: anomalies(12, n(200)),
        lambda: residual_tests(n(600)),
        lambda: flow_reports(60, 6, n(300)),
        lambda: flow_reports(400, 6, n(300)),
        lambda: flow_reports(200, 12, n(100)),
    ]
