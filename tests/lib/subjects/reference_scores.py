"""What the subjects of decomposition, scores, weights, measures and sphere must answer, a second
time: from :mod:`tests.lib.reference`, in float64, for the tiny kinds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.lib.kinds import decoder
from tests.lib.reference import geometry, moments, scores
from tests.lib.reference.decoder import Run
from tests.lib.subjects.row import Answers
from tests.lib.worlds import World

Expected = Mapping[str, Any]
WINDOW = 1
"""The first position of the default window."""
ENDS = ("_top", "_bottom")


@cache
def run_of(w: World, name: str) -> Run:
    """Its run over one of the inputs of a world."""
    return decoder(w.kind).run(w.inputs.tensors()[name])


def states(w: World, name: str) -> list[Tensor]:
    """All states ``[context position d]`` of one of the inputs."""
    return [run_of(w, name)["state", l] for l in range(decoder(w.kind).n_layers + 1)]


@cache
def parts_of(w: World, state: int, normalized: bool = False) -> moments.Parts:
    """The mean decomposition of a state over the corpus."""
    run, model = run_of(w, "corpus"), decoder(w.kind)
    h = scores.normed(model, run, state) if normalized else run["state", state]
    return moments.decompose(h.numpy(), (WINDOW, h.shape[1]))


def basis_of(w: World, state: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and positional vectors of every position."""
    parts = parts_of(w, state, normalized)
    return torch.from_numpy(parts.mean), torch.from_numpy(parts.pos_seen)


def places(heads: list[str]) -> list[tuple[int, int]]:
    """``"L1H2"`` -> (1, 2)."""
    return [(int(layer), int(head)) for layer, head in (h[1:].split("H") for h in heads)]


def decompose(w: World, variant: str, answers: Answers) -> Expected:
    window = (4, 12) if variant == "window" else (WINDOW, w.corpus.shape[1])
    of = states(w, "corpus")
    if variant == "normalized":
        of = [scores.normed(decoder(w.kind), run_of(w, "corpus"), l) for l in range(len(of))]
    of = [of[0], of[-1]] if variant == "two states" else of
    found = [moments.decompose(h.numpy(), window) for h in of]
    moment = moments.second_moment(of[-1].numpy(), window)
    raw = moments.second_moment(of[-1].numpy(), window, centred=False)
    return {
        "mean": np.stack([p.mean for p in found]),
        "pos": np.stack([p.pos for p in found]),
        "ctx": np.stack([p.ctx for p in found]),
        "second moment": moment,
        "second moment, not centred": raw,
    }


def anova(w: World, variant: str, answers: Answers) -> Expected:
    of = [moments.anova(h.numpy(), (WINDOW, h.shape[1])) for h in states(w, "corpus")]
    found = {f"share.{p}": np.array([getattr(a, p) / a.total for a in of]) for p in ("pos", "ctx")}
    for part in ("total", "pos", "ctx", "resid"):
        found[f"variance.{part}"] = np.array([getattr(a, part) for a in of])
    return found


def stream_parts(w: World, layer: int, variant: str) -> tuple[dict[str, Tensor], bool]:
    """The parts of a block's input that a variant of a split asks for, and whether they are those
    of the normed input."""
    run, model = run_of(w, "ids"), decoder(w.kind)
    if variant in ("blocks", "writers"):
        written = scores.writers(model, run, layer)
        return (scores.by_block(written) if variant == "blocks" else written), False
    h = run["state", layer]
    if variant == "mapping":
        generator = torch.Generator().manual_seed(3)
        shape = (2, model.n_layers, 1, h.shape[1], 1)
        share = torch.rand(*shape, generator=generator)[:, layer].double()
        first, second = share[0] * h, (1 - share[0]) * share[1] * h
        return {"first": first, "second": second, "rest": h - first - second}, False
    normalized = variant == "normalized basis"
    h = scores.normed(model, run, layer) if normalized else h
    window = (WINDOW, h.shape[1]) if "resid" in variant else None
    return scores.position_parts(h, *basis_of(w, layer, normalized), window=window), normalized


def split(w: World, variant: str, answers: Answers) -> Expected:
    """Terms where queries may attend, their sum, the pattern, and parts of queries and keys (their
    sizes alone where they are many)."""
    run, model = run_of(w, "ids"), decoder(w.kind)
    by_head: list[dict[str, Tensor]] = []
    for layer, head in places(answers["heads"]):
        parts, normalized = stream_parts(w, layer, variant)
        block = model.blocks[layer]
        allowed = block.allowed(w.ids.shape[1])
        of = scores.terms(model, run, layer, parts, normalized=normalized)
        total, shift = run["scores", layer][:, head], torch.zeros(1)
        if (scores.ALIBI, scores.ALIBI) in of:
            bias = of[scores.ALIBI, scores.ALIBI][0, head].where(allowed, 0.0)
            shift = bias.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)
        found = {
            "total": (total - shift).masked_fill(~allowed, -torch.inf),
            "scores before softmax": (block.cap(total) - shift).masked_fill(~allowed, -torch.inf),
            "pattern": run["pattern", layer][:, head],
        }
        for (a, b), term in of.items():
            shifted = term[:, head] - (shift if a == scores.ALIBI else 0.0)
            found[f"term {a}, {b}"] = shifted.where(allowed, 0.0)
        for which, size in (("q", block.score_scale), ("k", 1.0)):
            side = scores.projected(model, run, layer, which, parts, normalized=normalized)
            word = {"q": "query", "k": "key"}[which]
            found |= {f"{word} part {n}": size * x[:, :, head] for n, x in side.items()}
        by_head.append(found)
    axes = {name: 2 if " part " in name else 1 for name in by_head[0]}
    names = [name for name in axes if all(name in of for of in by_head)]
    joined = {name: torch.stack([of[name] for of in by_head], axes[name]) for name in names}
    if variant not in ("blocks", "writers"):
        return joined
    found = {name: x for name, x in joined.items() if name in ("total", "pattern")}
    for word in ("query", "key"):
        zero = torch.zeros(len(w.ids), 1)  # a writer of a later block
        sizes = [
            [
                of[name].norm(dim=(1, 2)) if (name := f"{word} part {p}") in of else zero[:, 0]
                for of in by_head
            ]
            for p in answers["parts"]
        ]
        found[f"size of {word} parts"] = torch.stack([torch.stack(row, -1) for row in sizes])
    return found


def shares(w: World, variant: str, answers: Answers) -> Expected:
    """Covariance and gain shares by the row-by-row formulas."""
    drop = WINDOW if variant not in ("mapping", "blocks") else 0
    run, model = run_of(w, "ids"), decoder(w.kind)
    found: list[tuple[list[float], list[float], float]] = []
    for layer, head in places(answers["heads"]):
        parts, normalized = stream_parts(w, layer, variant)
        of = scores.terms(model, run, layer, parts, normalized=normalized)
        of_head = scores.head_shares(model, of, layer, head, drop=drop)
        terms = [tuple(term.split(", ")) for term in answers["terms"]]
        # a writer of a later block wrote nothing that this one reads
        cs, gs = ([share.get(t, 0.0) for t in terms] for share in (of_head.cs, of_head.gs))
        found.append((cs, gs, of_head.total))
    cs, gs, total = (np.array(values) for values in zip(*found))
    return {"cs by term": cs, "gs by term": gs, "sum of squared scores": total}


def values(w: World, variant: str, answers: Answers) -> Expected:
    """Mixed values of parts, and what heads write with them."""
    run, model = run_of(w, "ids"), decoder(w.kind)
    found: dict[str, list[Tensor]] = {}
    for layer, head in places(answers["heads"]):
        parts, normalized = stream_parts(w, layer, variant)
        block = model.blocks[layer]
        mixed = scores.split_values(model, run, layer, parts, normalized=normalized)
        for name, z in mixed.items():
            found.setdefault(f"mixed values part.{name}", []).append(z[:, :, head])
            if block.after_attention is None:
                write = z[:, :, head] @ block.W_O[head]
                found.setdefault(f"output part {name}", []).append(write)
    shared = {name: x for name, x in found.items() if len(x) == len(answers["heads"])}
    return {name: torch.stack(x, 2) for name, x in shared.items()}


def sweep(w: World, variant: str, answers: Answers) -> Expected:
    """Shares of every head over the windows that the basis has not seen."""
    run, model = run_of(w, "fresh"), decoder(w.kind)
    normalized, found = variant == "normalized basis", []
    for layer, head in places(answers["heads"]):
        h = scores.normed(model, run, layer) if normalized else run["state", layer]
        parts = scores.position_parts(h, *basis_of(w, layer, normalized))
        of = scores.terms(model, run, layer, parts, normalized=normalized)
        of_head = scores.head_shares(model, of, layer, head, drop=WINDOW)
        terms = [(a, b) for a, b in (term.split(", ") for term in answers["terms"])]
        found.append([[share[t] for t in terms] for share in (of_head.cs, of_head.gs)])
    cs, gs = np.moveaxis(np.array(found), 1, 0)
    mass = [scores.dropped_mass(run["pattern", l], WINDOW)[h] for l, h in places(answers["heads"])]
    return {
        "cs by term": cs,
        "gs by term": gs,
        "attention to positions left out": torch.stack(mass),
    }


def readout(w: World, variant: str, answers: Answers) -> Expected:
    """Singular values of dense W_QK (at offset 0) and W_OV, and the tokens at the ends of their
    directions."""
    if variant == "OV" and w.kind == "gemma2":
        return {}  # a norm follows W_OV
    k = answers["ids at the left ends"].shape[-1]
    of = [
        geometry.token_readout(decoder(w.kind), layer, head, variant, 3, k)
        for layer, head in places(answers["heads"])
    ]
    ends = lambda side: [np.concatenate([getattr(r, side + end) for r in of]) for end in ENDS]
    found = {f"ids at the {side} ends": np.stack(ends(side)) for side in ("left", "right")}
    return found | {"singular values": np.stack([r.values for r in of])}


def positional(w: World, variant: str, answers: Answers) -> Expected:
    """Measures of the positional basis of each state."""
    frequencies = 6 if variant == "bound of 5" else 10
    pos = [parts_of(w, state).pos for state in range(decoder(w.kind).n_layers + 1)]
    inside = [h[:, WINDOW:].numpy() for h in states(w, "corpus")]
    of = lambda f, rows=pos: np.array([f(x) for x in rows])
    k = 5 if variant == "bound of 5" else (min(pos[0].shape) - 2) // 2
    s = [np.linalg.svd(P, compute_uv=False) for P in pos]
    rank, threshold = np.array([geometry.screenot(x, pos[0].shape, k) for x in s]).T
    kept = [x[: int(r)] for x, r in zip(s, rank)]
    return {
        "measure.rank": rank,
        "measure.threshold": threshold,
        "measure.explained": np.array([a.sum() / b.sum() for a, b in zip(kept, s)]),
        "measure.stable_rank": of(geometry.stable_rank),
        "measure.low_frequency": of(lambda P: geometry.low_frequency_share(P, frequencies)),
        "measure.off_diagonal": of(geometry.off_diagonal_share),
        "measure.smoothness": of(geometry.smoothness),
        "measure.smoothness_2": of(lambda P: geometry.smoothness(P, 2)),
        "measure.roughness": of(geometry.roughness),
        "measure.fracture": of(lambda P: geometry.fracture(P)[0]),
        "measure.fracture_at": of(lambda P: WINDOW + geometry.fracture(P)[1]),
        "measure.relative_norm": of(geometry.relative_norm, inside),
        "measure.relative_norm_reference": of(
            lambda h: geometry.relative_norm(h, centred=False), inside
        ),
    }


def contextual(w: World, variant: str, answers: Answers) -> Expected:
    """Incoherence of position and context, and compactness of documents."""
    parts = [parts_of(w, state) for state in range(decoder(w.kind).n_layers + 1)]
    cosines = [geometry.incoherence(p.pos, p.ctx) for p in parts]
    found = {
        f"measure.incoherence_{name}": np.array([getattr(c, name) for c in cosines])
        for name in ("max", "avg", "rms")
    }
    overlap = [geometry.subspace_overlap(p.pos, p.ctx, 5) for p in parts]
    found["measure.overlap"] = np.array(overlap)
    if variant == "documents":
        labels = [row[1] % 4 for row in w.corpus.tolist()]
        of = [geometry.cluster_similarity(p.ctx, labels) for p in parts]
        found |= {"measure.intra": np.array([x for x, _ in of])}
        found |= {"measure.inter": np.array([x for _, x in of])}
        points = np.repeat(labels, w.corpus.shape[1] - WINDOW).tolist()
        raw = [h[:, WINDOW:].numpy() for h in states(w, "corpus")]
        for name, rows in (("raw", raw), ("cvec", [h - p.pos for h, p in zip(raw, parts)])):
            flat = [geometry.compactness(h.reshape(-1, h.shape[-1]), points) for h in rows]
            found[f"measure.compactness_{name}"] = np.array(flat)
    return found


def smoothness(w: World, variant: str, answers: Answers) -> Expected:
    pos = [parts_of(w, state).pos for state in range(decoder(w.kind).n_layers + 1)]
    words = ("by first differences", "by second ones")
    return {
        word: np.array([geometry.smoothness(P, m + 1) for P in pos]) for m, word in enumerate(words)
    }


def token_paths(w: World, variant: str, answers: Answers) -> Expected:
    """Angles along the paths of tokens."""
    of = geometry.token_paths(decoder(w.kind), run_of(w, "ids"), w.ids)
    run, norm = run_of(w, "ids"), decoder(w.kind).norm
    updates: list[tuple[Tensor, Tensor, Tensor]] = []
    layers = range(decoder(w.kind).n_layers)
    for layer in layers:  # the MLP turns the stream that attention has added to
        h, attention = run["state", layer], run["writes", layer].sum(0)
        updates.append(geometry.update_split(norm, h, attention))
        updates.append(geometry.update_split(norm, h + attention, run["mlp", layer]))
    parts = dict(zip(("radial", "tangential", "turn"), map(torch.stack, zip(*updates))))
    found = {name: part.unflatten(0, (-1, 2)).transpose(0, 1) for name, part in parts.items()}
    found |= {"steps": of.steps, "length": of.length, "net": of.net, "rank of the token": of.rank}
    return found | {"angle to the token's own embedding": of.angle}
