"""What the subjects of circuits, interventions and flow must answer, a second time: from
:mod:`tests.lib.reference`, in float64, for the tiny kinds."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.lib.reference import contrast, edits, flow, scores
from tests.lib.reference.decoder import Hooks
from tests.lib.subjects.reference_scores import Expected, basis_of, decoder, places, run_of, states
from tests.lib.subjects.row import Answers
from tests.lib.worlds import World

SIDES = {"query": "q", "key": "k", "value": "v"}
POSITION = [(a, b) for a in ("bias", "pos") for b in ("bias", "pos")]
TERMS = {
    "content": [("cvec", "cvec")],
    "position-content": [("pos", "cvec"), ("cvec", "pos")],
    "token": [("bias", "cvec"), ("cvec", "bias")],
    "pos-pos": [("pos", "pos")],
}
MEAN = partial(edits.moving, lambda term: term.mean(0))
CHANGES = {"remove": edits.removing, "keep": edits.keeping, "mean": MEAN}


def between(w: World, variant: str, answers: Answers) -> Expected:
    """Values of all components in the graph between two prompts."""
    if variant == "MLPs as leaves":
        return {}  # the reference follows them
    (answer, other), model = w.targets[0], decoder(w.kind)
    others = torch.tensor([other]) if variant == "against another" else None
    found = contrast.contrast(model, w.ids[:1, :8], w.other[:1, :8], torch.tensor([answer]), others)
    of = {name: value[0] for name, value in found.nodes().items()}
    heads = [[f"L{l}H{h}" for h in range(model.n_heads)] for l in range(model.n_layers)]
    return {
        "value": found.value[0],
        "heads": torch.stack([torch.stack([of[n] for n in row]) for row in heads]),
        "MLPs": torch.stack([of[f"mlp{l}"] for l in range(model.n_layers)]),
        "by token": of["embed"],
    }


def _edge_scores(
    w: World, prompts: Tensor, others: Tensor, answers: Any, steps: int | None
) -> Tensor:
    metric = edits.logit_difference(answers)
    return edits.edge_scores(decoder(w.kind), prompts, others, metric, steps=steps)


def _named(w: World, by_reader: Tensor, names: list[str]) -> Tensor:
    """Numbers ``[... reader writer]`` in the order of edges by name."""
    layout = edits.Layout.of(decoder(w.kind))
    ends = [name.split("->") for name in names]
    rows = torch.tensor([layout.readers.index(reader) for _, reader in ends])
    columns = torch.tensor([layout.writers.index(writer) for writer, _ in ends])
    return by_reader[..., rows, columns]


def edge_scores(w: World, variant: str, answers: Answers) -> Expected:
    """Mean over pairs of the sum over positions, and the metric."""
    if variant == "contrast":
        return {}  # tests.laws.test_circuits_edges compares it
    steps = 3 if variant == "integrated" else None
    of = _edge_scores(w, w.prompts, w.prompts_other, w.answers, steps).sum(1)
    metric = edits.logit_difference(w.answers)
    clean, other = (metric(run_of(w, n)["logits", 0]) for n in ("prompts", "prompts_other"))
    by_pair = _named_all(w, of)
    return {
        "scores": by_pair.mean(0),
        "errors": by_pair.std(0) / len(by_pair) ** 0.5,
        "metric, clean": clean.mean(),
        "metric, counterfactual": other.mean(),
    }


def _named_all(w: World, by_reader: Tensor) -> Tensor:
    from tests.lib.subjects import answered

    names = answered(w.kind, "edge_scores", "gradient")["edges"]
    return _named(w, by_reader, names)


def faithfulness(w: World, variant: str, answers: Answers) -> Expected:
    """The metric with the edges of largest score kept, one run for each share."""
    if variant != "edges":
        return {}
    of = _edge_scores(w, w.ids, w.other, w.targets, None).sum(1).mean(0)
    layout, metric = edits.Layout.of(decoder(w.kind)), edits.logit_difference(w.answers)
    order = of[layout.allowed].abs().argsort(descending=True)
    kept = []
    for count in answers["number kept"].astype(int):
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[:count]] = True
        mask = torch.zeros_like(layout.allowed)
        mask[layout.allowed] = chosen
        run = edits.pruned(decoder(w.kind), w.prompts, w.prompts_other, mask)
        kept.append(metric(run["logits", 0]))
    clean, other = (metric(run_of(w, n)["logits", 0]) for n in ("prompts", "prompts_other"))
    return {"metric": torch.stack(kept), "metric, clean": clean, "metric, counterfactual": other}


def _said(w: World, hooks: Hooks) -> Expected:
    logits = decoder(w.kind).run(w.ids, hooks)["logits", 0]
    return {"log probabilities": logits.log_softmax(-1)}


def term_edit(w: World, variant: str, answers: Answers) -> Expected:
    mode, _, name = variant.partition(" ")
    name, _, several = name.partition(", ")
    alibi = [(scores.ALIBI, scores.ALIBI)] if w.kind == "bloom" else []
    terms = TERMS.get(name, [*POSITION, *alibi])
    hooks: Hooks = {}
    for layer, head in places(w.heads if several else [w.head]):
        change, basis = CHANGES[mode](*terms), basis_of(w, layer)
        hooks = {**hooks, **edits.edit_terms(decoder(w.kind), layer, [head], basis, change)}
    return _said(w, hooks)


def planes_edit(w: World, variant: str, answers: Answers) -> Expected:
    if variant not in ("remove", "keep"):
        return {}  # another prompt, random planes, and bands are chosen by the library
    keep = variant == "keep"
    hooks: Hooks = {}
    for layer, head in places(w.heads):
        planes = [0, 1] if keep else [0]
        of = edits.edit_planes(decoder(w.kind), layer, [head], planes, keep=keep)
        hooks = {**hooks, **of}
    return _said(w, hooks)


def edge_edit(w: World, variant: str, answers: Answers) -> Expected:
    if variant == "swap by another prompt":
        return {}  # which prompt is drawn by the library
    writer = {"remove MLP": "mlp0", "remove embedding": "embed"}.get(variant, "L0H0")
    side = {"remove MLP": "q", "remove embedding": "k"}.get(variant) or SIDES[variant.split()[1]]
    (layer, head), model = places(["L0H1" if writer == "embed" else w.heads[1]])[0], decoder(w.kind)
    clean = run_of(w, "ids")
    change = -scores.writers(model, clean, layer)[writer]
    if variant.startswith("swap"):
        change = change + scores.writers(model, run_of(w, "other"), layer)[writer]
    return _said(w, edits.edit_edge(model, clean, layer, [head], side, change))


def heads_edit(w: World, variant: str, answers: Answers) -> Expected:
    if variant == "another prompt":
        return {}
    heads, there = w.heads if variant == "two heads" else w.heads[:1], run_of(w, "other")
    new = {
        (l, h): there["z", l][:, :, h].mean(0) * (0.0 if variant == "zero" else 1.0)
        for l, h in places(list(heads))
    }
    return _said(w, edits.knockout(decoder(w.kind), new))


def knockouts(w: World, variant: str, answers: Answers) -> Expected:
    """Change of the difference of two logits, by prompt."""
    if variant == "loss":
        return {}
    metric, model = edits.logit_difference(w.answers), decoder(w.kind)
    there = run_of(w, "prompts_other" if variant == "reference" else "prompts")
    clean = metric(run_of(w, "prompts")["logits", 0])
    found = []
    for sets in answers["sets of heads"]:
        new = {
            (l, h): there["z", l][:, :, h].mean(0) * (0.0 if variant == "zero" else 1.0)
            for l, h in places(sets.split("+"))
        }
        run = model.run(w.prompts, edits.knockout(model, new))
        found.append(metric(run["logits", 0]) - clean)
    return {"effect by prompt": torch.stack(found), "metric, clean": clean}


def paths(w: World, variant: str, answers: Answers) -> Expected:
    """Change of the difference of two logits by one edge, ``[sender receiver prompt]``."""
    metric, model = edits.logit_difference(w.answers), decoder(w.kind)
    other = variant == "counterfactual"
    z = run_of(w, "prompts_other" if other else "prompts")["z", 0][:, :, 1]
    new = {(0, 1): z if other else z.mean(0)}
    readers = ["mlp1", "output"]
    if variant == "query and value":
        key = "L1H1" if w.kind in ("gpt2", "bloom") else "L1H0-1"
        readers = ["L1H1<q>", f"{key}<k>", f"{key}<v>"]
    clean = metric(run_of(w, "prompts")["logits", 0])
    runs = [edits.path_patch(model, w.prompts, new, [reader]) for reader in readers]
    return {
        "effect by prompt": torch.stack([metric(run["logits", 0]) - clean for run in runs])[None],
        "metric, clean": clean,
    }


@cache
def ensemble(w: World) -> np.ndarray:
    """Last-token trajectories of the pilots, the embedding's state too."""
    return torch.stack([h[:, -1] for h in states(w, "pilots")], 1).numpy()


def trajectories(w: World, variant: str, answers: Answers) -> Expected:
    at = 4 if variant == "position 4" else -1
    of = flow.trajectories(run_of(w, "pilots"), decoder(w.kind).n_layers, at)
    return {"trajectories": of}


def aligned(w: World, variant: str, answers: Answers) -> Expected:
    align = "hungarian" if variant == "hungarian" else "greedy"
    of = flow.bases(ensemble(w), align)
    return {"directions": of.U, "singular values": of.S}


def maps(w: World, variant: str, answers: Answers) -> Expected:
    X, probes = ensemble(w), torch.Generator().manual_seed(5)
    x = torch.randn(7, X.shape[-1], generator=probes, dtype=torch.float64).numpy()
    x[-1] = 0
    if variant == "flow":
        of = flow.flow_map(flow.bases(X), 0, 2)
    else:
        of = flow.fit_map(X[:, 0], X[:, 2], variant)
    return {"images of six vectors and zero": of(x)}


def truncation(w: World, variant: str, answers: Answers) -> Expected:
    """Divergence of the output where states are projected on K directions after every block."""
    X, model = ensemble(w)[:, 1:], decoder(w.kind)
    U = {t + 1: np.linalg.svd(X[:, t].T, full_matrices=False)[0] for t in range(X.shape[1])}
    own = run_of(w, "prompts")["logits", 0][:, -1]
    found = []
    for K in answers["directions"].astype(int):
        logits = flow.truncated(model, w.prompts, U, K)
        found.append(flow.divergence(logits, own))
    kl = torch.stack(found)
    error = kl.std(1) / kl.shape[1] ** 0.5
    return {"KL(truncated | own), mean and error": torch.stack([kl.mean(1), error])}
