"""Calibration of scores: intervals of shares and the p-value of position on windows that the basis
has not seen, and scores of head types, on a planted layer or on planted scores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.calibration_outcomes import SIZE, Origin, Outcome, covered, outcome
from benchmarks.planted import (
    TOPIC,
    T,
    World,
    layer_of,
    parts_of,
    true_shares,
)
from tl_geometry.base.intervals import Interval, LeftOut, jackknife_interval, t_quantile
from tl_geometry.base.results import row_hashes
from tl_geometry.base.rows import causal_mask
from tl_geometry.decomposition import PositionContext, decompose_activations
from tl_geometry.scores.sums import share_sums
from tl_geometry.scores.sweep import LayerSums


def origin_of(world: World, contexts: int) -> Origin:
    """A planted layer on so many windows of a world."""
    alike = f"{world.along:g} (AR)" if world.stay is None else f"{world.stay:g} (tokens stay)"
    alike += f", windows {world.between:g} (AR)" if world.between else ""
    alike += f", topics of {contexts // world.topics} windows" if world.topics else ""
    return Origin("planted layer, random weights", alike, f"{contexts} windows")


def basis_of(h: Tensor, ids: Tensor) -> PositionContext:
    """The basis of states, which knows its contexts by their (made-up) tokens."""
    basis = decompose_activations(h, window=(0, h.shape[1]), second_moments=False)
    return replace(basis, token_hashes=row_hashes(ids))


def measured(h: Tensor, basis: PositionContext, **of_layer: Any) -> LayerSums:
    """The sums of a sweep with intervals over states of one layer."""
    sums = LayerSums(basis, layers=1, intervals=True, by_plane=False)
    sums.add(layer_of(h, **of_layer))
    return sums


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
    """Intervals of the shares of covariance and of gain, with a basis of ``contexts`` and on
    ``fresh`` windows (as many)."""
    start, truth, fresh = time.perf_counter(), true_shares(world), fresh or contexts
    hits: dict[str, list[Tensor]] = {"score": [], "gain": []}
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        basis = basis_of(world.draw(contexts, g), _ids(contexts, seed))
        some = replace(world, topics=fresh // TOPIC if world.topics else 0)
        samples, sizes = measured(some.draw(fresh, g), basis).samples()
        hits["score"].append(covered(_interval(samples["cs"], sizes), truth.cs))
        hits["gain"].append(covered(_interval(samples["gs"], sizes), truth.gs))
    origin = origin_of(world, min(contexts, fresh))
    return [
        outcome(f"share of the {of}, {name}", torch.stack(x), start, origin)
        for of, x in hits.items()
    ]


def position_null(
    world: World,
    contexts: int,
    repeats: int,
    name: str,
    *,
    promised: bool = True,
    **of_layer: Any,
) -> Outcome:
    """Size of the p-value of position on states without any, with a basis of ``contexts`` and on as
    many windows; without a promise that of all repeats, printed or not."""
    start, hits = time.perf_counter(), []
    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        basis = basis_of(world.draw(contexts, g), _ids(contexts, seed, world.length))
        found = measured(world.draw(contexts, g), basis, rotary=world.rotary, **of_layer)
        p = found.null(seed)["p_position"]
        unknown = torch.nan if promised else 0.0
        hits.append(torch.where(p.isnan(), unknown, (p <= 0.05).double()))
    label = f"p-value of position, {name}"
    origin = origin_of(world, contexts)
    return outcome(label, torch.stack(hits), start, origin, goal=SIZE, promised=promised)


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
            cs = share_sums(*parts, layer.allowed).cs
            shares.append(cs[:, [0, 1, 3, 4]].sum(1))
        found = torch.stack(shares)
        hits.append((found[1:] < found[0]).all(0).double())
    old = f"p-value of position, permuted, {name} (of before)"
    origin = origin_of(world, contexts)
    return outcome(old, torch.stack(hits), start, origin, goal=SIZE, promised=False)


def share_settings() -> list[dict[str, Any]]:
    """Worlds in which the intervals of shares are tried. Below 32 contexts none is printed."""
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
    other = {"name": "C = 64{}, 32 windows", "contexts": 64, "fresh": 32}
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
        for c in (32, 64)
    ]
    for x in found:
        x["name"] += ", tokens stay with 0.95"
    topics = {"stay": 0.8, "length": 16, "topics": 4}
    found += [
        {"world": replace(none, stay=0.8, length=16), "contexts": 32, "name": "C = 32, stay 0.8"},
        {"world": replace(none, along=0.9), "contexts": 32, "name": "C = 32, AR 0.9"},
        {"world": replace(none, **topics), "contexts": 32, "name": "C = 32, four topics in blocks"},
        {"world": replace(none, along=0.0), "contexts": 32, "name": "C = 32, independent tokens"},
    ]
    rotary: list[tuple[str, dict[str, Any], float]] = [
        ("independent tokens", {"along": 0.0}, 0.0),
        ("stay 0.95", {"stay": 0.95, "length": 16}, 0.0),
        ("stay 0.95, queries alike", {"stay": 0.95, "length": 16}, 1.5),
    ]
    for name, changed, query in rotary:
        world = replace(turned, **changed)
        found.append({"world": world, "contexts": 32, "name": f"C = 32, rotary, {name}"})
        found[-1]["query"] = query
    label = "C = 32, rotary, four topics in blocks (hardly ever printed; of all repeats)"
    blocks = {"world": replace(turned, **topics), "contexts": 32, "promised": False}
    return [*found, {**blocks, "name": label}]


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
    origin = Origin("random scores of random tokens", "none", "12 sequences")
    return [outcome("head-type score, twelve sequences", torch.stack(hits), start, origin)]


def simulations(n: Callable[[int], int]) -> list[Callable[[], list[Outcome]]]:
    """The rows of this part of the table; ``n`` scales the repeats."""
    old = World(position=0.0, along=0.9)
    return [
        *(lambda x=x: sweep_intervals(repeats=n(300), **x) for x in share_settings()),
        *(lambda x=x: [position_null(repeats=n(300), **x)] for x in position_settings()),
        lambda: [permuted_positions(old, 32, n(200), "C = 32, AR 0.9")],
        lambda: head_types(n(1000)),
    ]
