"""Calibration of scores: intervals of shares, the p-value of position, scores of head types and the
share of the offset, on a planted layer or on planted scores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.calibration_outcomes import AT_MOST, SIZE, Origin, Outcome, covered, outcome
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
from tl_geometry.base.rows import causal_mask, row_center
from tl_geometry.decomposition import PositionContext, decompose_activations
from tl_geometry.scores.details import Details
from tl_geometry.scores.leave_out import own_groups
from tl_geometry.scores.relative import cross_validated, prompt_groups
from tl_geometry.scores.shapes import offset_sums
from tl_geometry.scores.sums import share_sums


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
    origin = origin_of(world, min(contexts, fresh or contexts))
    kept = [
        outcome(f"share of the {of}, {name}", torch.stack(x), start, origin)
        for of, x in hits.items()
    ]
    old = f"share of the score, {name} (of before)"
    return [*kept, outcome(old, torch.stack(before), start, origin, promised=False)]


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
    origin = origin_of(world, min(contexts, fresh or contexts))
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
            cs = share_sums(parts.q, parts.k, layer.allowed, energy=False, gain=False).pooled().cs
            shares.append(cs[:, [0, 1, 3, 4]].sum(1))
        found = torch.stack(shares)
        hits.append((found[1:] < found[0]).all(0).double())
    old = f"p-value of position, permuted, {name} (of before)"
    origin = origin_of(world, contexts)
    return outcome(old, torch.stack(hits), start, origin, goal=SIZE, promised=False)


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


OFFSETS = 16
"""Positions of the planted scores of :func:`offset_shares`."""


def planted_scores(contexts: int, own: float, topic: float, generator: torch.Generator) -> Tensor:
    """Row-centred scores ``[context 1 query key]``: noise in every cell, a profile of the offset of
    each window (``own``) and of each :data:`TOPIC` windows in a row (``topic``), none of all."""

    def profiles(count: int) -> Tensor:
        rows = torch.randn(count, OFFSETS, generator=generator).unbind(1)
        smooth = [rows[0]]
        for white in rows[1:]:
            smooth.append(0.95 * smooth[-1] + (1 - 0.95**2) ** 0.5 * white)
        return torch.stack(smooth, 1)

    by_topic = profiles(-(-contexts // TOPIC)).repeat_interleave(TOPIC, 0)[:contexts]
    offset = (torch.arange(OFFSETS)[:, None] - torch.arange(OFFSETS)).clamp(min=0)
    noise = torch.randn(contexts, OFFSETS, OFFSETS, generator=generator)
    scores = noise + (own * profiles(contexts) + topic * by_topic)[:, offset]
    return row_center(scores[:, None].double(), causal_mask(OFFSETS))


def offset_shares(
    name: str,
    contexts: int,
    repeats: int,
    *,
    own: float = 0.0,
    topic: float = 0.0,
    promised: bool = True,
) -> list[Outcome]:
    """How often the share of the offset is above its null, zero, where no profile is that of all
    windows; beside it with eight groups whatever the number of windows."""
    start, hits = time.perf_counter(), []
    mask = causal_mask(OFFSETS)
    for seed in range(repeats):
        scores = planted_scores(contexts, own, topic, torch.Generator().manual_seed(seed))
        shares = []
        for groups in (prompt_groups(contexts), 8):
            parts = [offset_sums(part, mask) for part in scores.tensor_split(groups)]
            shares.append(cross_validated(parts))
        hits.append((torch.cat(shares) > 0).double())
    by_groups = torch.stack(hits).unsqueeze(2)
    alike = f"0.95 (profile){f', topics of {TOPIC} windows' if topic else ''}"
    origin = Origin("planted scores, profiles of windows", alike, f"{contexts} windows")
    new = f"share of the offset above 0, {name}, C = {contexts}"
    kept = outcome(new, by_groups[:, 0], start, origin, goal=AT_MOST, promised=promised)
    if prompt_groups(contexts) == 8:
        return [kept]
    old = f"{new}, eight groups (of before)"
    return [kept, outcome(old, by_groups[:, 1], start, origin, goal=AT_MOST, promised=False)]


def simulations(n: Callable[[int], int]) -> list[Callable[[], list[Outcome]]]:
    """The rows of this part of the table; ``n`` scales the repeats."""
    old = World(position=0.0, along=0.9)
    few = "topics of 8 windows (fewer than eight texts: not offered)"
    return [
        *(lambda x=x: sweep_intervals(repeats=n(300), **x) for x in share_settings()),
        *(lambda x=x: [position_null(repeats=n(300), **x)] for x in position_settings()),
        lambda: [permuted_positions(old, 32, n(200), "C = 32, AR 0.9")],
        lambda: head_types(n(1000)),
        *(
            lambda c=c: offset_shares("profiles of windows", c, n(400), own=1.0)
            for c in (8, 16, 32, 64)
        ),
        lambda: offset_shares("topics of 8 windows", 64, n(400), topic=1.0),
        *(
            lambda c=c: offset_shares(few, c, n(400), topic=1.0, promised=False)
            for c in (10, 16, 32)
        ),
    ]
