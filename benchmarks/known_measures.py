"""What does each measure find in a model whose circuit is known? One function for each question
gives the findings of one seed; :mod:`benchmarks.known` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tl_geometry as tlg
from benchmarks.known_judging import (
    Counts,
    Finding,
    auroc,
    auroc_by_chance,
    by_name,
    exact_effects,
)
from benchmarks.known_models import KnownModel, known, trained
from benchmarks.known_models.planted import SLOW, VOCAB
from benchmarks.known_models.planted_heads import FAST, RECENT
from tl_geometry.base.checks import head_name
from tl_geometry.circuits.writer_edges import HEAD_SIDES, Composition
from tl_geometry.scores import offset_profile
from tl_geometry.scores.labels import MARGIN_OVER, SHARE_OVER, UNCLEAR, UNIFORM
from tl_geometry.scores.terms import GROUPS

SAID = {"all": "all tokens changed", "last": "last token changed", "key": "key changed"}
QUIET: dict[str, Any] = {"progress": False}
CONTEXTS, PAIRS = 64, 8
NEEDED = 0.1
"""An edge is a true one of a trained model where it alone carries more than this share of the
difference."""
PREDICTED = {"induction": 25, "sum": 9}
"""The first token of a trained model's rows that can be predicted, whatever the row."""
PLANES = {"offset": FAST, "position": RECENT, "identity": range(SLOW, SLOW + VOCAB)}
"""Rotary planes in which heads of the planted model are planted."""


@cache
def model_of(name: str, positions: str, seed: int) -> KnownModel:
    """A known model, built once."""
    return known(name, positions=positions, seed=seed)


def corpora(truth: KnownModel, name: str) -> tuple[Tensor, Tensor]:
    """Tokens that the basis is made from, and others that are split."""
    if name in trained.TASKS:
        generator = torch.Generator().manual_seed(3)
        made = [trained.TASKS[name].rows(CONTEXTS, generator)[0] for _ in range(2)]
        return made[0], made[1]
    return truth.random_tokens(CONTEXTS, seed=5), truth.random_tokens(CONTEXTS, seed=6)


def labels(name: str, positions: str, seed: int) -> Iterator[Finding]:
    """Labels of heads by group, by covariance alone, and the dominant term."""
    truth, title = model_of(name, positions, seed), f"{name}, {positions}"
    for_basis, tokens = corpora(truth, name)
    basis = tlg.decompose(truth.model, for_basis, **QUIET)
    table = tlg.sweep_heads(truth.model, tokens, basis, **QUIET)
    groups, terms = (table.dominant_by(by) for by in ("group", "term"))
    by_cs = [
        name if name == UNIFORM or (share > SHARE_OVER and margin > MARGIN_OVER) else UNCLEAR
        for name, share, margin in zip(groups.by_cs, groups.share, groups.margin, strict=True)
    ]
    for measure, given in (
        ("label of a head", groups.labels),
        ("label by covariance alone (rival)", by_cs),
    ):
        by_head = dict(zip(table.heads, given, strict=True))
        yield Finding.of_labels(measure, title, by_head, truth.labels)
    disputed = dict.fromkeys(truth.heads("disputed"), "position by cs, content by gs")
    if disputed:
        flags = dict(zip(table.heads, groups.flags, strict=True))
        measure = "both groups named where covariance and gain disagree"
        yield Finding.of_labels(measure, title, flags, disputed, none="")
    if truth.terms:
        by_head = dict(zip(table.heads, terms.labels, strict=True))
        yield Finding.of_labels("dominant term", title, by_head, truth.terms)
    if name in trained.TASKS:
        given, first = dict(zip(table.heads, groups.labels, strict=True)), PREDICTED[name]
        yield removals(truth, title, basis, tokens, given, first)


@torch.no_grad()
def removals(
    truth: KnownModel, title: str, basis: Any, tokens: Tensor, given: Any, first: int
) -> Finding:
    """Labels of the heads of a trained circuit against the group that costs most to remove, on what
    can be predicted (from position ``first`` on)."""

    def loss() -> float:
        logits = truth.model(tokens)[:, first - 1 : -1]
        return float(F.cross_entropy(logits.mT, tokens[:, first:]))

    clean, costliest = loss(), {}
    for head in truth.labels:
        costs = {}
        for group in GROUPS:
            with tlg.interventions.term(truth.model, basis, group, head):
                costs[group] = loss() - clean
        costliest[head] = max(costs, key=lambda group: costs[group])
    return Finding.of_labels("label, against what removal costs most", title, given, costliest)


def planes(positions: str, seed: int) -> Iterator[Finding]:
    """Rotary planes in which a head is planted, and the peak of its kernel of offsets."""
    truth, title = model_of("heads", positions, seed), f"heads, {positions}"
    for_basis, tokens = corpora(truth, "heads")
    at_offset = {head: str(truth.offset) for head in truth.heads("offset") + truth.heads("both")}
    if positions == "rotary":
        basis = tlg.decompose(truth.model, for_basis, **QUIET)
        table = tlg.sweep_heads(truth.model, tokens, basis, planes=True, **QUIET)
        shares = table.planes().total_cs
        chosen = {h: PLANES[d] for h, d in truth.does.items() if d in PLANES}
        scores = torch.cat([shares[table.heads.index(h)] for h in chosen])
        width = torch.arange(shares.shape[1])
        inside = torch.cat([(width >= x.start) & (width < x.stop) for x in chosen.values()])
        yield Finding.of_ranking("rotary planes", title, scores, inside)
        basis = tlg.decompose(truth.model, for_basis, normalize=True, **QUIET)
        term, measure = "bias-bias", "peak of the relative kernel"
    else:
        basis = tlg.decompose(truth.model, for_basis, **QUIET)
        term, measure = "pos-pos", "peak of the offset profile"
    split = tlg.split_scores(truth.model, tokens[:16], basis, layers=0, heads=list(at_offset))
    profile = offset_profile(split, term, drop=0 if term == "bias-bias" else None)
    heads, peaks = profile.heads, profile.peak.tolist()
    by_head = dict(zip(heads, map(str, peaks), strict=True))
    counted = Finding.of_labels(measure, title, by_head, at_offset, none="")
    chance = len(at_offset) / truth.length  # any offset is as likely
    yield Finding(measure, title, counted.counts, chance)


def head_to_head(table: Composition, values: Tensor, sides: range) -> tuple[list[Any], Tensor]:
    """(writer, reader, side) of the chosen sides, for writers that are heads, and their values."""
    keys, scores = [], []
    for h, (layer, head) in enumerate(table.heads):
        for p, part in enumerate(table.parts):
            if table.writer_heads[p] < 0 or table.wrote[p] >= layer:
                continue
            for s in sides:
                keys.append((part, head_name((layer, head)), HEAD_SIDES[s]))
                scores.append(values[h, s, p].abs())
    return keys, torch.stack(scores).double()


def composed(name: str, positions: str, seed: int) -> Iterator[Finding]:
    """Heads that read what another wrote, in a planted circuit, by shares on data and by weights
    alone."""
    truth, title = model_of(name, positions, seed), f"{name}, {positions}"
    tokens = truth.random_tokens(32, seed=6)
    table = tlg.composition(truth.model, tokens, layers=1, drop=1, **QUIET)
    writers = tlg.sweep_heads(truth.model, tokens, parts="writers", layers=1, **QUIET)
    reads = writers.cs.abs().double()
    keys, scores = [], []
    for h, reader in enumerate(writers.heads):
        for p, part in enumerate(writers.parts):
            if part.startswith("L0H"):
                keys += [(part, head_name(reader), side) for side in HEAD_SIDES[:2]]
                scores += list(reads[h, :, p])
    inside = torch.tensor([key in truth.head_pairs for key in keys])
    measure = "writers of queries and keys"
    yield Finding.of_ranking(measure, title, torch.stack(scores), inside)
    for measure, values in (
        ("composition, shares on data", table.cs),
        ("composition scores of weights alone (rival)", table.weights),
    ):
        keys, scores_of = head_to_head(table, values, range(3))
        inside = torch.tensor([key in truth.head_pairs for key in keys])
        yield Finding.of_ranking(measure, title, scores_of, inside)


def edges(name: str, positions: str, seed: int) -> Iterator[Finding]:
    """Edges that carry the difference of two prompts: the planted ones, or those of a trained model
    that do in live runs, one by one."""
    truth = model_of(name, positions, seed)
    several = len({layer for layer, _ in truth.does}) > 1
    weights = edge_weights(truth) if several else {}
    for changed in truth.changed:
        title = f"{name}, {positions}, {SAID[changed]}"
        pairs = truth.pairs(PAIRS, changed=changed, seed=7)
        names, effects = exact_effects(truth.model, pairs)
        inside = by_name(names, truth.edges[changed]) if truth.edges else effects > NEEDED
        if truth.edges:  # of a trained model they are the truth themselves
            measure = "edges, one by one in live runs"
            yield Finding.of_ranking(measure, title, effects.abs(), inside)
        for method in ("contrast", "integrated", "gradient"):
            given: Any = {"counterfactual": pairs.counterfactuals, "answer": pairs.targets}
            scores = tlg.edge_scores(truth.model, pairs.prompts, method=method, **given)
            measure = f"edges, {method}" + (" (attribution patching)" * (method == "gradient"))
            yield Finding.of_ranking(measure, title, scores.scores.abs(), inside)
        sources, _ = scores.layout.ends()
        by_node = scores.node_scores.abs()[sources]
        measure = "edges, by their writer's attribution patching (rival)"
        yield Finding.of_ranking(measure, title, by_node, inside)
        alone = torch.tensor([weights.get(edge, torch.nan) for edge in names])
        if bool(inside[~alone.isnan()].any()):
            measure = "edges of heads, by weights alone (rival)"
            yield Finding.of_ranking(measure, title, alone, inside)
            only = scores.scores.abs().where(~alone.isnan(), torch.nan)
            yield Finding.of_ranking("edges of heads, gradient", title, only, inside)


def edge_weights(truth: KnownModel) -> dict[str, float]:
    """Composition scores of weights alone, for edges from head to head."""
    tokens = truth.random_tokens(2)
    table = tlg.composition(truth.model, tokens, layers=1, draws=1, **QUIET)
    keys, values = head_to_head(table, table.weights, range(3))
    named = [f"{writer}->{reader}<{side[0]}>" for writer, reader, side in keys]
    return dict(zip(named, values.tolist(), strict=True))


def features(name: str, positions: str, seed: int) -> Iterator[Finding]:
    """Directions of a dictionary that the keys of heads read: tokens or positions, or attributes of
    tokens."""
    truth, title = model_of(name, positions, seed), f"{name}, {positions}"
    tokens, directions = truth.random_tokens(16, seed=6), truth.directions
    assert directions is not None
    with torch.no_grad():
        stream = truth.model.run_with_cache(tokens)[1]["blocks.0.hook_resid_pre"]
    given = (stream @ directions.T, directions, torch.zeros(directions.shape[1]))
    dictionary = tlg.circuits.dictionary(given, 0)
    heads = list(truth.reads)
    found = tlg.circuits.feature_shares(truth.model, tokens, dictionary, heads=heads, drop=1)
    at = found.feature_ids
    rows = [torch.isin(at, torch.tensor(truth.reads[head])) for head in found.heads]
    keys = found.cs[:, 1, len(found.parts) - len(at) :].abs().double()
    yield Finding.of_ranking("features of keys", title, keys.flatten(), torch.cat(rows))


def ranks(seed: int) -> Iterator[Finding]:
    """ScreeNOT's rank of a positional basis of planted rank, in Gaussian context."""
    labels_of, truth = {}, {}
    for rank in (2, 4, 8):
        g = torch.Generator().manual_seed(100 * seed + rank)
        left, right = (torch.linalg.qr(torch.randn(n, rank, generator=g))[0] for n in (32, 48))
        position = 20 * left @ right.T
        states = position + torch.randn(128, 32, 48, generator=g)
        basis = tlg.decompose_activations(states)
        report: Any = tlg.positional_report(basis, jackknife=False, nulls=False)
        truth[rank], labels_of[rank] = str(rank), str(int(report.df["rank"][0]))
    counted = Finding.of_labels("ScreeNOT rank", "ranks 2, 4 and 8", labels_of, truth, none="")
    yield Finding(counted.measure, counted.model, counted.counts, 3 / 20)


def separated(seed: int) -> Iterator[Finding]:
    """Clouds that differ by one standard deviation in one of eight coordinates, and that do not."""
    given, truth = {}, {}
    for shift in (0.0, 1.0):
        for draw in range(4):
            g = torch.Generator().manual_seed(1000 * seed + 10 * draw + int(shift))
            a, b = torch.randn(100, 8, generator=g), torch.randn(100, 8, generator=g)
            b[:, 0] += shift
            low = tlg.flow.separability(a, b, seed=seed).low
            given[shift, draw] = "apart" if low > 0.5 else "not shown"
            truth[shift, draw] = "apart" if shift else "not shown"
    title = "four pairs of clouds apart, four not"
    yield Finding.of_labels("separability", title, given, truth, none="not shown")


def anomalous(seed: int) -> Iterator[Finding]:
    """Maps of pairs of 12 states of which one state is off by five standard deviations of the
    others."""
    from benchmarks.calibration_flow import of_pairs

    counts, sizes, odd = Counts(0, 0, 0), [], []
    t = torch.arange(1, 13).double()
    for draw in range(5):
        g = torch.Generator().manual_seed(1000 * seed + draw)
        tau = (t - t[:, None]).clamp(min=1)
        values = 0.2 * t - 0.1 * tau.log() + 0.3 * torch.randn(12, generator=g).double()
        off = int(torch.randint(2, 12, (), generator=g))
        values[:, off] += 5 * 0.3
        found = tlg.flow.layer_anomalies(of_pairs(values), ["value"])
        flagged = found.column("flagged")
        hit = int(flagged[off])
        counts += Counts(hit, 1 - hit, sum(flagged) - hit)
        sizes.append(torch.tensor(found.column("z")[1:]).abs())
        odd.append(torch.arange(1, 12) == off)
    scores, inside = torch.cat(sizes), torch.cat(odd)
    ranked = (auroc(scores, inside), auroc_by_chance(scores, inside))
    yield Finding("anomalous layers", "five maps, one odd layer each", counts, 5 * 0.05, *ranked)
