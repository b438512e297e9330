"""Do printed intervals hold the truth, and are printed p-values uniform? Each is simulated in its
own setting, with a truth that is known: a planted model or a population of data.

``python -m benchmarks --only calibration`` prints coverage of nominal 95% intervals and size of
tests of nominal 5%, ``python -m benchmarks.calibration`` the same as the table of
``benchmarks/calibration.md``. Rows that end in "(of before)" are what a correction replaced.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Row
from benchmarks.planted import (
    TOPIC,
    T,
    World,
    layer_of,
    parts_of,
    true_shares,
)
from tl_geometry.base.intervals import (
    Interval,
    LeftOut,
    jackknife_interval,
    paired_interval,
    sign_flip_p,
    t_quantile,
)
from tl_geometry.base.results import row_hashes
from tl_geometry.base.rows import causal_mask
from tl_geometry.decomposition import PositionContext, decompose_activations
from tl_geometry.scores.details import Details
from tl_geometry.scores.leave_out import own_groups
from tl_geometry.scores.sums import share_sums

COVERAGE, SIZE = (0.90, 0.98), (0.03, 0.07)
"""What a nominal 95% interval and a nominal 5% test must keep to; no single term below
:data:`SINGLE`."""
SINGLE = 0.85


@dataclass(frozen=True)
class Outcome:
    """Coverage (or size) over repeats, its Monte-Carlo error, and the worst single term."""

    name: str
    size: bool
    value: float
    error: float
    worst: float
    repeats: int
    seconds: float
    promised: bool = True

    @property
    def kept(self) -> bool:
        """Whether the promise is kept, within three Monte-Carlo errors."""
        low, high = SIZE if self.size else COVERAGE
        inside = low - 3 * self.error <= self.value <= high + 3 * self.error
        return inside and (self.size or self.worst >= SINGLE - 0.1 * (self.repeats < 300))


def outcome(
    name: str, hits: Tensor, start: float, *, size: bool = False, promised: bool = True
) -> Outcome:
    """From hits ``[repeat term]`` (NaN where nothing was printed); terms of a repeat are not
    independent."""
    per_repeat = hits.nanmean(1)
    per_repeat = per_repeat[torch.isfinite(per_repeat)]
    error = float(per_repeat.std() / len(per_repeat) ** 0.5)
    terms = hits.nanmean(0)
    worst = float(terms.max() if size else terms.min())
    value, spent = float(per_repeat.mean()), time.perf_counter() - start
    return Outcome(name, size, value, error, worst, len(hits), spent, promised)


def covered(found: Interval, truth: Tensor) -> Tensor:
    """One where the truth is inside, NaN where there is no interval."""
    inside = ((found.low <= truth) & (truth <= found.high)).double()
    return torch.where(torch.isnan(found.low), torch.nan, inside).flatten()


# ---- the sweep: shares of a layer with random weights, on states with a known basis


def basis_of(h: Tensor, ids: Tensor) -> PositionContext:
    """The basis of states, which knows its contexts by their (made-up) tokens."""
    basis = decompose_activations(h, window=(0, h.shape[1]), second_moments=False)
    return replace(basis, token_hashes=row_hashes(ids))


def measured(
    h: Tensor, ids: Tensor, basis: PositionContext, *wanted: str, **of_layer: Any
) -> Details:
    """The details of a sweep over states of one layer."""
    details = Details(wanted, 0, seed=int(ids[0, 0]))
    layer = layer_of(h, **of_layer)
    details.begin(layer, basis)
    parts = parts_of(layer, basis.mean[0], basis.pos_seen[0])
    details.update(layer, parts, slice(0, len(h)), ids, own_groups(basis, ids).tolist())
    return details


def _interval(shares: Tensor, sizes: tuple[tuple[float, ...], ...]) -> Interval:
    found, at = [], 1
    for size in sizes:
        values = shares[:, at : at + len(size)].transpose(0, 1)
        found.append(LeftOut(values, shares.new_tensor(size)))
        at += len(size)
    return jackknife_interval(shares[:, 0], found)


def _ids(contexts: int, seed: int, length: int = T) -> Tensor:
    return torch.arange(contexts * length).reshape(contexts, length) + 1_000_000 * (seed + 1)


def sweep_intervals(
    name: str, world: World, contexts: int, repeats: int, *, fresh: int = 0
) -> list[Outcome]:
    """Intervals of the shares of covariance and of gain on the basis's own contexts or on
    ``fresh`` others; beside them the bootstrap over contexts with the basis as it is."""
    start, truth, before = time.perf_counter(), true_shares(world), []
    hits: dict[str, list[Tensor]] = {"score": [], "gain": []}
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        h, ids = world.draw(contexts, g), _ids(contexts, seed)
        basis = basis_of(h, ids)
        if fresh:
            h, ids = world.draw(fresh, g), _ids(fresh, seed + repeats)
        found = measured(h, ids, basis, "intervals").resampled(contexts)
        hits["score"].append(covered(_interval(found.cs, found.sizes), truth.cs))
        hits["gain"].append(covered(_interval(found.gs, found.sizes), truth.gs))
        before.append(covered(_bootstrap(h, basis, g), truth.cs))
    kept = [outcome(f"share of the {of}, {name}", torch.stack(x), start) for of, x in hits.items()]
    old = f"share of the score, {name} (of before)"
    return [*kept, outcome(old, torch.stack(before), start, promised=False)]


def _bootstrap(h: Tensor, basis: PositionContext, generator: torch.Generator) -> Interval:
    layer = layer_of(h)
    parts = parts_of(layer, basis.mean[0], basis.pos_seen[0])
    sums = share_sums(parts.q, parts.k, layer.allowed, energy=False, gain=False)
    chosen = torch.randint(len(h), (200, len(h)), generator=generator)
    cs = sums.numerators[chosen].sum(1) / sums.total[chosen].sum(1).unsqueeze(-1)
    value = sums.pooled().cs
    return Interval(value, cs.quantile(0.025, 0), cs.quantile(0.975, 0), cs.std(0))


def position_null(
    world: World,
    contexts: int,
    repeats: int,
    name: str,
    *,
    fresh: int = 0,
    promised: bool = True,
    **of_layer: Any,
) -> Outcome:
    """Size of the p-value of position on states without any, on the basis's own contexts or on
    ``fresh`` others; without a promise that of all repeats, printed or not."""
    start, hits = time.perf_counter(), []
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        h, ids = world.draw(contexts, g), _ids(contexts, seed, world.length)
        basis = basis_of(h, ids)
        if fresh:
            h, ids = world.draw(fresh, g), _ids(fresh, seed + repeats, world.length)
        details = measured(h, ids, basis, "nulls", rotary=world.rotary, **of_layer)
        p = details.table(contexts)["p_position"]
        unknown = torch.nan if promised else 0.0
        hits.append(torch.where(p.isnan(), unknown, (p <= 0.05).double()))
    label = f"p-value of position, {name}"
    return outcome(label, torch.stack(hits), start, size=True, promised=promised)


def permuted_positions(world: World, contexts: int, repeats: int, name: str) -> Outcome:
    """The same by permuted positions, the basis as it is: what the null of position replaced."""
    start, hits = time.perf_counter(), []
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        h = world.draw(contexts, g)
        basis, layer = basis_of(h, _ids(contexts, seed)), layer_of(h)
        orders = [torch.arange(T), *(torch.randperm(T, generator=g) for _ in range(19))]
        shares = []
        for order in orders:
            parts = parts_of(layer, basis.mean[0], basis.pos_seen[0][order])
            cs = share_sums(parts.q, parts.k, layer.allowed, energy=False, gain=False).pooled().cs
            shares.append(cs[:, [0, 1, 3, 4]].sum(1))
        found = torch.stack(shares)
        hits.append((found[1:] < found[0]).all(0).double())
    old = f"p-value of position, permuted, {name} (of before)"
    return outcome(old, torch.stack(hits), start, size=True, promised=False)


def share_settings() -> list[dict[str, Any]]:
    """Worlds in which the intervals of shares are tried. Below 32 contexts none is printed: of 16,
    of two topics, they covered 0.89, and the worst term 0.61."""
    worlds = {
        "": World(),
        ", no position": World(position=0.0),
        ", windows in order": World(between=0.5),
        ", tokens stay with 0.95": World(stay=0.95),
        ", topics of 8 windows": World(context=0.0, topics=1),
    }
    found: list[dict[str, Any]] = []
    for c in (32, 64):
        for name, world in worlds.items():
            some = replace(world, topics=c // TOPIC * world.topics)
            found.append({"name": f"C = {c}{name}", "world": some, "contexts": c})
    other = {"name": "C = 64{}, 32 other windows", "contexts": 64, "fresh": 32}
    for name in ("", ", topics of 8 windows"):
        some = replace(worlds[name], topics=64 // TOPIC * worlds[name].topics)
        found.append({**other, "name": other["name"].format(name), "world": some})
    return found


def position_settings() -> list[dict[str, Any]]:
    """Worlds in which the p-value of position is tried: tokens that stay what they are, topics in
    blocks of windows, relative position."""
    none, turned = World(position=0.0), World(position=0.0, rotary=True)
    found: list[dict[str, Any]] = [
        {"world": replace(none, stay=0.95, length=t), "contexts": c, "name": f"C = {c}, T = {t}"}
        for t in (16, 32)
        for c in (10, 16, 32, 64)
    ]
    for x in found:
        x["name"] += ", tokens stay with 0.95"
    topics = {"stay": 0.8, "length": 16, "topics": 4}
    two = {**topics, "topics": 2}
    far = replace(none, stay=0.95, length=16)
    found += [
        {"world": replace(none, stay=0.8, length=16), "contexts": 10, "name": "C = 10, stay 0.8"},
        {"world": replace(none, along=0.9), "contexts": 32, "name": "C = 32, AR 0.9"},
        {"world": replace(none, **topics), "contexts": 32, "name": "C = 32, four topics in blocks"},
        {"world": replace(none, **two), "contexts": 16, "name": "C = 16, two topics in blocks"},
        {"world": replace(none, along=0.0), "contexts": 32, "name": "C = 32, independent tokens"},
        {"world": far, "contexts": 32, "fresh": 32, "name": "C = 32, stay 0.95, other windows"},
    ]
    rotary: list[tuple[str, dict[str, Any], float]] = [
        ("independent tokens", {"along": 0.0}, 0.0),
        ("stay 0.95", {"stay": 0.95, "length": 16}, 0.0),
        ("stay 0.95, queries alike", {"stay": 0.95, "length": 16}, 1.5),
    ]
    for c in (10, 16, 32):
        for name, changed, query in rotary:
            world = replace(turned, **changed)
            label = f"C = {c}, rotary, {name}"
            found.append({"world": world, "contexts": c, "name": label, "query": query})
    for c, some, words in ((32, topics, "four topics"), (16, two, "two topics")):
        blocks = {"world": replace(turned, **some), "contexts": c, "promised": False}
        label = f"C = {c}, rotary, {words} in blocks (hardly ever printed; of all repeats)"
        found.append({**blocks, "name": label})
    return found


# ---- effects of edits, trajectories


@cache
def real_changes() -> Tensor:
    """Loss that removing the content terms of the embedded model's last block costs in each of 400
    windows: a population of paired differences."""
    import tl_geometry as tlg
    from tl_geometry.interventions import remove_term
    from tl_geometry.models.output_head import token_losses

    model = tlg.zoo.embedded()
    view = tlg.view(model)
    ids = tlg.zoo.default_windows(model, 32, n=400).tokens
    basis = tlg.decompose(view, ids[:64], progress=False)

    def losses() -> Tensor:
        log_p = view.logits(ids, {}).float().log_softmax(-1)
        return token_losses(log_p[:, :-1], ids[:, 1:]).double().mean(1)

    clean = losses()
    with remove_term(model, basis, "content", [(view.n_layers - 1, h) for h in range(4)]):
        return losses() - clean


def paired_effects(repeats: int) -> list[Outcome]:
    """Student's interval of paired differences, and sign flips of exchangeable pairs."""
    out: list[Outcome] = []
    population = real_changes()
    for n in (10, 16):
        start, g = time.perf_counter(), torch.Generator().manual_seed(n)
        chosen = torch.randint(len(population), (n, repeats), generator=g)
        found = paired_interval(population[chosen])
        hits = covered(found, population.mean()).unsqueeze(1)
        out.append(outcome(f"loss of an edit, {n} real prompts", hits, start))
    draws: dict[str, Callable[[torch.Generator], Tensor]] = {
        "normal": lambda g: torch.randn(12, generator=g),
        "heavy-tailed": lambda g: (
            torch.randn(12, generator=g) / torch.randn(3, 12, generator=g).square().mean(0).sqrt()
        ),
        "log-normal pairs": lambda g: torch.randn(2, 12, generator=g).mul(1.5).exp().diff(dim=0)[0],
    }
    for name, draw in draws.items():
        start, g = time.perf_counter(), torch.Generator().manual_seed(1)
        p = torch.tensor([sign_flip_p(draw(g)) for _ in range(repeats)])
        hits = (p <= 0.05).double().unsqueeze(1)
        out.append(outcome(f"sign flips of 12 prompts, {name}", hits, start, size=True))
    skewed = torch.randn(repeats, 12, generator=torch.Generator().manual_seed(1)).exp()
    p = torch.tensor([sign_flip_p(x - x.new_tensor(0.5).exp()) for x in skewed])
    name, hits = "sign flips as a test of the mean, skewed (not offered)", (p <= 0.05).double()
    return [*out, outcome(name, hits[:, None], time.perf_counter(), size=True, promised=False)]


def head_types(repeats: int) -> list[Outcome]:
    """Score of a head type +- t_11 error, twelve rows, against 4,000."""
    from tl_geometry.scores.head_types import head_type_scores

    start, names = time.perf_counter(), ("previous", "duplicate", "induction")

    def made(rows: int, g: torch.Generator) -> Any:
        tokens = torch.randint(0, 6, (rows, 10), generator=g)
        scores = 2 * torch.randn(rows, 2, 10, 10, generator=g)
        pattern = scores.masked_fill(~causal_mask(10), -torch.inf).softmax(-1)
        return head_type_scores(pattern, tokens)

    far = made(4_000, torch.Generator().manual_seed(99)).scores
    hits = []
    for seed in range(repeats):
        found = made(12, torch.Generator().manual_seed(seed))
        reach = float(t_quantile(torch.tensor(11.0)))
        inside = [(found.scores[n] - far[n]).abs() <= reach * found.errors[n] for n in names]
        hits.append(torch.cat(inside).double())
    return [outcome("head-type score, twelve sequences", torch.stack(hits), start)]


def accuracy(repeats: int) -> list[Outcome]:
    """The interval of a classifier's accuracy against its mean over fresh data."""
    from tl_geometry.flow.separation import separability

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
    name = "accuracy of a classifier"
    return [
        outcome(name, hits, start),
        outcome(f"{name}, floored (of before)", before, start, promised=False),
    ]


def anomalies(states: int, repeats: int) -> list[Outcome]:
    """Null runs in which some layer is called anomalous."""
    from tl_geometry.flow.noise import layer_anomalies

    start, g = time.perf_counter(), torch.Generator().manual_seed(states)
    t, hits, before = torch.arange(1, states + 1).double(), [], []
    for _ in range(repeats):
        tau = (t - t[:, None]).clamp(min=1)
        values = 0.2 * t - 0.1 * tau.log() + 0.3 * torch.randn(states, generator=g).double()
        found = layer_anomalies(values)
        hits.append(torch.tensor([float(found.flagged.any())]))
        before.append(torch.tensor([float((found.z.nan_to_num().abs() > 3.5).any())]))
    name, old = f"anomalous layers, {states} states", torch.stack(before)
    return [
        outcome(name, torch.stack(hits), start, size=True),
        outcome(f"{name}, z above 3.5 (of before)", old, start, size=True, promised=False),
    ]


def residual_tests(repeats: int) -> list[Outcome]:
    """p-values of sphericity and of normality, on Gaussian noise."""
    from tl_geometry.flow.noise import isotropy_tests, normality_p

    start, p = time.perf_counter(), {"sphericity": [], "normality": []}
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(100, 24, generator=g)
        p["sphericity"].append(torch.tensor([isotropy_tests(x).sphericity_p]))
        p["normality"].append(normality_p(x))
    return [
        outcome(f"{k} of residuals", (torch.stack(v) <= 0.05).double(), start, size=True)
        for k, v in p.items()
    ]


SCALE = {"smoke": 0.1, "cpu": 1.0, "gpu": 1.0}
"""Share of the repeats of the table."""


def simulations(size: str) -> list[Callable[[], list[Outcome]]]:
    """Every printed interval and p-value, in its own setting."""
    from benchmarks.calibration_measures import simulations as measures

    n = lambda full: max(8, int(full * SCALE[size]))  # noqa: E731
    old = World(position=0.0, along=0.9)
    return [
        *(lambda x=x: sweep_intervals(repeats=n(300), **x) for x in share_settings()),
        *(lambda x=x: [position_null(repeats=n(300), **x)] for x in position_settings()),
        lambda: [permuted_positions(old, 32, n(200), "C = 32, AR 0.9")],
        *measures(n),
        lambda: paired_effects(n(2000)),
        lambda: head_types(n(1000)),
        lambda: accuracy(n(150)),
        lambda: anomalies(6, n(300)),
        lambda: anomalies(12, n(200)),
        lambda: residual_tests(n(600)),
    ]


def run(size: str) -> list[Row]:
    """Rows of the benchmark: in place of the ratio the coverage of a nominal 95% or the size of a
    nominal 5%."""
    found = [o for simulate in simulations(size) for o in simulate()]
    return [Row("calibration", o.name, o.seconds, o.value, _note(o)) for o in found]


def _note(o: Outcome) -> str:
    about = "size of nominal 5%" if o.size else "coverage of nominal 95%"
    kept = "" if not o.promised else ", kept" if o.kept else ", NOT KEPT"
    return f"{about} (+- {o.error:.3f}), worst {o.worst:.3f}, {o.repeats} repeats{kept}"


def markdown(size: str) -> str:
    """The table of ``benchmarks/calibration.md``."""
    lines = [
        "# Calibration of printed intervals and p-values",
        "",
        "Made by `python -m benchmarks.calibration > benchmarks/calibration.md`. Each row "
        "simulates an interval or a p-value in its own setting with a known truth. Promised: "
        f"coverage of {COVERAGE[0]:.0%} to {COVERAGE[1]:.0%} for nominal 95% (no single term below "
        f"{SINGLE:.0%}), size of {SIZE[0]:.0%} to {SIZE[1]:.0%} for nominal 5%, each within three "
        "Monte-Carlo errors; more coverage and a smaller size than that err on the safe side. Rows "
        "'of before' are what a correction replaced.",
        "",
        "| setting | nominal | measured | Monte-Carlo error | worst term | repeats | promise |",
        "|---|---|---|---|---|---|---|",
    ]
    for simulate in simulations(size):
        for o in simulate():
            promise = "" if not o.promised else "kept" if o.kept else "**not kept**"
            nominal = "size 5%" if o.size else "coverage 95%"
            numbers = f"{o.value:.3f} | {o.error:.3f} | {o.worst:.3f} | {o.repeats}"
            lines.append(f"| {o.name} | {nominal} | {numbers} | {promise} |")
            sys.stderr.write(f"{lines[-1]} {o.seconds:.0f} s\n")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration")
    parser.add_argument("--size", choices=tuple(SCALE), default="cpu")
    sys.stdout.write(markdown(parser.parse_args().size))
