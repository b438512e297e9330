"""Edge scores, pruned runs and patched paths."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import PATH, Call, Command, World

TWO: dict[str, Any] = {"targets": (11, 12)}


def scored(
    world: World, prompts: Any = None, counterfactuals: Any = None, *args: Any, **options: Any
) -> Any:
    """Edge scores of two windows with the next two as counterfactuals."""
    prompts = world.ids[:2, :8] if prompts is None else prompts
    counterfactuals = world.ids[2:4, :8] if counterfactuals is None else counterfactuals
    options = {"method": "gradient"} | (options if args else TWO | options)
    return tlg.edge_scores(world.model, prompts, counterfactuals, *args, **options)


def pruned(world: World, circuit: Any, **options: Any) -> Any:
    """Pruned runs on the same pairs."""
    ids = world.ids[:4, :8]
    return tlg.faithfulness(
        world.model, circuit, ids[:2], ids[2:], **{"draws": 1, **TWO, **options}
    )


def loaded(world: World, content: str) -> Any:
    return tlg.circuits.read_mib(world.model, world.path("edges.json", content))


def patched(world: World, senders: Any, receivers: Any, **options: Any) -> Any:
    """Patched paths on four windows."""
    chosen: dict[str, Any] = {"controls": 0, "progress": False, **options}
    return tlg.interventions.head_paths(
        world.model, world.ids[:4, :8], senders, receivers, "loss", **chosen
    )


SCORES: list[Call] = [
    Call("edge scores of pairs", scored),
    Call("one pair as rows of ids", lambda w: scored(w, [3, 4, 5], [3, 9, 5])),
    Call(
        "pairs of several lengths",
        lambda w: scored(w, [[3, 4, 5], [3, 4]], [[3, 9, 5], [9, 4]]),
        check=lambda w, v: v.prompts == 2,
    ),
    Call(
        "a pair of two lengths",
        lambda w: scored(w, [[3, 4, 5], [3, 4]], [[3, 9, 5], [9, 4, 7]]),
        r"prompt pair 1 .*: expected .* equal token length, got 2 and 3 tokens",
    ),
    Call(
        "positions of several lengths",
        lambda w: scored(w, [[3, 4, 5], [3, 4]], [[3, 9, 5], [9, 4]], positions=True),
        "positions=True: expected pairs of one length",
    ),
    Call(
        "fewer counterfactuals than prompts",
        lambda w: scored(w, w.ids[:3, :8]),
        "counterfactuals: expected one for each of 3 prompts",
    ),
    Call("no prompts", lambda w: scored(w, []), "expected"),
    Call("prompts that are nothing", lambda w: scored(w, [None, None]), "expected"),
    Call(
        "texts without prepend_bos",
        lambda w: scored(w, ["a b"], ["a c"]),
        "prepend_bos: expected True or False",
    ),
    Call(
        "a prompt as its own counterfactual",
        lambda w: scored(w, w.ids[:1], w.ids[:1], None),
        "targets of prompt pair 0 .* after both",
    ),
    Call("an unknown method", lambda w: scored(w, method="eap"), "method: expected one of"),
    Call("no steps", lambda w: scored(w, steps=0), "steps: expected a whole number"),
    Call("half a step", lambda w: scored(w, steps=2.5), "steps: expected a whole number"),
    Call("a batch of nothing", lambda w: scored(w, batch_size=0), "batch_size: expected"),
    Call("a small budget", lambda w: scored(w, memory_budget=10), "memory_budget: expected"),
    Call("one target", lambda w: scored(w, targets=5), "targets: expected"),
    Call("a word as targets", lambda w: scored(w, targets="ab"), "targets: expected"),
    Call("targets that are equal", lambda w: scored(w, targets=(5, 5)), "two different tokens"),
    Call(
        "targets that are fractions", lambda w: scored(w, targets=(5.0, 6.0)), "targets: expected"
    ),
    Call("targets beyond the vocabulary", lambda w: scored(w, targets=(5, 10**6)), "token_ids"),
    Call("targets of three pairs", lambda w: scored(w, targets=[(5, 6)] * 3), "targets: expected"),
    Call(
        "targets of each pair as a tensor",
        lambda w: scored(w, targets=torch.tensor([[5, 6], [7, 8]])),
    ),
    Call("a metric that is a name", lambda w: scored(w, None, None, "kl"), "metric: expected"),
    Call(
        "a metric and targets",
        lambda w: scored(w, None, None, lambda logits: logits[:, -1, 5], targets=(5, 6)),
        "metric, targets: expected one of them",
    ),
    Call(
        "a metric over the batch",
        lambda w: scored(w, None, None, lambda logits: logits.mean()),
        "metric: expected one number for each of 2 prompts",
    ),
    Call(
        "a metric that is NaN",
        lambda w: scored(w, None, None, lambda logits: logits[:, -1, 5] * float("nan")),
        "metric: expected finite numbers",
    ),
    Call(
        "a metric without a gradient",
        lambda w: scored(w, None, None, lambda logits: logits[:, -1, 5].detach()),
        "metric: expected a differentiable function",
    ),
    Call(
        "names of the edges that no file marked", lambda w: scored(w).edges(), "fraction: expected"
    ),
    Call("all edges and more", lambda w: scored(w).edges(1.5), "fraction: expected a share"),
]
RUNS: list[Call] = [
    Call("pruned runs of scores", lambda w: pruned(w, scored(w), fractions=(0.1, 1))),
    Call("a chosen head", lambda w: pruned(w, "L1H0"), check=lambda w, v: v.kept.tolist() == [1]),
    Call("an unknown head", lambda w: pruned(w, "L9H0"), "layer of head"),
    Call("an unknown edge", lambda w: pruned(w, ["L1H0->embed"]), "edges of this model"),
    Call("an edge and a head", lambda w: pruned(w, ["embed->output", "L0H0"]), "heads: expected"),
    Call("no circuit", lambda w: pruned(w, []), "expected at least one"),
    Call("nothing as a circuit", lambda w: pruned(w, None), "circuit: expected"),
    Call("a file as a circuit", lambda w: pruned(w, PATH), "heads: expected"),
    Call("nodes of a chosen set", lambda w: pruned(w, "L1H0", nodes=True), "nodes, fractions"),
    Call("no fractions", lambda w: pruned(w, scored(w), fractions=()), "fractions: expected"),
    Call("a fraction of 0", lambda w: pruned(w, scored(w), fractions=[0.0]), "fraction: expected"),
    Call(
        "fractions in words", lambda w: pruned(w, scored(w), fractions=["1%"]), "fraction: expected"
    ),
    Call("no draws", lambda w: pruned(w, "L1H0", draws=0), "draws: expected"),
    Call("a seed below zero", lambda w: pruned(w, "L1H0", seed=-1), "seed: expected"),
    Call(
        "completeness of a curve",
        lambda w: pruned(w, scored(w), fractions=[0.5]).completeness,
        "completeness: expected a chosen set",
    ),
    Call("the area of a chosen set", lambda w: pruned(w, "L1H0").cpr, "CPR and CMD: expected"),
    Call(
        "a curve of a chosen set",
        lambda w: tlg.render.faithfulness_curve(pruned(w, "L1H0")),
        "results: expected curves",
    ),
    Call("an edge list that is none", lambda w: loaded(w, "[]"), "expected an edge list in JSON"),
    Call("an edge list that is broken", lambda w: loaded(w, "{"), "expected an edge list in JSON"),
    Call(
        "an edge list of another model",
        lambda w: loaded(w, '{"edges": {"input->logits": {"score": 1, "in_graph": true}}}'),
        "expected the edges of",
    ),
]
PATHS: list[Call] = [
    Call("a path to the output", lambda w: patched(w, "L0H0", "output")),
    Call(
        "a path to a sender's own block",
        lambda w: patched(w, "L1H0", ["output", "L1H1<v>"]),
        "the path from L1H0 to L1H1<v>: expected a receiver that reads behind the sender",
    ),
    Call(
        "a path to a head as a whole",
        lambda w: patched(w, "L0H0", "L1H0"),
        "receivers: expected inputs of this model: .*'L1H0<q>'",
    ),
    Call("a path to a number", lambda w: patched(w, "L0H0", 7), "receivers: expected"),
    Call("paths to nothing", lambda w: patched(w, "L0H0", {}), "at least one set of inputs"),
    Call("paths from nothing", lambda w: patched(w, [], "output"), "at least one head"),
    Call(
        "paths of no kind",
        lambda w: patched(w, "L0H0", "output", between="all"),
        "between: expected one of 'frozen', 'live'",
    ),
    Call(
        "counterfactuals of other length",
        lambda w: patched(w, "L0H0", "output", by="prompt", reference=w.ids[:4, :6]),
        "reference: expected counterfactual prompts",
    ),
    Call(
        "a receiver's position beyond the prompt",
        lambda w: patched(w, "L0H0", "output", receiver_position=8),
        "position: expected an index from 0 to 7",
    ),
]
CALLS: list[Call] = [*SCORES, *RUNS, *PATHS]
COMMANDS: list[Command] = []
